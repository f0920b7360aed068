"""Sums over individual gradients, fed with outer products where a layer has them, and with blocks elsewhere.

A statistic is an accumulator. ``outer`` takes the factors of ``g_i = delta_i x_i^T`` and ``sequence`` those of
``g_i = sum_t delta_it x_it^T``, and neither forms the products; ``block`` takes formed individual gradients
``[n, *parameter.shape]``, or a part of them. ``samples`` tells which samples of the local batch they belong to.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from distcockpit.gradients import kernels
from distcockpit.gradients.differences import ByRows
from distcockpit.gradients.factors import WHOLE, Rows, RowWise, grams, rows_of
from distcockpit.gradients.generic import rule_of
from distcockpit.gradients.uses import Use
from distcockpit.replay.devices import sent


class Statistic(ABC):
    """An abstract accumulator over individual gradients; the simplest one defines `outer` and `block`."""

    @abstractmethod
    def outer(self, name: str, delta: Tensor, x: Tensor, samples: slice) -> None:
        """Add samples whose individual gradients of parameter ``name`` are ``delta_i x_i^T``."""

    @abstractmethod
    def block(self, name: str, gradients: Tensor, samples: slice, part: slice = WHOLE) -> None:
        """Add formed individual gradients of parameter ``name``, or of a part of its first axis."""

    def prefers_factors(self, t: int, o: int, i: int) -> bool:
        """True if using factors ``[n, T, O]`` and ``[n, T, I]`` is cheaper than multiplying them first."""
        return t == 1

    def sequence(self, name: str, delta: Tensor, x: Tensor, samples: slice) -> None:
        """Add samples with individual gradients ``sum_t delta_it x_it^T``; only called if factors are preferred."""
        raise NotImplementedError(f"{type(self).__name__} prefers factors, so it must define sequence().")

    def prefers_uses(self, sources: Sequence[RowWise]) -> bool:
        """True if `uses` is defined, and cheaper than forming the sums over these uses of a parameter."""
        return False

    def uses(self, name: str, pairs: Sequence[tuple[Tensor, Tensor]], samples: slice) -> None:
        """Add samples whose individual gradients are sums over uses with these factors; only called if preferred."""
        raise NotImplementedError(f"{type(self).__name__} prefers uses, so it must define uses().")

    @property
    def takes_rows(self) -> bool:
        """True if `rows` is defined, for individual gradients that are mostly zero."""
        return False

    def rows(self, name: str, rows: Rows) -> None:
        """Add samples whose individual gradients have few nonzero rows; only called if `takes_rows`."""
        raise NotImplementedError(f"{type(self).__name__} takes rows, so it must define rows().")

    @property
    def takes_some_rows(self) -> bool:
        """True if `outer`, `sequence` and `rows` may be given some rows of a parameter, as if these were all of it.

        If not, some rows come as blocks, with their place in the parameter as ``part``.
        """
        return False

    @property
    def goes_along(self) -> bool:
        """True if this statistic may query whole calls of a layer, with `of_use` and `of_rows`."""
        return False

    def of_use(self, use: Use, parameters: Mapping[str, str]) -> Tensor | None:
        """Return what this statistic needs to know about the calls of a layer, if that needs no individual gradient.

        Args:
            use: A call of a layer.
            parameters: The parameters asked for: local name -> name in the model.
        """
        return None

    def of_rows(self, name: str, source: RowWise, rows: slice) -> Tensor:
        """Return the same for some rows of a parameter; only called if `goes_along`."""
        raise NotImplementedError(f"{type(self).__name__} goes along, so it must define of_rows().")

    def take(self, values: Tensor, samples: slice) -> None:
        """Add what `of_use` or `of_rows` returned."""


def vector(
    parameters: Mapping[str, Tensor], make: Callable[..., Tensor] = torch.zeros
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a vector, float64 ``[P]``, and its parts in the shapes of the parameters."""
    sizes = [p.numel() for p in parameters.values()]
    device = next((p.device for p in parameters.values()), None)
    flat = make(sum(sizes), dtype=torch.float64, device=device)
    parts = zip(parameters.items(), flat.split(sizes), strict=True)
    return flat, {name: part.view(p.shape) for (name, p), part in parts}


