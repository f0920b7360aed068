"""Plots of a run: one instrument per file, each a function that takes axes and a run; `plot_run` draws all of them.

>>> from distcockpit import open_run
>>> from distcockpit.instruments import alpha, plot_run
>>> run = open_run("runs/digits.zarr")              # doctest: +SKIP
>>> alpha(plt.gca(), run)                           # doctest: +SKIP
>>> plot_run(run).savefig("digits.png")             # doctest: +SKIP

May import: store, findings. Only needs a store: no torch, no process group. The extra ``view`` installs what it needs.
"""

from distcockpit.instruments.alpha import alpha
from distcockpit.instruments.cabs import cabs
from distcockpit.instruments.distance import distance
from distcockpit.instruments.drawing import draw
from distcockpit.instruments.early_stopping import early_stopping
from distcockpit.instruments.figures import plot_run
from distcockpit.instruments.grad_hist_1d import grad_hist_1d
from distcockpit.instruments.grad_hist_2d import grad_hist_2d
from distcockpit.instruments.grad_hist_2d_parameters import grad_hist_2d_parameters
from distcockpit.instruments.grad_norm import grad_norm
from distcockpit.instruments.gradient_size import gradient_size
from distcockpit.instruments.gradient_tests import gradient_tests
from distcockpit.instruments.gsnr import gsnr
from distcockpit.instruments.instrument import Instrument
from distcockpit.instruments.learning_rate import learning_rate
from distcockpit.instruments.losses import losses
from distcockpit.instruments.max_eigenvalue import max_eigenvalue
from distcockpit.instruments.metrics import metrics
from distcockpit.instruments.noise_scale import noise_scale
from distcockpit.instruments.output_gradients import output_gradients
from distcockpit.instruments.panel import Place, panel, panels
from distcockpit.instruments.ranks import ranks
from distcockpit.instruments.table import INSTRUMENTS
from distcockpit.instruments.tic import tic
from distcockpit.instruments.times import times
from distcockpit.instruments.trace import trace

__all__ = [
    "INSTRUMENTS",
    "Instrument",
    "Place",
    "alpha",
    "cabs",
    "distance",
    "draw",
    "early_stopping",
    "grad_hist_1d",
    "grad_hist_2d",
    "grad_hist_2d_parameters",
    "grad_norm",
    "gradient_size",
    "gradient_tests",
    "gsnr",
    "learning_rate",
    "losses",
    "max_eigenvalue",
    "metrics",
    "noise_scale",
    "output_gradients",
    "panel",
    "panels",
    "plot_run",
    "ranks",
    "tic",
    "times",
    "trace",
]
