"""A module on a part of the batch: its inputs, its random numbers, and whether it gives the same as on the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from distcockpit.gradients.uses import Axes, Axis, Folded, Use, from_front, to_front
from distcockpit.replay.trees import map_tensors, tensors

FEW = 8  # samples to run a module on together: fewer waste less work, more have less overhead


def pieces(samples: slice, size: int) -> list[slice]:
    """Return the parts of a batch of this size that contain these samples; boundaries do not depend on the request."""
    starts = range(samples.start // FEW * FEW, samples.stop, FEW)
    return [slice(start, min(start + FEW, size)) for start in starts]


def split(samples: slice) -> list[slice]:
    """Split into a few samples each."""
    starts = range(samples.start, samples.stop, FEW)
    return [slice(start, min(start + FEW, samples.stop)) for start in starts]


def batch_size(use: Use) -> int:
    """Return the number of samples of a call."""
    return len(next(iter(use.output_gradients.values())))


def batch_axes(use: Use) -> Axes:
    """Return the axis along which each input is split."""
    return tuple(_batch_axis(use, tensor) for tensor in tensors((use.args, use.kwargs)))


def inputs_of(use: Use, samples: slice) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs of some samples."""

    def cut(tensor: Tensor) -> Tensor:
        axis = _batch_axis(use, tensor)
        return tensor if axis is None else from_front(to_front(tensor, axis)[samples], axis)

    return map_tensors(cut, (use.args, use.kwargs))


def rows_of(use: Use, samples: slice) -> list[Tensor]:
    """Return the inputs with a batch axis, for some samples, with that axis first."""
    cut = zip(tensors((use.args, use.kwargs)), batch_axes(use), strict=True)
    return [to_front(tensor, axis)[samples] for tensor, axis in cut if axis is not None]


def of_one(use: Use, rows: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs as a batch of one sample, which has these rows."""
    left = iter(rows)

    def exchange(tensor: Tensor) -> Tensor:
        axis = _batch_axis(use, tensor)
        return tensor if axis is None else from_front(next(left).unsqueeze(0), axis)

    return map_tensors(exchange, (use.args, use.kwargs))


def _batch_axis(use: Use, tensor: Tensor) -> Axis:
    """Return the axis of an input that has the batch's length, preferring the batch axis of the output."""
    first, n = next((axis for axis in use.axes if axis is not None), 0), batch_size(use)
    if isinstance(first, Folded):
        length, first_axis = first.outer * n * first.inner, first.axis
        if tensor.dim() > first_axis and tensor.shape[first_axis] == length:
            return first
        first = 0
    return next((k for k in (first, 0) if tensor.dim() > k and tensor.shape[k] == n), None)


def rows_agree(found: Mapping[int, Tensor], expected: Mapping[int, Tensor], samples: slice, tolerance: float) -> Tensor:
    """Return whether all outputs of each sample are equal up to rounding, bool ``[n]``; does not wait for a device.

    Args:
        found: Outputs of some samples.
        expected: Those of the whole batch.
        samples: The samples that were run.
        tolerance: Relative to the largest output of the batch.
    """
    agree = []
    for position, z in expected.items():
        size = z.detach().abs().nan_to_num(nan=0.0, posinf=0.0).amax() if z.numel() else 0.0
        n = samples.stop - samples.start
        kind = torch.promote_types(z.dtype, torch.float32)
        a, b = (t.detach().to(kind).reshape(n, z.numel() // len(z)) for t in (found[position], z[samples]))
        near = (a - b).abs_() <= tolerance * size
        agree.append((near | (a == b) | (a.isnan() & b.isnan())).all(1))
    return torch.stack(agree).all(0)


class Drawn(TorchDispatchMode):
    """Records what a call draws for the whole batch; then gives each part of the batch its share.

    Args:
        size: Size of the batch.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self._kept: list[list[Tensor]] = []
        self._size, self._part, self._next = size, slice(0, size), -1

    def for_part(self, part: slice) -> Self:
        """From now on, replay the recorded numbers for this part."""
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
        """Return the samples of the part, which may have several rows each (attention heads).

        If samples are mapped, they have an axis of their own, before the shape of a batch of one.
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
