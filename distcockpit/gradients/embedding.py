"""Embeddings: the gradient of a row is the sum of the output gradients at the positions with its index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distcockpit.gradients import kernels
from distcockpit.gradients.factors import Rows
from distcockpit.gradients.uses import Blocks, Use, UseRule


@dataclass(frozen=True)
class EmbeddingRule(UseRule):
    """``y_t = W[x_t]``, on ``[N]`` or ``[N, *]``.

    Args:
        n_rows: Of W.
        padding: The index that has no gradient.
    """

    n_rows: int
    padding: int | None = None

    def blocks(self, use: Use, names: Sequence[str], values: Mapping[str, Tensor]) -> Blocks:
        """``g_i[v] = sum_t [x_it = v] delta_it``."""
        (name,) = names
        index, delta = self._occurrences(use)

        def block(samples: slice) -> dict[str, Tensor]:
            d, i = delta[samples], index[samples].unsqueeze(2)
            return {name: d.new_zeros(len(d), self.n_rows, d.shape[2]).scatter_add_(1, i.expand_as(d), d)}

        return block

    def jvp(self, use: Use, direction: Mapping[str, Tensor]) -> Tensor:
        """``sum_t <delta_it, V[x_it]>``."""
        (v,) = direction.values()
        index, delta = self._occurrences(use)
        return kernels.inner_rows(v.to(delta.dtype)[index].flatten(1), delta.flatten(1))

    def rows(self, use: Use, samples: slice) -> Rows:
        """Return the nonzero rows, without waiting for the device."""
        index, delta = (t[samples] for t in self._occurrences(use))
        index = index.contiguous()
        ordered = index.sort(1).values
        first = torch.searchsorted(ordered, index)  # where each token first occurs
        values = torch.zeros_like(delta).scatter_add_(1, first.unsqueeze(2).expand_as(delta), delta)
        return Rows(ordered, values, self.n_rows)

    def _occurrences(self, use: Use) -> tuple[Tensor, Tensor]:
        """Return the row that each position of a sample selects, ``[B, T]``, and its output gradient, ``[B, T, E]``."""
        delta = use.delta.flatten(1, -2) if use.delta.dim() > 2 else use.delta.unsqueeze(1)
        index = use.input.reshape(delta.shape[:2]).long()
        if self.padding is None:
            return index, delta
        return index, delta.masked_fill((index == self.padding).unsqueeze(2), 0)
