"""Gradients at the outputs of modules: where to put a hook, and how to process what it receives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from distcockpit.gradients.uses import Axis, to_front
from distcockpit.replay.trees import memory_of

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


class Kept:
    """The gradients at outputs that are kept until the step ends, as autograd made them: nothing is copied.

    The gradient of a parameter may be the same tensor or a view of it, which DDP and clipping write to: `apart` gives
    the parameter a copy. What else writes to a kept gradient is found out.
    """

    def __init__(self) -> None:
        self._memory: set[int] = set()
        self._versions: list[tuple[Tensor, int]] = []
        self._passing: tuple[Tensor, int] | None = None
        self._were_written = False

    def __call__(self, gradient: Tensor) -> Tensor:
        """Keep it, in at least float32."""
        kept = detached(gradient)
        if kept.dtype == gradient.dtype:
            self._memory.add(memory_of(kept))
            self._versions.append((kept, kept._version))
        return kept

    def for_now(self, gradient: Tensor) -> Tensor:
        """Return it, in at least float32, and keep it until the next one comes: the hooks of others run after ours."""
        self._look_at_passing()
        kept = detached(gradient)
        self._passing = kept, kept._version
        return kept

    def _look_at_passing(self) -> None:
        if self._passing is not None:
            gradient, version = self._passing
            self._were_written |= gradient._version != version
            self._passing = None

    def apart(self, gradient: Tensor) -> Tensor | None:
        """Return a copy of a parameter's gradient if it shares memory with a kept one; for a hook on the parameter."""
        memory = memory_of(gradient._values() if gradient.layout == torch.sparse_coo else gradient)
        return gradient.clone() if memory in self._memory else None

    def check(self) -> None:
        """Check that nothing wrote to them.

        Raises:
            RuntimeError: If something did.
        """
        self._look_at_passing()
        if self._were_written or any(gradient._version != version for gradient, version in self._versions):
            raise RuntimeError(
                "The gradient at the output of a layer was overwritten before `track` ended, such as through the "
                ".grad of a tensor that requires gradients. Overwrite it after the `with` block."
            )
        self._versions.clear()


def detached(gradient: Tensor) -> Tensor:
    """Return it without its graph, in at least float32."""
    return gradient.detach().float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient.detach()


def collector(
    add: Callable[[Tensor], None], view: View | None, keep: Callable[[Tensor], Tensor] = Tensor.detach
) -> Callable[[Tensor], None]:
    """Return a receiver that passes on gradients in the shape and strides of the output, as kept by ``keep``."""

    def receive(gradient: Tensor) -> None:
        gradient = keep(gradient)
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
