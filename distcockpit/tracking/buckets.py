"""The walk over buckets of parameters: sums over individual gradients, what ranks pool of them, projections on G.

One walk over the individual gradients of a bucket feeds everything that needs nothing pooled. Then its element-wise
vectors are pooled, the mean gradient G among them; a second walk takes the projections on G. Where no quantity
subtracts squares, G comes from autograd, is pooled at once, and one walk does. Where squared norms are subtracted,
autograd's G serves, too, as long as its rounding is small against the variance: ranks see that from the same pooled
numbers, and where it is not sum up again in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distcockpit.curvature.diagonals import Curvature
from distcockpit.gradients import kernels
from distcockpit.gradients.rounding import RoundedNorms, doubtful, sums_over_sequences
from distcockpit.gradients.statistics import GradientSum, PowerSums, Projection, SquaredNorms, Statistic
from distcockpit.gradients.uses import MicroBatch
from distcockpit.gradients.walk import walk
from distcockpit.quantities.batch import ByParameter, Shard
from distcockpit.tracking.exchanges import AVERAGED, MEAN, ROUNDING, SQUARES, Exchanges
from distcockpit.tracking.inputs import StepInputs
from distcockpit.tracking.setup import Setup


@dataclass(frozen=True)
class BucketSums:
    """What is known of a bucket when it was walked, by parameter; of all, when they are joined."""

    part_of_mean: ByParameter  # this rank's part of G
    mean: ByParameter  # G
    mean_squared: Tensor  # |G|^2, float64 [parameters]
    projections: Tensor  # of this rank's individual gradients on G, float64 [B_r]
    averaged: ByParameter | None  # what autograd gave all ranks together, in its own scale
    shard: Shard

    @classmethod
    def joined(cls, buckets: Sequence[BucketSums], names: Sequence[str]) -> BucketSums:
        """Those of all buckets, in this order of the parameters."""
        if len(buckets) == 1:
            return buckets[0]

        def join(parts: Sequence[ByParameter]) -> ByParameter:
            every = {name: part for each in parts for name, part in each.items()}
            return ByParameter({name: every[name] for name in names if name in every})

        mean, shards = join([bucket.mean for bucket in buckets]), [bucket.shard for bucket in buckets]
        walked = [name for bucket in buckets for name in bucket.mean]
        averaged = [bucket.averaged for bucket in buckets if bucket.averaged is not None]
        return cls(
            join([bucket.part_of_mean for bucket in buckets]),
            mean,
            torch.cat([bucket.mean_squared for bucket in buckets])[[walked.index(name) for name in mean]],
            torch.stack([bucket.projections for bucket in buckets]).sum(0),
            join(averaged) if averaged else None,
            Shard(
                torch.cat([shard.mean for shard in shards]),
                torch.cat([shard.squares for shard in shards]),
                {kind: torch.cat([shard.curvature[kind] for shard in shards]) for kind in shards[0].curvature},
            ),
        )


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
    ) -> None:
        self._setup, self._inputs, self._batches, self._exchanges = setup, inputs, batches, exchanges
        self._curvature, self._statistics, self._norms, self._local_n = curvature, statistics, norms, local_n
        self._values, self._n = inputs.header.state.every, inputs.header.totals.n
        active = inputs.active
        self._projects = active.wants("projections")
        self._subtracts_squares = active.subtracts_squares
        self._takes_autograds = active.takes_autograds_sums and not setup.batch_statistics_are_constants

    def walk(self) -> BucketSums:
        """All buckets, one after the other."""
        return BucketSums.joined([self._bucket(names) for names in self._setup.buckets], list(self._setup.tracked))

    def _bucket(self, names: Sequence[str]) -> BucketSums:
        """One bucket: its sums, their exchange, and projections on what is pooled."""
        setup, exchanges = self._setup, self._exchanges
        parameters = {name: self._values[name] for name in names}
        summed = self._summed(parameters)
        own = summed.part
        vectors: dict[object, Sequence[Tensor]] = {
            kind: [hs[name] for name in names] for kind, hs in self._curvature.items()
        }
        vectors |= {MEAN: list(own.values())}
        vectors |= {} if summed.squares is None else {SQUARES: [summed.squares]}
        if AVERAGED in exchanges.kinds:
            vectors |= {AVERAGED: list(self._inputs.parameter_gradients.times(1, names).values())}
        if ROUNDING in exchanges.kinds and self._norms is not None:
            vectors |= {ROUNDING: [summed.rounded.pooled(name, self._norms) for name in names]}
        pooled = exchanges.pool(names, vectors)
        mean = ByParameter.of(pooled[MEAN], parameters) if MEAN in pooled else own
        nothing = torch.zeros(0, dtype=torch.float64, device=setup.device)
        mean_squared = kernels.squared_norms(list(mean.values())) if mean else nothing
        if ROUNDING in pooled and self._norms is not None:
            again = doubtful(names, pooled[ROUNDING].view(-1, 3), mean_squared, self._n)
            if again:
                self.sum_exactly(again, own, mean)
                mean_squared = kernels.squared_norms(list(mean.values()))
        onto = [Projection(mean, self._local_n, in_double=True)] if self._projects else []
        once_more = setup.memory_budget if self._inputs.keeps else 0
        walk(self._batches, self._values, names, [*summed.left, *onto], setup.block_elements, once_more)
        if not self._inputs.keeps:
            for batch in self._batches:
                batch.materialized.clear()
        size = sum(p.numel() for p in parameters.values())
        rank, ranks = setup.world.rank, setup.world.size
        mine = slice(size * rank // ranks, size * (rank + 1) // ranks)
        return BucketSums(
            own,
            mean,
            mean_squared,
            onto[0].values[0] if onto else nothing,
            ByParameter.of(pooled[AVERAGED], parameters) if AVERAGED in pooled else None,
            Shard(
                mean=mean.flat[mine] if mean and pooled.keys() - {MEAN, ROUNDING, AVERAGED} else nothing,
                squares=pooled.get(SQUARES, nothing)[mine],
                curvature={kind: flat[mine] for kind, flat in pooled.items() if isinstance(kind, Curvature)},
            ),
        )

    def _summed(self, parameters: Mapping[str, Tensor]) -> _Summed:
        """This rank's part of G, from autograd where its rounding may do; else in float64, in one walk with others."""
        setup, inputs, norms = self._setup, self._inputs, self._norms
        autograds, rounded = None, RoundedNorms({}, {})
        if self._takes_autograds:
            factors = sums_over_sequences(self._batches, list(parameters)) if self._subtracts_squares else {}
            if factors or not self._subtracts_squares:
                autograds = _autograds_sums(inputs, list(parameters))
            if autograds is not None:
                rounded = RoundedNorms(parameters, factors)
        if autograds is not None and not self._subtracts_squares:
            return _Summed(ByParameter(autograds), None, rounded, self._statistics)
        exact = {name: p for name, p in parameters.items() if name not in rounded.values}
        powers = PowerSums(exact) if SQUARES in self._exchanges.kinds else None
        adding = powers or (GradientSum(exact) if MEAN in self._exchanges.kinds else None)
        once_more = setup.memory_budget if inputs.keeps or self._projects else 0
        all_exact = [*self._statistics, *([] if adding is None else [adding])]
        once_more = walk(self._batches, self._values, list(exact), all_exact, setup.block_elements, once_more)
        if norms is not None and rounded.values:
            those = [rounded if statistic is norms else statistic for statistic in self._statistics]
            walk(self._batches, self._values, list(rounded.values), those, setup.block_elements, once_more)
            norms.replace(rounded)
        if adding is not None:
            adding.flat.div_(self._n)
        part = ByParameter({}) if adding is None else ByParameter.of(adding.flat, exact)
        if autograds is not None:
            part = ByParameter({name: part[name] if name in part else autograds[name] for name in autograds})
        return _Summed(part, None if powers is None else powers.flat_squares, rounded, [])

    def sum_exactly(self, names: Sequence[str], own: ByParameter, mean: ByParameter) -> None:
        """Replace rounded sums with float64 sums over exactly the gradients that are squared."""
        parameters = {name: self._values[name] for name in names}
        self._exchanges.expect_more(sum(p.numel() for p in parameters.values()))
        again, adding = SquaredNorms(parameters), GradientSum(parameters)
        walk(self._batches, self._values, names, [again, adding], self._setup.block_elements)
        assert self._norms is not None  # without them nothing is rounded
        self._norms.replace(again)
        pooled = ByParameter.of(self._exchanges.pool_more(adding.flat.div_(self._n)), parameters)
        own.replace(adding.sums)
        mean.replace(pooled)


@dataclass(frozen=True)
class _Summed:
    """What the individual gradients of this rank add up to, in one bucket."""

    part: ByParameter  # this rank's part of G
    squares: Tensor | None  # sums of squared elements; flat, float64
    rounded: RoundedNorms  # for parameters whose part of G is autograd's, when squares are summed
    left: Sequence[Statistic]  # statistics not fed yet


def _autograds_sums(inputs: StepInputs, names: Sequence[str]) -> dict[str, Tensor] | None:
    """Return this rank's part of G from what arrived at the parameters, by name, in autograd's precision.

    ``None`` if that is not possible: several micro-batches with scales of their own were accumulated, or autograd
    rounds to less than float32.
    """
    totals, gradients = inputs.header.totals, inputs.parameter_gradients
    present = [micro for micro in inputs.captured if micro.batch_size]
    if not present:
        return gradients.times(0, names)
    if (
        len(present) > 1
        or totals.is_mixed
        or gradients.is_rounded
        or present[0].beside.gradients
        or any(use.before.autocast is not None for use in present[0].uses)
    ):
        return None
    factor = present[0].scale.unscale * totals.samples_per_weight / totals.n
    return gradients.times(factor if present[0].weight else 0, names)
