"""Normalisation layers: the gradient of weight and bias is that of a scaling, after the normalisation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from distcockpit.gradients.factors import Factors
from distcockpit.gradients.uses import Blocks, Use

Normalise = Callable[[Any, Tensor], Tensor]

LAST_AXES: dict[type, Normalise] = {
    nn.LayerNorm: lambda m, x: functional.layer_norm(x, m.normalized_shape, eps=m.eps),
    nn.RMSNorm: lambda m, x: functional.rms_norm(x, m.normalized_shape, eps=m.eps),
}
CHANNELS: dict[type, Normalise] = {nn.GroupNorm: lambda m, x: functional.group_norm(x, m.num_groups, eps=m.eps)}


class NormRule:
    """``y = w x^ + b``: ``sum_t delta_it x^_it`` and ``sum_t delta_it``.

    Args:
        channels: Whether weight and bias belong to the axis behind the batch, not to the last ones.
    """

    description = "closed form"

    def __init__(self, *, channels: bool = False) -> None:
        self.unfolds = not channels

    @staticmethod
    def has_channels(module: nn.Module) -> bool:
        """Whether the parameters belong to the axis behind the batch."""
        return type(module) in CHANNELS

    @staticmethod
    def serves(module: nn.Module) -> bool:
        """Whether the module is a norm within each sample."""
        return type(module) in LAST_AXES or type(module) in CHANNELS

    def factors(self, use: Use) -> dict[str, Factors]:
        """None."""
        return {}

    def blocks(self, use: Use, names: Sequence[str], values: Mapping[str, Tensor]) -> Blocks:
        """Sums over all axes but those of the parameters."""
        module, delta, x = use.layer.module, use.delta, use.input
        if type(module) in LAST_AXES:
            normalise = LAST_AXES[type(module)]
            axes = list(range(1, delta.dim() - len(module.normalized_shape)))  # type: ignore[arg-type]
        else:
            normalise = CHANNELS[type(module)]
            axes = list(range(2, delta.dim()))

        def block(samples: slice) -> dict[str, Tensor]:
            d = delta[samples]
            formulas = {
                "weight": lambda: _summed(normalise(module, x[samples].to(d.dtype)) * d, axes),
                "bias": lambda: _summed(d, axes),
            }
            return {name: formulas[name]() for name in names}

        return block

    def along(self, use: Use, direction: Mapping[str, Tensor]) -> None:
        """Blocks are small."""
        return None

    def rows(self, use: Use, samples: slice) -> None:
        """Not of few rows."""
        return None

    def elements_per_sample(self, use: Use) -> int:
        """The normalised input, and its product with the output gradient."""
        return 2 * use.delta[:1].numel()


def _summed(values: Tensor, axes: list[int]) -> Tensor:
    return torch.sum(values, axes) if axes else values
