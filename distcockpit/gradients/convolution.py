"""nn.Conv1d, Conv2d, Conv3d: at each place of the output an outer product of its gradient and the inputs it sees."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from distcockpit import kernels
from distcockpit.gradients.factors import Factors
from distcockpit.gradients.uses import Blocks, Use

KINDS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
CONVOLVE = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}


class ConvolutionRule:
    """Convolutions in one to three dimensions, with groups, dilation, stride, and every padding."""

    description = "closed form"
    unfolds = False

    def factors(self, use: Use) -> dict[str, Factors]:
        """``sum_t delta_it x_it^T`` over the places t of the output; with groups it is none such."""
        module, delta = _module(use), use.delta.flatten(2)
        if module.groups > 1:
            return {}
        n_inputs = math.prod(module.weight.shape[1:])
        x = _padded(use)
        return {"weight": Factors(delta.transpose(1, 2), lambda s: _windows(x[s], module).transpose(1, 2), n_inputs)}

    def blocks(self, use: Use, names: Sequence[str], values: Mapping[str, Tensor]) -> Blocks:
        """The products of each group, and ``sum_t delta_it``."""
        module, delta = _module(use), use.delta.flatten(2)
        shape, groups, x = module.weight.shape, module.groups, _padded(use)

        def weight(samples: slice) -> Tensor:
            d = delta[samples]
            windows = _windows(x[samples], module)
            d, windows = (t.reshape(len(t) * groups, -1, t.shape[2]) for t in (d, windows))
            return torch.bmm(d, windows.transpose(1, 2)).view(-1, *shape)

        def block(samples: slice) -> dict[str, Tensor]:
            formulas = {"weight": lambda: weight(samples), "bias": lambda: delta[samples].sum(2)}
            return {name: formulas[name]() for name in names}

        return block

    def along(self, use: Use, direction: Mapping[str, Tensor]) -> Tensor | None:
        """``<delta_i, conv(x_i; V, v)>``."""
        module, delta, x = _module(use), use.delta, _padded(use)
        if delta.is_cuda and torch.backends.cudnn.allow_tf32:
            return None  # blocks are in full precision
        v = {name: tensor.to(delta.dtype) for name, tensor in direction.items()}
        if "weight" not in v:
            return delta.flatten(2).sum(2, dtype=torch.float64) @ v["bias"].double()
        options = (module.stride, 0, module.dilation, module.groups)
        output = CONVOLVE[delta.dim() - 2](x, v["weight"], v.get("bias"), *options)
        return kernels.inner_rows(output.flatten(1), delta.flatten(1))

    def rows(self, use: Use, samples: slice) -> None:
        """Not of few rows."""
        return None

    def elements_per_sample(self, use: Use) -> int:
        """The inputs that each place of the output sees."""
        module = _module(use)
        return math.prod(module.weight.shape[1:]) * module.groups * math.prod(use.delta.shape[2:])


def _module(use: Use) -> Any:
    return use.layer.module


def _padded(use: Use) -> Tensor:
    """The input with its padding written out."""
    module, x = _module(use), use.input.to(use.delta.dtype)
    if module.padding_mode != "zeros":
        return functional.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode)
    # As the forward pass reads it, not as it was constructed: those who adapt models change padding and dilation.
    sides: list[int] = []
    for k, dilation in reversed(list(enumerate(module.dilation))):
        if module.padding == "same":
            total = dilation * (module.kernel_size[k] - 1)
            sides += [total // 2, total - total // 2]
        else:
            sides += [0, 0] if module.padding == "valid" else [module.padding[k]] * 2
    return functional.pad(x, sides) if any(sides) else x


def _windows(x: Tensor, module: Any) -> Tensor:
    """What each place of the output sees: ``[n, C k, T]``, a copy."""
    x = x.contiguous()
    return (
        x
        .as_strided(*_view(tuple(x.shape), module.kernel_size, module.stride, module.dilation))
        .flatten(-len(module.kernel_size))
        .flatten(1, -2)
    )


@lru_cache(256)
def _view(
    shape: tuple[int, ...], kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides of the windows ``[n, C, *kernel, *output]`` over a contiguous input of this shape."""
    steps = [math.prod(shape[k + 1 :]) for k in range(len(shape))]
    places = [
        (size - d * (k - 1) - 1) // s + 1 for size, k, s, d in zip(shape[2:], kernel, stride, dilation, strict=True)
    ]
    inside = [step * d for step, d in zip(steps[2:], dilation, strict=True)]
    outside = [step * s for step, s in zip(steps[2:], stride, strict=True)]
    return (*shape[:2], *kernel, *places), (*steps[:2], *inside, *outside)
