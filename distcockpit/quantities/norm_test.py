"""The norm test of the batch size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from distcockpit.quantities.base import Quantity, Sums, Totals
from distcockpit.quantities.batch import LocalBatch, Model, Needs
from distcockpit.quantities.variance import sample_variance
from distcockpit.store.schema import Field, Group, Row


@dataclass(frozen=True, kw_only=True)
class NormTest(Quantity):
    r"""Standard error of the mean gradient relative to its norm: the smallest theta that passes the norm test.

    $$\theta = \sqrt{\frac{V}{N \|G\|^2}}, \qquad V = \frac{\sum_i \|g_i\|^2 - N\|G\|^2}{N - 1}$$

    Byrd, Chin, Nocedal and Wu 2012, "Sample size selection in optimization methods for machine learning", Eq. 3.9.
    Unitless: above 1, the noise of the batch exceeds its gradient. NaN for fewer than two samples and where G is zero.
    """

    source: ClassVar[str] = "Byrd et al. 2012, Mathematical Programming 134, Eq. 3.9"

    @property
    def needs(self) -> Needs:
        """G, and the norms of the individual gradients."""
        return Needs(mean_squared=True, squared_norms=True)

    def group(self, model: Model) -> Group:
        """One number per step."""
        return Group({"norm_test": Field((), "norm test: relative standard error of G")})

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """This rank's S2; the squared norm of G."""
        mean_squared = batch.replicated(lambda: batch.mean_squared.sum())
        return {"squares": batch.squared_norms.sum(), "mean_squared": mean_squared}

    def finalize(self, totals: Totals, n: int) -> Row:
        """Theta."""
        with np.errstate(all="ignore"):
            variance = sample_variance(totals["squares"], totals["mean_squared"], n)
            return {"norm_test": np.sqrt(variance / (n * totals["mean_squared"]))}
