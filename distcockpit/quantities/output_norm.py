"""Norm of the outputs of every leaf module."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from distcockpit.gradients import kernels
from distcockpit.gradients.uses import label
from distcockpit.quantities.base import Quantity, Sums, Totals
from distcockpit.quantities.batch import LocalBatch, Model, Needs
from distcockpit.store.schema import Field, Group, Row


@dataclass(frozen=True, kw_only=True)
class OutputNorm(Quantity):
    r"""Mean norm of a sample's output z of each leaf module: $\frac1N \sum_i \|z_i\|$.

    The output-norm lens of monitorch, over the samples of all ranks. Norms that grow or vanish with depth mean a
    signal that explodes or dies. In units of the output. If a module is called several times in a forward pass, all its
    outputs count together. NaN for a module whose output does not start with the batch axis, or that not all samples
    go through.

    Args:
        normalize_by_size: Store the mean over samples of the root mean square over elements instead of the norm.
        skip_activation: Leave activation modules out.
    """

    normalize_by_size: bool = False
    skip_activation: bool = False

    source: ClassVar[str] = "the output-norm lens of monitorch, pooled over ranks"

    @property
    def needs(self) -> Needs:
        """The outputs."""
        return Needs(outputs=True)

    def observed_layers(self, leaves: Mapping[str, bool]) -> list[str]:
        """The modules in the row."""
        return [path for path, is_activation in leaves.items() if not (is_activation and self.skip_activation)]

    def group(self, model: Model) -> Group:
        """A norm per layer."""
        what = "root mean square" if self.normalize_by_size else "norm"
        labels = [label(path) for path in self.observed_layers(model.leaves)]
        return Group({"output_norm": Field(("layer",), f"mean output {what}")}, {"layer": labels})

    def observe(self, output: Tensor, has_batch_axis: bool) -> Tensor | None:
        """Squared norm and number of elements of each sample, ``[2, B]``."""
        if not has_batch_axis:
            return None
        rows = output.reshape(len(output), math.prod(output.shape[1:]))
        squares = kernels.inner_rows(rows, rows)
        return torch.stack([squares, torch.full_like(squares, math.prod(output.shape[1:]))])

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """Sum of the norms, and number of samples, by layer."""
        layers = self.observed_layers(batch.model.leaves)
        sums: dict[str, Tensor | float] = dict.fromkeys(layers, 0.0)
        counts = dict.fromkeys(layers, 0)
        for micro in batch.observed:
            calls: dict[str, Tensor] = {}
            for path, seen in micro:
                calls[path] = seen + calls[path] if path in calls else seen
            for path in calls.keys() & sums.keys():
                squares, sizes = calls[path]
                sums[path] = sums[path] + (squares / sizes if self.normalize_by_size else squares).sqrt().sum()
                counts[path] += len(squares)
        return {"norms": batch.vector(list(sums.values())), "samples": batch.vector(list(counts.values()))}

    def finalize(self, totals: Totals, n: int) -> Row:
        """The means."""
        known = totals["samples"] == n if n else np.zeros_like(totals["samples"], dtype=bool)
        return {"output_norm": np.where(known, totals["norms"] / (n or 1), np.nan)}
