"""The kernels on the CPU: Numba's compiled loops, with work shared among torch's threads.

The loops release the GIL and run on the same OpenMP threads as torch's own operations: after each operation these
threads spin, waiting for the next one, so any other thread would have to wait for a core. Numba's parallel loops would
start a second OpenMP runtime, or a work queue, in the user's process. If torch has no GNU OpenMP, one thread does all
the work.

Loops that go over each block of individual gradients are run by a team of threads without Python, see `numba_teams`.
The others are called from Python on each thread (`in_parts`), which takes longer, because threads wait for the GIL.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distcockpit.gradients.kernels import numba_loops as loops
from distcockpit.gradients.kernels import numba_teams as teams
from distcockpit.gradients.kernels.compiling import once_per_machine

# Nanoseconds of work below which another thread does not pay off: without Python, and with it.
PER_MEMBER, PER_THREAD = 10_000, 100_000

# Approximate nanoseconds per element: of a loop that only adds, one that searches for slots, and one that divides.
ADDED, COUNTED, DIVIDED = 0.2, 0.3, 1.0

INTEGER: dict[Any, Any] = {np.dtype(np.float32): np.dtype(np.int32), np.dtype(np.float64): np.dtype(np.int64)}


is_ready = False  # whether `compile_once` was called


def compile_once(exercise: Callable[[], Iterator[str]]) -> None:
    """Compile the loops, unless a process of this machine has done so.

    Args:
        exercise: Calls them, see `once_per_machine`.
    """
    folder = getattr(getattr(loops.slots, "stats", None), "cache_path", None)  # none where Numba is told to do nothing
    if folder:
        once_per_machine(exercise, [loops, teams], Path(folder))


def slots(values: Tensor, limits: Tensor) -> Tensor:
    """Return the slot number of every value, int32."""
    edges, flat = limits.numpy(), _rows(values.reshape(-1))
    numbers, scale = np.empty(flat.size, np.int32), _scale(edges)
    in_parts(lambda part: loops.slots(flat[part], edges, *scale, numbers[part]), flat.size, COUNTED, flat.dtype)
    return torch.from_numpy(numbers).view(values.shape)


def count_block(values: Tensor, limits: Tensor) -> Tensor:
    """Count all elements of ``values``, see the package docstring."""
    values, limits = values.contiguous(), limits.contiguous()
    n, parts = values.numel(), _members(values.numel() * COUNTED)
    scale = torch.tensor([float(each) for each in _scale(limits.numpy())], dtype=values.dtype, device="cpu")
    counts = torch.zeros(parts, len(limits) + 2, dtype=torch.int64, device="cpu")
    _run(teams.count_block(KINDS[values.dtype]), (parts, n, len(limits)), (values, limits, scale, counts))
    return counts.sum(0)


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
    n, d, values = len(values), sums.numel(), values.contiguous()
    parts = _members(2 * ADDED * n * d)
    _run(teams.add_powers(KINDS[values.dtype]), (parts, n, d), (values, sums.view(-1), squares.view(-1)))


def signal_to_noise(mean: Tensor, squares: Tensor, n: int, epsilon: float) -> Tensor:
    """Return the sum of the squared mean over the variance, float64."""
    parts = _members(DIVIDED * mean.numel())
    options = torch.tensor([1 / n, epsilon], dtype=torch.float64, device="cpu")
    sums = torch.empty(parts, dtype=torch.float64, device="cpu")
    given = mean.contiguous(), squares.contiguous(), options, sums
    _run(teams.signal_to_noise(), (parts, mean.numel()), given)
    return sums.sum()


def count_nonfinite(values: Tensor) -> Tensor:
    """Count the elements that are NaN or infinite."""
    flat = _rows(values.reshape(-1))
    count = sum(in_parts(lambda part: loops.count_nonfinite(flat[part]), flat.size, ADDED, flat.dtype))
    return torch.tensor(count, dtype=torch.int64, device="cpu")


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

        return _shared_out(count, a, ADDED * c, rows.dtype) if a else torch.zeros(c, dtype=torch.int64, device="cpu")
    rows, counts = _rows(values.reshape(a * c, i)), np.zeros(a * c, np.int64)
    in_parts(lambda part: loops.count_small_in_rows(rows[part], limit, counts[part]), a * c, ADDED * i, rows.dtype)
    return torch.from_numpy(counts).view(a, c).sum(0)


def squared_norm(values: Tensor) -> Tensor:
    """Return the sum of all squares, float64."""
    return _inner_rows(values, values, 1, values.numel(), 1)[0]


def squared_distance(values: Tensor, others: Tensor) -> Tensor:
    """Return the squared length of the difference, float64."""
    n, parts = values.numel(), _members(values.numel() * ADDED)
    sums = torch.empty(parts, dtype=torch.float64, device="cpu")
    loop = teams.squared_distance(KINDS[values.dtype])
    _run(loop, (parts, n), (values.contiguous(), others.contiguous(), sums))
    return sums.sum()


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of all squares of each tensor, float64."""
    return inner_products(tensors, tensors)


