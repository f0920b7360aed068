"""Norm and direction of the pooled mean gradient, per parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from distcockpit.quantities.base import Quantity, Sums, Totals
from distcockpit.quantities.batch import BucketSums, LocalBatch, Model, Needs, ReplicatedValue
from distcockpit.quantities.geometry import PREVIOUS, compared_in, norm_and_correlation, with_previous
from distcockpit.store.schema import Field, Group, Row


@dataclass(frozen=True, kw_only=True)
class GradientGeometry(Quantity):
    r"""Norm of the pooled mean gradient G of each parameter, and its cosine with that of the previous tracked step.

    The parameter-gradient lens of monitorch, for the gradient of the pooled batch. A cosine near -1 means oscillation.
    Norms are in units of loss per parameter; cosines are NaN at the first tracked step and where a gradient is zero.
    Rank 0 keeps a copy of G; if parameters are sharded, each rank keeps its part.
    """

    source: ClassVar[str] = "the parameter-gradient-geometry lens of monitorch, pooled over ranks"

    @property
    def needs(self) -> Needs:
        """G."""
        return Needs(bucket_sums=True)

    def group(self, model: Model) -> Group:
        """A norm and a cosine per parameter."""
        fields = {
            "norm": Field(("parameter",), "norm of the mean gradient", "loss / parameter"),
            "correlation": Field(("parameter",), "cosine with the previous mean gradient"),
            "previous_step": PREVIOUS,
        }
        return Group(fields, {"parameter": model.parameters})

    def reduce(self, bucket: BucketSums, memory: dict[str, Any]) -> Mapping[str, Tensor]:
        """Squared norms and inner products of what this rank answers for, of which it keeps a copy."""
        return {"pairs": bucket.by_parameter(compared_in(bucket, memory))} if bucket.own else {}

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """The same, and the previous step."""
        if "pairs" not in batch.reduced:
            return dict.fromkeys(("compared", "gaps", "previous"), ReplicatedValue(None))
        found = with_previous(batch.step, batch.reduced["pairs"], memory)
        if batch.pieces is not None:
            return found
        return {k: v if isinstance(v, ReplicatedValue) else ReplicatedValue(v) for k, v in found.items()}

    def finalize(self, totals: Totals, n: int) -> Row:
        """Norms and cosines."""
        return norm_and_correlation(totals)
