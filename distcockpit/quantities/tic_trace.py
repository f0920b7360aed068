"""The Takeuchi information criterion, approximated by traces."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from distcockpit.quantities.base import Sums, Totals
from distcockpit.quantities.batch import LocalBatch, Model, Needs
from distcockpit.quantities.curved import OfTraces
from distcockpit.store.schema import Field, Group, Row


@dataclass(frozen=True, kw_only=True)
class TICTrace(OfTraces):
    r"""Takeuchi information criterion from the traces of gradient second moment and curvature.

    $$\frac{\frac1N\sum_i \|g_i\|^2}{\sum_d h_d + \epsilon}$$

    with the pooled curvature diagonal h. Thomas et al. 2019, "On the interplay between noise and curvature and its
    effect on optimization and generalization", arXiv:1906.07774. In units of loss. NaN for N = 0.

    Args:
        curvature: BackPACK's diagonals, for chains of modules that it supports: ``"diag_h"``, the Hessian;
            ``"diag_ggn_exact"``, the generalised Gauss-Newton matrix (GGN); ``"diag_ggn_mc"``, its Monte-Carlo
            estimate, with draws that differ between ranks. Estimates, for any twice-differentiable model:
            ``"hutchinson"`` of the Hessian, ``"hutchinson_ggn"`` of the GGN.
        mc_samples: Draws per sample for ``"diag_ggn_mc"``, at least 1.
        samples: Random vectors for the estimates, at least 1; each costs a product with the matrix.
        seed: Base seed of draws and vectors. The global random state is not changed.
        epsilon: Added to the trace of the curvature.
    """

    epsilon: float = 1e-7

    source: ClassVar[str] = "Thomas et al. 2019, arXiv:1906.07774"

    @property
    def needs(self) -> Needs:
        """The norms of the individual gradients, and the diagonal."""
        return replace(super().needs, squared_norms=True)

    def group(self, model: Model) -> Group:
        """One number per step."""
        field = Field((), "TIC from traces", "loss", f"with {self.curvature}")
        return Group({"tic_trace": field})

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """S2 and this rank's part of the trace."""
        return {"squares": batch.squared_norms.sum(), "trace": self.traces(batch).mean(0).sum()}

    def finalize(self, totals: Totals, n: int) -> Row:
        """The ratio."""
        with np.errstate(all="ignore"):
            return {"tic_trace": totals["squares"] / n / (totals["trace"] + self.epsilon) if n else np.nan}
