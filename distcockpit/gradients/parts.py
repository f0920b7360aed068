"""A module on a part of the batch: its inputs, its random numbers, and whether it gives what it gave for the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from distcockpit.gradients.uses import Axes, Axis, Folded, Use, from_front, to_front
from distcockpit.replay.trees import map_tensors, tensors

FEW = 8  # samples that a module is run on together: fewer leave less to do for nothing, more have less overhead


def pieces(samples: slice, size: int) -> list[slice]:
    """The parts of a batch of this size that hold these samples; they do not depend on which are asked for."""
    starts = range(samples.start // FEW * FEW, samples.stop, FEW)
    return [slice(start, min(start + FEW, size)) for start in starts]


def split(samples: slice) -> list[slice]:
    """A few samples each."""
    starts = range(samples.start, samples.stop, FEW)
    return [slice(start, min(start + FEW, samples.stop)) for start in starts]


def batch_size(use: Use) -> int:
    """How many samples a call had."""
    return len(next(iter(use.output_gradients.values())))


def batch_axes(use: Use) -> Axes:
    """Which axis of each input is cut."""
    return tuple(_batch_axis(use, tensor) for tensor in tensors((use.args, use.kwargs)))


def inputs_of(use: Use, samples: slice) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs of some samples."""

    def cut(tensor: Tensor) -> Tensor:
        axis = _batch_axis(use, tensor)
        return tensor if axis is None else from_front(to_front(tensor, axis)[samples], axis)

    return map_tensors(cut, (use.args, use.kwargs))


def rows_of(use: Use, samples: slice) -> list[Tensor]:
    """The inputs that have a batch axis, of some samples, with that axis in front."""
    cut = zip(tensors((use.args, use.kwargs)), batch_axes(use), strict=True)
    return [to_front(tensor, axis)[samples] for tensor, axis in cut if axis is not None]


def of_one(use: Use, rows: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs as a batch of one sample, which has these rows."""
    left = iter(rows)

    def exchange(tensor: Tensor) -> Tensor:
        axis = _batch_axis(use, tensor)
        return tensor if axis is None else from_front(next(left).unsqueeze(0), axis)

    return map_tensors(exchange, (use.args, use.kwargs))


def _batch_axis(use: Use, tensor: Tensor) -> Axis:
    """Which axis of an input is as long as the batch: first that which is the batch in the output."""
    first, n = next((axis for axis in use.axes if axis is not None), 0), batch_size(use)
    if isinstance(first, Folded):
        length, first_axis = first.outer * n * first.inner, first.axis
        if tensor.dim() > first_axis and tensor.shape[first_axis] == length:
            return first
        first = 0
    return next((k for k in (first, 0) if tensor.dim() > k and tensor.shape[k] == n), None)


def rows_agree(found: Mapping[int, Tensor], expected: Mapping[int, Tensor], samples: slice, tolerance: float) -> Tensor:
    """For each sample whether all its outputs are the same but for rounding, bool ``[n]``; waits for no device.

    Args:
        found: Outputs of some samples.
        expected: Those of the whole batch.
        samples: Which these are.
        tolerance: Relative to the largest output of the batch.
    """
    agree = []
    for position, z in expected.items():
        size = z.detach().abs().nan_to_num(nan=0.0, posinf=0.0).amax() if z.numel() else 0.0
        n = samples.stop - samples.start
        a, b = (t.detach().double().reshape(n, z.numel() // len(z)) for t in (found[position], z[samples]))
        agree.append((((a - b).abs() <= tolerance * size) | (a == b) | (a.isnan() & b.isnan())).all(1))
    return torch.stack(agree).all(0)


class Drawn(TorchDispatchMode):
    """What a call draws for the whole batch; then each part of the batch is given its own.

    Args:
        size: Of the batch.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self._kept: list[list[Tensor]] = []
        self._size, self._part, self._next = size, slice(0, size), -1

    def for_part(self, part: slice) -> Self:
        """From now on, hand out what was kept."""
        self._part, self._next = part, 0
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return result
        if self._next < 0:
            self._kept.append([tensor.clone() for tensor in tensors(result)])
            return result
        for tensor, whole in zip(tensors(result), self._kept[self._next], strict=True):
            tensor.copy_(self._of_part(whole, tensor.shape))
        self._next += 1
        return result

    def _of_part(self, whole: Tensor, shape: torch.Size) -> Tensor:
        """The samples of the part, which may have several rows each (heads of attention).

        Where samples are mapped, they have an axis of their own, in front of the shape of a batch of one.
        """
        if whole.shape == shape:
            return whole
        n, mapped = self._part.stop - self._part.start, len(shape) > whole.dim()
        of_part = shape[1:] if mapped else shape
        held = 1 if mapped else n
        axis = next(k for k, length in enumerate(whole.shape) if length * held == of_part[k] * self._size)
        each = of_part[axis] // held
        rows = whole.narrow(axis, self._part.start * each, n * each)
        return rows.unflatten(axis, (n, each)).movedim(axis, 0) if mapped else rows
