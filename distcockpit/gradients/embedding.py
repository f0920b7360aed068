"""nn.Embedding: the gradient of a row is the sum of the output gradients where the index is that row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distcockpit import kernels
from distcockpit.gradients.factors import Factors, Rows
from distcockpit.gradients.uses import Blocks, Use


class EmbeddingRule:
    """``y_t = W[x_t]``, on ``[N]`` or ``[N, *]``; the padding index has no gradient."""

    description = "closed form"
    unfolds = True

    def factors(self, use: Use) -> dict[str, Factors]:
        """None: a gradient has few rows that are not zero."""
        return {}

    def blocks(self, use: Use, names: Sequence[str], values: Mapping[str, Tensor]) -> Blocks:
        """``g_i[v] = sum_t [x_it = v] delta_it``."""
        (name,) = names
        index, delta = _occurrences(use)
        n_rows = len(values[use.layer.parameters[name]])

        def block(samples: slice) -> dict[str, Tensor]:
            d, i = delta[samples], index[samples].unsqueeze(2)
            return {name: d.new_zeros(len(d), n_rows, d.shape[2]).scatter_add_(1, i.expand_as(d), d)}

        return block

    def along(self, use: Use, direction: Mapping[str, Tensor]) -> Tensor:
        """``sum_t <delta_it, V[x_it]>``."""
        (v,) = direction.values()
        index, delta = _occurrences(use)
        return kernels.inner_rows(v.to(delta.dtype)[index].flatten(1), delta.flatten(1))

    def rows(self, use: Use, samples: slice) -> Rows:
        """The rows that are not zero; found without waiting for the device."""
        index, delta = (t[samples] for t in _occurrences(use))
        index = index.contiguous()
        ordered = index.sort(1).values
        first = torch.searchsorted(ordered, index)  # where each token comes first
        values = torch.zeros_like(delta).scatter_add_(1, first.unsqueeze(2).expand_as(delta), delta)
        module: Any = use.layer.module
        return Rows(ordered, values, module.num_embeddings)

    def elements_per_sample(self, use: Use) -> int:
        """Nothing beside the gradients."""
        return 0


def _occurrences(use: Use) -> tuple[Tensor, Tensor]:
    """Which row each position of a sample takes, ``[B, T]``, and its output gradient, ``[B, T, E]``."""
    delta = use.delta.flatten(1, -2) if use.delta.dim() > 2 else use.delta.unsqueeze(1)
    index = use.input.reshape(delta.shape[:2]).long()
    padding = getattr(use.layer.module, "padding_idx", None)
    return index, delta if padding is None else delta.masked_fill((index == padding).unsqueeze(2), 0)
