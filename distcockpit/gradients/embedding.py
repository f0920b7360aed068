"""nn.Embedding: the gradient of a row is the sum of the output gradients where the index is that row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from distcockpit import kernels
from distcockpit.gradients.factors import Factors
from distcockpit.gradients.uses import Blocks, Use


class EmbeddingRule:
    """``y_t = W[x_t]``, on ``[N]`` or ``[N, *]``; the padding index has no gradient."""

    description = "closed form"

    def factors(self, use: Use) -> dict[str, Factors]:
        """None: a gradient has few rows that are not zero."""
        return {}

    def blocks(self, use: Use, names: Sequence[str], values: Mapping[str, Tensor]) -> Blocks:
        """``g_i[v] = sum_t [x_it = v] delta_it``."""
        (weight,) = (values[use.layer.parameters[name]] for name in names)
        n_rows, width = weight.shape
        delta = use.delta.reshape(len(use.delta), -1, width)
        index = use.input.reshape(len(delta), delta.shape[1], 1).long()
        padding = getattr(use.layer.module, "padding_idx", None)
        if padding is not None:
            delta = delta.masked_fill(index == padding, 0)

        def block(samples: slice) -> dict[str, Tensor]:
            d, i = delta[samples], index[samples]
            return {name: d.new_zeros(len(d), n_rows, width).scatter_add_(1, i.expand_as(d), d) for name in names}

        return block

    def along(self, use: Use, direction: Mapping[str, Tensor]) -> Tensor:
        """``sum_t <delta_it, V[x_it]>``."""
        (v,) = direction.values()
        delta = use.delta.flatten(1, -2) if use.delta.dim() > 2 else use.delta.unsqueeze(1)
        index = use.input.reshape(delta.shape[:2]).long()
        rows = v.to(delta.dtype)[index]
        padding = getattr(use.layer.module, "padding_idx", None)
        if padding is not None:
            rows = rows.masked_fill((index == padding).unsqueeze(2), 0)
        return kernels.inner_rows(rows.flatten(1), delta.flatten(1))

    def elements_per_sample(self, use: Use) -> int:
        """Nothing beside the gradients."""
        return 0
