"""From the captured step to what quantities see: sums over individual gradients, and what ranks hold together.

One walk over the individual gradients feeds everything that needs nothing pooled. Then the element-wise vectors are
pooled, the mean gradient G among them; a second walk takes the projections on G. Where no quantity subtracts squares, G
comes from autograd, is pooled at once, and one walk does. Where squared norms are subtracted, autograd's G serves, too,
as long as its rounding is small against the variance: ranks see that from the same pooled numbers, and where it is not
sum up again in float64. At last comes the iteration for eigenvalues.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distcockpit.capture.captured import Captured
from distcockpit.capture.interpretation import alike
from distcockpit.capture.parameter_gradients import ParameterGradients
from distcockpit.curvature.diagonals import Curvature
from distcockpit.curvature.hutchinson import TraceEstimate
from distcockpit.curvature.lanczos import Eigenvalue, LargestEigenvalue, largest_eigenvalue
from distcockpit.gradients import kernels
from distcockpit.gradients.rounding import RoundedNorms, doubtful, sums_over_sequences
from distcockpit.gradients.statistics import GradientSum, PowerSums, Projection, SquaredNorms, Statistic
from distcockpit.gradients.uses import MicroBatch
from distcockpit.gradients.walk import walk
from distcockpit.quantities.batch import Averaged, ByParameter, LocalBatch, Shard, Times, Update
from distcockpit.tracking.active import Active
from distcockpit.tracking.agreed import Setup
from distcockpit.tracking.session import Session

MEAN, SQUARES, AVERAGED = "(1/N) sum_i g_i", "sum_i g_i^2", "what autograd gave, in its own scale"
ROUNDING = "what bounds the rounding of sums"


@dataclass(frozen=True)
class LocalCurvature:
    """Curvature of the sum over this rank's micro-batches of w L."""

    diagonals: Mapping[Curvature, Mapping[str, Tensor]]
    traces: Mapping[TraceEstimate, Tensor]


@dataclass(frozen=True)
class BatchTotals:
    """What the headers of all ranks say together."""

    n: int  # N
    weight: float  # W
    is_mixed: bool = False  # whether ranks differentiate different combinations of losses
    owns: Sequence[float] = ()  # what ranks multiply their means by, where they differ
    is_sum: bool = False  # whether nothing divides the sum over samples, on any rank

    @classmethod
    def of(cls, records: Sequence[Mapping[str, float]]) -> BatchTotals:
        """From the headers of all ranks."""
        present = [r for r in records if r["batch_size"]]
        is_sum = bool(present) and all(r["is_sum"] for r in present)
        same = any(alike([r[name] for r in present]) for name in ("own", "coefficient"))
        return cls(
            int(sum(r["batch_size"] for r in records)),
            sum(r["of_sum" if is_sum else "weight"] for r in present),
            not alike([r["mix"] for r in present]) or any(math.isinf(r["mix"]) for r in present),
            () if same else [r["own"] for r in present],
            is_sum,
        )

    @property
    def samples_per_weight(self) -> float:
        """N/W."""
        return self.n / self.weight if self.weight else 0.0


