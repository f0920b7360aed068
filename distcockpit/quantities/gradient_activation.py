"""How much of each parameter receives a gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from distcockpit.gradients import kernels
from distcockpit.quantities.base import Quantity, Sums, Totals
from distcockpit.quantities.batch import LocalBatch, Model, Needs
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
        return Needs(mean_gradient=True)

    def group(self, model: Model) -> Group:
        """Two shares per parameter."""
        fields = {
            "active": Field(("parameter",), "share of elements with a gradient"),
            "dead": Field(("parameter",), "share of neurons without a gradient"),
        }
        return Group(fields, {"parameter": model.parameters})

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """The shares, which all ranks know."""
        gradients = list(batch.mean_gradient.values())

        def shares() -> Tensor:
            shapes = [(len(g), g[:1].numel()) if g.numel() and g.dim() else (1, g.numel()) for g in gradients]
            quiet = [
                kernels.count_small(g.reshape(1, *shape), self.epsilon)
                for g, shape in zip(gradients, shapes, strict=True)
            ]
            pairs = [
                (1 - zeros.sum().double() / (rows * columns), (zeros == columns).double().mean())
                for (rows, columns), zeros in zip(shapes, quiet, strict=True)
            ]
            return torch.stack([batch.vector(values) for values in zip(*pairs, strict=True)])

        return {"shares": batch.replicated(shares)}

    def finalize(self, totals: Totals, n: int) -> Row:
        """The same."""
        active, dead = totals["shares"] if n else np.full_like(totals["shares"], np.nan)
        return {"active": active, "dead": dead}
