"""When a variance may be computed from sums rounded to float32: autograd's G, and norms from Gram matrices.

``V = S2 - N |G|^2`` is a difference. float64 sums over exactly the gradients that were squared lose nothing in it, but
cost as much as the matrix products of the backward pass. If V is not small compared to S2, autograd's float32 sums
serve just as well. Their rounding error is bounded as in Higham and Mary 2019, "A new approach to probabilistic
rounding error analysis", SIAM J. Sci. Comput. 41, for independent errors: a sum of K products has an error of
``u sqrt(K)`` times the root of the sum of their squares, with u the unit roundoff. (Sums of products of one sign may
exceed that by ``sqrt(K) / 3``; what many of them add up to does not.) The squares of all products of a linear layer on
sequences add up to ``D = sum_it |delta_it|^2 |x_it|^2``.

Elements of a Gram matrix are inner products of O or I numbers. A sum of K products of one sign has a relative error of
``u sqrt(K) / 3``, and if rows are alike, so are the errors, and S2 has the same one. Others are smaller than
``u sqrt(K) D``, all together. So ``3 u sqrt(K) (S2 + D)``, for the larger K, is some six standard deviations for both
matrices. K is the longest sum, see `longest_sum`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distcockpit.gradients import kernels
from distcockpit.gradients.factors import WHOLE, RowWise, grams, longest_sum
from distcockpit.gradients.generic import rule_of
from distcockpit.gradients.statistics import SquaredNorms
from distcockpit.gradients.uses import MicroBatch, Use

TOLERANCE = 1e-4
"""The largest share of V that may be rounding, by the bound. Measured errors are some hundred times below the bound."""

SQUARED_ELEMENTS = 1 << 20
"""Elements of factors that are squared at a time."""

MARGIN = 2
"""By how much the bound of matrices in float32 must be below the tolerance before these are taken again."""

STEPS_IN_DOUBT = 16
"""For how many tracked steps autograd's sums are not tried again where they did not do."""

Calls = Mapping[str, Sequence[tuple[Use, str]]]
"""The calls that use each parameter, with its name there."""


def calls_by_parameter(batches: Sequence[MicroBatch]) -> Calls:
    """Return the calls of some micro-batches by parameter."""
    calls: dict[str, list[tuple[Use, str]]] = defaultdict(list)
    for batch in batches:
        for use in batch.uses:
            for local, name in use.layer.parameters.items():
                calls[name].append((use, local))
    return calls


def sums_over_sequences(calls: Calls, rows: Mapping[str, slice]) -> dict[str, Sequence[RowWise]]:
    """Return the parameters whose individual gradients are only sums over sequences, with those of each use.

    Args:
        calls: By parameter.
        rows: The parameters to look at, each with the rows that are wanted.
    """
    found: dict[str, Sequence[RowWise]] = {}
    for name, part in rows.items():
        uses = calls.get(name, ())
        sources = [each for use, local in uses if (each := rule_of(use).row_wise(use).get(local)) is not None]
        if len(sources) == len(uses) > 0 and _are_sums(sources):
            found[name] = sources if part == WHOLE else [source.of_rows(part) for source in sources]
    return found


def _are_sums(sources: Sequence[RowWise]) -> bool:
    """True if these are sums of several products, and two matrices ``[T, T]`` cost less than one of their shape."""
    t = sum(source.sizes[0] for source in sources)
    return t > 1 and len({source.delta.dtype for source in sources}) == 1 and _pays(t, *sources[0].sizes[1:])


def _pays(t: int, o: int, i: int) -> bool:
    """True if two matrices ``[T, T]`` cost less than one of the shape of the parameter."""
    return t == 1 or t * (o + i) < o * i


class Doubts:
    """The parameters for which float32 did not do, so that the next tracked steps use float64 from the beginning.

    Where norms came from Gram matrices, these are in float64 then, until their bound says that float32 does again.
    Where that did not do either, or norms came from gradients that were formed, all sums are, for some steps.
    """

    def __init__(self) -> None:
        self.of_grams: set[str] = set()
        self.of_sums: dict[str, int] = {}  # by parameter: steps that are left

    def settle(self, verdict: Verdict, grams: Collection[str]) -> None:
        """End a step.

        Args:
            verdict: What all ranks found.
            grams: The parameters whose norms came from Gram matrices in float32, on this rank or, if it has no call, on
                others.
        """
        again = set(verdict.again)
        self.of_grams = (self.of_grams - set(verdict.would_do)) | (again & set(grams))
        left = {name: steps - 1 for name, steps in self.of_sums.items() if steps > 1}
        self.of_sums = left | dict.fromkeys(again - set(grams), STEPS_IN_DOUBT)