class GradientSum(Statistic):
    """``sum_i g_i``, by parameter, in float64.

    Args:
        parameters: By name, in the shapes of what is summed.
        first: The first row of those of which these are only some rows.
        in_double: Whether products are in float64 before they are added up.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], first: Mapping[str, int] | None = None, *, in_double: bool = True
    ) -> None:
        self.flat, self.sums = vector(parameters)
        self._first, self._in_double = first or {}, in_double

    @property
    def takes_some_rows(self) -> bool:
        """Sums have the shapes of these rows."""
        return True

    def outer(self, name: str, delta: Tensor, x: Tensor, samples: slice) -> None:
        """``delta^T x``."""
        if self._in_double:
            self._matrix(name, delta, x).addmm_(delta.double().T, x.double())
        else:
            self._matrix(name, delta, x).add_(delta.T @ x)

    def prefers_factors(self, t: int, o: int, i: int) -> bool:
        """Always."""
        return True

    def sequence(self, name: str, delta: Tensor, x: Tensor, samples: slice) -> None:
        """The same, over all t."""
        self.outer(name, delta.flatten(0, 1), x.flatten(0, 1), samples)

    def block(self, name: str, gradients: Tensor, samples: slice, part: slice = WHOLE) -> None:
        """The sum over the samples of the block."""
        kernels.add_sums(self._part(self.sums, name, part), gradients)

    @property
    def takes_rows(self) -> bool:
        """Rows are added where they belong."""
        return True

    def rows(self, name: str, rows: Rows) -> None:
        """The sum, row by row."""
        self.sums[name].index_add_(0, rows.index.flatten(), rows.values.flatten(0, 1).double())

    def _matrix(self, name: str, delta: Tensor, x: Tensor) -> Tensor:
        return self.sums[name].view(delta.shape[1], x.shape[1])

    def _part(self, sums: Mapping[str, Tensor], name: str, part: slice) -> Tensor:
        return _of(sums[name], part, self._first.get(name, 0))


class PowerSums(GradientSum):
    """``sum_i g_i`` and ``sum_i g_i^2``, element by element, by parameter, in float64.

    In float64, because ``N G^2`` is subtracted later: squares of float32 numbers are exact in float64, and a difference
    of such sums loses nothing that the individual gradients had.
    """

    def __init__(self, parameters: Mapping[str, Tensor], first: Mapping[str, int] | None = None) -> None:
        super().__init__(parameters, first)
        self.flat_squares, self.squares = vector(parameters)

    def outer(self, name: str, delta: Tensor, x: Tensor, samples: slice) -> None:
        """``delta^T x`` and ``(delta^2)^T (x^2)``."""
        super().outer(name, delta, x, samples)
        matrix = self.squares[name].view(delta.shape[1], x.shape[1])
        matrix.addmm_(delta.double().square().T, x.double().square())

    def prefers_factors(self, t: int, o: int, i: int) -> bool:
        """Never: squares of sums over t are not sums of squares."""
        return t == 1

    def block(self, name: str, gradients: Tensor, samples: slice, part: slice = WHOLE) -> None:
        """The sums over the samples of the block."""
        kernels.add_powers(self._part(self.sums, name, part), self._part(self.squares, name, part), gradients)

    def rows(self, name: str, rows: Rows) -> None:
        """Both, row by row."""
        super().rows(name, rows)
        self.squares[name].index_add_(0, rows.index.flatten(), rows.values.flatten(0, 1).double().square())


class SquaredNorms(Statistic):
    """``sum_i |g_i|^2``: a number per parameter, ``values``, together ``flat``; float64, as in `PowerSums`."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        device = next((p.device for p in parameters.values()), None)
        self.flat = torch.zeros(len(parameters), dtype=torch.float64, device=device)
        self.values = dict(zip(parameters, self.flat.unbind(), strict=True))

    def add(self, other: SquaredNorms) -> None:
        """Add the values of another one, for its parameters."""
        for name, value in other.values.items():
            self.values[name] += value

    @property
    def takes_some_rows(self) -> bool:
        """Squares add up over rows."""
        return True

    def outer(self, name: str, delta: Tensor, x: Tensor, samples: slice) -> None:
        """``sum_i |delta_i|^2 |x_i|^2``."""
        self.values[name] += kernels.inner_rows(delta, delta) @ kernels.inner_rows(x, x)

    def prefers_factors(self, t: int, o: int, i: int) -> bool:
        """True if two float64 matrices ``[T, T]`` cost less than one of the shape of the parameter."""
        return t == 1 or 4 * t * (o + i) < o * i

    def sequence(self, name: str, delta: Tensor, x: Tensor, samples: slice) -> None:
        """``sum_st <delta_is, delta_it> <x_is, x_it>``; in float64, because terms may cancel."""
        self.add_gram(name, *grams([(delta.double(), x.double())]))

    def add_gram(self, name: str, first: Tensor, second: Tensor) -> None:
        """Add the inner products of inner products, both ``[n, T, T]``."""
        self.values[name] += kernels.inner_rows(first.flatten(1), second.flatten(1)).clamp_(min=0).sum()

    def block(self, name: str, gradients: Tensor, samples: slice, part: slice = WHOLE) -> None:
        """The sum over the block."""
        self.values[name] += kernels.squared_norm(gradients)

    @property
    def takes_rows(self) -> bool:
        """Zeros add nothing."""
        return True

    def rows(self, name: str, rows: Rows) -> None:
        """The sum over the rows."""
        self.values[name] += kernels.squared_norm(rows.values)


