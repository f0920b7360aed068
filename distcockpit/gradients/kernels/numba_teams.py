"""The loops that run most often, shared among torch's OpenMP threads without Python, because each takes microseconds.

A loop is a C function of one address: that of a *task*, eight integers, which are the number of parts, sizes and the
addresses of arrays. Each thread of a team computes its own parts, always the same ones: it finds in its cache what it
wrote there itself, as matrix products of many samples do. What threads sum up is in rows of their own.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import llvmlite.binding
import numpy as np
from numba import carray, cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic

from distcockpit.gradients.kernels import numba_loops as loops

TASK = ctypes.c_int64 * 8

_team = cfunc(types.void(types.voidptr), cache=True, error_model="numpy")
_thread: Any = types.ExternalFunction("omp_get_thread_num", types.int32())
_threads: Any = types.ExternalFunction("omp_get_num_threads", types.int32())


def _pointer(_: Any, address: Any) -> Any:
    def lower(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), lower


_at: Any = intrinsic(_pointer)  # an address as a pointer


@cache
def inner_rows(first: np.dtype, second: np.dtype) -> Any:
    """Inner products of rows ``values [n, d]`` and ``others [m, d]``, in parts of rows, or of columns if rows are few.

    Task: parts, n, m, d, values, others, sums float64 ``[n]``, or ``[parts, n]`` if ``n < parts``.
    """

    @_team
    def run(data):
        task = carray(data, (8,), np.int64)
        parts, n, m, d = task[0], task[1], task[2], task[3]
        values, others = carray(_at(task[4]), (n, d), first), carray(_at(task[5]), (m, d), second)
        sums = carray(_at(task[6]), (parts if n < parts else 1, n), np.float64)
        for k in range(_thread(), parts, _threads()):
            if n >= parts:
                for i in range(n * k // parts, n * (k + 1) // parts):
                    sums[0, i] = loops.inner(values[i], others[i % m])
            else:
                start, stop = d * k // parts, d * (k + 1) // parts
                for i in range(n):
                    sums[k, i] = loops.inner(values[i, start:stop], others[i % m, start:stop])

    return run


@cache
def squared_distance(kind: np.dtype) -> Any:
    """Squared lengths of ``values [n] - others [n]``, in parts of elements.

    Task: parts, n, values, others, sums float64 ``[parts]``.
    """

    @_team
    def run(data):
        task = carray(data, (8,), np.int64)
        parts, n = task[0], task[1]
        values, others = carray(_at(task[2]), (n,), kind), carray(_at(task[3]), (n,), kind)
        sums = carray(_at(task[4]), (parts,), np.float64)
        for k in range(_thread(), parts, _threads()):
            some = slice(n * k // parts, n * (k + 1) // parts)
            sums[k] = loops.squared_distance(values[some], others[some])

    return run


@cache
def inner_rows_with_difference(kind: np.dtype, of_both: np.dtype) -> Any:
    """Inner products of rows ``values [n, d]`` with ``after [d] - before [d]``, in parts of columns.

    Task: parts, n, d, values, after, before, sums float64 ``[parts, n]``.
    """

    @_team
    def run(data):
        task = carray(data, (8,), np.int64)
        parts, n, d = task[0], task[1], task[2]
        values = carray(_at(task[3]), (n, d), kind)
        after, before = carray(_at(task[4]), (d,), of_both), carray(_at(task[5]), (d,), of_both)
        sums = carray(_at(task[6]), (parts, n), np.float64)
        for k in range(_thread(), parts, _threads()):
            some = slice(d * k // parts, d * (k + 1) // parts)
            for i in range(n):
                sums[k, i] = loops.inner_with_difference(values[i, some], after[some], before[some])

    return run


@cache
def add_powers(kind: np.dtype) -> Any:
    """Sums and sums of squares over rows of ``values [n, d]``, in parts of columns.

    Task: parts, n, d, values, sums float64 ``[d]``, squares float64 ``[d]``.
    """

    @_team
    def run(data):
        task = carray(data, (8,), np.int64)
        parts, n, d = task[0], task[1], task[2]
        values = carray(_at(task[3]), (n, d), kind)
        sums, squares = carray(_at(task[4]), (d,), np.float64), carray(_at(task[5]), (d,), np.float64)
        for k in range(_thread(), parts, _threads()):
            start, stop = d * k // parts, d * (k + 1) // parts
            loops.add_powers(values[:, start:stop], sums[start:stop], squares[start:stop])

    return run


@cache
def signal_to_noise() -> Any:
    """Sums of the squared mean over the variance, in parts of elements.

    Task: parts, d, mean float64 ``[d]``, squares float64 ``[d]``, 1/n and epsilon float64 ``[2]``, sums float64
    ``[parts]``.
    """

    @_team
    def run(data):
        task = carray(data, (8,), np.int64)
        parts, d = task[0], task[1]
        mean, squares = carray(_at(task[2]), (d,), np.float64), carray(_at(task[3]), (d,), np.float64)
        options, sums = carray(_at(task[4]), (2,), np.float64), carray(_at(task[5]), (parts,), np.float64)
        for k in range(_thread(), parts, _threads()):
            some = slice(d * k // parts, d * (k + 1) // parts)
            sums[k] = loops.signal_to_noise(mean[some], squares[some], options[0], options[1])

    return run


@cache
def count_block(kind: np.dtype) -> Any:
    """Counts by slot of ``values [n]``.

    Task: parts, n, b + 3, values, limits, scale ``[2]`` of the type of the values, counts int64 ``[parts, b + 5]``.
    """

    @_team
    def run(data):
        task = carray(data, (8,), np.int64)
        parts, n = task[0], task[1]
        values, limits = carray(_at(task[3]), (n,), kind), carray(_at(task[4]), (task[2],), kind)
        scale, counts = carray(_at(task[5]), (2,), kind), carray(_at(task[6]), (parts, task[2] + 2), np.int64)
        for k in range(_thread(), parts, _threads()):
            loops.count_block(values[n * k // parts : n * (k + 1) // parts], limits, scale[0], scale[1], counts[k])

    return run


def without_openmp() -> None:
    """Say to the compiler that there is one thread, because nothing else does."""
    for name, function in (("omp_get_thread_num", _zero), ("omp_get_num_threads", _one)):
        llvmlite.binding.add_symbol(name, function.address)


@cfunc(types.int32())
def _zero() -> int:
    return 0


@cfunc(types.int32())
def _one() -> int:
    return 1
