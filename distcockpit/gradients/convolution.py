"""Convolutions, transposed or not: at each position an outer product of one side and a window of the other side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from distcockpit.gradients import kernels
from distcockpit.gradients.factors import Factors
from distcockpit.gradients.uses import Axis, Blocks, Use, UseRule
from distcockpit.replay.devices import convolutions_round

Sizes = tuple[int, ...]
"""One number per spatial axis."""

CONVOLVE = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
TRANSPOSED = {1: functional.conv_transpose1d, 2: functional.conv_transpose2d, 3: functional.conv_transpose3d}


@dataclass(frozen=True)
class ConvolutionRule(UseRule):
    """Convolutions in one to three dimensions, with groups, dilation, stride and padding.

    Args:
        shape: Of the weight.
        stride: Along each spatial axis.
        padding: Before and after each spatial axis, the first axis first.
        dilation: Along each spatial axis.
        groups: Of channels.
        output_padding: Of a transposed convolution; ``None`` if it is not transposed.
    """

    shape: torch.Size
    stride: Sizes
    padding: tuple[tuple[int, int], ...]
    dilation: Sizes
    groups: int
    output_padding: Sizes | None = None

    def takes(self, axis: Axis, n_axes: int) -> bool:
        """True if the batch comes first."""
        return axis == 0

    def factors(self, use: Use) -> dict[str, Factors]:
        """``sum_t delta_it x_it^T`` over the positions t of the output; not available with groups."""
        if self.groups > 1:
            return {}
        places, seen = self._sides(use)
        width = math.prod(self.shape[1:])
        factors = Factors(
            places.transpose(1, 2), lambda s: self._windows(seen[s]).transpose(1, 2), width, are_windows=True
        )
        return {"weight": factors}

    def blocks(self, use: Use, names: Sequence[str], values: Mapping[str, Tensor]) -> Blocks:
        """The products of each group, and ``sum_t delta_it``."""
        places, seen = self._sides(use)

        def weight(samples: slice) -> Tensor:
            first, second = places[samples], self._windows(seen[samples])
            first, second = (t.reshape(len(t) * self.groups, -1, t.shape[2]) for t in (first, second))
            return torch.bmm(first, second.transpose(1, 2)).view(-1, *self.shape)

        def block(samples: slice) -> dict[str, Tensor]:
            formulas = {"weight": lambda: weight(samples), "bias": lambda: use.delta[samples].flatten(2).sum(2)}
            return {name: formulas[name]() for name in names}

        return block

    def jvp(self, use: Use, direction: Mapping[str, Tensor]) -> Tensor | None:
        """``<delta_i, conv(x_i; V, v)>``."""
        delta, n_axes = use.delta, len(self.stride)
        if convolutions_round(delta.device):
            return None  # blocks are in full precision
        v = {name: tensor.to(delta.dtype) for name, tensor in direction.items()}
        if "weight" not in v:
            return delta.flatten(2).sum(2, dtype=torch.float64) @ v["bias"].double()
        x = use.input.to(delta.dtype)
        if self.output_padding is None:
            options = (self.stride, 0, self.dilation, self.groups)
            output = CONVOLVE[n_axes](_padded(x, self.padding), v["weight"], v.get("bias"), *options)
        else:
            padding = tuple(before for before, _ in self.padding)
            further = (self.stride, padding, self.output_padding, self.groups, self.dilation)
            output = TRANSPOSED[n_axes](x, v["weight"], v.get("bias"), *further)
        return kernels.inner_rows(output.flatten(1), delta.flatten(1))

    def elements_per_sample(self, use: Use) -> int:
        """Number of elements in the windows of all positions."""
        places, _ = self._sides(use)
        return math.prod(self.shape[1:]) * self.groups * places.shape[2]

    def _sides(self, use: Use) -> tuple[Tensor, Tensor]:
        """Return the side with one vector per position, ``[B, C, T]``, and the padded side that provides the windows.

        A convolution sees windows of its input at the positions of its output, a transposed one the other way round.
        """
        delta, x = use.delta, use.input.to(use.delta.dtype)
        if self.output_padding is None:
            return delta.flatten(2), _padded(x, self.padding)
        behind = [
            (size - 1) * s + d * (k - 1) + 1 - before - length
            for size, s, d, k, (before, _), length in zip(
                x.shape[2:], self.stride, self.dilation, self.shape[2:], self.padding, delta.shape[2:], strict=True
            )
        ]
        padding = tuple((before, after) for (before, _), after in zip(self.padding, behind, strict=True))
        return x.flatten(2), _padded(delta, padding)

    def _windows(self, x: Tensor) -> Tensor:
        """Return the window of each position: ``[n, C k, T]``, a copy."""
        x = x.contiguous()
        kernel = tuple(self.shape[2:])
        view = _view(tuple(x.shape), kernel, self.stride, self.dilation)
        return x.as_strided(*view).flatten(-len(kernel)).flatten(1, -2)


def _padded(x: Tensor, padding: Sequence[tuple[int, int]]) -> Tensor:
    """Pad with zeros; crop where the padding is negative."""
    sides = [size for pair in reversed(padding) for size in pair]
    return functional.pad(x, sides) if any(sides) else x


@lru_cache(256)
def _view(shape: Sizes, kernel: Sizes, stride: Sizes, dilation: Sizes) -> tuple[Sizes, Sizes]:
    """Return sizes and strides of the windows ``[n, C, *kernel, *places]`` over a contiguous tensor of this shape."""
    steps = [math.prod(shape[k + 1 :]) for k in range(len(shape))]
    places = [
        (size - d * (k - 1) - 1) // s + 1 for size, k, s, d in zip(shape[2:], kernel, stride, dilation, strict=True)
    ]
    inside = [step * d for step, d in zip(steps[2:], dilation, strict=True)]
    outside = [step * s for step, s in zip(steps[2:], stride, strict=True)]
    return (*shape[:2], *kernel, *places), (*steps[:2], *inside, *outside)
