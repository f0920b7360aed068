"""How much of each activation module is active."""

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
from distcockpit.quantities.batch import LocalBatch, Model, Needs, Observed
from distcockpit.store.schema import Field, Group, Row


@dataclass(frozen=True, kw_only=True)
class OutputActivation(Quantity):
    r"""Share of active outputs of each activation module, and share of its neurons that are dead.

    An output element is active if $|z| > \epsilon$. A neuron (a channel: one index of the channel axis) is dead if none
    of its outputs is active, over all samples of the pooled batch and all positions. This is the output-activation lens
    of monitorch, over all ranks. Shares between 0 and 1. NaN for a module whose output does not start with the batch
    axis, or that not all samples go through; the dead share is NaN if the number of neurons on any rank differs from
    the first tracked step. In a model without activation modules (functional ones are not seen), all leaf modules are
    tracked.

    Args:
        epsilon: Magnitude up to which an output counts as zero, at least 0.
        channel_axis: Axis of the neurons: 1 for ``[B, C, *]``, -1 for ``[B, *, C]``; not 0, the batch.
    """

    epsilon: float = 1e-8
    channel_axis: int = 1

    source: ClassVar[str] = "the output-activation lens of monitorch, pooled over ranks"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.epsilon >= 0:
            raise ValueError(f"OutputActivation(epsilon={self.epsilon!r}): must be at least 0.")
        if isinstance(self.channel_axis, bool) or not isinstance(self.channel_axis, int) or self.channel_axis == 0:
            raise ValueError(
                f"OutputActivation(channel_axis={self.channel_axis!r}): must be an axis other than the batch axis, 0."
            )

    @property
    def needs(self) -> Needs:
        """The outputs, and how many neurons they have."""
        return Needs(outputs=True, output_sizes=True)

    def observed_layers(self, leaves: Mapping[str, bool]) -> list[str]:
        """The modules in the row."""
        return [path for path, is_activation in leaves.items() if is_activation] or list(leaves)

    def group(self, model: Model) -> Group:
        """Two shares per layer."""
        fields = {
            "active": Field(("layer",), "share of active outputs"),
            "dead": Field(("layer",), "share of dead neurons"),
        }
        labels = [label(path) for path in self.observed_layers(model.leaves)]
        return Group(fields, {"layer": labels})

    def observe(self, output: Tensor, has_batch_axis: bool) -> Tensor | None:
        """Numbers of active outputs, of all outputs, and of samples, for each neuron: ``[3, C]``."""
        if not has_batch_axis:
            return None
        samples = len(output)
        output = output[:, None] if output.dim() == 1 else output
        axis = self.channel_axis if -output.dim() < self.channel_axis < output.dim() else 1
        axis %= output.dim()
        sizes = math.prod(output.shape[:axis]), output.shape[axis], math.prod(output.shape[axis + 1 :])
        zeros = kernels.count_small(output.reshape(sizes), self.epsilon).double()
        elements = torch.full_like(zeros, output.numel() / output.shape[axis] if output.shape[axis] else 0)
        return torch.stack([elements - zeros, elements, torch.full_like(zeros, samples)])

    def sizes(self, observed: Observed) -> Mapping[str, int]:
        """The number of neurons of each module; 0 if it differs between calls."""
        seen: dict[str, set[int]] = {}
        for micro in observed:
            for path, counts in micro:
                seen.setdefault(path, set()).add(counts.shape[1])
        return {path: widths.pop() if len(widths) == 1 else 0 for path, widths in seen.items()}

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """Active outputs, outputs and samples by layer; active outputs by neuron, layer after layer."""
        layers = self.observed_layers(batch.model.leaves)
        widths = {path: batch.sizes.get(path, 0) for path in layers}
        neurons = {path: batch.vector([]).new_zeros(width) for path, width in widths.items()}
        whole = {path: batch.vector([0.0] * 4) for path in layers}
        for micro in batch.observed:
            called: set[str] = set()
            for path, seen in micro:
                if path not in whole:
                    continue
                active, elements, samples = seen
                fits = len(active) == widths[path]
                if fits:
                    neurons[path] += active
                first = samples[:1].sum() if path not in called else 0.0
                whole[path] += batch.vector([active.sum(), elements.sum(), first, not fits])
                called.add(path)
        return {
            "whole": torch.stack(list(whole.values())) if layers else batch.vector([]).reshape(0, 4),
            "neurons": torch.cat(list(neurons.values())) if layers else batch.vector([]),
            "widths": batch.replicated(lambda: batch.vector(list(widths.values()))),
        }

    def finalize(self, totals: Totals, n: int) -> Row:
        """The shares."""
        active, elements, samples, misfits = totals["whole"].T
        ends = np.cumsum(totals["widths"]).astype(int)
        parts = np.split(totals["neurons"], ends[:-1]) if len(ends) else []
        known = (samples == n) & (n > 0)
        with np.errstate(all="ignore"):
            dead = np.array([np.mean(part == 0) if len(part) else np.nan for part in parts])
            return {
                "active": np.where(known, active / elements, np.nan),
                "dead": np.where(known & (misfits == 0), dead, np.nan),
            }
