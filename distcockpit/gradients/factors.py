"""Individual gradients that need not be formed: sums of outer products, and those with few rows."""

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
        are_windows: Whether the inputs are copies of what overlaps, which take longer to make than to multiply.
    """

    delta: Tensor
    inputs: Callable[[slice], Tensor]
    n_inputs: int
    are_windows: bool = False

    @property
    def sizes(self) -> tuple[int, int, int]:
        """T, O, I."""
        return self.delta.shape[1], self.delta.shape[2], self.n_inputs

    def of(self, samples: slice) -> tuple[Tensor, Tensor]:
        """The factors of some samples."""
        return self.delta[samples], self.inputs(samples)

    def products(self, samples: slice) -> Tensor:
        """Individual gradients of some samples, ``[n, O, I]``."""
        return products(*self.of(samples))


def products(delta: Tensor, x: Tensor) -> Tensor:
    """``sum_t delta_it x_it^T``: ``[n, O, I]`` from ``[n, T, O]`` and ``[n, T, I]``."""
    return torch.bmm(delta.transpose(1, 2), x)


@dataclass(frozen=True)
class Rows:
    """Individual gradients that are zero but for T rows of a parameter ``[V, E]`` at most: those of an embedding.

    Args:
        index: Which rows of the parameter, ``[n, T]``. Where one comes several times, all but one are rows of zeros.
        values: These rows, ``[n, T, E]``.
        n_rows: V.
    """

    index: Tensor
    values: Tensor
    n_rows: int

    @property
    def surplus(self) -> int:
        """How many zeros are not among the values; negative where there are more rows than the parameter has."""
        n, t, width = self.values.shape
        return n * (self.n_rows - t) * width