def inner_products(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """Return the inner product of each tensor with its counterpart, float64."""
    pairs = zip(tensors, others, strict=True)
    return torch.cat([_inner_rows(values, other, 1, values.numel(), 1) for values, other in pairs])


def inner_rows(values: Tensor, others: Tensor) -> Tensor:
    """Return inner products of rows, float64 ``[N]``."""
    n, d = values.shape
    return _inner_rows(values, others, n, d, 1 if others.dim() == 1 else n)


def inner_rows_with_difference(values: Tensor, after: Tensor, before: Tensor) -> Tensor:
    """Return inner products of rows with a difference, float64 ``[N]``."""
    n, d = values.shape
    parts = _members(n * d * ADDED)
    sums = torch.empty(parts, n, dtype=torch.float64, device="cpu")
    loop = teams.inner_rows_with_difference(KINDS[values.dtype], KINDS[after.dtype])
    _run(loop, (parts, n, d), (values.contiguous(), after.contiguous(), before.contiguous(), sums))
    return sums.sum(0)


def _inner_rows(values: Tensor, others: Tensor, n: int, d: int, m: int) -> Tensor:
    parts = _members(n * d * ADDED)
    sums = torch.empty(n if n >= parts else n * parts, dtype=torch.float64, device="cpu")
    loop = teams.inner_rows(KINDS[values.dtype], KINDS[others.dtype])
    _run(loop, (parts, n, m, d), (values.contiguous(), others.contiguous(), sums))
    return sums if n >= parts else sums.view(parts, n).sum(0)


# -- threads -----------------------------------------------------------------------------------------------------------


KINDS = {torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64)}


def _members(nanoseconds: float) -> int:
    """Return in how many parts a team does this much work, at least one."""
    if nanoseconds < 2 * PER_MEMBER or not _has_threads():
        return 1
    return min(torch.get_num_threads(), int(nanoseconds) // PER_MEMBER)


def _run(loop: Any, sizes: Sequence[int], tensors: Sequence[Tensor]) -> None:
    """Run a loop of `numba_teams`.

    Args:
        loop: The loop.
        sizes: What its task begins with; the number of parts comes first.
        tensors: Contiguous, of the types and sizes that the task lists.
    """
    task = teams.TASK(*sizes, *[tensor.data_ptr() for tensor in tensors])
    if sizes[0] == 1:
        loop.ctypes(ctypes.addressof(task))
    else:
        _openmp()(loop.address, ctypes.addressof(task), sizes[0], 0)


def _has_threads() -> bool:
    return _openmp() is not None and os.getpid() == PROCESS


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
    if parts < 2 or not _has_threads() or (work.__code__, dtype) not in COMPILED:
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
    address = ctypes.addressof(called)  # `ctypes.cast` would make a cycle, which keeps the values
    _openmp()(ctypes.c_void_p.from_address(address), None, parts, 0)
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
        teams.without_openmp()
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
