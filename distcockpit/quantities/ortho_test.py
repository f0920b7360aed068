"""The orthogonality test of the batch size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from distcockpit.quantities.base import Quantity, Sums, Totals
from distcockpit.quantities.batch import LocalBatch, Model, Needs
from distcockpit.quantities.variance import scatter
from distcockpit.store.schema import Field, Group, Row


@dataclass(frozen=True, kw_only=True)
class OrthoTest(Quantity):
    r"""Standard error of the mean gradient orthogonal to its own direction: the smallest nu that passes the test.

    $$\nu = \sqrt{\frac{\sum_i \|g_i\|^2 - \sum_i p_i^2 / \|G\|^2}{(N - 1)\, N \|G\|^2}}, \qquad
      p_i = \langle g_i, G\rangle$$

    The numerator is the scatter of the individual gradients about G, minus that of their projections about
    $\|G\|^2$. Bollapragada, Byrd and Nocedal 2017, "Adaptive Sampling Strategies for Stochastic Optimization",
    arXiv:1710.11258, Eq. 3.3. Unitless. NaN for fewer than two samples and where G is zero.
    """

    source: ClassVar[str] = "Bollapragada et al. 2017, arXiv:1710.11258, Eq. 3.3"

    @property
    def needs(self) -> Needs:
        """G, the norms of the individual gradients, and their projections on G."""
        return Needs(squared_norms=True, projections=True)

    def group(self, model: Model) -> Group:
        """One number per step."""
        field = Field((), "orthogonality test: relative standard error across G")
        return Group({"ortho_test": field})

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """This rank's S2 and centred squares of the projections; the squared norm of G."""
        mean_squared = batch.mean_squared.sum()
        along = (batch.projections - mean_squared).square().sum()
        return {"squares": batch.squared_norms.sum(), "along": along, "mean_squared": batch.replicated(mean_squared)}

    def finalize(self, totals: Totals, n: int) -> Row:
        """Nu."""
        squared = totals["mean_squared"]
        with np.errstate(all="ignore"):
            across = scatter(totals["squares"], squared, n) - totals["along"] / squared
            across = np.where(across < 0, 0.0, across)  # rounding errors, when all scatter is along G
            return {"ortho_test": np.sqrt(across / (n - 1 if n > 1 else np.nan) / (n * squared))}
