"""The inner product test of the batch size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from distcockpit.quantities.base import Quantity, Sums, Totals
from distcockpit.quantities.batch import LocalBatch, Model, Needs
from distcockpit.store.schema import Field, Group, Row


@dataclass(frozen=True, kw_only=True)
class InnerTest(Quantity):
    r"""Standard error of the projections of individual gradients on G: the smallest theta that passes the test.

    $$\theta = \sqrt{\frac{\sum_i (p_i - \|G\|^2)^2}{(N - 1)\, N \|G\|^4}}, \qquad p_i = \langle g_i, G\rangle$$

    The numerator is $\sum_i p_i^2 - N\|G\|^4$, centred before it is squared. Bollapragada, Byrd and Nocedal 2017,
    "Adaptive Sampling Strategies for Stochastic Optimization", arXiv:1710.11258, Eq. 2.6. Unitless: above 1, the batch
    gradient may well not point downhill. NaN for fewer than two samples and where G is zero.
    """

    source: ClassVar[str] = "Bollapragada et al. 2017, arXiv:1710.11258, Eq. 2.6"

    @property
    def needs(self) -> Needs:
        """G, and the projections onto it."""
        return Needs(projections=True)

    def group(self, model: Model) -> Group:
        """One number per step."""
        field = Field((), "inner product test: relative standard error along G")
        return Group({"inner_test": field})

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """This rank's centred sum of squares."""
        mean_squared = batch.mean_squared.sum()
        along = (batch.projections - mean_squared).square().sum()
        return {"along": along, "mean_squared": batch.replicated(mean_squared)}

    def finalize(self, totals: Totals, n: int) -> Row:
        """Theta."""
        with np.errstate(all="ignore"):
            variance = totals["along"] / (n - 1 if n > 1 else np.nan)
            return {"inner_test": np.sqrt(variance / n) / totals["mean_squared"]}
