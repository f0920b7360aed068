"""How much of each parameter receives a gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from distcockpit.gradients import kernels
from distcockpit.quantities.base import Quantity, Sums, Totals
from distcockpit.quantities.batch import BucketSums, LocalBatch, Model, Needs
from distcockpit.store.schema import Field, Group, Row


@dataclass(frozen=True, kw_only=True)
class GradientActivation(Quantity):
    r"""Share of each parameter's elements that have a gradient, and share of its neurons that have none.

    An element is active if $|G_d| > \epsilon$ for the pooled mean gradient; a neuron, which is one index of the
    parameter's first axis, is dead if none of its elements is active. This is the gradient-activation lens of
    monitorch, for the gradient of the pooled batch: a neuron that is dead on some rank's own batch may be alive in the
    pooled batch. Shares between 0 and 1; NaN for N = 0.

    Args:
        epsilon: Magnitude up to which a gradient counts as zero, at least 0.
    """

    epsilon: float = 1e-8

    source: ClassVar[str] = "the parameter-gradient-activation lens of monitorch, pooled over ranks"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.epsilon >= 0:
            raise ValueError(f"GradientActivation(epsilon={self.epsilon!r}): must be at least 0.")

    @property
    def needs(self) -> Needs:
        """G."""
        return Needs(bucket_sums=True)

    def group(self, model: Model) -> Group:
        """Two shares per parameter."""
        fields = {
            "active": Field(("parameter",), "share of elements with a gradient"),
            "dead": Field(("parameter",), "share of neurons without a gradient"),
        }
        return Group(fields, {"parameter": model.parameters})

    def reduce(self, bucket: BucketSums, memory: dict[str, Any]) -> Mapping[str, Tensor]:
        """How many elements have no gradient, and how many neurons; rank 0 counts."""
        counts = bucket.mean_squared.new_zeros(2, len(bucket.rows))
        for k, g in enumerate(bucket.mean.values() if bucket.rank == 0 else ()):
            rows, columns = _matrix(g.shape)
            zeros = kernels.count_small(g.reshape(1, rows, columns), self.epsilon)
            counts[0, k], counts[1, k] = zeros.sum(), (zeros == columns).sum()
        return {"counts": bucket.by_parameter(counts)}

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """The shares, which all ranks know."""
        shapes = [_matrix(shape) for shape in batch.model.shapes.values()]
        sizes = batch.vector([rows * columns for rows, columns in shapes])
        quiet, dead = batch.reduced["counts"]
        return {
            "shares": batch.replicated(
                lambda: torch.stack([1 - quiet / sizes, dead / batch.vector([rows for rows, _ in shapes])])
            )
        }

    def finalize(self, totals: Totals, n: int) -> Row:
        """The same."""
        active, dead = totals["shares"] if n else np.full_like(totals["shares"], np.nan)
        return {"active": active, "dead": dead}


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Number of neurons, and of elements of each."""
    size = math.prod(shape)
    return (shape[0], size // shape[0]) if size and shape else (1, size)
