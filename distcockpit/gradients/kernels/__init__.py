"""Passes over many numbers: one interface, with identical counts from every implementation.

Every value falls into one *slot*. For ``b`` bins with edges ``e_0 < ... < e_b`` there are ``b + 5`` slots, in
this order::

    -inf | below e_0 | bin 0 | ... | bin b-1 | above e_b | +inf | NaN

Bins are half-open, ``[e_k, e_{k+1})``, the last one is closed, as in ``numpy.histogram``. A slot is found by comparing
the value with the edges, never by arithmetic alone, so that a value on an edge (above all an exact zero) lands where
the definition says.

All functions return int64 counts on the device of their input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from distcockpit.gradients.kernels import reference
from distcockpit.replay.devices import sent

try:
    from distcockpit.gradients.kernels import numba_cpu
except ImportError:  # the extra "fast" is not installed
    numba_cpu = None  # type: ignore[assignment]

CPU = torch.device("cpu")
BINNED = (torch.float32, torch.float64)

OUTSIDE = 5
"""Number of slots besides the bins."""


def bin_edges(low: float, high: float, bins: int) -> np.ndarray:
    """Return the edges of ``bins`` equal bins from ``low`` to ``high``.

    ``e_k = (low (b - k) + high k) / b`` with exact ends: the middle edge of a symmetric range is exactly 0.

    Returns:
        float64, shape ``[bins + 1]``.
    """
    k = np.arange(bins + 1, dtype=np.float64)
    edges = (low * (bins - k) + high * k) / bins
    edges[0], edges[-1] = low, high
    return edges


def thresholds(edges: np.ndarray, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """Return the values of type ``dtype`` at which the slot number increases by one.

    For ``v`` of that type, ``v >= e_k`` if and only if ``v >= t_k``, where ``t_k`` is the smallest number of the type
    that is not below ``e_k``. The slot of ``v`` is the number of thresholds that are not above it.

    Args:
        edges: float64, shape ``[b + 1]``.
        dtype: ``torch.float32`` or ``torch.float64``.
        device: Where they are needed; the host does not wait until they are there.

    Returns:
        Tensor of shape ``[b + 3]``; do not write to it.
    """
    # Sent each time: a copy that is kept could be read on another stream before it has arrived.
    return sent(_thresholds(edges.tobytes(), dtype), device, dtype)


@lru_cache(64)
def _thresholds(edge_bytes: bytes, dtype: torch.dtype) -> Tensor:
    kind = np.float32 if dtype == torch.float32 else np.float64
    edges = np.frombuffer(edge_bytes, np.float64)
    with np.errstate(over="ignore"):
        rounded = edges.astype(kind)
    up = np.nextafter(rounded, kind(np.inf))
    starts = np.where(np.less(rounded, edges), up, rounded)[:-1]
    end = up[-1] if rounded[-1] <= edges[-1] else rounded[-1]
    return torch.from_numpy(np.concatenate([[np.finfo(kind).min], starts, [end, np.inf]]).astype(kind))


def binnable(values: Tensor) -> Tensor:
    """Return ``values`` in a type that is binned directly: float64 stays, everything else becomes float32 (exact)."""
    values = values.detach() if values.requires_grad else values
    return values if values.dtype in BINNED else values.float()


def slots(values: Tensor, edges: np.ndarray) -> Tensor:
    """Return the slot number of every value: int32, the shape of ``values``."""
    values = binnable(values)
    return _implementation(values).slots(values, thresholds(edges, values.dtype, values.device)).int()


def slot_of_zero(edges: np.ndarray) -> int:
    """Return the slot number of an exact zero."""
    return int(np.searchsorted(thresholds(edges, torch.float64).numpy(), 0.0, side="right"))


def count_block(values: Tensor, edges: np.ndarray) -> Tensor:
    """Count all elements of ``values``.

    Returns:
        int64, shape ``[b + 5]``.
    """
    values = binnable(values)
    return _implementation(values).count_block(values, thresholds(edges, values.dtype, values.device))


def count_outer(delta: Tensor, x: Tensor, edges: np.ndarray) -> Tensor:
    """Count all products ``delta[n, o] * x[n, i]``.

    Args:
        delta: Shape ``[N, O]``.
        x: Shape ``[N, I]``.
        edges: float64, shape ``[b + 1]``.

    Returns:
        int64, shape ``[b + 5]``.
    """
    delta, x = binnable(delta), binnable(x)
    return _implementation(x).count_outer(delta, x, thresholds(edges, x.dtype, x.device))


def count_block_2d(values: Tensor, edges: np.ndarray, columns: Tensor, n_columns: int) -> Tensor:
    """Count pairs (slot of ``values[n, d]``, ``columns[d]``).

    Args:
        values: Shape ``[N, D]``.
        edges: float64, shape ``[b + 1]``.
        columns: Column of each ``d``, an integer, shape ``[D]``.
        n_columns: Number of columns.

    Returns:
        int64, shape ``[b + 5, n_columns]``.
    """
    values = binnable(values)
    limits = thresholds(edges, values.dtype, values.device)
    return _implementation(values).count_block_2d(values, limits, columns, n_columns)


def count_outer_2d(delta: Tensor, x: Tensor, edges: np.ndarray, columns: Tensor, n_columns: int) -> Tensor:
    """Count pairs (slot of ``delta[n, o] * x[n, i]``, ``columns[o, i]``).

    Args:
        delta: Shape ``[N, O]``.
        x: Shape ``[N, I]``.
        edges: float64, shape ``[b + 1]``.
        columns: Integers, shape ``[O, I]``.
        n_columns: Number of columns.

    Returns:
        int64, shape ``[b + 5, n_columns]``.
    """
    delta, x = binnable(delta), binnable(x)
    limits = thresholds(edges, x.dtype, x.device)
    return _implementation(x).count_outer_2d(delta, x, limits, columns, n_columns)


def add_sums(sums: Tensor, values: Tensor) -> None:
    """Add ``sum_n values[n]``, in float64, to ``sums``.

    Args:
        sums: float64, changed in place.
        values: Shape ``[N, *sums.shape]``.
    """
    values = binnable(values)
    _implementation(values).add_sums(sums, values)


def count_nonfinite(values: Tensor) -> Tensor:
    """Count the elements that are NaN or infinite; an int64 number."""
    values = binnable(values)
    return _implementation(values).count_nonfinite(values)


def extremes(values: Tensor) -> Tensor:
    """Return the smallest and the largest element, ``[2]``; NaN and infinities show up in them, and nothing is 0."""
    values = torch.view_as_real(values) if values.is_complex() else values
    return torch.stack(values.aminmax()) if values.numel() else values.new_zeros(2)


def count_small(values: Tensor, epsilon: float) -> Tensor:
    """Count elements ``|values[a, c, i]| <= epsilon`` for each c; NaN does not count.

    Args:
        values: Shape ``[A, C, I]``.
        epsilon: At least 0; compared in the type of the values.

    Returns:
        int64, shape ``[C]``.
    """
    values = binnable(values)
    return _implementation(values).count_small(values, epsilon)


def squared_norm(values: Tensor) -> Tensor:
    """Return the sum of all squares, squared and added in float64; a number."""
    values = binnable(values)
    return _implementation(values).squared_norm(values)


def squared_distance(values: Tensor, others: Tensor) -> Tensor:
    """Return ``|values - others|^2``, in float64; a number. If they have the same type, they are not copied as a whole.

    Raises:
        ValueError: If their shapes differ.
    """
    values, others = _of_one_type(values, others)
    implementation = _implementation(values) if values.dtype in BINNED else reference
    return implementation.squared_distance(values, others)


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of all squares of each tensor, see `squared_norm`: float64 ``[len(tensors)]``, at least one."""
    return _implementation(tensors[0]).squared_norms([binnable(t) for t in tensors])


