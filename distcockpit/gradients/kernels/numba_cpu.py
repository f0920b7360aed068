"""The kernels on the CPU: Numba's compiled loops, with work shared among torch's threads.

The loops release the GIL and run on the same OpenMP threads as torch's own operations: after each operation these
threads spin, waiting for the next one, so any other thread would have to wait for a core. Numba's parallel loops would
start a second OpenMP runtime, or a work queue, in the user's process. If torch has no GNU OpenMP, one thread does all
the work.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distcockpit.gradients.kernels import numba_loops as loops

PER_THREAD = 100_000  # nanoseconds of work below which another thread does not pay off

# Approximate nanoseconds per element: of a loop that only adds, and of one that searches for slots.
ADDED, COUNTED = 0.2, 0.3

INTEGER: dict[Any, Any] = {np.dtype(np.float32): np.dtype(np.int32), np.dtype(np.float64): np.dtype(np.int64)}


def slots(values: Tensor, limits: Tensor) -> Tensor:
    """Return the slot number of every value, int32."""
    edges, flat = limits.numpy(), _rows(values.reshape(-1))
    numbers, scale = np.empty(flat.size, np.int32), _scale(edges)
    in_parts(lambda part: loops.slots(flat[part], edges, *scale, numbers[part]), flat.size, COUNTED, flat.dtype)
    return torch.from_numpy(numbers).view(values.shape)


def count_block(values: Tensor, limits: Tensor) -> Tensor:
    """Count all elements of ``values``, see the package docstring."""
    edges, flat = limits.numpy(), values.reshape(-1).numpy()
    scale = _scale(edges)

    def count(part: slice) -> np.ndarray:
        counts = np.zeros(edges.size + 2, np.int64)
        loops.count_block(flat[part], edges, *scale, counts)
        return counts

    return _shared_out(count, flat.size, COUNTED, flat.dtype)


def count_outer(delta: Tensor, x: Tensor, limits: Tensor) -> Tensor:
    """Count all products ``delta[n, o] * x[n, i]``."""
    if delta.shape[1] > x.shape[1]:  # the longer side is worth sorting
        delta, x = x, delta
    d, y, edges = _rows(delta), _rows(x), limits.numpy()
    bits = y.view(INTEGER[y.dtype])
    scale = _scale(edges)

    def count(part: slice) -> np.ndarray:
        counts = np.zeros(edges.size + 2, np.int64)
        rest = np.empty(d[part].shape, np.bool_)
        left = loops.count_near(d[part], y[part], bits[part], edges, counts, rest)
        for kind, are_sorted in ((1, False), (2, True)):
            samples = np.flatnonzero(left == kind)
            if samples.size:
                rows = y[part][samples]
                rows = np.sort(rows, 1) if are_sorted else rows
                loops.count_rest(d[part], rows, samples, are_sorted, rest, edges, *scale, counts)
        return counts

    return _shared_out(count, len(d), 40 * d.shape[1] + 4 * y.shape[1], y.dtype)


def count_block_2d(values: Tensor, limits: Tensor, columns: Tensor, n_columns: int) -> Tensor:
    """Count pairs (slot of ``values[n, d]``, ``columns[d]``)."""
    edges, rows, column = limits.numpy(), _rows(values), _rows(columns)
    scale = _scale(edges)

    def count(part: slice) -> np.ndarray:
        counts = np.zeros((edges.size + 2, n_columns), np.int64)
        loops.count_block_2d(rows[part], edges, *scale, column, counts)
        return counts

    return _shared_out(count, len(rows), COUNTED * rows.shape[1], rows.dtype)


def count_outer_2d(delta: Tensor, x: Tensor, limits: Tensor, columns: Tensor, n_columns: int) -> Tensor:
    """Count pairs (slot of ``delta[n, o] * x[n, i]``, ``columns[o, i]``)."""
    d, y, column, edges = _rows(delta), _rows(x), _rows(columns), limits.numpy()
    bits = y.view(INTEGER[y.dtype])
    scale = _scale(edges)
    flat = column + np.arange(len(column), dtype=column.dtype)[:, None] * n_columns
    row_counts = np.bincount(flat.ravel(), minlength=column.shape[0] * n_columns).reshape(-1, n_columns)

    def count(part: slice) -> np.ndarray:
        counts = np.zeros((edges.size + 2, n_columns), np.int64)
        loops.count_outer_2d(d[part], y[part], bits[part], edges, *scale, column, row_counts, counts)
        return counts

    return _shared_out(count, len(d), d.shape[1] * (n_columns + y.shape[1] / 4), y.dtype)


def add_sums(sums: Tensor, values: Tensor) -> None:
    """Add ``sum_n values[n]`` to ``sums``, float64."""
    rows, total = _rows(values.reshape(len(values), sums.numel())), sums.view(-1).numpy()
    in_parts(lambda part: loops.add_sums(rows[:, part], total[part]), total.size, ADDED * len(rows), rows.dtype)


def add_powers(sums: Tensor, squares: Tensor, values: Tensor) -> None:
    """Add ``sum_n values[n]`` to ``sums`` and ``sum_n values[n]^2`` to ``squares``, float64."""
    rows = _rows(values.reshape(len(values), sums.numel()))
    first, second = sums.view(-1).numpy(), squares.view(-1).numpy()
    cost = 2 * ADDED * len(rows)
    in_parts(lambda part: loops.add_powers(rows[:, part], first[part], second[part]), first.size, cost, rows.dtype)


def count_nonfinite(values: Tensor) -> Tensor:
    """Count the elements that are NaN or infinite."""
    flat = _rows(values.reshape(-1))
    count = sum(in_parts(lambda part: loops.count_nonfinite(flat[part]), flat.size, ADDED, flat.dtype))
    return torch.tensor(count, dtype=torch.int64)


def count_small(values: Tensor, epsilon: float) -> Tensor:
    """Count the small elements for each index of the second axis."""
    a, c, i = values.shape
    limit = (np.float32 if values.dtype == torch.float32 else np.float64)(epsilon)
    if i == 1:
        rows = _rows(values.view(a, c))

        def count(part: slice) -> np.ndarray:
            counts = np.zeros(c, np.int64)
            loops.count_small_in_columns(rows[part], limit, counts)
            return counts

        return _shared_out(count, a, ADDED * c, rows.dtype) if a else torch.zeros(c, dtype=torch.int64)
    rows, counts = _rows(values.reshape(a * c, i)), np.zeros(a * c, np.int64)
    in_parts(lambda part: loops.count_small_in_rows(rows[part], limit, counts[part]), a * c, ADDED * i, rows.dtype)
    return torch.from_numpy(counts).view(a, c).sum(0)


def squared_norm(values: Tensor) -> Tensor:
    """Return the sum of all squares, float64."""
    return squared_norms([values])[0]


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of all squares of each tensor, float64."""
    return inner_products(tensors, tensors)


