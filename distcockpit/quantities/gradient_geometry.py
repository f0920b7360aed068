"""Norm and direction of the pooled mean gradient, per parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from distcockpit.quantities.base import Quantity, Sums, Totals
from distcockpit.quantities.batch import LocalBatch, Model, Needs
from distcockpit.quantities.geometry import PREVIOUS, compared, norm_and_correlation
from distcockpit.store.schema import Field, Group, Row


@dataclass(frozen=True, kw_only=True)
class GradientGeometry(Quantity):
    r"""Norm of the pooled mean gradient G of each parameter, and its cosine with that of the previous tracked step.

    The parameter-gradient lens of monitorch, for the gradient of the pooled batch. A cosine near -1 means oscillation.
    Norms are in units of loss per parameter; cosines are NaN at the first tracked step and where a gradient is zero.
    Rank 0 keeps a copy of G.
    """

    source: ClassVar[str] = "the parameter-gradient-geometry lens of monitorch, pooled over ranks"

    @property
    def needs(self) -> Needs:
        """G."""
        return Needs(mean_gradient=True)

    def group(self, model: Model) -> Group:
        """A norm and a cosine per parameter."""
        fields = {
            "norm": Field(("parameter",), "norm of the mean gradient", "loss / parameter"),
            "correlation": Field(("parameter",), "cosine with the previous mean gradient"),
            "previous_step": PREVIOUS,
        }
        return Group(fields, {"parameter": model.parameters})

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """Norms and inner products, which are the same on all ranks."""
        return {
            "compared": batch.replicated(lambda: compared(batch.step, batch.mean_gradient, batch.mean_squared, memory))
        }

    def finalize(self, totals: Totals, n: int) -> Row:
        """Norms and cosines."""
        return norm_and_correlation(totals)
