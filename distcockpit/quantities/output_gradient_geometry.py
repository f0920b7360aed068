"""Norm and direction of the loss gradient at the output of every leaf module."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from distcockpit.gradients import kernels
from distcockpit.quantities.base import Quantity, Sums, Totals
from distcockpit.quantities.batch import LocalBatch, Model, Needs, ReplicatedValue
from distcockpit.store.schema import Field, Group, Row


@dataclass(frozen=True, kw_only=True)
class OutputGradientGeometry(Quantity):
    r"""Norm of the gradient at the output z of each leaf module, and its cosine with the previous tracked one.

    $$\|\partial L/\partial z\|^2 = \frac1{N^2}\sum_i \|\partial \ell_i/\partial z_i\|^2, \qquad z = (z_1, \dots, z_N)$$

    for the pooled batch. Small norms towards the input mean vanishing gradients, a cosine near -1 means oscillation.
    In units of loss per unit of output. NaN for a module that received no gradient; the cosine is NaN at the first
    tracked step, if the shape of the local outputs changed on any rank, and if a norm is zero.

    Args:
        normalize_by_size: Store the root mean square over the elements of z instead of the norm.
        compute_correlation: Store the cosine; each rank then keeps the output gradients until the next tracked step.
        skip_activation: Leave activation modules out.
    """

    normalize_by_size: bool = False
    compute_correlation: bool = True
    skip_activation: bool = True

    source: ClassVar[str] = "the output-gradient lens of monitorch, pooled over ranks"
    remembers_samples: ClassVar[bool] = True

    @property
    def needs(self) -> Needs:
        """The output gradients."""
        return Needs(output_gradients=True)

    def _layers(self, leaves: Mapping[str, bool]) -> list[str]:
        return [path for path, is_activation in leaves.items() if not (is_activation and self.skip_activation)]

    def group(self, model: Model) -> Group:
        """A norm and a cosine per layer."""
        what = "root mean square" if self.normalize_by_size else "norm"
        fields = {"norm": Field(("layer",), f"output gradient {what}", "loss / output")}
        if self.compute_correlation:
            fields["correlation"] = Field(("layer",), "cosine with the previous output gradient")
            fields["previous_step"] = Field(
                (), "previous tracked step", description="-1: there was none", dtype="int64"
            )
        labels = [path or "(model)" for path in self._layers(model.leaves)]
        return Group(fields, {"layer": labels})

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """Squares, sizes, and inner products with what this rank kept from the previous tracked step."""
        layers, gradients = self._layers(batch.model.leaves), batch.output_gradients
        now = {path: list(gradients[path]) for path in layers}
        squares = batch.vector([_dot(now[path], now[path]) for path in layers])
        sums: dict[str, Tensor | ReplicatedValue] = {
            "squares": squares,
            "elements": batch.vector([sum(g.numel() for g in now[path]) for path in layers]),
        }
        if self.compute_correlation:
            before = memory.get("gradients", {path: [] for path in layers})
            changed = [[g.shape for g in now[path]] != [g.shape for g in before[path]] for path in layers]
            pairs = [([], []) if c else (now[path], before[path]) for path, c in zip(layers, changed, strict=True)]
            sums |= {
                "changed": batch.vector(changed),
                "inner": batch.vector([_dot(a, b) for a, b in pairs]),
                "squares_before": memory.get("squares", squares.new_zeros(len(layers))),
                "previous_step": batch.replicated(memory.get("step", -1)),
            }
            memory.update(gradients=now, squares=squares, step=batch.step)
        return sums

    def finalize(self, totals: Totals, n: int) -> Row:
        """Norms and cosines of the pooled batch."""
        with np.errstate(all="ignore"):
            reached = totals["elements"] > 0
            norm = np.where(reached, np.sqrt(totals["squares"]) / n if n else np.nan, np.nan)
            if self.normalize_by_size:
                norm = norm / np.sqrt(totals["elements"])
            row: dict[str, Any] = {"norm": norm}
            if self.compute_correlation:
                cosine = totals["inner"] / np.sqrt(totals["squares"] * totals["squares_before"])
                row["correlation"] = np.where(reached & (totals["changed"] == 0), cosine, np.nan)
                row["previous_step"] = int(totals["previous_step"])
        return row


def _dot(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor | float:
    """Inner product over all calls of a module, accumulated in float64."""
    return sum((kernels.inner_rows(_rows(a), _rows(b)).sum() for a, b in zip(first, second, strict=True)), 0.0)


def _rows(values: Tensor) -> Tensor:
    return values.reshape(len(values) if values.dim() else 1, math.prod(values.shape[1:]))