def inner_products(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """Return the inner product of each tensor with its counterpart, float64."""

    def product(values: Tensor, other: Tensor) -> float:
        a, b = _rows(values.reshape(-1)), _rows(other.reshape(-1))
        return sum(in_parts(lambda part: loops.inner(a[part], b[part]), a.size, ADDED, a.dtype))

    products = [product(values, other) for values, other in zip(tensors, others, strict=True)]
    return torch.tensor(products, dtype=torch.float64)


def inner_rows(values: Tensor, others: Tensor) -> Tensor:
    """Return inner products of rows, float64 ``[N]``."""
    rows, sums = _rows(values), np.empty(len(values))
    second = _rows(others if others.dim() == 2 else others.unsqueeze(0))

    def multiply(part: slice) -> None:
        loops.inner_rows(rows[part], second[part] if others.dim() == 2 else second, sums[part])

    in_parts(multiply, len(rows), ADDED * rows.shape[1], rows.dtype)
    return torch.from_numpy(sums)


# -- threads -----------------------------------------------------------------------------------------------------------


def _shared_out(count: Callable[[slice], np.ndarray], n: int, cost: float, dtype: np.dtype) -> Tensor:
    """Return the sum of ``count`` over parts of ``range(n)``; otherwise see `in_parts`."""
    return torch.from_numpy(sum(in_parts(count, n, cost, dtype)))


def in_parts(work: Callable[[slice], Any], n: int, cost: float, dtype: np.dtype) -> list[Any]:
    """Return what ``work`` returns for parts of ``range(n)``.

    Args:
        work: Calls a compiled loop on a part.
        n: Number of items.
        cost: Approximate cost of each item, in nanoseconds.
        dtype: The type of the values, for which the loop is compiled.
    """
    parts = min(torch.get_num_threads(), int(n * cost) // PER_THREAD, n)
    # The first call may compile, which must not happen on a thread whose stack size is not ours.
    if parts < 2 or _openmp() is None or os.getpid() != PROCESS or (work.__code__, dtype) not in COMPILED:
        COMPILED.add((work.__code__, dtype))
        return [work(slice(0, n))]
    ends = [n * k // parts for k in range(parts + 1)]
    results: list[Any] = [None] * parts
    errors: list[BaseException] = []
    left = iter(range(parts))

    def take(_: int | None) -> None:
        try:
            for k in left:  # threads take parts until none are left: there may be fewer than requested
                results[k] = work(slice(ends[k], ends[k + 1]))
        except BaseException as error:  # no exception may leave a function called from C
            errors.append(error)

    called = CALLED(take)
    _openmp()(ctypes.cast(called, ctypes.c_void_p), None, parts, 0)
    take(None)  # take what is left, in case a thread was interrupted
    if errors:
        raise errors[0]
    return results


PROCESS = os.getpid()  # OpenMP's threads do not survive a fork
COMPILED: set[tuple[Any, np.dtype]] = set()
CALLED = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def _openmp() -> Any:
    """Return ``GOMP_parallel(function, data, threads, flags)`` of torch's OpenMP runtime, or ``None``."""
    try:
        run = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):  # no such OpenMP; Windows has no such handle
        return None
    run.argtypes, run.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return run


def _scale(limits: np.ndarray) -> tuple[np.floating, np.floating]:
    """Return where the bins start and how many there are per unit, for the guess, in the type of the values."""
    return _scale_of(limits.tobytes(), limits.dtype)


@lru_cache(64)
def _scale_of(limit_bytes: bytes, dtype: np.dtype) -> tuple[np.floating, np.floating]:
    limits = np.frombuffer(limit_bytes, dtype)
    low, high = limits[1], limits[-2]
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        per_width = limits.dtype.type((limits.size - 3) / (np.float64(high) - np.float64(low)))
    return low, per_width if np.isfinite(per_width) else limits.dtype.type(0)


def _rows(tensor: Tensor) -> np.ndarray:
    """Return a C-contiguous array, so that each kernel is compiled once per type."""
    return tensor.contiguous().numpy()