class Exchanges:
    """The exchanges between header and sums, which other ranks wait for: a rank that fails must still answer.

    Args:
        session: This rank's side of the run.
        active: The quantities of this step.
    """

    def __init__(self, session: Session, active: Active) -> None:
        self._setup, self._clock = session.setup, session.clock
        kinds: list[object] = [MEAN] if active.wants("mean_gradient", "projections") else []
        kinds += [SQUARES] if active.wants("squared_gradients") else []
        kinds += [AVERAGED] if active.wants("averaged") else []
        kinds += dict.fromkeys(active.needs[q.name].curvature for q in active.with_need("pooled_curvature"))
        self.kinds = kinds  # in the order of the buffer
        kinds += [ROUNDING] if active.takes_autograds_sums and active.subtracts_squares else []
        self._to_pool, self._more = bool(kinds), 0
        self.eigenvalues: list[LargestEigenvalue] = active.each("eigenvalue")
        self._to_confirm = len(self.eigenvalues)

    def pool(self, vectors: Mapping[object, Sequence[Tensor]]) -> dict[object, Tensor]:
        """Add element-wise vectors over ranks.

        Args:
            vectors: By kind: one vector, or its parts in the order of the tracked parameters.

        Returns:
            Flat totals, float64, by kind; with one rank all but the mean, which needs no exchange and no copy.
        """
        if not self._to_pool:
            return {}
        if self._setup.world.size == 1:
            self._to_pool = False
            parts = {kind: [part.double().reshape(-1) for part in vectors[kind]] for kind in self.kinds if kind != MEAN}
            return {kind: own[0] if len(own) == 1 else torch.cat(own) for kind, own in parts.items()}
        sizes = [self._size(kind) for kind in self.kinds]
        buffer = torch.empty(sum(sizes), dtype=torch.float64, device=self._setup.device)
        own = [part for kind in self.kinds for part in vectors[kind]]
        for place, part in zip(buffer.split([part.numel() for part in own]), own, strict=True):
            place.copy_(part.reshape(-1))
        return dict(zip(self.kinds, self._pool(buffer).split(sizes), strict=True))

    def _size(self, kind: object) -> int:
        facts = self._setup.facts
        return 3 * len(self._setup.tracked) if kind == ROUNDING else facts.n_parameters

    def _pool(self, buffer: Tensor) -> Tensor:
        self._to_pool = False
        return self._waited_for(buffer)

    def expect_more(self, size: int) -> None:
        """All ranks are about to pool a vector of this length once more."""
        self._more = size

    def pool_more(self, vector: Tensor) -> Tensor:
        """Add it over ranks."""
        self._more = 0
        return vector if self._setup.world.size == 1 else self._waited_for(vector.clone())

    def confirm(self) -> None:
        """Make sure that all ranks are about to begin an iteration for an eigenvalue; once for each.

        Raises:
            RuntimeError: If one failed before.
        """
        if failed := self._confirm(0.0):
            raise RuntimeError(f"{failed} rank(s) could not finish the tracked step; their own errors say why.")

    def _confirm(self, failed: float) -> int:
        flag = torch.full((1,), failed, dtype=torch.float64, device=self._setup.device)
        total = int(self._waited_for(flag).item())
        self._to_confirm = 0 if total else self._to_confirm - 1
        return total

    def _waited_for(self, buffer: Tensor) -> Tensor:
        before = time.perf_counter()
        total = self._setup.world.all_reduce(buffer)
        self._clock.wait += time.perf_counter() - before
        return total

    def give_up(self) -> None:
        """Answer what the other ranks still wait for: with NaN, and with the word that this one failed."""
        unknown = torch.full((), float("nan"), dtype=torch.float64, device=self._setup.device)
        if self._to_pool:
            self._pool(unknown.repeat(sum(map(self._size, self.kinds))))
        if self._more:
            self.pool_more(unknown.repeat(self._more))
        if self._to_confirm:
            self._confirm(1.0)


@dataclass(frozen=True)
class ModelState:
    """The model and the optimizer as they are at a step."""

    every: Mapping[str, Tensor]  # all parameters
    learning_rates: Sequence[float | Tensor]
    scale: float | None  # of mixed precision

    @classmethod
    def of(cls, setup: Setup) -> ModelState:
        """Those of this rank."""
        return cls({name: p.detach() for name, p in setup.every.items()}, setup.learning_rates(), setup.loss_scale())


@dataclass(frozen=True)
class StepInputs:
    """One rank's side of a tracked step, when the headers of all are known."""

    step: int
    totals: BatchTotals
    captured: Sequence[Captured]  # the micro-batches
    parameter_gradients: ParameterGradients  # what autograd gave the tracked parameters
    active: Active  # the quantities of this step
    starting: Active  # those of them with a row that begins here
    update: Update | None  # the update that ended here
    curvatures: LocalCurvature  # those of this rank's micro-batches
    state: ModelState
    start_values: Mapping[str, Tensor] | None  # copies of the parameters, for an update that begins here
    times: Callable[[], Times]

    @property
    def keeps(self) -> bool:
        """True if formed individual gradients are needed once more, when the update that begins here is known."""
        return self.starting.wants("update")


