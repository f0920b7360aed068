"""Sums over individual gradients, fed with outer products where a layer has them, and with blocks elsewhere.

A statistic is an accumulator. ``outer`` takes the factors of ``g_i = delta_i x_i^T`` and avoids forming the
products where a closed form exists; ``block`` takes formed individual gradients ``[n, *parameter.shape]``.
``samples`` says which samples of the local batch they belong to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from distcockpit import kernels


class Statistic(Protocol):
    """An accumulator over individual gradients."""

    def outer(self, name: str, delta: Tensor, x: Tensor, samples: slice) -> None:
        """Add samples whose individual gradients of parameter ``name`` are ``delta_i x_i^T``."""

    def block(self, name: str, gradients: Tensor, samples: slice) -> None:
        """Add formed individual gradients of parameter ``name``."""


class GradientSum:
    """``sum_i g_i``, by parameter, in float64."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.sums = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in parameters.items()}

    def outer(self, name: str, delta: Tensor, x: Tensor, samples: slice) -> None:
        """``delta^T x``."""
        self.sums[name].addmm_(delta.double().T, x.double())

    def block(self, name: str, gradients: Tensor, samples: slice) -> None:
        """The sum over the samples of the block."""
        self.sums[name] += gradients.sum(0, dtype=torch.float64)


class SquareSum:
    """``sum_i g_i^2``, element by element, by parameter, in float64.

    float64 because ``N G^2`` is subtracted later: squares of float32 numbers are exact in float64, and a difference
    of sums of them loses nothing that the individual gradients had.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.sums = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in parameters.items()}

    def outer(self, name: str, delta: Tensor, x: Tensor, samples: slice) -> None:
        """``(delta^2)^T (x^2)``."""
        self.sums[name].addmm_(delta.double().square().T, x.double().square())

    def block(self, name: str, gradients: Tensor, samples: slice) -> None:
        """The sum over the samples of the block."""
        self.sums[name] += gradients.double().square().sum(0)


class SquaredNorms:
    """``sum_i |g_i|^2``: one number per parameter, ``values``, float64, for the reason given in `SquareSum`."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.values = {n: torch.zeros((), dtype=torch.float64, device=p.device) for n, p in parameters.items()}

    def outer(self, name: str, delta: Tensor, x: Tensor, samples: slice) -> None:
        """``sum_i |delta_i|^2 |x_i|^2``."""
        self.values[name] += delta.double().square().sum(1) @ x.double().square().sum(1)

    def block(self, name: str, gradients: Tensor, samples: slice) -> None:
        """The sum over the block."""
        self.values[name] += gradients.double().square().sum()


class Projection:
    """``<g_i, v>`` for every sample of the local batch: ``values``, float64, shape ``[B]``.

    In float64, because the variance of the projections over samples may be small against their mean.
    """

    def __init__(self, direction: Mapping[str, Tensor], batch_size: int) -> None:
        self.direction = direction
        device = next(iter(direction.values())).device
        self.values = torch.zeros(batch_size, dtype=torch.float64, device=device)

    def outer(self, name: str, delta: Tensor, x: Tensor, samples: slice) -> None:
        """``<delta_i, V x_i>``."""
        self.values[samples] += ((x.double() @ self.direction[name].double().T) * delta.double()).sum(1)

    def block(self, name: str, gradients: Tensor, samples: slice) -> None:
        """The inner product itself."""
        product = gradients * self.direction[name].to(gradients.dtype)
        rows = product.reshape(len(product), math.prod(product.shape[1:]))
        self.values[samples] += rows.sum(1, dtype=torch.float64)


class AbsMax:
    """The largest absolute element over samples and parameters; NaN and infinite elements do not count."""

    def __init__(self) -> None:
        self.value: Tensor | float = 0.0

    def outer(self, name: str, delta: Tensor, x: Tensor, samples: slice) -> None:
        """``max_i max|delta_i| max|x_i|``: rounding is monotone, so this is the largest rounded product."""
        largest = _finite_abs(delta).amax(1) * _finite_abs(x.to(delta.dtype)).amax(1)
        self._add(largest)

    def block(self, name: str, gradients: Tensor, samples: slice) -> None:
        """The largest element of the block."""
        self._add(gradients.abs())

    def _add(self, magnitudes: Tensor) -> None:
        largest = _finite_abs(magnitudes).amax().double()
        self.value = torch.maximum(largest, torch.as_tensor(self.value, dtype=torch.float64, device=largest.device))


def _finite_abs(values: Tensor) -> Tensor:
    return values.abs().nan_to_num(nan=0.0, posinf=0.0)


class Histogram1d:
    """Counts of all elements: int64, shape ``[b + 5]``, see :mod:`distcockpit.kernels` for the slots."""

    def __init__(self, edges: np.ndarray) -> None:
        self.edges = edges
        self.counts: Tensor | int = 0

    def outer(self, name: str, delta: Tensor, x: Tensor, samples: slice) -> None:
        """Bin products without storing them."""
        self.counts = self.counts + kernels.count_outer(delta, x.to(delta.dtype), self.edges)

    def block(self, name: str, gradients: Tensor, samples: slice) -> None:
        """Bin the elements of the block."""
        self.counts = self.counts + kernels.count_block(gradients, self.edges)


class Histogram2d:
    """Counts over (gradient element, value of its parameter), per parameter: int64, ``[b_g + 5, b_p + 5]``."""

    def __init__(self, edges: tuple[np.ndarray, np.ndarray], parameters: Mapping[str, Tensor]) -> None:
        self.gradient_edges = edges[0]
        self.n_columns = len(edges[1]) - 1 + kernels.OUTSIDE
        self.columns = {name: kernels.slots(p, edges[1]) for name, p in parameters.items()}
        self.counts: dict[str, Tensor | int] = dict.fromkeys(parameters, 0)

    def outer(self, name: str, delta: Tensor, x: Tensor, samples: slice) -> None:
        """Bin products without storing them."""
        self.counts[name] = self.counts[name] + kernels.count_outer_2d(
            delta, x.to(delta.dtype), self.gradient_edges, self.columns[name], self.n_columns
        )

    def block(self, name: str, gradients: Tensor, samples: slice) -> None:
        """Bin the elements of the block."""
        self.counts[name] = self.counts[name] + kernels.count_block_2d(
            gradients.flatten(1), self.gradient_edges, self.columns[name].flatten(), self.n_columns
        )
