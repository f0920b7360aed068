"""What is kept of one call of a layer: its inputs, and the gradient of the loss with respect to its outputs.

Together they determine the individual gradients of the layer's parameters. That is why nothing of shape
``[N, P]`` is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Module

from distcockpit.gradients.factors import Factors, Rows
from distcockpit.module_state import ModuleStates
from distcockpit.rng import RandomState

Axes = tuple[int | None, ...]
"""The batch axis of each tensor of an output; ``None`` where there is none."""

Shapes = Sequence[torch.Size]

Blocks = Callable[[slice], dict[str, Tensor]]
"""Maps a range of samples to their individual gradients by local parameter name, each ``[n, *parameter.shape]``."""


class Rule(Protocol):
    """How the individual gradients of one kind of layer follow from a :class:`Use`."""

    description: str

    def factors(self, use: Use) -> dict[str, Factors]:
        """The parameters whose individual gradients are sums of outer products, by local name."""

    def rows(self, use: Use, samples: slice) -> Rows | None:
        """The individual gradients of the one parameter of a layer, if they have few rows that are not zero."""

    def along(self, use: Use, direction: Mapping[str, Tensor]) -> Tensor | None:
        """``<g_i, v>`` for all samples, where that needs no individual gradient: the derivative of the output along v.

        Args:
            use: The call of the layer.
            direction: v, by local name; some of the parameters or all.

        Returns:
            float64 ``[B]``, or ``None``.
        """

    def blocks(self, use: Use, names: Sequence[str], values: Mapping[str, Tensor]) -> Blocks:
        """Individual gradients of the parameters ``names`` for any range of samples.

        Args:
            use: The call of the layer.
            names: Local parameter names.
            values: What the parameters of the model were in that call, by full name.
        """

    def elements_per_sample(self, use: Use) -> int:
        """Elements that a block needs per sample beside the individual gradients themselves."""


@dataclass(frozen=True)
class Layer:
    """A module, and the rule by which the individual gradients of parameters follow from its calls."""

    path: str
    module: Module
    parameters: Mapping[str, str]  # local name -> name in the model, of the tracked ones; each of these once
    names: Mapping[str, str]  # the same of all parameters of this module and those below it
    rule: Rule
    is_leaf: bool  # whether it has no tracked modules below it


@dataclass
class Use:
    """One call of a layer in one forward pass, with the gradients that arrived at its outputs."""

    layer: Layer
    rule: Rule
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: list[tuple[Tensor, int]]  # the input tensors, with their versions in the call
    training: dict[Module, bool]  # of the module and those below it
    buffers: dict[str, Tensor]
    random_state: RandomState | None
    states: ModuleStates | None  # attributes of the module and those below it before the call
    autocast: torch.dtype | None  # the type of mixed precision in the call, if any
    axes: Axes  # where the batch is in each tensor of the output
    shapes: Shapes  # of these tensors
    call: int  # how often the module was called before in the pass
    is_late: bool = False  # whether the call came after the model had returned, as when checkpointing computes again
    output_gradients: dict[int, Tensor] = field(default_factory=dict)  # [B, *], by position among these tensors
    observed: dict[str, Tensor] = field(default_factory=dict)  # what was kept of the output, by observer
    drew: bool = False  # whether random numbers of torch's were drawn in the call, of a layer that is run again
    found: dict[str, Any] = field(default_factory=dict)  # views that the rule worked out

    @property
    def delta(self) -> Tensor:
        """The output gradient of a layer with one output."""
        (delta,) = self.output_gradients.values()
        return delta

    @property
    def input(self) -> Tensor:
        """The input of a layer with one input, ``[B, *]``; its batch axis is that of the output."""
        (x,) = [*self.args, *self.kwargs.values()]
        return x.detach().movedim(self.axes[0] or 0, 0)

    def serving(self, parameters: Mapping[str, str]) -> Use:
        """The same call, for these parameters of its layer."""
        return replace(self, layer=replace(self.layer, parameters=parameters))

    def settle(self, axes: Axes) -> None:
        """Correct the batch axes, where they were guessed."""
        for position, gradient in self.output_gradients.items():
            if gradient.dim():
                as_it_was = gradient.movedim(0, self.axes[position] or 0)
                self.output_gradients[position] = as_it_was.movedim(axes[position] or 0, 0)
        self.axes = axes

    def scale(self, factor: Tensor | float) -> None:
        """Multiply the output gradients, which are copies of our own; zero is exactly zero, whatever they are."""
        for gradient in self.output_gradients.values():
            if isinstance(factor, float) and not factor:
                gradient.zero_()
            else:
                gradient.mul_(factor)

    @property
    def is_separable(self) -> bool:
        """Whether the output gradients of the samples can be told apart."""
        return all(self.axes[position] is not None for position in self.output_gradients)

    @property
    def inputs_changed(self) -> bool:
        """Whether an input tensor was written to after the call."""
        return any(tensor._version != version for tensor, version in self.versions)


Formed = dict[str, list[tuple[slice, slice, Tensor]]]
"""Individual gradients that were formed, by parameter: some samples, a part of its first axis, and those."""


@dataclass
class MicroBatch:
    """The uses of one forward pass, with output gradients scaled to those of the individual losses."""

    batch_size: int
    uses: list[Use]
    formed: Formed = field(default_factory=dict)  # what a walk kept for the next one

    def what_is_needed(self) -> MicroBatch:
        """The same without the uses that no walk needs any more: the individual gradients of theirs were formed."""
        uses = [use for use in self.uses if any(name not in self.formed for name in use.layer.parameters.values())]
        return MicroBatch(self.batch_size, uses, self.formed)
