"""Individual gradients that need not be formed: sums of outer products, and gradients with few nonzero rows."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from distcockpit.gradients import kernels

WHOLE = slice(None)

PRODUCTS = 256
"""How many products are added up in a row where their sums are added up after that, which rounds less."""


def rows_of(values: Tensor, rows: slice) -> Tensor:
    """Return some rows; all of them of a scalar, which has no axis."""
    return values if rows == WHOLE else values[rows]


Form = Callable[[slice, slice, Tensor | None], Tensor]
"""Maps samples, rows, and the gradients of another use, which it may overwrite, to the sum ``[n, rows, I]``."""


class RowWise(ABC):
    """Individual gradients of a parameter viewed as a matrix, any rows of which can be formed without the others."""

    delta: Tensor  # output gradients

    @abstractmethod
    def of_rows(self, rows: slice) -> RowWise:
        """Return the same for some rows of the parameter."""

    @abstractmethod
    def prepared(self, samples: slice) -> Form:
        """Return a function that forms the gradients of some of these samples, and of some rows."""

    @abstractmethod
    def pair(self, samples: slice) -> tuple[Tensor, Tensor]:
        """Return the factors of some samples, ``[n, T, O]`` and ``[n, T, I]``; indices ``[n, T]`` are rows of ones."""

    def products(self, samples: slice) -> Tensor:
        """Return the individual gradients of some samples, ``[n, O, I]``."""
        return self.prepared(samples)(WHOLE, WHOLE, None)

    @abstractmethod
    def along(self, direction: Tensor) -> Tensor:
        """Return the inner products with a direction ``[O, I]``, without forming anything: float64 ``[B]``."""

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, int, int]:
        """T, O, I."""


@dataclass(frozen=True)
class Factors(RowWise):
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

    def pair(self, samples: slice) -> tuple[Tensor, Tensor]:
        """See `RowWise.pair`."""
        return self.delta[samples], self.inputs(samples)

    def of_rows(self, rows: slice) -> Factors:
        """See `RowWise.of_rows`."""
        return replace(self, delta=self.delta[:, :, rows])

    def prepared(self, samples: slice) -> Form:
        """See `RowWise.prepared`."""
        delta, x = self.pair(samples)

        def form(some: slice, rows: slice, other: Tensor | None) -> Tensor:
            found = products(delta[some, :, rows], x[some])
            return found if other is None else found + other

        return form

    def along(self, direction: Tensor) -> Tensor:
        """``sum_t <delta_it, V x_it>``; with one t, in the precision of the direction."""
        kind = self.delta.dtype
        kind = torch.promote_types(direction.dtype, kind) if self.sizes[0] == 1 else kind
        x = self.inputs(WHOLE).to(kind)
        output = x @ direction.reshape(self.sizes[1:]).to(kind).T
        return kernels.inner_rows(output.flatten(1), self.delta.to(kind).flatten(1))


def grams(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the inner products between the rows of each sample, of all uses together: two of ``[n, T, T]``.

    Args:
        pairs: The factors of each use, see `RowWise.pair`.
    """
    ones, xs = zip(*pairs, strict=True)
    x = xs[0] if len(xs) == 1 else torch.cat(xs, 1)
    rows = [torch.cat([_inner(first, second, x.dtype) for second in ones], 2) for first in ones]
    return torch.cat(rows, 1), _inner(x, x, x.dtype)


def _inner(first: Tensor, second: Tensor, kind: torch.dtype) -> Tensor:
    """Return the inner products between the rows of two factors, ``[n, S, T]``."""
    if first.dim() == second.dim() == 2:
        return (first.unsqueeze(2) == second.unsqueeze(1)).to(kind)
    if first.dim() == 2:
        return _inner(second, first, kind).transpose(1, 2)
    if second.dim() == 2:
        return first.gather(2, second.unsqueeze(1).expand(-1, first.shape[1], -1))
    parts = zip(first.split(PRODUCTS, 2), second.split(PRODUCTS, 2), strict=True)
    return functools.reduce(Tensor.add_, (torch.bmm(a, b.transpose(1, 2)) for a, b in parts))


def longest_sum(k: int) -> int:
    """Return how many numbers at most are added up one after the other in an inner product of k products."""
    return min(k, PRODUCTS) + k // PRODUCTS


def products(delta: Tensor, x: Tensor) -> Tensor:
    """``sum_t delta_it x_it^T``: ``[n, O, I]`` from ``[n, T, O]`` and ``[n, T, I]``."""
    return torch.bmm(delta.transpose(1, 2), x)


@dataclass(frozen=True)
class Occurrences(RowWise):
    """``g_i[v] = sum_t [x_it = v] delta_it``, the individual gradients of an embedding ``[V, E]``.

    Args:
        index: The row that each position of a sample selects, ``[B, T]``; none if it is negative.
        delta: Its output gradient, ``[B, T, E]``.
        n_rows: V.
    """

    index: Tensor
    delta: Tensor
    n_rows: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """T, V, E."""
        return self.delta.shape[1], self.n_rows, self.delta.shape[2]

    def of_rows(self, rows: slice) -> Occurrences:
        """See `RowWise.of_rows`."""
        start, stop, _ = rows.indices(self.n_rows)
        inside = (self.index >= start) & (self.index < stop)
        return Occurrences(torch.where(inside, self.index - start, -1), self.delta, stop - start)

    def prepared(self, samples: slice) -> Form:
        """See `RowWise.prepared`."""
        mine = Occurrences(self.index[samples], self.delta[samples], self.n_rows)

        def form(some: slice, rows: slice, other: Tensor | None) -> Tensor:
            part = Occurrences(mine.index[some], mine.delta[some], self.n_rows).of_rows(rows)
            index, delta = part._present()
            if other is None:
                other = delta.new_zeros(len(delta), part.n_rows, delta.shape[2])
            kind = torch.promote_types(delta.dtype, other.dtype)
            return other.to(kind).scatter_add_(1, index.unsqueeze(2).expand_as(delta), delta.to(kind))

        return form

    def pair(self, samples: slice) -> tuple[Tensor, Tensor]:
        """See `RowWise.pair`; what selects no row is zero."""
        index, delta = self._present()
        return index[samples], delta[samples]

    def along(self, direction: Tensor) -> Tensor:
        """``sum_t <delta_it, V[x_it]>``."""
        index, delta = self._present()
        return kernels.inner_rows(direction.to(delta.dtype)[index].flatten(1), delta.flatten(1))

    def rows(self, samples: slice) -> Rows:
        """Return the nonzero rows, without waiting for the device."""
        index, delta = (t[samples] for t in self._present())
        index = index.contiguous()
        ordered = index.sort(1).values
        first = torch.searchsorted(ordered, index)  # where each row first occurs
        values = torch.zeros_like(delta).scatter_add_(1, first.unsqueeze(2).expand_as(delta), delta)
        return Rows(ordered, values, self.n_rows)

    def _present(self) -> tuple[Tensor, Tensor]:
        """Return indices that exist; what selects no row is zero at row 0."""
        absent = self.index < 0
        return self.index.clamp(min=0), self.delta.masked_fill(absent.unsqueeze(2), 0)


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
