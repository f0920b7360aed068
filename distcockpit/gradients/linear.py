"""nn.Linear: individual gradients are outer products of the output gradient and the input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from distcockpit.gradients.uses import Blocks, Use


class LinearRule:
    """``y = x W^T + b``, on ``[N, in]`` or with further axes, ``[N, *, in]``, which are summed over."""

    description = "closed form"

    def outer(self, use: Use) -> tuple[str, Tensor, Tensor] | None:
        """The weight, if there are no further axes: ``g_i = delta_i x_i^T``."""
        if "weight" not in use.layer.parameters or use.input.dim() != 2:
            return None
        return "weight", use.delta, use.input

    def blocks(self, use: Use, names: Sequence[str], values: Mapping[str, Tensor]) -> Blocks:
        """``sum_t delta_it x_it^T`` and ``sum_t delta_it``."""
        delta, x = use.delta, use.input
        delta, x = (t.reshape(t.shape[0], -1, t.shape[-1]) for t in (delta, x.to(delta.dtype)))

        def block(samples: slice) -> dict[str, Tensor]:
            d = delta[samples]
            formulas = {
                "weight": lambda: torch.bmm(d.transpose(1, 2), x[samples]),
                "bias": lambda: d.sum(1),
            }
            return {name: formulas[name]() for name in names}

        return block

    def elements_per_sample(self, use: Use) -> int:
        """Nothing beside the gradients."""
        return 0
