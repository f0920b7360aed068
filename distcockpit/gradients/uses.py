"""What is kept of one call of a layer: its inputs, and the gradient of the loss with respect to its outputs.

Together they determine the individual gradients of the layer's parameters. That is why nothing of shape ``[N, P]`` is
stored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from distcockpit.gradients.factors import Factors, RowWise
from distcockpit.replay.snapshot import Snapshot
from distcockpit.replay.trees import tensors


@dataclass(frozen=True)
class Folded:
    """A batch axis merged with its neighbours, as by ``view(-1, C)`` of ``[B, T, C]`` or ``[T, B, C]``.

    Args:
        axis: The merged axis.
        outer: The length of what is outside of the batch.
        inner: The length of what is inside of the batch.
    """

    axis: int
    outer: int
    inner: int


Axis = int | Folded | None


def place(axis: int | Folded) -> int:
    """Return the index of the axis."""
    return axis.axis if isinstance(axis, Folded) else axis


Axes = tuple[Axis, ...]
"""The batch axis of each tensor of an output; ``None`` if there is none."""


def to_front(tensor: Tensor, axis: Axis) -> Tensor:
    """Move the batch axis to the front; what it was merged with becomes two axes in place of the merged one."""
    if isinstance(axis, Folded):
        return tensor.unflatten(axis.axis, (axis.outer, -1, axis.inner)).movedim(axis.axis + 1, 0)
    return tensor.movedim(axis, 0) if axis else tensor


def from_front(tensor: Tensor, axis: Axis) -> Tensor:
    """Undo `to_front`."""
    if isinstance(axis, Folded):
        return tensor.movedim(0, axis.axis + 1).flatten(axis.axis, axis.axis + 2)
    return tensor.movedim(0, axis) if axis else tensor


Shapes = Sequence[torch.Size]

CALLS = "calls of functions"
"""What serves parameters that no module is run again for."""

Blocks = Callable[[slice], dict[str, Tensor]]
"""Maps a range of samples to their individual gradients by local parameter name, each ``[n, *parameter.shape]``."""


class UseRule(ABC):
    """How the individual gradients of some parameters follow from a :class:`Use`."""

    def takes(self, axis: Axis, n_axes: int) -> bool:
        """True if it serves a call whose output has this many axes, with the batch on this one."""
        return axis is not None

    def factors(self, use: Use) -> dict[str, Factors]:
        """Return the parameters whose individual gradients are sums of outer products, by local name."""
        return {}

    def row_wise(self, use: Use) -> Mapping[str, RowWise]:
        """Return the parameters any rows of whose individual gradients can be formed without the others."""
        return {name: factors for name, factors in self.factors(use).items() if not factors.are_windows}

    def jvp(self, use: Use, direction: Mapping[str, Tensor]) -> Tensor | None:
        """Return ``<g_i, v>`` for all samples if it needs no individual gradient: the derivative of the output along v.

        Args:
            use: The call.
            direction: v, by local name; for some of the parameters or all.

        Returns:
            float64 ``[B]``, or ``None``.
        """
        return None

    @abstractmethod
    def blocks(self, use: Use, names: Sequence[str], values: Mapping[str, Tensor]) -> Blocks:
        """Return the individual gradients of the parameters ``names`` for any range of samples.

        Args:
            use: The call.
            names: Local parameter names.
            values: The values of the model's parameters in that call, by full name.
        """

    def elements_per_sample(self, use: Use) -> int:
        """Number of elements that a block needs per sample, besides the individual gradients themselves."""
        return 0


@dataclass(frozen=True)
class Layer:
    """A module, or the function calls with some parameters, and the parameters that its calls serve."""

    path: str  # of the module, or of the module that owns the parameters
    module: Module
    parameters: Mapping[str, str]  # local name -> name in the model, of the tracked parameters; each of them once
    names: Mapping[str, str]  # the same for all parameters of this module and those below it
    is_leaf: bool  # whether it has no tracked modules below it
    function: str = ""  # the name of the called function; empty for a module

    @property
    def scope(self) -> str:
        """What is replaced if this does not serve a parameter: all calls of functions, or a module."""
        return CALLS if self.function else self.path

    def __str__(self) -> str:
        if self.function:
            return f"the call of {self.function} with {', '.join(map(repr, self.parameters.values()))}"
        return f"layer '{self.path}' ({type(self.module).__name__})"


@dataclass(eq=False)
class Use:
    """One call of a layer in one forward pass, with the gradients that arrived at its outputs."""

    layer: Layer
    form: UseRule | None  # the rule that serves it, if it supports this position of the batch
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: list[tuple[Tensor, int]]  # the input tensors, with their versions in the call
    before: Snapshot
    axes: Axes  # where the batch is in each tensor of the output
    shapes: Shapes  # of these tensors
    given: Sequence[tuple[torch.Size, torch.Size]]  # shapes of the input tensors, and of what they are views of
    key: str  # the key its axes are known by
    call: int  # how many times this was called before in the pass
    is_late: bool = (
        False  # whether it was called after the model had returned, as in the recomputation of checkpointing
    )
    output_gradients: dict[int, Tensor] = field(default_factory=dict)  # [B, *], by position among these tensors
    by_part: dict[Any, dict[int, Tensor]] = field(default_factory=dict)  # the gradients of each part of the loss
    observed: dict[str, Tensor] = field(default_factory=dict)  # what was kept of the output, by observer
    drew: bool = False  # whether the call drew torch random numbers, for a layer that is run again
    source: int = 0  # which of the input tensors the closed form uses
    values: Mapping[str, Tensor] = field(default_factory=dict)  # sharded parameters in the call, if it is run again
    found: dict[str, Any] = field(default_factory=dict)  # intermediate results of the rule
    formed_by: UseRule | None = None  # the closed form whose individual gradients are in place of the output gradients
    extremes: Tensor | None = None  # then: the smallest and the largest output gradient, [2]

    @property
    def delta(self) -> Tensor:
        """The output gradient of a layer with one output."""
        (delta,) = self.output_gradients.values()
        return delta

    @property
    def input(self) -> Tensor:
        """The input of a layer with one input, ``[B, *]``; its batch axis is that of the output."""
        if self.layer.function:  # the recorded call, and the tensors it was given
            return to_front(self.args[1 + self.source].detach(), self.axes[0])
        return to_front(tensors((self.args, self.kwargs))[0].detach(), self.axes[0])

    def receive_of_part(self, part: Any, gradient: Tensor, receive: Callable[[Tensor], None]) -> None:
        """Receive the gradient of a loss part at an output; ``receive`` would add it to the whole gradient."""
        whole = dict(self.output_gradients)
        self.have(self.by_part.get(part, {}))
        receive(gradient)
        self.by_part[part] = dict(self.output_gradients)
        self.have(whole)

    def have(self, gradients: Mapping[int, Tensor]) -> None:
        """Replace the output gradients, and drop everything computed from the old ones."""
        self.output_gradients.clear()
        self.output_gradients.update(gradients)
        self.found.clear()

    def serving(self, parameters: Mapping[str, str]) -> Use:
        """Return the same call, for these parameters of its layer."""
        return replace(self, layer=replace(self.layer, parameters=parameters))

    @property
    def is_formed(self) -> bool:
        """True if individual gradients have taken the place of the output gradients, see `form`."""
        return self.formed_by is not None

    @property
    def closed(self) -> UseRule | None:
        """The closed form, if there is one that supports the call."""
        if self.form is None or self.is_formed:
            return self.form
        takes = len(self.axes) == 1 and self.form.takes(self.axes[0], len(self.shapes[0]))
        return self.form if takes else None

    def settle(self, axes: Axes) -> None:
        """Correct the batch axes, if they were guessed."""
        if self.is_formed:  # once the axis was known
            return
        for gradients in (self.output_gradients, *self.by_part.values()):
            for position, gradient in gradients.items():
                if gradient.dim():
                    gradients[position] = to_front(from_front(gradient, self.axes[position]), axes[position])
        self.axes = axes
        self.found.clear()

    @property
    def is_separable(self) -> bool:
        """True if the output gradients can be separated by sample."""
        return all(self.axes[position] is not None for position in self.output_gradients)

    @property
    def inputs_changed(self) -> bool:
        """True if an input tensor was written to after the call."""
        return any(tensor._version != version for tensor, version in self.versions)


Materialized = dict[tuple[str, int | None], list[tuple[slice, slice, Tensor]]]
"""Individual gradients that were formed, by parameter and the first of the rows that were walked over, ``None`` for all
of them: the samples, the part of the first axis, and the gradients."""


@dataclass
class MicroBatch:
    """The uses of one forward pass, with output gradients scaled to those of the individual losses."""

    batch_size: int
    uses: list[Use]
    materialized: Materialized = field(default_factory=dict)  # what a walk kept for the next one

    @cached_property
    def by_parameter(self) -> Mapping[str, Sequence[Use]]:
        """The uses of each parameter that has any; asked for at every bucket."""
        found: dict[str, list[Use]] = defaultdict(list)
        for use in self.uses:
            for name in use.layer.parameters.values():
                found[name].append(use)
        return found

    def what_is_needed(self) -> MicroBatch:
        """Return a copy without the uses that no walk needs any more because their gradients were formed."""
        known = {name for name, _ in self.materialized}
        uses = [use for use in self.uses if not known.issuperset(use.layer.parameters.values())]
        return MicroBatch(self.batch_size, uses, self.materialized)


def label(path: str) -> str:
    """Return a module's name as the store shows it; the model itself, whose path is empty, is "(model)"."""
    return path or "(model)"
