"""Binning in plain torch, for any device: the definition that faster kernels must match count for count."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK = 1 << 21  # elements binned at a time: 8 MiB of float32, 16 MiB of slot numbers


def slots(values: Tensor, limits: Tensor) -> Tensor:
    """Return the slot number of every value."""
    number = torch.bucketize(values.contiguous(), limits, right=True)
    return torch.where(values.isnan(), limits.numel() + 1, number)


def _count(numbers: Tensor, counts: Tensor) -> None:
    """Count like ``bincount``, which would wait for the device."""
    counts.scatter_add_(0, numbers, torch.ones((), dtype=torch.int64, device=numbers.device).expand_as(numbers))


def count_block(values: Tensor, limits: Tensor) -> Tensor:
    """Count all elements of ``values``, see the package docstring."""
    counts = torch.zeros(limits.numel() + 2, dtype=torch.int64, device=values.device)
    for part in values.reshape(-1).split(CHUNK):
        _count(slots(part, limits), counts)
    return counts


def count_outer(delta: Tensor, x: Tensor, limits: Tensor) -> Tensor:
    """Count all products ``delta[n, o] * x[n, i]``."""
    counts = torch.zeros(limits.numel() + 2, dtype=torch.int64, device=x.device)
    for d, y in _samples(delta, x):
        counts += count_block(d.unsqueeze(2) * y.unsqueeze(1), limits)
    return counts


def count_block_2d(values: Tensor, limits: Tensor, columns: Tensor, n_columns: int) -> Tensor:
    """Count pairs (slot of ``values[n, d]``, ``columns[d]``)."""
    size = (limits.numel() + 2) * n_columns
    counts = torch.zeros(size, dtype=torch.int64, device=values.device)
    for part in values.split(max(1, CHUNK // max(1, values.shape[1]))):
        _count((slots(part, limits) * n_columns + columns).reshape(-1), counts)
    return counts.view(-1, n_columns)


def count_outer_2d(delta: Tensor, x: Tensor, limits: Tensor, columns: Tensor, n_columns: int) -> Tensor:
    """Count pairs (slot of ``delta[n, o] * x[n, i]``, ``columns[o, i]``)."""
    counts = torch.zeros(limits.numel() + 2, n_columns, dtype=torch.int64, device=x.device)
    for d, y in _samples(delta, x):
        products = (d.unsqueeze(2) * y.unsqueeze(1)).flatten(1)
        counts += count_block_2d(products, limits, columns.reshape(-1), n_columns)
    return counts


def add_sums(sums: Tensor, values: Tensor) -> None:
    """Add ``sum_n values[n]`` to ``sums``, float64."""
    sums += values.sum(0, dtype=torch.float64)


def count_nonfinite(values: Tensor) -> Tensor:
    """Count the elements that are NaN or infinite."""
    return values.numel() - values.isfinite().sum()


def count_small(values: Tensor, epsilon: float) -> Tensor:
    """Count the small elements for each index of the second axis."""
    return (values.abs() <= epsilon).sum((0, 2))


def squared_norm(values: Tensor) -> Tensor:
    """Return the sum of all squares, float64."""
    return torch.linalg.vector_norm(values.reshape(-1), dtype=torch.float64).square()


def squared_distance(values: Tensor, others: Tensor) -> Tensor:
    """Return the squared length of the difference, float64."""
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    for some, other in zip(values.reshape(-1).split(CHUNK), others.reshape(-1).split(CHUNK), strict=True):
        kind = torch.promote_types(some.dtype, torch.float32)
        total += squared_norm(some.to(kind) - other.to(kind))
    return total


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of all squares of each tensor, float64."""
    return torch.stack(torch._foreach_norm(list(tensors), 2, torch.float64)).square()


def inner_products(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """Return the inner product of each tensor with its counterpart, float64."""
    pairs = zip(tensors, others, strict=True)
    return torch.stack([torch.dot(a.double().reshape(-1), b.double().reshape(-1)) for a, b in pairs])


def inner_rows(values: Tensor, others: Tensor) -> Tensor:
    """Return inner products of rows, float64 ``[N]``."""
    return torch.linalg.vecdot(values.double(), others.double())


def inner_rows_with_difference(values: Tensor, after: Tensor, before: Tensor) -> Tensor:
    """Return inner products of rows with a difference, float64 ``[N]``."""
    return inner_rows(values, after - before)


def add_powers(sums: Tensor, squares: Tensor, values: Tensor) -> None:
    """Add ``sum_n values[n]`` to ``sums`` and ``sum_n values[n]^2`` to ``squares``, float64."""
    for part in values.split(max(1, CHUNK // max(1, sums.numel()))):
        wide = part.double()
        sums += wide.sum(0)
        squares += wide.square().sum(0)


def signal_to_noise(mean: Tensor, squares: Tensor, n: int, epsilon: float) -> Tensor:
    """Return the sum of ratios, float64, without a copy of all elements."""
    total = mean.new_zeros(())
    for some, of_squares in zip(mean.split(CHUNK), squares.split(CHUNK), strict=True):
        signal = some.square()
        noise = signal.sub(of_squares, alpha=1 / n).neg_()
        total += signal.div_(noise.add_(epsilon)).sum()
    return total


def _samples(delta: Tensor, x: Tensor) -> zip[tuple[Tensor, Tensor]]:
    """Yield pieces of a few samples whose products fit a chunk."""
    n = max(1, CHUNK // max(1, delta.shape[1] * x.shape[1]))
    return zip(delta.split(n), x.split(n), strict=True)
