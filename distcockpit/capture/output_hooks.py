"""Gradients at the outputs of modules: where to put a hook, and how to process what it receives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from distcockpit.gradients.uses import Axis, to_front

View = tuple[torch.Size, tuple[int, ...], Any]


def owned_memory(output: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, View | None]:
    """Return the tensor to hook, and the size, strides and offset that turn its gradient into that of the output.

    A hook on a view is lost when the view is modified in place (a linear layer on [N, T, in] followed by an in-place
    activation). The hook goes on the base tensor of the view, if that was created inside the layer and holds nothing
    else.
    """
    base = output._base
    if base is None or base.grad_fn is None or any(base is x or base is x._base for x in inputs):
        return output, None
    if base.numel() != output.numel() or not base.is_contiguous() or not _is_dense(output):
        return output, None
    return base, (output.shape, output.stride(), output.storage_offset() - base.storage_offset())


def _is_dense(tensor: Tensor) -> bool:
    """True if the elements fill a range of memory, each once: a contiguous tensor, possibly with its axes permuted."""
    expected = 1
    for stride, size in sorted((st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si != 1):
        if stride != expected:
            return False
        expected *= size
    return True


class Copies:
    """Copies gradients, once for consecutive receivers of the same one: a function, and the module that called it.

    A parameter's gradient may be a view of the original, which DDP and clipping write to.
    """

    def __init__(self) -> None:
        self._of: Tensor | None = None
        self._copy = torch.empty(0)

    def __call__(self, gradient: Tensor) -> Tensor:
        """The copy, at least float32."""
        if self._of is not gradient:
            half = gradient.dtype in (torch.float16, torch.bfloat16)
            copy = gradient.detach().float() if half else gradient.detach().clone()
            self._of, self._copy = gradient, copy
        return self._copy


def collector(
    add: Callable[[Tensor], None], view: View | None, copy: Callable[[Tensor], Tensor] = Tensor.detach
) -> Callable[[Tensor], None]:
    """Return a receiver that passes on gradients in the shape and strides of the output, as copied by ``copy``."""

    def receive(gradient: Tensor) -> None:
        gradient = copy(gradient)
        if view is not None:
            gradient = gradient.contiguous().as_strided(*view)
        add(gradient)

    return receive


def adder(
    gradients: dict[int, Tensor], position: int, axis: Callable[[], Axis] = lambda: 0
) -> Callable[[Tensor], None]:
    """Return a receiver that adds up gradients of one output, with the batch axis moved to the front."""

    def add(gradient: Tensor) -> None:
        gradient = to_front(gradient, axis()) if gradient.dim() else gradient
        gradients[position] = gradients[position] + gradient if position in gradients else gradient

    return add