def look(session: Session, inputs: StepInputs) -> dict[str, LocalBatch]:
    """What each of the active quantities sees, by name.

    Raises:
        Exception: What went wrong on this rank; no other rank is left waiting for it.
    """
    exchanges = Exchanges(session, inputs.active)
    try:
        return _look(session, inputs, exchanges)
    except Exception:
        exchanges.give_up()
        raise


def _look(session: Session, inputs: StepInputs, exchanges: Exchanges) -> dict[str, LocalBatch]:
    step, totals, captured, active, update = inputs.step, inputs.totals, inputs.captured, inputs.active, inputs.update
    curvatures = inputs.curvatures
    setup = session.setup
    batches = [micro.scaled(totals.samples_per_weight, totals.n) for micro in captured]
    every_parameter = inputs.state.every
    parameters = {name: every_parameter[name] for name in setup.tracked}
    weight = totals.weight or 1.0
    curvature = {k: {n: h / weight for n, h in hs.items()} for k, hs in curvatures.diagonals.items()}
    nothing = torch.zeros(0, dtype=torch.float64, device=setup.device)
    losses = torch.cat([
        nothing,
        *(m.individual_losses(totals.samples_per_weight, totals.n, setup.device) for m in captured),
    ])
    wanted = {q.name: q.statistics(step, parameters, session.memory_of(q)) for q in active}

    norms = SquaredNorms(parameters) if active.wants("squared_norms") else None
    slopes = None
    if update is not None and not update.interrupted:
        slopes = Projection(update.direction, len(losses), setup.facts.parts_of_updates)
    statistics: list[Statistic] = [statistic for statistic in (norms, slopes) if statistic is not None]
    statistics += [statistic for each in wanted.values() for statistic in each.values()]

    names, blocks = list(parameters), setup.block_elements
    summed = _summed(session, inputs, exchanges, batches, statistics, norms)
    own = summed.part
    vectors: dict[object, Sequence[Tensor]] = {kind: list(hs.values()) for kind, hs in curvature.items()}
    vectors |= {MEAN: list(own.values())}
    vectors |= {} if summed.squares is None else {SQUARES: [summed.squares]}
    vectors |= {AVERAGED: list(inputs.parameter_gradients.times(1).values())} if AVERAGED in exchanges.kinds else {}
    if ROUNDING in exchanges.kinds and norms is not None:
        vectors |= {ROUNDING: [summed.rounded.pooled(name, norms) for name in names]}
    pooled = exchanges.pool(vectors)
    mean = ByParameter.of(pooled[MEAN], parameters) if MEAN in pooled else own
    mean_squared = kernels.squared_norms(list(mean.values())) if mean else nothing
    if ROUNDING in pooled and norms is not None:
        again = doubtful(names, pooled[ROUNDING].view(-1, 3), mean_squared, totals.n)
        if again:
            _sum_exactly(again, batches, inputs, exchanges, blocks, norms, own, mean)
            mean_squared = kernels.squared_norms(list(mean.values()))
    onto = Projection(mean, len(losses), in_double=True) if active.wants("projections") else None
    once_more = setup.memory_budget if inputs.keeps else 0
    walk(batches, every_parameter, names, [*summed.left, *([] if onto is None else [onto])], blocks, once_more)
    rank, size, n_parameters = setup.world.rank, setup.world.size, setup.facts.n_parameters
    mine = slice(n_parameters * rank // size, n_parameters * (rank + 1) // size)
    if update is not None and slopes is not None:
        update = update.ending(slopes.values / update.norm)
    batch = LocalBatch(
        model=setup.facts,
        step=step,
        n=totals.n,
        local_n=len(losses),
        rank=rank,
        world_size=size,
        loss=_sum_of_known([micro.total_loss(totals.samples_per_weight, totals.n) for micro in captured], setup.device),
        losses=losses,
        losses_known=all(micro.tells_losses for micro in captured),
        has_gradients=all(micro.has_gradients for micro in captured),
        parameters=parameters,
        every_parameter=every_parameter,
        initial=session.initial,
        statistics={},
        mean_gradient=mean,
        part_of_mean=own,
        mean_squared=mean_squared,
        squared_norms=nothing if norms is None else norms.flat,
        projections=nothing if onto is None else onto.values[0],
        shard=Shard(
            mean=mean.flat[mine] if mean and pooled.keys() - {MEAN, ROUNDING, AVERAGED} else nothing,
            squares=pooled.get(SQUARES, nothing)[mine],
            curvature={kind: flat[mine] for kind, flat in pooled.items() if isinstance(kind, Curvature)},
        ),
        observed=[],
        sizes={},
        output_gradients=_output_gradients(batches, setup.facts.leaves),
        backward=_backward(batches, setup.facts.layers),
        curvature=curvature,
        traces={kind: forms / weight for kind, forms in curvatures.traces.items()},
        eigenvalues=_eigenvalues(setup, totals, captured, exchanges),
        update=None,
        learning_rates=inputs.state.learning_rates,
        averaged=_averaged(inputs, parameters, pooled[AVERAGED] / size) if AVERAGED in pooled else None,
        times=inputs.times(),
    )
    return {
        q.name: batch.for_quantity(
            active.needs[q.name],
            statistics=wanted[q.name],
            observed=observed(captured, q.name),
            sizes=session.sizes.get(q.name, {}),
            update=update if q.starts(step - 1) else None,
        )
        for q in active
    }


@dataclass(frozen=True)
class _Summed:
    """What the individual gradients of this rank add up to."""

    part: ByParameter  # of G
    squares: Tensor | None  # of their elements; flat, float64
    rounded: RoundedNorms  # of the parameters whose part of G is autograd's, beside sums of squares
    left: Sequence[Statistic]  # what was not fed


def _summed(
    session: Session,
    inputs: StepInputs,
    exchanges: Exchanges,
    batches: Sequence[MicroBatch],
    statistics: Sequence[Statistic],
    norms: SquaredNorms | None,
) -> _Summed:
    """This rank's part of G, from autograd where its rounding may do; else in float64, in one walk with all others."""
    setup, active, parameters = (
        session.setup,
        inputs.active,
        {name: inputs.state.every[name] for name in session.setup.tracked},
    )
    told, rounded = None, RoundedNorms({}, {})
    if active.takes_autograds_sums and not setup.batch_statistics_are_constants:
        factors = sums_over_sequences(batches, list(parameters)) if active.subtracts_squares else {}
        if factors or not active.subtracts_squares:
            told = told_by_autograd(inputs.captured, inputs.parameter_gradients, inputs.totals)
        if told is not None:
            rounded = RoundedNorms(parameters, factors)
    if told is not None and not active.subtracts_squares:
        return _Summed(ByParameter(told), None, rounded, statistics)
    exact = {name: p for name, p in parameters.items() if name not in rounded.values}
    powers = PowerSums(exact) if SQUARES in exchanges.kinds else None
    adding = powers or (GradientSum(exact) if MEAN in exchanges.kinds else None)
    once_more = setup.memory_budget if inputs.keeps or active.wants("projections") else 0
    all_exact = [*statistics, *([] if adding is None else [adding])]
    once_more = walk(batches, inputs.state.every, list(exact), all_exact, setup.block_elements, once_more)
    if norms is not None and rounded.values:
        those = [rounded if statistic is norms else statistic for statistic in statistics]
        walk(batches, inputs.state.every, list(rounded.values), those, setup.block_elements, once_more)
        norms.replace(rounded)
    if adding is not None:
        adding.flat.div_(inputs.totals.n)
    part = ByParameter({}) if adding is None else ByParameter.of(adding.flat, exact)
    if told is not None:
        part = ByParameter({name: part[name] if name in part else told[name] for name in told})
    return _Summed(part, None if powers is None else powers.flat_squares, rounded, [])


def _sum_exactly(
    names: Sequence[str],
    batches: Sequence[MicroBatch],
    inputs: StepInputs,
    exchanges: Exchanges,
    block_elements: int,
    norms: SquaredNorms,
    own: ByParameter,
    mean: ByParameter,
) -> None:
    """Put sums in float64, over the very gradients that are squared, in the place of rounded ones."""
    parameters = {name: inputs.state.every[name] for name in names}
    exchanges.expect_more(sum(p.numel() for p in parameters.values()))
    again, adding = SquaredNorms(parameters), GradientSum(parameters)
    walk(batches, inputs.state.every, names, [again, adding], block_elements)
    norms.replace(again)
    pooled = ByParameter.of(exchanges.pool_more(adding.flat.div_(inputs.totals.n)), parameters)
    own.replace(adding.sums)
    mean.replace(pooled)


def told_by_autograd(
    captured: Sequence[Captured], parameter_gradients: ParameterGradients, totals: BatchTotals
) -> dict[str, Tensor] | None:
    """This rank's part of G, from what arrived at the parameters, by name, in the precision of autograd.

    ``None`` where it is not that: if several micro-batches came together, each with a scale of its own, and if
    autograd rounds it to less than float32.
    """
    present = [micro for micro in captured if micro.batch_size]
    if not present:
        return parameter_gradients.times(0)
    if (
        len(present) > 1
        or totals.is_mixed
        or parameter_gradients.is_rounded
        or present[0].beside.gradients
        or any(use.autocast is not None for use in present[0].uses)
    ):
        return None
    factor = present[0].scale.unscale * totals.samples_per_weight / totals.n
    return parameter_gradients.times(factor if present[0].weight else 0)


def _averaged(inputs: StepInputs, parameters: Mapping[str, Tensor], plain: Tensor) -> Averaged:
    """What the step left in ``.grad``, beside the plain average.

    Args:
        inputs: This rank's side of the step.
        parameters: The tracked parameters.
        plain: The mean over ranks of what arrived.
    """
    held = [inputs.parameter_gradients.added(name).reshape(-1) for name in inputs.parameter_gradients.left]
    nothing = torch.zeros((), dtype=torch.float64, device=plain.device)
    own = [micro for micro in inputs.captured if micro.weight]
    parts = [micro.weight / torch.as_tensor(micro.scale.unscale, device=plain.device).double() for micro in own]
    factor = torch.stack([nothing, *parts]).sum()
    flat = torch.cat(held) if held else torch.zeros_like(plain)
    return Averaged(ByParameter.of(flat, parameters), ByParameter.of(plain, parameters), factor)


def _eigenvalues(
    setup: Setup, totals: BatchTotals, captured: Sequence[Captured], exchanges: Exchanges
) -> dict[LargestEigenvalue, Eigenvalue]:
    result = {}
    for kind in exchanges.eigenvalues:
        result[kind] = largest_eigenvalue(
            kind, setup.world, setup.bare, setup.loss_fn, setup.tracked, captured, totals.weight, exchanges.confirm
        )
    return result


def _sum_of_known(values: Sequence[Tensor | float | None], device: torch.device) -> Tensor | None:
    """The sum, float64; ``None`` if one of the values is not known."""
    known = [torch.as_tensor(value, dtype=torch.float64, device=device) for value in values if value is not None]
    nothing = torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([nothing, *known]).sum() if len(known) == len(values) else None


def _backward(batches: Sequence[MicroBatch], layers: Mapping[str, Sequence[str]]) -> list[tuple[str, Tensor]]:
    """Gradients at the outputs of calls with parameters, by layer, in the order of the backward pass."""
    uses = [use for batch in batches for use in reversed(batch.uses) if use.layer.parameters]
    return [(use.layer.path, g) for use in uses if use.layer.path in layers for g in use.output_gradients.values()]


def _output_gradients(batches: Sequence[MicroBatch], leaves: Mapping[str, bool]) -> dict[str, list[Tensor]]:
    """Gradients at the outputs of modules."""
    gradients: dict[str, list[Tensor]] = {path: [] for path in leaves}
    for batch in batches:
        for use in batch.uses:
            if use.layer.scope in gradients:
                gradients[use.layer.path] += use.output_gradients.values()
    return gradients


def observed(captured: Sequence[Captured], name: str) -> list[list[tuple[str, Tensor]]]:
    """What one quantity kept of the outputs: by micro-batch, in forward order."""
    return [[(path, kept[name]) for path, kept in micro.observed if name in kept] for micro in captured]
