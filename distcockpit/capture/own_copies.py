"""Copies of inputs: the loop may overwrite what it passed to the model, such as a static buffer or a prefetcher's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from distcockpit.replay.trees import memory_of


class OwnCopies:
    """Copies of tensors that the user may write to: called with such a tensor, or a view of it, it returns the copy.

    Args:
        given: The tensors; parameters are not copied.
    """

    def __init__(self, given: Sequence[Tensor] = ()) -> None:
        self._given = [t for t in given if not isinstance(t, nn.Parameter)]
        self._memory = {memory_of(t) for t in self._given}
        self._made: dict[tuple[Any, ...], Tensor] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return a copy of the tensor as it is now if it shares memory with a given one, else the tensor itself."""
        memory = memory_of(tensor)
        if memory not in self._memory or isinstance(tensor, nn.Parameter):
            return tensor
        view = () if memory == id(tensor) else (tensor.storage_offset(), tensor.shape, tensor.stride())
        key = (memory, tensor.dtype, view, _version(tensor))
        if key not in self._made:
            self._made[key] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return self._made[key]

    @property
    def were_written(self) -> bool:
        """True if the given tensors have changed since they were copied."""
        return any(_version(t) != key[-1] for t in self._given for key in self._made if key[0] == memory_of(t))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
