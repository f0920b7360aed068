"""Individual gradients that are sums of outer products, and what follows from the factors alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Factors:
    """``g_i = sum_t delta_it x_it^T``, for a parameter seen as a matrix ``[O, I]``.

    A linear layer has T = 1, or as many as its input has positions; a convolution has one for each place of its output.

    Args:
        delta: Output gradients, ``[B, T, O]``.
        inputs: Maps a range of samples to their inputs, ``[n, T, I]``.
        n_inputs: I.
    """

    delta: Tensor
    inputs: Callable[[slice], Tensor]
    n_inputs: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """T, O, I."""
        return self.delta.shape[1], self.delta.shape[2], self.n_inputs

    def of(self, samples: slice) -> tuple[Tensor, Tensor]:
        """The factors of some samples."""
        return self.delta[samples], self.inputs(samples)

    def products(self, samples: slice) -> Tensor:
        """Individual gradients of some samples, ``[n, O, I]``."""
        delta, x = self.of(samples)
        return torch.bmm(delta.transpose(1, 2), x)
