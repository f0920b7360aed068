"""Layers whose parameter Jacobians BackPACK knows: transposed convolutions, and batch norm in eval mode."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

from backpack.core.derivatives.batchnorm_nd import BatchNormNdDerivatives
from backpack.core.derivatives.conv_transpose1d import ConvTranspose1DDerivatives
from backpack.core.derivatives.conv_transpose2d import ConvTranspose2DDerivatives
from backpack.core.derivatives.conv_transpose3d import ConvTranspose3DDerivatives
from torch import Tensor, nn

from distcockpit.gradients.factors import Factors
from distcockpit.gradients.uses import Blocks, Use

DERIVATIVES = {
    nn.ConvTranspose1d: ConvTranspose1DDerivatives(),
    nn.ConvTranspose2d: ConvTranspose2DDerivatives(),
    nn.ConvTranspose3d: ConvTranspose3DDerivatives(),
    nn.BatchNorm1d: BatchNormNdDerivatives(),
    nn.BatchNorm2d: BatchNormNdDerivatives(),
    nn.BatchNorm3d: BatchNormNdDerivatives(),
}


class BackpackRule:
    """Blocks from BackPACK's matrix-Jacobian products, a few samples at a time."""

    description = "BackPACK blocks"
    unfolds = False

    @staticmethod
    def serves(module: nn.Module) -> bool:
        """Whether BackPACK is right for this module: it ignores padding modes, named and output paddings."""
        if type(module) not in DERIVATIVES:
            return False
        plain = getattr(module, "padding_mode", "zeros") == "zeros" and not any(getattr(module, "output_padding", ()))
        return plain and not isinstance(getattr(module, "padding", 0), str)

    def factors(self, use: Use) -> dict[str, Factors]:
        """None."""
        return {}

    def along(self, use: Use, direction: Mapping[str, Tensor]) -> None:
        """By way of blocks."""
        return None

    def blocks(self, use: Use, names: Sequence[str], values: Mapping[str, Tensor]) -> Blocks:
        """``J_i^T delta_i`` for the weight and the bias."""
        derivatives = DERIVATIVES[type(use.layer.module)]
        delta, x = use.delta, use.input
        # BackPACK reads inputs and buffers off the module: give them to a shallow copy, not to the user's module.
        view = copy.copy(use.layer.module)
        view.__dict__["_buffers"] = use.buffers
        view.__dict__["training"] = use.training[use.layer.module]

        def block(samples: slice) -> dict[str, Tensor]:
            view.__dict__["input0"], view.__dict__["output"] = x[samples].to(delta.dtype), delta[samples]
            return {
                name: derivatives.param_mjp(name, view, None, None, delta[samples], sum_batch=False) for name in names
            }

        return block

    def rows(self, use: Use, samples: slice) -> None:
        """Not of few rows."""
        return None

    def elements_per_sample(self, use: Use) -> int:
        """Room for the input and the output gradient, which BackPACK repeats."""
        return use.delta[0].numel() + use.input[0].numel() if len(use.delta) else 0
