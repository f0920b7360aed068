"""How much of each activation module is active."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from distcockpit.quantities.base import Quantity, Sums, Totals
from distcockpit.quantities.batch import LocalBatch, Model, Needs, label
from distcockpit.schema import Field, Group, Row


@dataclass(frozen=True, kw_only=True)
class OutputActivation(Quantity):
    r"""Share of active outputs of each activation module, and share of its neurons that are dead.

    An output element is active if $|z| > \epsilon$. A neuron (a channel: one index of the channel axis) is dead if no
    output of it is active, over all samples of the pooled batch and all positions. The output-activation lens of
    monitorch, over all ranks. Shares of 1. NaN for a module whose output does not begin with the batch axis; the dead
    share is NaN where ranks saw different numbers of neurons. In a model without activation modules (functional ones
    are not seen) all leaf modules are watched.

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
                f"OutputActivation(channel_axis={self.channel_axis!r}): must be an axis other than 0, the batch."
            )

    @property
    def needs(self) -> Needs:
        """The outputs."""
        return Needs(outputs=True)

    def _layers(self, leaves: Mapping[str, bool]) -> list[str]:
        return [path for path, is_activation in leaves.items() if is_activation] or list(leaves)

    def group(self, model: Model) -> Group:
        """Two shares per layer."""
        fields = {
            "active": Field(("layer",), "share of active outputs"),
            "dead": Field(("layer",), "share of dead neurons"),
        }
        labels = [label(path) for path in self._layers(model.leaves)]
        return Group(fields, {"layer": labels})

    def observe(self, output: Tensor) -> Tensor:
        """Active outputs, and all outputs, of each neuron: ``[2, C]``."""
        output = output[:, None] if output.dim() == 1 else output
        axis = self.channel_axis if -output.dim() < self.channel_axis < output.dim() else 1
        active = ~(output.abs() <= self.epsilon).movedim(axis, 0).flatten(1)  # what is not finite is not zero
        counts = active.sum(1, dtype=torch.float64)
        return torch.stack([counts, torch.full_like(counts, active.shape[1])])

    def shapes(self, observed: Sequence[Sequence[tuple[str, Tensor]]]) -> object:
        """The numbers of neurons."""
        return sorted({(path, seen.shape[1]) for micro in observed for path, seen in micro})

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """Active outputs by neuron, layer after layer; and how many neurons each layer has."""
        seen: dict[str, list[Tensor]] = {path: [] for path in self._layers(batch.model.leaves)}
        for micro in batch.observed:
            for path, counts in micro:
                if path in seen:
                    seen[path].append(counts)
        nothing = batch.vector([]).new_zeros(2, 0)
        whole = [
            torch.stack([c.sum(1) for c in counts]).sum(0) if counts else nothing.sum(1) for counts in seen.values()
        ]
        alike = batch.uniform and all(len({c.shape[1] for c in counts}) <= 1 for counts in seen.values())
        neurons = [torch.stack(counts).sum(0)[0] if counts and alike else nothing[0] for counts in seen.values()]
        return {
            "counts": torch.stack(whole) if whole else nothing.T,
            "neurons": torch.cat(neurons) if neurons else nothing[0],
            "widths": batch.once(lambda: batch.vector([len(part) for part in neurons])),
        }

    def finalize(self, totals: Totals, n: int) -> Row:
        """The shares."""
        active, elements = totals["counts"].T
        parts = np.split(totals["neurons"], np.cumsum(totals["widths"]).astype(int)[:-1]) if len(active) else []
        with np.errstate(all="ignore"):
            dead = [np.mean(part == 0) if len(part) and n else np.nan for part in parts]
            return {"active": active / elements, "dead": np.array(dead)}
