"""Everything that can be tracked: one quantity, one file."""

from distcockpit.quantities.adaptation import GradAbsMax, ParamAbsMax
from distcockpit.quantities.alpha import Alpha
from distcockpit.quantities.base import LocalBatch, Model, Needs, Quantity, Shard, Update
from distcockpit.quantities.grad_hist_1d import GradHist1d
from distcockpit.quantities.grad_hist_2d import GradHist2d
from distcockpit.quantities.hess_trace import HessTrace
from distcockpit.quantities.mean_gsnr import MeanGSNR
from distcockpit.quantities.output_gradient_geometry import OutputGradientGeometry
from distcockpit.schema import Field, Group

__all__ = [
    "Alpha",
    "Field",
    "GradAbsMax",
    "GradHist1d",
    "GradHist2d",
    "Group",
    "HessTrace",
    "LocalBatch",
    "MeanGSNR",
    "Model",
    "Needs",
    "OutputGradientGeometry",
    "ParamAbsMax",
    "Quantity",
    "Shard",
    "Update",
]