class RoundedNorms(SquaredNorms):
    """``sum_i |g_i|^2`` in the precision of the factors, with bounds on its rounding and that of autograd's sums.

    Args:
        parameters: The parameters, by name.
        sources: Of each use of some of these.
        in_double: The parameters whose Gram matrices are in float64.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        sources: Mapping[str, Sequence[RowWise]],
        in_double: Collection[str] = (),
    ) -> None:
        super().__init__({name: parameters[name] for name in sources})
        self._sources, self._in_double = sources, in_double
        self._squares: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)  # of the rows of both factors

    def prefers_factors(self, t: int, o: int, i: int) -> bool:
        """True if factors pay off."""
        return _pays(t, o, i)

    def sequence(self, name: str, delta: Tensor, x: Tensor, samples: slice) -> None:
        """``sum_st <delta_is, delta_it> <x_is, x_it>``; infinite if these overflow."""
        self.uses(name, [(delta, x)], samples)

    def prefers_uses(self, sources: Sequence[RowWise]) -> bool:
        """True if factors pay off."""
        return len(sources) > 1 and _pays(sum(source.sizes[0] for source in sources), *sources[0].sizes[1:])

    def uses(self, name: str, pairs: Sequence[tuple[Tensor, Tensor]], samples: slice) -> None:
        """The same, where s and t go over all uses."""
        if name in self._in_double:
            pairs = [(ones.double() if ones.dim() == 3 else ones, x.double()) for ones, x in pairs]
        first, second = grams(pairs)
        self.add_gram(name, first, second)
        self.values[name].nan_to_num_(nan=torch.inf, posinf=torch.inf)
        self._squares[name].append((_diagonal(first), _diagonal(second)))

    @property
    def from_grams(self) -> set[str]:
        """The parameters whose norms came from Gram matrices in the precision of the factors."""
        return self._squares.keys() - set(self._in_double)

    def bounds(self, name: str) -> Tensor:
        """Return what ranks add up, float64 ``[4]``.

        S2, a bound on its error, the squared bound for ``N |G|``, and a bound on the error of S2 if Gram matrices were
        in the precision of the factors; without any, it is zero.
        """
        squares, sources = self.values[name], self._sources[name]
        pairs = self._squares.get(name)
        if pairs is None:  # from blocks
            pairs = [(_squares_of(ones), _squares_of(x)) for ones, x in (source.pair(WHOLE) for source in sources)]
        of_delta, of_x = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        t, (_, o, i) = sum(source.sizes[0] for source in sources), sources[0].sizes
        factor = torch.finfo(sources[0].delta.dtype)
        unit, spread = factor.eps / 2, of_delta @ of_x

        def of_grams(kind: torch.finfo) -> Tensor:
            # The loss of Gram matrices whose elements are too small for their type.
            underflow = kind.tiny * t * (o * of_x.sum() + i * of_delta.sum())
            return 1.5 * kind.eps * longest_sum(max(o, i)) ** 0.5 * (spread + squares) + underflow

        if name in self._squares:
            rounded = of_grams(factor)
            error = of_grams(torch.finfo(torch.float64)) if name in self._in_double else rounded
            fits = torch.maximum(of_delta.max(), of_x.max()) <= factor.max
            rounded = rounded.where(fits, torch.inf)
        else:  # |g + e|^2 - |g|^2, where e are errors of sums of t products, some of them too small for their type
            size = (unit**2 * t * spread).sqrt() + factor.tiny * t * (len(of_delta) // t * o * i) ** 0.5
            error = 2 * squares.sqrt() * size + size.square()
            rounded = torch.zeros_like(error)
        return torch.stack([squares, error, unit**2 * len(of_delta) * spread, rounded])


def _diagonal(gram: Tensor) -> Tensor:
    return gram.diagonal(dim1=1, dim2=2).double().flatten()


def _squares_of(factor: Tensor) -> Tensor:
    """Return the squared lengths of the rows of a factor, float64; those of indices are 1."""
    if factor.dim() == 2:
        return factor.new_ones(factor.numel(), dtype=torch.float64)
    rows = factor.flatten(0, 1)
    parts = rows.split(max(1, SQUARED_ELEMENTS // max(1, rows.shape[1])))  # which may be copied
    return torch.cat([kernels.inner_rows(part, part) for part in parts])


@dataclass(frozen=True)
class Verdict:
    """What rounding did to V; the same on all ranks."""

    again: list[str]  # the parameters whose V may contain more of it than is tolerated
    would_do: list[str]  # those for which Gram matrices in float32 would do, with a margin


def verdict(names: Sequence[str], pooled: Tensor, mean_squared: Tensor, n: int) -> Verdict:
    """Compare bounds on the rounding of V with V.

    Args:
        names: Names of the parameters.
        pooled: What `RoundedNorms.bounds` gave, added over ranks, float64 ``[parameters, 4]``.
        mean_squared: ``|G|^2``, float64 ``[parameters]``.
        n: N.
    """
    squares, error, of_sum, of_grams = pooled.unbind(1)
    tolerated, of_mean = TOLERANCE * (squares - n * mean_squared), 2 * (mean_squared * of_sum).sqrt()
    bound = error + of_mean
    # Infinite squares may only have overflowed in float32. NaN comes from a failed rank: it will not pool again.
    are_more = (bound > 0) & ((bound > tolerated) | squares.isposinf())
    would_do = (of_grams > 0) & (MARGIN * (of_grams + of_mean) <= tolerated)
    found = zip(names, torch.stack([are_more, would_do], 1).tolist(), strict=True)
    by_name = dict(found)
    return Verdict([name for name, (more, _) in by_name.items() if more], [n for n, (_, do) in by_name.items() if do])
