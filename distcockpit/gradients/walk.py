"""One pass over the individual gradients of a local batch: every statistic sees every sample once."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from distcockpit.gradients.factors import WHOLE, Factors, Occurrences, RowWise
from distcockpit.gradients.generic import rule_of
from distcockpit.gradients.statistics import Statistic
from distcockpit.gradients.uses import Materialized, MicroBatch, Use

BLOCK_ELEMENTS = 1 << 23  # 32 MiB of float32: smaller blocks give matrix products too little work
CACHED_ELEMENTS = 800_000  # per thread: products that are mostly in its cache when statistics read them
FEWEST_ROWS = 32  # of products, to keep matrix products fast


@torch.no_grad()
def walk(
    batches: Sequence[MicroBatch],
    values: Mapping[str, Tensor],
    tracked: Sequence[str],
    statistics: Sequence[Statistic],
    block_elements: int = BLOCK_ELEMENTS,
    keep: int = 0,
    rows: Mapping[str, slice] | None = None,
) -> int:
    """Feed the individual gradients of all tracked parameters to ``statistics``.

    Whatever follows from the factors of a layer is computed from them. If a statistic needs formed gradients, they come
    in blocks of samples; the blocks of several uses of a parameter are added first, because the gradient of a sample is
    the sum over the uses.

    Args:
        batches: The micro-batches of the step; their samples are numbered consecutively.
        values: The parameters of the model by name, as they were in the forward pass.
        tracked: Names of the tracked ones. A tracked parameter without a use has individual gradients that are
            zero, and they count.
        statistics: Accumulators; all of them see the same blocks while these are in cache.
        block_elements: Maximum elements of a block and of what is needed to form it; it holds at least one sample.
        keep: Bytes of formed individual gradients that may be kept in the micro-batches for the next walk.
        rows: The rows to walk over of parameters of which not all are wanted, by name.

    Returns:
        The number of bytes that may still be kept.
    """
    if not statistics or not tracked:
        return keep
    start, left, rows = 0, keep, rows or {}
    with torch.autocast(values[tracked[0]].device.type, enabled=False):  # `track` may be called under autocast
        for batch in batches:
            if batch.batch_size:
                rest = [name for name in tracked if not _from_formed(name, batch, start, statistics, rows)]
                groups = _grouped(batch, [name for name in rest if name not in rows])
                groups += [each for name in rest if name in rows for each in _grouped(batch, [name])]
                for uses, names in groups:
                    group = _Group(uses, names, batch.batch_size, start, values, block_elements, rows.get(names[0]))
                    made = group.feed(statistics, left)
                    batch.materialized.update(made)
                    left -= sum(g.numel() * g.element_size() for pieces in made.values() for *_, g in pieces)
            start += batch.batch_size
    return left


def _from_formed(
    name: str, batch: MicroBatch, start: int, statistics: Sequence[Statistic], rows: Mapping[str, slice]
) -> bool:
    """Feed what an earlier walk formed and kept, if anything."""
    found = batch.materialized.get((name, rows.get(name, WHOLE).start))
    for samples, part, gradients in found or ():
        for statistic in statistics:
            statistic.block(name, gradients, slice(start + samples.start, start + samples.stop), part)
    return found is not None


class _UseTuple(tuple[Use, ...]):
    """Uses as a dictionary key, by identity."""

    __slots__ = ()

    def __hash__(self) -> int:
        return hash(tuple(map(id, self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, tuple) and tuple(map(id, self)) == tuple(map(id, other))


def _grouped(batch: MicroBatch, tracked: Sequence[str]) -> list[tuple[Sequence[Use], list[str]]]:
    """Group parameters that have the same uses, usually a weight and its bias."""
    groups: dict[_UseTuple, list[str]] = defaultdict(list)
    for name in tracked:
        groups[_UseTuple(batch.by_parameter.get(name, ()))].append(name)
    return list(groups.items())


class _Group:
    """The parameters that are served by the same uses, or some rows of one parameter."""

    def __init__(
        self,
        uses: Sequence[Use],
        names: Sequence[str],
        batch_size: int,
        start: int,
        values: Mapping[str, Tensor],
        block_elements: int,
        rows: slice | None,
    ) -> None:
        self._uses, self._names, self._batch_size, self._start = uses, names, batch_size, start
        self._values, self._block_elements, self._rows = values, block_elements, rows
        self._shapes = {name: values[name].shape if rows is None else values[name][rows].shape for name in names}
        self._locals = [{n: full for n, full in use.layer.parameters.items() if full in names} for use in uses]
        self._factors: dict[str, Factors] = {}
        sources: dict[str, list[RowWise]] = defaultdict(list)
        self._rules = [rule_of(use) for use in uses]
        for use, rule, local in zip(uses, self._rules, self._locals, strict=True):
            if len(uses) == 1:
                self._factors = {local[n]: factors for n, factors in rule.factors(use).items() if n in local}
            for n, source in rule.row_wise(use).items():
                if n in local:
                    sources[local[n]].append(source)
        called = [full for local in self._locals for full in local.values()]
        self._sources = {name: each for name, each in sources.items() if len(each) == called.count(name)}  # of all uses
        if rows is not None:
            self._factors = {name: factors.of_rows(rows) for name, factors in self._factors.items()}
            self._sources = {name: [each.of_rows(rows) for each in found] for name, found in self._sources.items()}

    def feed(self, statistics: Sequence[Statistic], keep: int) -> Materialized:
        """Show every sample to every statistic.

        Args:
            statistics: Accumulators.
            keep: Bytes of formed individual gradients that may be kept.

        Returns:
            The gradients that the next walk should not have to form again.
        """
        by_elements = [statistic for statistic in statistics if not statistic.goes_along]
        left, forms_blocks = list(statistics), bool(by_elements) and self._forms_blocks(by_elements)
        if not forms_blocks:
            left = [s for s in statistics if not (s.goes_along and self._along(s))]
        if not left:
            return {}
        ways = (self._from_factors, self._from_uses, self._from_rows)
        names = [name for name in self._names if not any(feeds(name, left) for feeds in ways)]
        if not names:
            return {}
        materialized: Materialized = defaultdict(list)
        pays = forms_blocks or any(statistic.goes_along for statistic in left)
        forms_rows = all(name in self._factors or name in self._sources for name in names)
        keeps = pays and bool(self._uses) and (self._rows is None or forms_rows) and self._bytes(names) <= keep
        for samples, part, name, gradients in self._blocks(names):
            for statistic in left:
                statistic.block(name, gradients, self._numbered(samples), part)
            if keeps:
                materialized[name, self._rows.start if self._rows else None].append((samples, part, gradients))
        return materialized

    def _bytes(self, names: Sequence[str]) -> int:
        """Return the size of the individual gradients of these parameters."""
        sizes = (self._shapes[name].numel() * self._values[name].element_size() for name in names)
        return self._batch_size * sum(sizes)

    def _forms_blocks(self, statistics: Sequence[Statistic]) -> bool:
        """True if most of the individual gradients will be formed for these statistics."""
        takes = (self._takes_factors, self._takes_uses, self._takes_rows)
        formed = [name for name in self._names if not any(take(name, statistics) for take in takes)]
        sizes = {name: self._shapes[name].numel() for name in self._names}
        return 2 * sum(sizes[name] for name in formed) > sum(sizes.values())

    def _takes_factors(self, name: str, statistics: Sequence[Statistic]) -> bool:
        """True if all of these take the factors rather than the products."""
        if name not in self._factors:
            return False
        sizes = self._factors[name].sizes
        return self._take_some(statistics) and all(statistic.prefers_factors(*sizes) for statistic in statistics)

    def _takes_uses(self, name: str, statistics: Sequence[Statistic]) -> bool:
        """True if all of these take the factors of all uses together."""
        sources = self._sources.get(name, ())
        return bool(sources) and self._take_some(statistics) and all(s.prefers_uses(sources) for s in statistics)

    def _takes_rows(self, name: str, statistics: Sequence[Statistic]) -> bool:
        """True if there are few nonzero rows, and all of these take them."""
        sources = self._sources.get(name, ())
        are_few = len(sources) == 1 and isinstance(sources[0], Occurrences)
        return are_few and self._take_some(statistics) and all(statistic.takes_rows for statistic in statistics)

    def _take_some(self, statistics: Sequence[Statistic]) -> bool:
        """True unless only some rows are walked over, and not all of these take them as if they were the whole."""
        return self._rows is None or all(statistic.takes_some_rows for statistic in statistics)

    def _along(self, statistic: Statistic) -> bool:
        """True if the statistic got what it needs from whole uses."""
        if not self._uses:  # no layer used the parameter: its individual gradients are zero, and count
            return False
        if self._rows is not None:
            (name,) = self._names
            taken = [statistic.of_rows(name, source, self._rows) for source in self._sources.get(name, ())]
            if not taken:
                return False
        else:
            taken = []
            for use, local in zip(self._uses, self._locals, strict=True):
                found = statistic.of_use(use, local)
                if found is None:
                    return False
                taken.append(found)
        for values in taken:
            statistic.take(values, self._numbered(slice(0, self._batch_size)))
        return True

    def _from_rows(self, name: str, statistics: Sequence[Statistic]) -> bool:
        """Feed the nonzero rows, if there are few and every statistic takes them."""
        if not self._takes_rows(name, statistics):
            return False
        (source,) = self._sources[name]
        assert isinstance(source, Occurrences)
        for samples in self._pieces(source.delta[:1].numel()):
            rows = source.rows(samples)
            for statistic in statistics:
                statistic.rows(name, rows)
        return True

    def _from_factors(self, name: str, statistics: Sequence[Statistic]) -> bool:
        """Feed the factors, if there are any and no statistic needs the products."""
        if not self._takes_factors(name, statistics):
            return False
        factors = self._factors[name]
        t, o, i = factors.sizes
        for samples in self._pieces(0 if t == 1 else t * (o + i)):
            delta, x = factors.pair(samples)
            for statistic in statistics:
                if t == 1:
                    statistic.outer(name, delta[:, 0], x[:, 0], self._numbered(samples))
                else:
                    statistic.sequence(name, delta, x, self._numbered(samples))
        return True

    def _from_uses(self, name: str, statistics: Sequence[Statistic]) -> bool:
        """Feed the factors of all uses together, if every statistic prefers them."""
        if not self._takes_uses(name, statistics):
            return False
        sources = self._sources[name]
        for samples in self._pieces(sum(t * (o + i) for t, o, i in (source.sizes for source in sources))):
            pairs = [source.pair(samples) for source in sources]
            for statistic in statistics:
                statistic.uses(name, pairs, self._numbered(samples))
        return True

    def _blocks(self, names: Sequence[str]) -> Iterator[tuple[slice, slice, str, Tensor]]:
        """Yield individual gradients of ``names``: samples, part of the first axis, name, and gradients."""
        for name in names:
            if name in self._sources or name in self._factors:
                yield from self._products(name)
        names = [name for name in names if not (name in self._sources or name in self._factors)]
        if not names:
            return
        sources = []
        for use, rule, locals_ in zip(self._uses, self._rules, self._locals, strict=True):
            local = {name: full for name, full in locals_.items() if full in names}
            if local:
                sources.append((local, rule.blocks(use, list(local), self._values)))
        per_sample = sum(self._values[name].numel() for name in names)
        per_sample += sum(rule.elements_per_sample(use) for use, rule in zip(self._uses, self._rules, strict=True))
        for samples in self._pieces(per_sample):
            parts = [(local, block(samples)) for local, block in sources]
            for name in names:
                value = self._values[name]
                shape = (samples.stop - samples.start, *value.shape)
                gradients = [
                    block[n].view(shape) for local, block in parts for n, full in local.items() if full == name
                ]
                whole = functools.reduce(torch.add, gradients) if gradients else value.new_zeros(()).expand(shape)
                if self._rows is None:
                    yield samples, WHOLE, name, whole
                else:
                    yield samples, self._rows, name, whole[:, self._rows]

    def _products(self, name: str) -> Iterator[tuple[slice, slice, str, Tensor]]:
        """Form the gradients of a parameter a few rows at a time, so that statistics read them from the cache."""
        factors, shape = self._factors.get(name), self._shapes[name]
        sources: Sequence[RowWise] = [factors] if factors is not None else self._sources[name]
        sources = sorted(sources, key=lambda source: isinstance(source, Occurrences))  # which add to few rows
        _, o, i = sources[0].sizes
        cached = self._values[name].is_cpu and not (factors is not None and factors.are_windows)
        most = min(CACHED_ELEMENTS * torch.get_num_threads(), self._block_elements) if cached else self._block_elements
        first = 0 if self._rows is None else self._rows.start
        for samples in self._pieces(max(t * (o + i) for t, o, i in (source.sizes for source in sources))):
            n = samples.stop - samples.start
            first_form, *other_forms = [source.prepared(samples) for source in sources]
            rows = max(FEWEST_ROWS, most // (n * i or 1))
            for part in even_pieces(o, rows):
                for some in even_pieces(n, most // ((part.stop - part.start) * i or 1)):
                    gradients = first_form(some, part, None)
                    for form in other_forms:
                        gradients = form(some, part, gradients)
                    where = slice(samples.start + some.start, samples.start + some.stop)
                    place = slice(first + part.start, first + part.stop)
                    yield where, place, name, gradients.view(len(gradients), -1, *shape[1:])

    def _pieces(self, per_sample: int) -> Iterator[slice]:
        return even_pieces(self._batch_size, self._block_elements // (per_sample or 1))

    def _numbered(self, samples: slice) -> slice:
        return slice(self._start + samples.start, self._start + samples.stop)


def even_pieces(n: int, most: int) -> Iterator[slice]:
    """Split ``range(n)`` evenly into as few pieces as possible of at most this size each, at least one."""
    size = -(-n // -(-n // max(1, most))) if n else 1
    for first in range(0, n, size):
        yield slice(first, min(first + size, n))
