"""Effective step size alpha."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from distcockpit.quantities.base import Quantity, Sums, Totals
from distcockpit.quantities.batch import LocalBatch, Model, Needs, ReplicatedValue
from distcockpit.store.schema import Field, Group, Row

STATUS = (
    "minimum",
    "concave",
    "no_step",
    "singular",
    "step_skipped",
    "inputs_changed",
    "fewer_than_two_samples",
    "interrupted",
    "losses_unknown",
    "no_individual_gradients",
    "failed",  # on a rank; a notice says why
    "out_of_memory",  # likewise
)
OBSERVATIONS = ("f_start", "f_end", "slope_start", "slope_end")
ZERO_VARIANCE = 1e-10


@dataclass(frozen=True, kw_only=True)
class Alpha(Quantity):
    r"""Effective step size: how far the optimizer went, relative to the minimum of a local quadratic fit.

    Along the unit direction of $d = \theta_{t+1} - \theta_t$, the pooled loss and its slope are observed at
    $\tau = 0$ and $\tau = \|d\|$, each on the batch of its own step. Generalised least squares, weighted by the
    inverse sample variances (ddof 1) of individual losses and projections, fits
    $f(\tau) = \mu_0 + \mu_1\tau + \mu_2\tau^2$, and

    $$\alpha = \frac{2\|d\|}{\bar\alpha} - 1, \qquad \bar\alpha = -\mu_1/\mu_2.$$

    Mutschler and Zell 2020 and Schneider et al. 2021, "Cockpit: A Practical Debugging Tool for the Training of Deep
    Neural Networks", arXiv:2102.06604. Unitless: 0 is a step to the minimum, a positive value overshoots,
    between -1 and 0 the step falls short, and below -1 it goes uphill, away from a minimum behind it. -1 for a concave
    fit or no step, NaN where the fit is undefined; ``status`` says which. Stored under the step t at which the update
    began. Works with any optimizer.

    **Several optimizers** move the parameters together. The change of the loss is not due to the part $d_k$ of one of
    them alone, so only the slopes at both ends of the whole update are fitted, by a straight line:

    $$\alpha_k = -\frac{\langle G_{t+1}, d_k\rangle}{\langle G_t, d_k\rangle},$$

    0 where the slope along its own part vanishes after the step.

    Args:
        optimizer: Name of one of several optimizers; ``update_norm`` and slopes are then those of its part. By default
            the whole update. If there are several optimizers, ``Alpha()`` adds one for each.
    """

    optimizer: str | None = None

    source: ClassVar[str] = "Schneider et al. 2021, arXiv:2102.06604"

    def __post_init__(self) -> None:
        if not self.name and self.optimizer is not None:
            object.__setattr__(self, "name", f"alpha_{self.optimizer}")
        super().__post_init__()

    def for_optimizers(self, names: Sequence[str]) -> list[Quantity]:
        """One for each optimizer, in addition to the one for the whole update."""
        if self.optimizer is not None:
            return [self]
        each = [dataclasses.replace(self, name=f"{self.name}_{name}", optimizer=name) for name in names]
        return [self, *each]

    @property
    def needs(self) -> Needs:
        """Individual losses and projections at both ends of an update."""
        return Needs(losses=True, update=True)

    def group(self, model: Model) -> Group:
        """Alpha, its status, and the observations behind it.

        Raises:
            ValueError: If the optimizer does not exist.
        """
        if self.optimizer is not None and not model.optimizers.get(self.optimizer):
            known = [name for name, held in model.optimizers.items() if held]
            raise ValueError(
                f"Alpha(optimizer={self.optimizer!r}): no optimizer of this name holds tracked parameters; those that "
                f"do are {known}. Pass DistCockpit optimizer={{name: optimizer, ...}}, or omit the argument."
            )
        names = {
            "f_start": "mean loss at the start of the update",
            "f_end": "mean loss at its end, on the next batch",
            "slope_start": "mean projected gradient at the start",
            "slope_end": "mean projected gradient at the end, on the next batch",
        }
        fields = {
            "alpha": Field(
                (),
                "effective step size alpha",
                description="0: minimum, > 0: beyond, -1 to 0: short of it, < -1: uphill",
            ),
            "status": Field((), "status of alpha", dtype="int8", codes=STATUS),
            "update_norm": Field((), "Euclidean norm of the update"),
            **{name: Field((), long_name) for name, long_name in names.items()},
            **{f"{name}_variance": Field((), f"sample variance: {text}") for name, text in names.items()},
        }
        return Group(fields)

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """Sums and sums of squares of the four observations."""
        update = batch.update
        if update is None:
            return {}
        norm, ends = update.norm, (update.start_slopes.sum(0), update.end_slopes.sum(0))
        if self.optimizer is not None:
            k = list(batch.model.optimizers).index(self.optimizer)
            norm = update.norms[k]
            per_own_length = update.norm / norm.where(norm != 0, 1)
            ends = (update.start_slopes[k] * per_own_length, update.end_slopes[k] * per_own_length)
        samples = (update.start_losses, batch.known_losses, *ends)
        sums: dict[str, Tensor | ReplicatedValue] = {
            "update_norm": batch.replicated(norm),
            "start_n": batch.replicated(update.start_n),
            "inputs_changed": batch.vector([update.inputs_changed])[0],
            "skipped": batch.replicated(update.skipped),
            "interrupted": batch.vector([update.interrupted])[0],
            "unknown": batch.vector([not batch.losses_known])[0],
            "coupled": batch.vector([not batch.has_gradients])[0],
        }
        return sums | {name: _moments(values) for name, values in zip(OBSERVATIONS, samples, strict=True)}

    def finalize(self, totals: Totals, n: int) -> Row | None:
        """The fit."""
        if "update_norm" not in totals:
            return None
        norm = float(totals["update_norm"])
        if np.isnan([totals["inputs_changed"], totals["start_n"]]).any():
            unknown = dict.fromkeys([*OBSERVATIONS, *(f"{name}_variance" for name in OBSERVATIONS)], np.nan)
            return {"alpha": np.nan, "status": STATUS.index("failed"), "update_norm": norm, **unknown}
        counts = (int(totals["start_n"]), n, int(totals["start_n"]), n)
        with np.errstate(all="ignore"):
            pairs = [_mean_and_variance(totals[name], count) for name, count in zip(OBSERVATIONS, counts, strict=True)]
        means, variances = np.array(pairs).T
        if totals["inputs_changed"]:
            alpha, status = np.nan, "inputs_changed"
            means[2], variances[2] = np.nan, np.nan
        elif totals["skipped"] and norm == 0:  # with several optimizers, one may be skipped
            alpha, status = np.nan, "step_skipped"
        elif totals["interrupted"]:
            alpha, status = np.nan, "interrupted"
            means[2:], variances[2:] = np.nan, np.nan
        elif totals["coupled"]:
            alpha, status = np.nan, "no_individual_gradients"
        elif totals["unknown"]:
            alpha, status = np.nan, "losses_unknown"
        elif min(counts) < 2:
            alpha, status = np.nan, "fewer_than_two_samples"
        else:
            fit = fit_alpha if self.optimizer is None else fit_slopes
            alpha, status = fit(means, variances, norm)
        row = {"alpha": alpha, "status": STATUS.index(status), "update_norm": norm}
        row |= dict(zip(OBSERVATIONS, means, strict=True))
        return row | {f"{name}_variance": v for name, v in zip(OBSERVATIONS, variances, strict=True)}


def _moments(values: Tensor) -> Tensor:
    """Sum and sum of squares, float64 ``[2]``."""
    return torch.stack([values.sum(), values.square().sum()])


def _mean_and_variance(moments: np.ndarray, n: int) -> tuple[float, float]:
    """Mean and sample variance (ddof 1) of n numbers; a variance within rounding of zero is zero."""
    mean = moments[0] / n if n else np.nan
    squares = moments[1] - n * mean**2
    if squares <= 8 * np.finfo(float).eps * moments[1]:
        squares = 0.0
    return mean, squares / (n - 1) if n > 1 else np.nan


def fit_alpha(means: np.ndarray, variances: np.ndarray, norm: float) -> tuple[float, str]:
    """Alpha and its status from f(0), f(|d|), f'(0), f'(|d|), their sample variances, and |d|.

    Solved by QR on the whitened system with tau in units of |d|, so that its condition does not depend on |d|.

    Args:
        means: Shape ``[4]``.
        variances: Shape ``[4]``; a zero counts as 1e-10.
        norm: Length of the update.
    """
    if norm == 0:
        return -1.0, "no_step"
    if not (np.isfinite(means).all() and np.isfinite(variances).all() and np.isfinite(norm)):
        return np.nan, "singular"
    design = np.array([[1.0, 0, 0], [1, 1, 1], [0, 1, 0], [0, 1, 2]])
    unit = np.array([1.0, 1, norm, norm])  # slopes per unit of u = tau / |d|
    deviations = np.sqrt(np.where(variances == 0, ZERO_VARIANCE, variances)) * unit
    q, r = np.linalg.qr(design / deviations[:, None])
    diagonal = np.abs(np.diag(r))
    if not diagonal.min() > np.finfo(float).eps * diagonal.max():
        return np.nan, "singular"
    _, mu_1, mu_2 = np.linalg.solve(r, q.T @ (means * unit / deviations))
    if mu_2 <= 0:
        return -1.0, "concave"
    with np.errstate(divide="ignore"):
        return float(np.float64(-2.0) * mu_2 / mu_1 - 1.0), "minimum"


def fit_slopes(means: np.ndarray, variances: np.ndarray, norm: float) -> tuple[float, str]:
    """Alpha and its status from only the slopes at both ends; arguments as for `fit_alpha`."""
    if norm == 0:
        return -1.0, "no_step"
    start, end = means[2:]
    if not (np.isfinite(start) and np.isfinite(end) and np.isfinite(norm)):
        return np.nan, "singular"
    if end <= start:
        return -1.0, "concave"
    with np.errstate(divide="ignore"):
        return float(-np.float64(end) / start), "minimum"
