"""Embeddings: the gradient of a row is the sum of the output gradients at the positions with its index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distcockpit.gradients.factors import Occurrences
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

    def row_wise(self, use: Use) -> dict[str, Occurrences]:
        """``g_i[v] = sum_t [x_it = v] delta_it``."""
        return {"weight": self._occurrences(use)}

    def blocks(self, use: Use, names: Sequence[str], values: Mapping[str, Tensor]) -> Blocks:
        """The same, formed."""
        (name,), occurrences = names, self._occurrences(use)
        return lambda samples: {name: occurrences.products(samples)}

    def jvp(self, use: Use, direction: Mapping[str, Tensor]) -> Tensor:
        """``sum_t <delta_it, V[x_it]>``."""
        (v,) = direction.values()
        return self._occurrences(use).along(v)

    def _occurrences(self, use: Use) -> Occurrences:
        delta = use.delta.flatten(1, -2) if use.delta.dim() > 2 else use.delta.unsqueeze(1)
        index = use.input.reshape(delta.shape[:2]).long()
        if self.padding is not None:
            index = torch.where(index == self.padding, -1, index)
        return Occurrences(index, delta, self.n_rows)
