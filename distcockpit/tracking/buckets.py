"""The walk over buckets of parameters: sums over individual gradients, what ranks pool of them, projections on G.

One walk over the individual gradients of a bucket gives its part of G, and feeds what needs nothing pooled. While
several ranks add up its element-wise vectors, the next bucket is walked. Then a second walk takes the projections on G,
the quantities reduce the sums of the bucket, and everything of it is freed.

Autograd's sums serve as G where nothing is subtracted, and where squared norms are subtracted as long as their rounding
is small against the variance. They are known without a walk, so that the second one does all. Ranks see from the same
pooled numbers where they did not do, and there sum up again in float64; see `Doubts` for the next steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distcockpit.curvature.diagonals import Curvature
from distcockpit.gradients import kernels
from distcockpit.gradients.convolution import ConvolutionRule
from distcockpit.gradients.differences import Gathered
from distcockpit.gradients.factors import WHOLE, RowWise, rows_of
from distcockpit.gradients.rounding import (
    Calls,
    Doubts,
    RoundedNorms,
    calls_by_parameter,
    sums_over_sequences,
    verdict,
)
from distcockpit.gradients.statistics import GradientSum, PowerSums, Projection, SquaredNorms, Statistic
from distcockpit.gradients.uses import MicroBatch
from distcockpit.gradients.walk import walk
from distcockpit.quantities.batch import Averaged, BucketSums, Shard
from distcockpit.replay.devices import convolutions_round
from distcockpit.tracking.exchanges import AVERAGED, MEAN, SQUARES, Exchanges, Pooled, elements
from distcockpit.tracking.inputs import StepInputs
from distcockpit.tracking.reductions import Reductions
from distcockpit.tracking.setup import Bucket, Setup


@dataclass(frozen=True)
class StepSums:
    """What buckets add up to."""

    mean_squared: Tensor  # |G|^2, float64 [parameters]
    projections: Tensor  # of this rank's individual gradients on G, float64 [B_r]
    mean: Mapping[str, Tensor]  # G, if all of it is wanted
    part_of_mean: Mapping[str, Tensor]  # this rank's part of it, likewise


@dataclass(frozen=True)
class _Begun:
    """A bucket whose sums are on their way."""

    rows: Bucket
    own: dict[str, Tensor]  # this rank's part of G
    exact: list[str]  # the parameters whose individual gradients were walked over
    rounded: RoundedNorms  # for those of the others whose squared norms are summed
    pooled: Pooled


class GradientsLost(RuntimeError):
    """What autograd left in ``.grad`` is gone, and so are the calls that it could be summed up from."""


class BucketWalk:
    """Walks the buckets of one step.

    Args:
        setup: What all ranks agreed on.
        inputs: This rank's side of the step.
        batches: Its micro-batches, in the pooled scale.
        exchanges: Those of the step.
        curvature: This rank's part of the pooled diagonals, by parameter.
        statistics: Accumulators that need nothing pooled.
        norms: The one among them of squared norms, if there is one.
        local_n: B_r.
        reductions: What quantities make of the sums of a bucket.
        doubts: Where float32 did not do at earlier steps; kept up to date.
        gathered: What statistics read of sharded parameters, to be gathered bucket by bucket.
    """

    def __init__(
        self,
        setup: Setup,
        inputs: StepInputs,
        batches: Sequence[MicroBatch],
        exchanges: Exchanges,
        curvature: Mapping[Curvature, Mapping[str, Tensor]],
        statistics: Sequence[Statistic],
        norms: SquaredNorms | None,
        local_n: int,
        reductions: Reductions,
        doubts: Doubts,
        gathered: Sequence[Gathered] = (),
    ) -> None:
        self._setup, self._inputs, self._batches, self._exchanges = setup, inputs, batches, exchanges
        self._curvature, self._statistics, self._norms, self._local_n = curvature, statistics, norms, local_n
        self._reductions, self._gathered = reductions, gathered
        self._values, self._n = inputs.header.state.every, inputs.header.totals.n
        active = inputs.active
        self._projects, self._keeps_all = active.wants("projections"), active.wants("mean_gradient")
        self._subtracts_squares, self._doubts = active.subtracts_squares, doubts
        self._rounded = rounded_convolutions(inputs, setup.device)
        self._factor = None if setup.batch_statistics_are_constants else factor_of_autograds(inputs)
        self._scale = scale_of_autograds(inputs) if active.wants("averaged") and setup.shards is not None else 1.0
        self._calls: Calls = calls_by_parameter(batches) if self._subtracts_squares else {}
        self._index = {name: k for k, name in enumerate(setup.tracked)}
        nothing = torch.zeros(0, dtype=torch.float64, device=setup.device)
        self._mean_squared, self._projections = nothing.new_zeros(len(self._index)), nothing.new_zeros(local_n)
        self._mean: dict[str, Tensor] = {}
        self._part_of_mean: dict[str, Tensor] = {}
        self._bounds = nothing.new_zeros(len(self._index), 4)
        self._grams: set[str] = set()  # the parameters whose norms come from Gram matrices in float32
        self._onto_rounded: dict[str, Tensor] = {}  # projections on autograd's G, which may have to be taken again
        self._room = setup.kept_bytes(beside_update=inputs.update is not None)

    def walk(self) -> StepSums:
        """All buckets, one after the other."""
        begun: deque[_Begun] = deque()
        for rows in self._setup.buckets:
            begun.append(self._begin(rows))
            if len(begun) == self._setup.buckets_at_a_time:
                self._end(begun.popleft())
        while begun:
            self._end(begun.popleft())
        if self._exchanges.rounds and self._norms is not None:
            self._sum_again(self._norms)
        for onto in self._onto_rounded.values():
            self._projections += onto
        return StepSums(self._mean_squared, self._projections, self._mean, self._part_of_mean)

    # -- one bucket ----------------------------------------------------------------------------------------------------

    def _begin(self, rows: Bucket) -> _Begun:
        """Sum up this rank's part, and send it.

        Raises:
            GradientsLost: If that is not possible.
        """
        exchanges, inputs = self._exchanges, self._inputs
        for each in self._gathered:
            each.hold(rows, exchanges.gather(rows, each.pieces))
        parameters = {name: rows_of(self._values[name], part) for name, part in rows.items()}
        sources: Mapping[str, Sequence[RowWise]] = {}
        if self._subtracts_squares and self._factor is not None:
            doubts = self._doubts.of_sums
            sources = sums_over_sequences(self._calls, {n: part for n, part in rows.items() if n not in doubts})
        own = {
            name: part
            for name in (sources if self._subtracts_squares else rows)
            if self._factor is not None
            and name not in self._rounded
            and (part := inputs.parameter_gradients.times(self._factor, name, rows[name])) is not None
        }
        rounds = self._subtracts_squares and exchanges.rounds
        own = own if rounds or not self._subtracts_squares else {}
        rounded = RoundedNorms(parameters, {name: sources[name] for name in own if rounds}, self._doubts.of_grams)
        exact = [name for name in rows if name not in own]
        if exact and MEAN in exchanges.kinds and not inputs.has_calls:
            raise GradientsLost(
                f"The gradient of parameter '{exact[0]}' was overwritten before `track` ended. Clip, unscale or clear "
                "gradients after the `with` block. Later steps copy gradients when they arrive."
            )
        there = {name: parameters[name] for name in exact}
        adding: GradientSum | None = None
        if SQUARES in exchanges.kinds:
            adding = PowerSums(there, _first(rows))
        elif MEAN in exchanges.kinds:
            in_double = self._subtracts_squares or bool(self._rounded) or inputs.parameter_gradients.is_rounded
            adding = GradientSum(there, _first(rows), in_double=in_double)
        self._walk(exact, rows, [*self._statistics, *([] if adding is None else [adding])], again=self._projects)
        if adding is not None:
            adding.flat.div_(self._n)
            own = {name: own[name] if name in own else adding.sums[name] for name in rows}
        summed = [adding.flat] if adding is not None and len(exact) == len(rows) else list(own.values())
        vectors: dict[object, Sequence[Tensor]] = {MEAN: summed}
        pooled = {kind: hs for kind, hs in self._curvature.items() if kind in exchanges.kinds}
        vectors |= {kind: [rows_of(hs[n], part) for n, part in rows.items()] for kind, hs in pooled.items()}
        vectors |= {SQUARES: [adding.flat_squares]} if isinstance(adding, PowerSums) else {}
        if AVERAGED in exchanges.kinds and self._setup.shards is not None:  # nobody holds autograd's gradients
            vectors |= {AVERAGED: [own[name].double() / self._scale for name in rows]}
        elif AVERAGED in exchanges.kinds:
            seen = {name: inputs.parameter_gradients.times(1, name, part) for name, part in rows.items()}
            vectors |= {AVERAGED: [torch.zeros_like(parameters[n]) if g is None else g for n, g in seen.items()]}
        return _Begun(rows, own, exact, rounded, exchanges.start(elements(self._values, rows), vectors))

    def _end(self, begun: _Begun) -> None:
        """Wait for the sums of all ranks, project on G, let the quantities see, and free everything."""
        rows, own, inputs = begun.rows, begun.own, self._inputs
        pooled = begun.pooled()
        shapes = {name: rows_of(self._values[name], part).shape for name, part in rows.items()}
        mean = cut(pooled[MEAN], shapes) if MEAN in pooled else own
        squared = kernels.squared_norms(list(mean.values())) if mean else self._mean_squared[:0]
        for k, name in enumerate(mean):
            self._mean_squared[self._index[name]] += squared[k]
        self._walk_again(begun, mean)
        for each in self._gathered:
            each.drop(rows)
        self._reductions.see(self._bucket_sums(rows, mean, own, squared, pooled))
        if self._keeps_all:
            for name in mean:
                for whole, some in ((self._mean, mean[name]), (self._part_of_mean, own[name])):
                    whole[name] = torch.cat([whole[name], some]) if name in whole else some.clone()
        for name, part in rows.items():
            self._let_go(name, part)
            if part == WHOLE or part.stop == len(self._values[name]):
                inputs.parameter_gradients.release(name)

    def _walk_again(self, begun: _Begun, mean: Mapping[str, Tensor]) -> None:
        """Project on G, and feed the statistics with parameters whose part of G was known without a walk."""
        rows, first, norms = begun.rows, _first(begun.rows), self._norms
        rest = [name for name in rows if name not in begun.exact]
        statistics = [begun.rounded if s is norms and begun.rounded.values else s for s in self._statistics]
        if self._projects and begun.exact:
            onto = Projection(mean, self._local_n, in_double=True, first=first)
            self._walk(begun.exact, rows, [onto])
            self._projections += onto.values[0]
        if self._projects and rest:
            those = {name: mean[name] for name in rest}
            onto = Projection(those, self._local_n, [[name] for name in rest], in_double=True, first=first)
            self._walk(rest, rows, [*statistics, onto])
            for name, values in zip(rest, onto.values, strict=True):
                self._onto_rounded[name] = self._onto_rounded.get(name, 0) + values
        elif rest:
            self._walk(rest, rows, statistics)
        if begun.rounded.values and norms is not None:
            norms.add(begun.rounded)
            self._grams |= begun.rounded.from_grams
            for name in begun.rounded.values:
                self._bounds[self._index[name]] += begun.rounded.bounds(name)

    def _bucket_sums(
        self,
        rows: Bucket,
        mean: Mapping[str, Tensor],
        own: Mapping[str, Tensor],
        squared: Tensor,
        pooled: Mapping[object, Tensor],
    ) -> BucketSums:
        setup, inputs, nothing = self._setup, self._inputs, self._mean_squared[:0]
        size, rank, ranks = sum(elements(self._values, rows).values()), setup.world.rank, setup.world.size
        mine = slice(size * rank // ranks, size * (rank + 1) // ranks)
        averaged: Averaged | None = None
        if AVERAGED in pooled:
            shapes = {name: rows_of(self._values[name], part).shape for name, part in rows.items()}
            plain = cut(pooled[AVERAGED] / ranks, shapes)
            averaged = self._averaged_pieces(rows, mean, plain)
            if averaged is None:
                held = {name: inputs.parameter_gradients.added(name, part) for name, part in rows.items()}
                averaged = Averaged(held, plain, mean)
        flat = nothing
        if mean and pooled.keys() - {MEAN, AVERAGED}:
            flat = pooled[MEAN] if MEAN in pooled else torch.cat([g.double().reshape(-1) for g in mean.values()])
        return BucketSums(
            model=setup.facts,
            step=inputs.step,
            n=self._n,
            local_n=self._local_n,
            rank=rank,
            world_size=ranks,
            has_gradients=all(micro.has_gradients for micro in inputs.captured),
            rows=rows,
            mean=mean,
            part_of_mean=own,
            mean_squared=squared,
            own=self._own(rows, mean, mine),
            shard=Shard(
                mean=flat[mine],
                squares=pooled.get(SQUARES, nothing)[mine],
                curvature={kind: values[mine] for kind, values in pooled.items() if isinstance(kind, Curvature)},
            ),
            averaged=averaged,
        )

    def _averaged_pieces(
        self, rows: Bucket, mean: Mapping[str, Tensor], plain: Mapping[str, Tensor]
    ) -> Averaged | None:
        """Return what this rank's pieces of ``.grad`` have of a bucket, with the same elements of the others."""
        shards = self._setup.shards
        if shards is None:
            return None
        parts: tuple[dict[str, Tensor], ...] = ({}, {}, {})
        for name, part in rows.items():
            piece = shards.pieces[name]
            own, of_plain = piece.common(part, plain[name])
            _, of_mean = piece.common(part, mean[name])
            held = self._inputs.parameter_gradients.added(name, own)
            for found, values in zip(parts, (held, of_plain, of_mean), strict=True):
                found[name] = values if piece.counts else values.reshape(-1)[:0]
        return Averaged(*parts)

    def _own(self, rows: Bucket, mean: Mapping[str, Tensor], mine: slice) -> dict[str, Tensor]:
        """Return the part of G that this rank answers for, by parameter."""
        if self._setup.shards is None:
            return dict(mean) if self._setup.world.rank == 0 else {}
        found, start = {}, 0
        for name, g in mean.items():
            first, last = (min(max(end - start, 0), g.numel()) for end in (mine.start, mine.stop))
            found[name] = g.reshape(-1)[first:last]
            start += g.numel()
        return found

    def _walk(
        self, names: Sequence[str], rows: Bucket, statistics: Sequence[Statistic], *, again: bool = False
    ) -> None:
        """Walk over a bucket; with ``again``, this step will do so once more."""
        some = {name: rows[name] for name in names if rows[name] != WHOLE}
        keep = self._room if again or (self._inputs.keeps and not some) else 0
        left = walk(self._batches, self._values, names, statistics, self._setup.block_elements, keep, some)
        self._room -= keep - left

    def _let_go(self, name: str, part: slice) -> None:
        """Drop individual gradients that were kept for another walk of this step."""
        if part != WHOLE or not self._inputs.keeps:
            for batch in self._batches:
                pieces = batch.materialized.pop((name, part.start), [])
                self._room += sum(g.numel() * g.element_size() for *_, g in pieces)

    # -- where autograd's sums did not do ------------------------------------------------------------------------------

    def _sum_again(self, norms: SquaredNorms) -> None:
        """Replace sums whose rounding is not small against the variance by sums in float64; all ranks do so alike."""
        self._bounds[:, 0] = norms.flat  # also of what this rank sums up exactly, and others do not
        pooled = self._exchanges.pool_bounds(self._bounds)
        found = self._setup.world.insist(lambda: verdict(list(self._index), pooled, self._mean_squared, self._n))
        again = found.again
        places = [(name, bucket[name]) for name in again for bucket in self._setup.buckets if name in bucket]
        self._exchanges.expect_more([rows_of(self._values[name], part).numel() for name, part in places])
        self._doubts.settle(found, self._grams | {name for name in again if name not in self._calls})
        for name in again:
            norms.values[name].zero_()
            self._mean_squared[self._index[name]] = 0
            self._onto_rounded.pop(name, None)
        self._mean = {name: mean for name, mean in self._mean.items() if name not in again}
        for name, part in places:
            self.sum_exactly(name, part, norms)

    def sum_exactly(self, name: str, part: slice, norms: SquaredNorms) -> None:
        """Sum up over exactly the gradients that are squared."""
        parameter, first = {name: rows_of(self._values[name], part)}, _first({name: part})
        adding = GradientSum(parameter, first)
        self._walk([name], {name: part}, [norms, adding], again=self._projects)
        mean = self._exchanges.pool_more(adding.flat.div_(self._n)).view(parameter[name].shape)
        self._mean_squared[self._index[name]] += kernels.squared_norm(mean)
        if self._projects:
            onto = Projection({name: mean}, self._local_n, in_double=True, first=first)
            self._walk([name], {name: part}, [onto])
            self._projections += onto.values[0]
        self._let_go(name, part)
        if self._keeps_all:
            whole = self._mean
            whole[name] = torch.cat([whole[name], mean]) if name in whole else mean.clone()


