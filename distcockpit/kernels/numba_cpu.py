"""Binning on the CPU with Numba: products are counted as they are formed and never stored."""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

_jit = numba.njit(nogil=True, cache=True, error_model="numpy")


@_jit
def _slot(v, limits, low, per_width):
    """Guess the slot by arithmetic, then correct it by comparing with the edges."""
    n = limits.size
    if v != v:
        return n + 1
    guess = (v - low) * per_width
    k = 2 + int(guess) if 0 <= guess < n - 3 else (1 if guess < 0 else n - 1)
    while k < n and v >= limits[k]:
        k += 1
    while k > 0 and v < limits[k - 1]:
        k -= 1
    return k


@_jit
def _count_block(values, limits, low, per_width, counts):
    for v in values:
        counts[_slot(v, limits, low, per_width)] += 1


@_jit
def _count_outer(delta, x, limits, low, per_width, counts):
    for n in range(delta.shape[0]):
        for o in range(delta.shape[1]):
            d = delta[n, o]
            for i in range(x.shape[1]):
                counts[_slot(d * x[n, i], limits, low, per_width)] += 1


@_jit
def _count_block_2d(values, limits, low, per_width, columns, counts):
    for n in range(values.shape[0]):
        for d in range(values.shape[1]):
            counts[_slot(values[n, d], limits, low, per_width), columns[d]] += 1


@_jit
def _count_outer_2d(delta, x, limits, low, per_width, columns, counts):
    for n in range(delta.shape[0]):
        for o in range(delta.shape[1]):
            d = delta[n, o]
            for i in range(x.shape[1]):
                counts[_slot(d * x[n, i], limits, low, per_width), columns[o, i]] += 1


def _scale(limits: np.ndarray) -> tuple[np.floating, np.floating]:
    """Where the bins begin and how many there are per unit, for the guess, in the type of the values."""
    low, high = limits[1], limits[-2]
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        per_width = limits.dtype.type((limits.size - 3) / (np.float64(high) - np.float64(low)))
    return low, per_width if np.isfinite(per_width) else limits.dtype.type(0)


def count_block(values: Tensor, limits: Tensor) -> Tensor:
    """Counts of all elements of ``values``, see the package docstring."""
    edges = limits.numpy()
    counts = np.zeros(edges.size + 2, np.int64)
    _count_block(values.reshape(-1).numpy(), edges, *_scale(edges), counts)
    return torch.from_numpy(counts)


def count_outer(delta: Tensor, x: Tensor, limits: Tensor) -> Tensor:
    """Counts of all products ``delta[n, o] * x[n, i]``."""
    edges = limits.numpy()
    counts = np.zeros(edges.size + 2, np.int64)
    _count_outer(_rows(delta), _rows(x), edges, *_scale(edges), counts)
    return torch.from_numpy(counts)


def count_block_2d(values: Tensor, limits: Tensor, columns: Tensor, n_columns: int) -> Tensor:
    """Counts over pairs (slot of ``values[n, d]``, ``columns[d]``)."""
    edges = limits.numpy()
    counts = np.zeros((edges.size + 2, n_columns), np.int64)
    _count_block_2d(_rows(values), edges, *_scale(edges), _rows(columns), counts)
    return torch.from_numpy(counts)


def count_outer_2d(delta: Tensor, x: Tensor, limits: Tensor, columns: Tensor, n_columns: int) -> Tensor:
    """Counts over pairs (slot of ``delta[n, o] * x[n, i]``, ``columns[o, i]``)."""
    edges = limits.numpy()
    counts = np.zeros((edges.size + 2, n_columns), np.int64)
    _count_outer_2d(_rows(delta), _rows(x), edges, *_scale(edges), _rows(columns), counts)
    return torch.from_numpy(counts)


def _rows(tensor: Tensor) -> np.ndarray:
    """As a C-contiguous array, so that each kernel is compiled once per type."""
    return tensor.contiguous().numpy()
