"""The table of all instruments."""

from distcockpit.instruments.alpha import alpha
from distcockpit.instruments.cabs import cabs
from distcockpit.instruments.distance import distance
from distcockpit.instruments.early_stopping import early_stopping
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
from distcockpit.instruments.ranks import ranks
from distcockpit.instruments.tic import tic
from distcockpit.instruments.times import times
from distcockpit.instruments.trace import trace

INSTRUMENTS: dict[str, Instrument] = {
    one.name: one
    for one in (
        losses,
        learning_rate,
        metrics,
        alpha,
        distance,
        cabs,
        gradient_size,
        grad_norm,
        gradient_tests,
        noise_scale,
        grad_hist_1d,
        grad_hist_2d,
        grad_hist_2d_parameters,
        gsnr,
        early_stopping,
        output_gradients,
        trace,
        tic,
        max_eigenvalue,
        ranks,
        times,
    )
}
"""All instruments, in the order of the panel within their sections."""