def inner_products(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """Return the inner product of each tensor with its counterpart, in float64: ``[len(tensors)]``, at least one."""
    return _implementation(tensors[0]).inner_products([binnable(t) for t in tensors], [binnable(t) for t in others])


def inner_rows(values: Tensor, others: Tensor) -> Tensor:
    """Return inner products of rows, multiplied and added in float64: ``[N]``.

    Args:
        values: Shape ``[N, D]``.
        others: Shape ``[N, D]``, or ``[D]`` for the same vector in all rows.
    """
    values, others = binnable(values), binnable(others)
    return _implementation(values).inner_rows(values, others)


def inner_rows_with_difference(values: Tensor, after: Tensor, before: Tensor) -> Tensor:
    """Return ``<values[n], after - before>``, in float64: ``[N]``. Compiled loops do not store the difference.

    Args:
        values: Shape ``[N, D]``.
        after: Shape ``[D]``.
        before: Likewise.

    Raises:
        ValueError: If the shapes of the last two differ.
    """
    after, before = _of_one_type(after, before)
    values, after, before = binnable(values), binnable(after), binnable(before)
    return _implementation(values).inner_rows_with_difference(values, after, before)


def _of_one_type(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in a type that holds both: compiled loops read the memory of the second like that of the first.

    Raises:
        ValueError: If their shapes differ.
    """
    if first.shape != second.shape:
        raise ValueError(f"The difference of tensors of shapes {tuple(first.shape)} and {tuple(second.shape)}.")
    kind = torch.promote_types(first.dtype, second.dtype)
    return first.detach().to(kind), second.detach().to(kind)


def add_powers(sums: Tensor, squares: Tensor, values: Tensor) -> None:
    """Add ``sum_n values[n]`` to ``sums`` and ``sum_n values[n]^2`` to ``squares``, both in float64.

    Args:
        sums: float64, changed in place.
        squares: float64 of the same shape, changed in place.
        values: Shape ``[N, *sums.shape]``.
    """
    values = binnable(values)
    _implementation(values).add_powers(sums, squares, values)


def signal_to_noise(mean: Tensor, squares: Tensor, n: int, epsilon: float) -> Tensor:
    """Return ``sum_d mean_d^2 / (squares_d / n - mean_d^2 + epsilon)``; a float64 number.

    Args:
        mean: float64 ``[D]``.
        squares: Sums of n squares, likewise.
        n: At least 1.
        epsilon: Added to the variance.
    """
    return _implementation(mean).signal_to_noise(mean, squares, n, epsilon)


def _implementation(values: Tensor) -> ModuleType:
    if numba_cpu is None or not values.is_cpu:
        return reference
    if not numba_cpu.is_ready:
        numba_cpu.is_ready = True
        numba_cpu.compile_once(_exercise)
    return numba_cpu


def _exercise() -> Iterator[str]:
    """Call every function with the types that it is usually called with, and name each before it is called."""
    values, edges = torch.linspace(-1, 1, 24, dtype=torch.float32, device="cpu").view(4, 6), bin_edges(-0.5, 0.5, 8)
    wide, columns = values.double(), torch.zeros_like(values, dtype=torch.int32)
    calls: list[tuple[Callable[..., object], tuple[object, ...]]] = [
        (slots, (values, edges)),
        (count_block, (values, edges)),
        (count_outer, (values, values, edges)),
        (count_block_2d, (values, edges, columns[0], 2)),
        (count_outer_2d, (values[:, :4], values, edges, columns, 2)),
        (add_sums, (wide[0].clone(), values)),
        (add_powers, (wide[0].clone(), wide[1].clone(), values)),
        (signal_to_noise, (wide[0], wide[0].square(), 1, 1.0)),
        (count_small, (values.view(2, 4, 3), 0.0)),
        (count_small, (values.view(4, 6, 1), 0.0)),
        *((count_nonfinite, (each,)) for each in (values, wide)),
        *((inner_rows, (first, second)) for first, second in ((values, values), (wide, wide), (values, wide))),
        (squared_distance, (values, values)),
        (inner_rows_with_difference, (values, values[0], values[1])),
    ]
    for k, (call, arguments) in enumerate(calls):
        yield f"{k} of {len(calls)}"
        call(*arguments)
