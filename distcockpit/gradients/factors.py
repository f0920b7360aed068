"""Individual gradients that need not be formed: sums of outer products, and gradients with few nonzero rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Factors:
    """``g_i = sum_t delta_it x_it^T``, for a parameter viewed as a matrix ``[O, I]``.

    For a linear layer, T is 1, or the number of positions of its input; for a convolution, that of its output
    positions.

    Args:
        delta: Output gradients, ``[B, T, O]``.
        inputs: Maps a range of samples to their inputs, ``[n, T, I]``.
        n_inputs: I.
        are_windows: Whether the inputs are copies of overlapping windows, which take longer to make than to multiply.
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
        """Return the factors of some samples."""
        return self.delta[samples], self.inputs(samples)

    def products(self, samples: slice) -> Tensor:
        """Return the individual gradients of some samples, ``[n, O, I]``."""
        return products(*self.of(samples))


def products(delta: Tensor, x: Tensor) -> Tensor:
    """``sum_t delta_it x_it^T``: ``[n, O, I]`` from ``[n, T, O]`` and ``[n, T, I]``."""
    return torch.bmm(delta.transpose(1, 2), x)


@dataclass(frozen=True)
class Rows:
    """Individual gradients with at most T nonzero rows of a parameter ``[V, E]``, such as those of an embedding.

    Args:
        index: The rows of the parameter, ``[n, T]``. If one occurs several times, all but one are rows of zeros.
        values: These rows, ``[n, T, E]``.
        n_rows: V.
    """

    index: Tensor
    values: Tensor
    n_rows: int

    @property
    def surplus(self) -> int:
        """How many zeros are not among the values; negative if there are more rows than the parameter has."""
        n, t, width = self.values.shape
        return n * (self.n_rows - t) * width
