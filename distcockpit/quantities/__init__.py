"""Everything that can be tracked: one quantity, one file.

May import: replay (numbers to the device), store (what rows look like), gradients,
curvature. Quantities neither communicate nor touch a model.
"""

from distcockpit.gradients.statistics import Statistic
from distcockpit.quantities.adaptation import GradAbsMax, ParamAbsMax
from distcockpit.quantities.alpha import Alpha
from distcockpit.quantities.base import Quantity
from distcockpit.quantities.batch import BucketSums, LocalBatch, Model, Needs, Shard, Update
from distcockpit.quantities.cabs import CABS
from distcockpit.quantities.compression_error import CompressionError
from distcockpit.quantities.distance import Distance
from distcockpit.quantities.early_stopping import EarlyStopping
from distcockpit.quantities.grad_hist_1d import GradHist1d
from distcockpit.quantities.grad_hist_2d import GradHist2d
from distcockpit.quantities.grad_norm import GradNorm
from distcockpit.quantities.gradient_activation import GradientActivation
from distcockpit.quantities.gradient_geometry import GradientGeometry
from distcockpit.quantities.gradient_noise_scale import GradientNoiseScale
from distcockpit.quantities.hess_max_ev import HessMaxEV
from distcockpit.quantities.hess_trace import HessTrace
from distcockpit.quantities.inner_test import InnerTest
from distcockpit.quantities.learning_rate import LearningRate
from distcockpit.quantities.loss import Loss
from distcockpit.quantities.mean_gsnr import MeanGSNR
from distcockpit.quantities.norm_test import NormTest
from distcockpit.quantities.ortho_test import OrthoTest
from distcockpit.quantities.output_activation import OutputActivation
from distcockpit.quantities.output_gradient_geometry import OutputGradientGeometry
from distcockpit.quantities.output_norm import OutputNorm
from distcockpit.quantities.parameter_condition import ParameterCondition
from distcockpit.quantities.parameter_norm import ParameterNorm
from distcockpit.quantities.parameters import Parameters
from distcockpit.quantities.rank_disagreement import RankDisagreement
from distcockpit.quantities.rank_health import RankHealth
from distcockpit.quantities.replica_drift import ReplicaDrift
from distcockpit.quantities.tic_diag import TICDiag
from distcockpit.quantities.tic_trace import TICTrace
from distcockpit.quantities.time import Time
from distcockpit.quantities.update_geometry import UpdateGeometry
from distcockpit.quantities.update_size import UpdateSize
from distcockpit.store.schema import Field, Group

__all__ = [
    "CABS",
    "Alpha",
    "CompressionError",
    "Distance",
    "EarlyStopping",
    "Field",
    "GradAbsMax",
    "GradHist1d",
    "GradHist2d",
    "GradNorm",
    "GradientActivation",
    "GradientGeometry",
    "GradientNoiseScale",
    "Group",
    "HessMaxEV",
    "HessTrace",
    "InnerTest",
    "LearningRate",
    "BucketSums",
    "LocalBatch",
    "Loss",
    "MeanGSNR",
    "Model",
    "Needs",
    "NormTest",
    "OrthoTest",
    "OutputActivation",
    "OutputGradientGeometry",
    "OutputNorm",
    "ParamAbsMax",
    "ParameterCondition",
    "ParameterNorm",
    "Parameters",
    "Quantity",
    "RankDisagreement",
    "RankHealth",
    "ReplicaDrift",
    "Shard",
    "Statistic",
    "TICDiag",
    "TICTrace",
    "Time",
    "Update",
    "UpdateGeometry",
    "UpdateSize",
]