def _first(rows: Bucket) -> dict[str, int]:
    return {name: part.start for name, part in rows.items() if part != WHOLE}


def cut(flat: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Cut a vector into tensors of these shapes, by name."""
    parts = flat.split([shape.numel() for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def rounded_convolutions(inputs: StepInputs, device: torch.device) -> set[str]:
    """Return the parameters whose gradients autograd rounds to less than float32, because it convolves for them.

    Calls that are run again may contain a convolution, too.
    """
    if not convolutions_round(device):
        return set()
    uses = [use for micro in inputs.captured for use in micro.uses]
    convolving = [use for use in uses if use.closed is None or isinstance(use.formed_by or use.closed, ConvolutionRule)]
    return {name for use in convolving for name in use.layer.parameters.values()}


def scale_of_autograds(inputs: StepInputs) -> float | Tensor:
    """Return by what this rank's part of G exceeds what autograd delivered; NaN if micro-batches differ in it."""
    totals = inputs.header.totals
    scales = [micro.scale.unscale for micro in inputs.captured if micro.weight]
    if not scales:
        return 1.0  # of zeros
    same = all(scale is scales[0] or not isinstance(scale, Tensor) and scale == scales[0] for scale in scales)
    if totals.is_mixed or not same:
        return float("nan")
    return scales[0] * totals.samples_per_weight / totals.n


def factor_of_autograds(inputs: StepInputs) -> float | Tensor | None:
    """Return what turns autograd's sums into this rank's part of G.

    ``None`` if that is not possible: several micro-batches with scales of their own were accumulated, or autograd
    rounds to less than float32.
    """
    totals, gradients = inputs.header.totals, inputs.parameter_gradients
    present = [micro for micro in inputs.captured if micro.batch_size]
    if not inputs.active.takes_autograds_sums:
        return None
    if not present:
        return 0.0
    if (
        len(present) > 1
        or totals.is_mixed
        or gradients.is_rounded
        or present[0].beside.gradients
        or any(use.before.autocast is not None for use in present[0].uses)
    ):
        return None
    return present[0].scale.unscale * totals.samples_per_weight / totals.n if present[0].weight else 0.0
