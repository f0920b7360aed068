"""What is kept of one call of a layer: its inputs, and the gradient of the loss with respect to its outputs.

Together they determine the individual gradients of the layer's parameters. That is why nothing of shape
``[N, P]`` is stored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from distcockpit.gradients.factors import Factors, Rows
from distcockpit.replay.snapshot import Snapshot
from distcockpit.replay.trees import tensors


@dataclass(frozen=True)
class Folded:
    """A batch axis that was merged with its neighbours, as by ``view(-1, C)`` of ``[B, T, C]`` or of ``[T, B, C]``.

    Args:
        axis: The merged one.
        outer: The length of what the batch lies within.
        inner: The length of what lies within the batch.
    """

    axis: int
    outer: int
    inner: int


Axis = int | Folded | None


def place(axis: int | Folded) -> int:
    """Which one it is."""
    return axis.axis if isinstance(axis, Folded) else axis


Axes = tuple[Axis, ...]
"""The batch axis of each tensor of an output; ``None`` where there is none."""


def to_front(tensor: Tensor, axis: Axis) -> Tensor:
    """With the batch axis in front; what it was merged with becomes two axes, in the place of the merged one."""
    if isinstance(axis, Folded):
        return tensor.unflatten(axis.axis, (axis.outer, -1, axis.inner)).movedim(axis.axis + 1, 0)
    return tensor.movedim(axis, 0) if axis else tensor


def from_front(tensor: Tensor, axis: Axis) -> Tensor:
    """The opposite of `to_front`."""
    if isinstance(axis, Folded):
        return tensor.movedim(0, axis.axis + 1).flatten(axis.axis, axis.axis + 2)
    return tensor.movedim(0, axis) if axis else tensor


Shapes = Sequence[torch.Size]

CALLS = "calls of functions"
"""What serves the parameters that no module is run again for."""

Blocks = Callable[[slice], dict[str, Tensor]]
"""Maps a range of samples to their individual gradients by local parameter name, each ``[n, *parameter.shape]``."""


class UseRule(ABC):
    """How the individual gradients of some parameters follow from a :class:`Use`."""

    def takes(self, axis: Axis, n_axes: int) -> bool:
        """True if it serves a call whose output has as many axes, and the batch there."""
        return axis is not None

    def factors(self, use: Use) -> dict[str, Factors]:
        """The parameters whose individual gradients are sums of outer products, by local name."""
        return {}

    def rows(self, use: Use, samples: slice) -> Rows | None:
        """The individual gradients of the one parameter of a call, if they have few rows that are not zero."""
        return None

    def jvp(self, use: Use, direction: Mapping[str, Tensor]) -> Tensor | None:
        """``<g_i, v>`` for all samples, where that needs no individual gradient: the derivative of the output along v.

        Args:
            use: The call.
            direction: v, by local name; some of the parameters or all.

        Returns:
            float64 ``[B]``, or ``None``.
        """
        return None

    @abstractmethod
    def blocks(self, use: Use, names: Sequence[str], values: Mapping[str, Tensor]) -> Blocks:
        """Individual gradients of the parameters ``names`` for any range of samples.

        Args:
            use: The call.
            names: Local parameter names.
            values: What the parameters of the model were in that call, by full name.
        """

    def elements_per_sample(self, use: Use) -> int:
        """Elements that a block needs per sample beside the individual gradients themselves."""
        return 0


@dataclass(frozen=True)
class Layer:
    """A module, or the calls of functions with some parameters, and the parameters that its calls serve."""

    path: str  # of the module, or of that which owns the parameters
    module: Module
    parameters: Mapping[str, str]  # local name -> name in the model, of the tracked ones; each of these once
    names: Mapping[str, str]  # the same of all parameters of this module and those below it
    is_leaf: bool  # whether it has no tracked modules below it
    function: str = ""  # the name of the function that was called; of a module: none

    @property
    def scope(self) -> str:
        """What is raised where this does not serve: all calls of functions, or a module."""
        return CALLS if self.function else self.path

    def __str__(self) -> str:
        if self.function:
            return f"the call of {self.function} with {', '.join(map(repr, self.parameters.values()))}"
        return f"layer '{self.path}' ({type(self.module).__name__})"


@dataclass(eq=False)
class Use:
    """One call of a layer in one forward pass, with the gradients that arrived at its outputs."""

    layer: Layer
    form: UseRule | None  # what serves it, where the batch is where that can take it
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: list[tuple[Tensor, int]]  # the input tensors, with their versions in the call
    before: Snapshot
    axes: Axes  # where the batch is in each tensor of the output
    shapes: Shapes  # of these tensors
    given: Sequence[tuple[torch.Size, torch.Size]]  # of the input tensors, and of what they are views of
    key: str  # what its axes are known by
    call: int  # how often this one was called before in the pass
    is_late: bool = False  # whether the call came after the model had returned, as when checkpointing computes again
    output_gradients: dict[int, Tensor] = field(default_factory=dict)  # [B, *], by position among these tensors
    by_part: dict[Any, dict[int, Tensor]] = field(default_factory=dict)  # those of parts of the loss, one by one
    observed: dict[str, Tensor] = field(default_factory=dict)  # what was kept of the output, by observer
    drew: bool = False  # whether random numbers of torch's were drawn in the call, of a layer that is run again
    source: int = 0  # which of the input tensors is that of the closed form
    found: dict[str, Any] = field(default_factory=dict)  # views that the rule worked out

    @property
    def delta(self) -> Tensor:
        """The output gradient of a layer with one output."""
        (delta,) = self.output_gradients.values()
        return delta

    @property
    def input(self) -> Tensor:
        """The input of a layer with one input, ``[B, *]``; its batch axis is that of the output."""
        if self.layer.function:  # the recorded call, and the tensors that it was given
            return to_front(self.args[1 + self.source].detach(), self.axes[0])
        return to_front(tensors((self.args, self.kwargs))[0].detach(), self.axes[0])

    def receive_of_part(self, part: Any, gradient: Tensor, receive: Callable[[Tensor], None]) -> None:
        """A part of the loss has this gradient at an output; ``receive`` would add it to the whole one."""
        whole = dict(self.output_gradients)
        self.have(self.by_part.get(part, {}))
        receive(gradient)
        self.by_part[part] = dict(self.output_gradients)
        self.have(whole)

    def have(self, gradients: Mapping[int, Tensor]) -> None:
        """Have these output gradients instead, and nothing that was worked out from others."""
        self.output_gradients.clear()
        self.output_gradients.update(gradients)
        self.found.clear()

    def serving(self, parameters: Mapping[str, str]) -> Use:
        """The same call, for these parameters of its layer."""
        return replace(self, layer=replace(self.layer, parameters=parameters))

    @property
    def closed(self) -> UseRule | None:
        """The closed form, if there is one that takes the call."""
        takes = self.form is not None and len(self.axes) == 1 and self.form.takes(self.axes[0], len(self.shapes[0]))
        return self.form if takes else None

    def settle(self, axes: Axes) -> None:
        """Correct the batch axes, where they were guessed."""
        for gradients in (self.output_gradients, *self.by_part.values()):
            for position, gradient in gradients.items():
                if gradient.dim():
                    gradients[position] = to_front(from_front(gradient, self.axes[position]), axes[position])
        self.axes = axes
        self.found.clear()

    @property
    def is_separable(self) -> bool:
        """True if the output gradients of the samples can be told apart."""
        return all(self.axes[position] is not None for position in self.output_gradients)

    @property
    def inputs_changed(self) -> bool:
        """True if an input tensor was written to after the call."""
        return any(tensor._version != version for tensor, version in self.versions)


Materialized = dict[str, list[tuple[slice, slice, Tensor]]]
"""Individual gradients that were formed, by parameter: some samples, a part of its first axis, and those."""


@dataclass
class MicroBatch:
    """The uses of one forward pass, with output gradients scaled to those of the individual losses."""

    batch_size: int
    uses: list[Use]
    materialized: Materialized = field(default_factory=dict)  # what a walk kept for the next one

    def what_is_needed(self) -> MicroBatch:
        """The same without the uses that no walk needs any more: the individual gradients of theirs were formed."""
        uses = [
            use for use in self.uses if any(name not in self.materialized for name in use.layer.parameters.values())
        ]
        return MicroBatch(self.batch_size, uses, self.materialized)


def label(path: str) -> str:
    """A module's name as the store shows it; the model itself has an empty one."""
    return path or "(model)"