def _of(tensor: Tensor, part: slice, first: int = 0) -> Tensor:
    """Return a part of a parameter from a tensor that begins with this row of it."""
    return tensor if part == WHOLE else tensor[part.start - first : part.stop - first]  # a scalar has no axis


class Projection(Statistic):
    """``<g_i, v_k>`` for every sample of the local batch and K vectors with disjoint parameters: float64 ``[K, B]``.

    With ``in_double``, products are in float64 for layers with one product per sample: the variance of the projections
    over samples may be small compared to their mean.
    """

    def __init__(
        self,
        direction: Mapping[str, Tensor],
        batch_size: int,
        parts: Sequence[Sequence[str]] | None = None,
        *,
        in_double: bool = False,
        first: Mapping[str, int] | None = None,
    ) -> None:
        """Initialise; without ``parts``, the direction is the only vector.

        Args:
            direction: All vectors together, by parameter.
            batch_size: B.
            parts: The parameters of each vector.
            in_double: Whether products of layers with one product per sample are in float64.
            first: If the direction holds what is walked over and no more: the first rows of the parameters of which
                it holds only some.
        """
        self.direction, self._in_double, self._first = direction, in_double, first
        self._part = {name: k for k, names in enumerate(parts or [list(direction)]) for name in names}
        device = direction.device if isinstance(direction, ByRows) else direction[next(iter(direction))].device
        self.values = torch.zeros(len(parts or [0]), batch_size, dtype=torch.float64, device=device)

    @property
    def goes_along(self) -> bool:
        """Always: unless blocks are formed for others, the derivative of the output is cheaper."""
        return True

    def of_use(self, use: Use, parameters: Mapping[str, str]) -> Tensor | None:
        """The derivative of the output in this direction, times the output gradient: ``[K, B]``."""
        by_part: dict[int, dict[str, Tensor]] = {}
        in_double = self._in_double and all(delta.dim() == 2 for delta in use.output_gradients.values())
        for local, name in parameters.items():
            direction = self.direction[name]
            by_part.setdefault(self._part[name], {})[local] = direction.double() if in_double else direction
        found = {k: rule_of(use).jvp(use, part) for k, part in by_part.items()}
        known = {k: values for k, values in found.items() if values is not None}
        if len(known) < len(found):
            return None
        if len(self.values) == 1:
            return known[0][None]
        result = self.values.new_zeros(len(self.values), *next(iter(known.values())).shape)
        for k, values in known.items():
            result[k] = values
        return result

    @property
    def takes_some_rows(self) -> bool:
        """Projections add up over rows, but those of a whole direction must know which ones are meant."""
        return self._first is not None

    def of_rows(self, name: str, source: RowWise, rows: slice) -> Tensor:
        """The same, for some rows of a parameter."""
        direction = self._rows(name, rows)
        in_double = self._in_double and source.sizes[0] == 1
        along = source.along(direction.double() if in_double else direction)
        result = along.new_zeros(len(self.values), len(along))
        result[self._part[name]] = along
        return result

    def _rows(self, name: str, part: slice) -> Tensor:
        """Return some rows of the direction, given as rows of the parameter."""
        some, direction = self._place(name, part), self.direction
        return direction.rows(name, some) if isinstance(direction, ByRows) else rows_of(direction[name], some)

    def _place(self, name: str, part: slice) -> slice:
        """Return where the direction has these rows of the parameter."""
        first = (self._first or {}).get(name, 0)
        return part if part == WHOLE else slice(part.start - first, part.stop - first)

    def take(self, values: Tensor, samples: slice) -> None:
        """Projections add up over layers."""
        self.values[:, samples] += values

    def outer(self, name: str, delta: Tensor, x: Tensor, samples: slice) -> None:
        """``<delta_i, V x_i>``."""
        direction = self.direction[name].double().view(delta.shape[1], x.shape[1])
        self.values[self._part[name], samples] += ((x.double() @ direction.T) * delta.double()).sum(1)

    def block(self, name: str, gradients: Tensor, samples: slice, part: slice = WHOLE) -> None:
        """The inner product itself."""
        rows = gradients.reshape(len(gradients), math.prod(gradients.shape[1:]))
        some, direction = self._place(name, part), self.direction
        if isinstance(direction, ByRows):
            along = direction.inner_rows(rows, name, some)
        else:
            along = kernels.inner_rows(rows, rows_of(direction[name], some).reshape(-1))
        self.values[self._part[name], samples] += along


