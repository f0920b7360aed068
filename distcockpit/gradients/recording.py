"""A recorded call of a torch function, which can be run again starting from the parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from distcockpit.replay.trees import tensors

WRITING = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod")}


class ParameterPart(ABC):
    """A placeholder in recorded arguments for a tensor that is not a constant."""

    parameters: frozenset[str] = frozenset()

    @abstractmethod
    def value(self, again: Again) -> Tensor:
        """Return the tensor, when the call is run again."""


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
    """One run of recorded calls: the parameters, the batch tensors, and intermediate results."""

    def __init__(self, leaves: Mapping[str, Tensor], given: Sequence[Tensor]) -> None:
        self.leaves, self.given = leaves, given
        self.made: dict[int, list[Tensor]] = {}


class Recording:
    """A function call, with placeholders for the tensors that are not constant.

    Args:
        function: The called function.
        args: The arguments, with placeholders.
        kwargs: Likewise.
        parts: All placeholders.
        constants: The tensors among the arguments.
        shapes: The shapes of the batch tensors.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        parts: Sequence[ParameterPart],
        constants: Sequence[Tensor],
        shapes: Sequence[torch.Size] = (),
    ) -> None:
        self.function, self.args, self.kwargs, self._shapes = function, args, kwargs, shapes
        self._parts = parts
        self.parameters = frozenset(name for part in parts for name in part.parameters)
        self.has_gradient = torch.is_grad_enabled()
        self.constants = [t for t in constants if not t.is_inference()]
        self.constants += [t for part in parts if isinstance(part, Made) for t in part.call.constants]

    def keep(self, constants: Collection[int]) -> None:
        """Copy constants whose memory will be gone when the call is run again.

        Args:
            constants: Their ids.
        """

        def copied(leaf: Any) -> Any:
            return leaf.detach().clone() if id(leaf) in constants else leaf

        self.args, self.kwargs = tree_map(copied, self.args), tree_map(copied, self.kwargs)
        for part in self._parts:
            if isinstance(part, Made):
                part.call.keep(constants)

    def run(self, again: Again) -> Any:
        """Return what the function returns, or has written to, with gradients where it had them."""
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
        """Return the axis on which fewer samples are run now, with the number of samples before and now.

        Tensors made for all samples, such as ``p.expand(B, -1, -1)``, are cut along it. If their rows differ, the
        outputs do not match those of the whole batch, which is checked wherever a part of it is run.
        """
        for before, tensor in zip(self._shapes, given, strict=False):  # without shapes, nothing belongs to the batch
            for axis, (size, length) in enumerate(zip(before, tensor.shape, strict=True)):
                if size != length:
                    return axis, size, length
        return None


class Call(nn.Module):
    """A recorded call as a module, so that it can be run again like one.

    Args:
        names: The parameters it takes: their names in the model, by local name.
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
