"""A call of a torch function as it was recorded, so that it can be run again from the parameters on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from distcockpit.replay.trees import tensors

WRITING = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod")}


class ParameterPart(ABC):
    """Stands in recorded arguments for a tensor that is not a constant."""

    parameters: frozenset[str] = frozenset()

    @abstractmethod
    def value(self, again: Again) -> Tensor:
        """The tensor, when the call is run again."""


class Given(ParameterPart):
    """A tensor of the batch."""

    def __init__(self, position: int) -> None:
        self.position = position

    def value(self, again: Again) -> Tensor:
        """See `ParameterPart.value`."""
        return again.given[self.position]


class Leaf(ParameterPart):
    """A parameter."""

    def __init__(self, name: str, shape: torch.Size) -> None:
        self.name, self.shape, self.parameters = name, shape, frozenset({name})

    def value(self, again: Again) -> Tensor:
        """See `ParameterPart.value`."""
        return again.leaves[self.name]


class Made(ParameterPart):
    """One of the tensors that a call on parameters and constants returned."""

    def __init__(self, call: Recording, position: int) -> None:
        self.call, self._position, self.parameters = call, position, call.parameters

    def value(self, again: Again) -> Tensor:
        """See `ParameterPart.value`."""
        if id(self.call) not in again.made:
            again.made[id(self.call)] = tensors(self.call.run(again))
        return again.made[id(self.call)][self._position]


class Again:
    """One run of recorded calls: the parameters, the tensors of the batch, and what was made on the way."""

    def __init__(self, leaves: Mapping[str, Tensor], given: Sequence[Tensor]) -> None:
        self.leaves, self.given = leaves, given
        self.made: dict[int, list[Tensor]] = {}


class Recording:
    """A call of a function, with parts in place of the tensors that are not constant.

    Args:
        function: What was called.
        args: With parts in it.
        kwargs: Likewise.
        parts: All of them.
        shapes: Of the tensors of the batch.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        parts: Sequence[ParameterPart],
        shapes: Sequence[torch.Size] = (),
    ) -> None:
        self.function, self.args, self.kwargs, self._shapes = function, args, kwargs, shapes
        self.parameters = frozenset(name for part in parts for name in part.parameters)
        self.has_gradient = torch.is_grad_enabled()
        self.constants = [t for t in tensors((args, kwargs)) if not t.is_inference()]
        self.constants += [t for part in parts if isinstance(part, Made) for t in part.call.constants]

    def run(self, again: Again) -> Any:
        """What the function returns, or has written to, with gradients where it had them."""
        cut, is_written_to = self._cut(again.given), writes(self.function)

        def fill(leaf: Any) -> Any:
            if not isinstance(leaf, ParameterPart | Tensor):
                return leaf
            value = leaf.value(again) if isinstance(leaf, ParameterPart) else leaf.detach()
            if cut is not None and isinstance(leaf, Made):
                axis, size, length = cut
                value = value.narrow(axis, 0, length) if value.dim() > axis and value.shape[axis] == size else value
            return value.clone() if is_written_to else value

        with torch.set_grad_enabled(self.has_gradient and torch.is_grad_enabled()):
            args, kwargs = tree_map(fill, self.args), tree_map(fill, self.kwargs)
            result = self.function(*args, **kwargs)
            return args[0] if result is None else result

    def _cut(self, given: Sequence[Tensor]) -> tuple[int, int, int] | None:
        """The axis on which fewer samples are run now, with the number of samples before and now.

        What was made for all samples, such as ``p.expand(B, -1, -1)``, is cut there. If its rows differ, the outputs do
        not agree with those of the whole batch, which is looked at wherever a part of it is run.
        """
        for before, tensor in zip(self._shapes, given, strict=False):  # without shapes: nothing of the batch
            for axis, (size, length) in enumerate(zip(before, tensor.shape, strict=True)):
                if size != length:
                    return axis, size, length
        return None


class Call(nn.Module):
    """A recorded call as a module, so that it can be run again as modules are.

    Args:
        names: The parameters that it takes: their names in the model, by local name.
        parameters: Of the model, by name.
    """

    def __init__(self, names: Mapping[str, str], parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._names = names
        for local, full in names.items():
            self.register_parameter(local, parameters[full])

    def forward(self, recording: Recording, *given: Tensor) -> Any:
        """Run it again."""
        return recording.run(Again({full: getattr(self, local) for local, full in self._names.items()}, given))


def writes(function: Any) -> bool:
    """True if a function writes to its first argument."""
    name = getattr(function, "__name__", "")
    return name in WRITING or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