class AbsMax(Statistic):
    """The largest absolute element over samples and parameters; NaN and infinite elements do not count."""

    def __init__(self) -> None:
        self.value: Tensor | float = 0.0

    @property
    def takes_some_rows(self) -> bool:
        """True: no row is like another."""
        return True

    def outer(self, name: str, delta: Tensor, x: Tensor, samples: slice) -> None:
        """``max_i max|delta_i| max|x_i|``: rounding is monotone, so this is the largest rounded product."""
        if not delta.numel() or not x.numel():
            return
        largest = _finite_abs(delta).amax(1) * _finite_abs(x.to(delta.dtype)).amax(1)
        self._add(largest)

    def block(self, name: str, gradients: Tensor, samples: slice, part: slice = WHOLE) -> None:
        """The largest element of the block."""
        self._add(gradients.abs())

    @property
    def takes_rows(self) -> bool:
        """Zeros are never the largest."""
        return True

    def rows(self, name: str, rows: Rows) -> None:
        """The largest element of the rows."""
        self._add(rows.values.abs())

    def _add(self, magnitudes: Tensor) -> None:
        if not magnitudes.numel():
            return
        largest = _finite_abs(magnitudes).amax().double()
        self.value = torch.maximum(largest, sent(self.value, largest.device))


def _finite_abs(values: Tensor) -> Tensor:
    return values.abs().nan_to_num(nan=0.0, posinf=0.0)


class Histogram1d(Statistic):
    """Counts of all elements: int64, shape ``[b + 5]``, see :mod:`distcockpit.gradients.kernels` for the slots."""

    def __init__(self, edges: np.ndarray) -> None:
        self.edges = edges
        self.counts: Tensor | int = 0

    @property
    def takes_some_rows(self) -> bool:
        """Counts add up over rows."""
        return True

    def outer(self, name: str, delta: Tensor, x: Tensor, samples: slice) -> None:
        """Bin products without storing them."""
        self.counts = self.counts + kernels.count_outer(delta, x.to(delta.dtype), self.edges)

    def block(self, name: str, gradients: Tensor, samples: slice, part: slice = WHOLE) -> None:
        """Bin the elements of the block."""
        self.counts = self.counts + kernels.count_block(gradients, self.edges)

    @property
    def takes_rows(self) -> bool:
        """Zeros are counted by their number."""
        return True

    def rows(self, name: str, rows: Rows) -> None:
        """Bin the rows, and all other elements as zeros."""
        counts = kernels.count_block(rows.values, self.edges)
        counts[kernels.slot_of_zero(self.edges)] += rows.surplus
        self.counts = self.counts + counts


class Histogram2d(Statistic):
    """Counts over (gradient element, value of its parameter), per parameter: int64, ``[b_g + 5, b_p + 5]``."""

    def __init__(self, edges: tuple[np.ndarray, np.ndarray], parameters: Mapping[str, Tensor]) -> None:
        self.gradient_edges, self._parameter_edges = edges
        self.n_columns = len(edges[1]) - 1 + kernels.OUTSIDE
        self._parameters = parameters
        self._columns: dict[str, tuple[slice, Tensor]] = {}  # the bins of the latest rows of a parameter
        self.counts: dict[str, Tensor | int] = dict.fromkeys(parameters, 0)

    def _bins(self, name: str, part: slice) -> Tensor:
        """Return the bins of the values of some rows of a parameter."""
        there = self._parameters.rows(name, part) if isinstance(self._parameters, ByRows) else self._parameters[name]
        known = part if isinstance(self._parameters, ByRows) else WHOLE
        if name not in self._columns or self._columns[name][0] != known:
            self._columns[name] = known, kernels.slots(there, self._parameter_edges)
        columns = self._columns[name][1]
        return columns if known == part else _of(columns, part)

    def outer(self, name: str, delta: Tensor, x: Tensor, samples: slice) -> None:
        """Bin products without storing them."""
        self.counts[name] = self.counts[name] + kernels.count_outer_2d(
            delta,
            x.to(delta.dtype),
            self.gradient_edges,
            self._bins(name, WHOLE).view(delta.shape[1], x.shape[1]),
            self.n_columns,
        )

    def block(self, name: str, gradients: Tensor, samples: slice, part: slice = WHOLE) -> None:
        """Bin the elements of the block."""
        self.counts[name] = self.counts[name] + kernels.count_block_2d(
            gradients.reshape(len(gradients), -1),
            self.gradient_edges,
            self._bins(name, part).flatten(),
            self.n_columns,
        )
