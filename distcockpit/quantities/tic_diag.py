"""The Takeuchi information criterion, approximated by diagonals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from distcockpit.quantities.base import Sums, Totals
from distcockpit.quantities.batch import BucketSums, LocalBatch, Model, Needs
from distcockpit.quantities.curved import OfCurvature
from distcockpit.store.schema import Field, Group, Row


@dataclass(frozen=True, kw_only=True)
class TICDiag(OfCurvature):
    r"""Takeuchi information criterion from the diagonals of gradient second moment and curvature.

    $$\sum_d \frac{s_d / N}{h_d + \epsilon}, \qquad s_d = \sum_i g_{i,d}^2$$

    with the pooled curvature diagonal h. Thomas et al. 2019, "On the interplay between noise and curvature and its
    effect on optimization and generalization", arXiv:1906.07774. In units of loss; large where gradient noise meets
    flat directions. With ``diag_h`` it is ill-conditioned where h + epsilon is near zero, which is common away from
    minima; the GGN is never negative. NaN for N = 0.

    Args:
        curvature: ``"diag_h"``: the Hessian; ``"diag_ggn_exact"``: the generalised Gauss-Newton matrix;
            ``"diag_ggn_mc"``: its Monte-Carlo estimate, with draws that differ between ranks.
        mc_samples: Draws per sample for ``"diag_ggn_mc"``, at least 1.
        seed: Base seed of these draws. The global random state is not changed.
        epsilon: Added to the curvature.
    """

    epsilon: float = 1e-7

    source: ClassVar[str] = "Thomas et al. 2019, arXiv:1906.07774"

    @property
    def needs(self) -> Needs:
        """The pooled sums of g_i^2, and the pooled diagonal."""
        return Needs(squared_gradients=True, curvature=self.diagonal, pooled_curvature=True)

    def group(self, model: Model) -> Group:
        """One number per step."""
        field = Field((), "TIC from diagonals", "loss", f"with {self.curvature}")
        return Group({"tic_diag": field})

    def reduce(self, bucket: BucketSums, memory: dict[str, Any]) -> Mapping[str, Tensor]:
        """The sum over this rank's range of elements."""
        curvature = bucket.shard.curvature[self.diagonal]
        return {"sum": (bucket.shard.squares / bucket.n / (curvature + self.epsilon)).sum()}

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """The same, over all."""
        return batch.reduced

    def finalize(self, totals: Totals, n: int) -> Row:
        """The sum over all."""
        return {"tic_diag": totals["sum"] if n else np.nan}
