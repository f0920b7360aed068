"""What each quantity sees of a step: sums over individual gradients, and what ranks hold together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from distcockpit.curvature.lanczos import Eigenvalue, LargestEigenvalue, NotTwiceError, largest_eigenvalue
from distcockpit.gradients import kernels
from distcockpit.gradients.differences import Differences, Gathered
from distcockpit.gradients.statistics import Projection, SquaredNorms, Statistic
from distcockpit.gradients.uses import MicroBatch
from distcockpit.losses.captured import CapturedMicroBatch
from distcockpit.quantities.batch import Held, LocalBatch
from distcockpit.replay.devices import sent
from distcockpit.replay.memory import is_out_of_memory, release
from distcockpit.replay.trees import memory_of, tensors
from distcockpit.shards import local
from distcockpit.tracking.buckets import BucketWalk
from distcockpit.tracking.exchanges import Exchanges
from distcockpit.tracking.inputs import StepInputs
from distcockpit.tracking.reductions import Reductions
from distcockpit.tracking.session import Session


def local_batches(session: Session, inputs: StepInputs, reductions: Reductions) -> dict[str, LocalBatch]:
    """Compute what each active quantity sees, by name.

    Args:
        session: This rank's side of the run.
        inputs: This rank's side of the step.
        reductions: What quantities make of the sums of each bucket.

    Raises:
        Exception: Whatever went wrong on this rank; no other rank is left waiting.
    """
    setup, rounds = session.setup, inputs.header.totals.rounds
    gathered: list[Gathered] = []
    if inputs.update is not None and isinstance(inputs.update.direction, Gathered):
        gathered.append(inputs.update.direction)
    if setup.shards is not None and inputs.active.wants("values"):
        gathered.append(Gathered(setup.held, setup.tracked, setup.device))
    exchanges = Exchanges(setup, session.clock, inputs.active, rounds=rounds, gathers=len(gathered))
    try:
        return _local_batches(session, inputs, exchanges, reductions, gathered)
    except Exception as error:
        if is_out_of_memory(error):
            release(error)
        exchanges.give_up()
        raise


def _local_batches(
    session: Session, inputs: StepInputs, exchanges: Exchanges, reductions: Reductions, gathered: Sequence[Gathered]
) -> dict[str, LocalBatch]:
    setup, step, active, update = session.setup, inputs.step, inputs.active, inputs.update
    totals, state, captured = inputs.header.totals, inputs.header.state, inputs.captured
    batches = [micro.scaled(totals.samples_per_weight, totals.n) for micro in captured]
    parameters = {name: state.every[name] for name in setup.tracked}
    weight = totals.weight or 1.0
    curvature = {k: {n: h / weight for n, h in hs.items()} for k, hs in inputs.curvatures.diagonals.items()}
    nothing = torch.zeros(0, dtype=torch.float64, device=setup.device)
    losses = torch.cat([
        nothing,
        *(m.individual_losses(totals.samples_per_weight, totals.n, setup.device) for m in captured),
    ])
    is_sharded = setup.shards is not None
    values = gathered[-1] if is_sharded and active.wants("values") else parameters
    wanted = {
        q.name: q.statistics(step, values if active.needs[q.name].values else parameters, session.memories.of(q))
        for q in active
    }

    norms = SquaredNorms(parameters) if active.wants("squared_norms") else None
    slopes = None
    if update is not None and update.direction and (is_sharded or not update.interrupted):
        slopes = Projection(update.direction, len(losses), setup.facts.parts_of_updates)
    statistics: list[Statistic] = [statistic for statistic in (norms, slopes) if statistic is not None]
    statistics += [statistic for each in wanted.values() for statistic in each.values()]
    sums = BucketWalk(
        setup,
        inputs,
        batches,
        exchanges,
        curvature,
        statistics,
        norms,
        len(losses),
        reductions,
        session.doubts,
        gathered,
    ).walk()
    if update is not None and slopes is not None:
        update = update.ending(slopes.values / update.norm)
    batch = LocalBatch(
        model=setup.facts,
        step=step,
        n=totals.n,
        local_n=len(losses),
        rank=setup.world.rank,
        world_size=setup.world.size,
        loss=_sum_of_known([micro.total_loss(totals.samples_per_weight, totals.n) for micro in captured], setup.device),
        losses=losses,
        losses_known=all(micro.tells_losses for micro in captured),
        has_gradients=all(micro.has_gradients for micro in captured),
        parameters=parameters,
        every_parameter={name: local(p) for name, p in setup.parameters.items()} if is_sharded else state.every,
        own_parameters=setup.own(setup.held if is_sharded else parameters),
        pieces=None if setup.shards is None else setup.shards.pieces,
        initial=session.initial,
        statistics={},
        reduced={},
        mean_gradient={name: sums.mean[name] for name in parameters if name in sums.mean},
        part_of_mean={name: sums.part_of_mean[name] for name in parameters if name in sums.part_of_mean},
        mean_squared=sums.mean_squared,
        squared_norms=nothing if norms is None else norms.flat,
        projections=sums.projections,
        observed=[],
        sizes={},
        output_gradients=_output_gradients(batches, setup.facts.leaves),
        backward=_backward(batches, setup.facts.layers) if active.wants("backward") else [],
        curvature=curvature,
        traces={kind: forms / weight for kind, forms in inputs.curvatures.traces.items()},
        eigenvalues=_eigenvalues(session, inputs, exchanges),
        update=None,
        learning_rates=state.learning_rates,
        scale_of_grad=_scale_of_grad(inputs, setup.device),
        times=inputs.times(),
        held=_held(session, inputs, batches) if active.wants("held") else None,
    )
    return {
        q.name: batch.for_quantity(
            active.needs[q.name],
            statistics=wanted[q.name],
            reduced=reductions.of(q),
            observed=observed(captured, q.name),
            sizes=session.agreements.sizes_of(q.name),
            update=update if q.starts(step - 1) else None,
        )
        for q in active
    }


def _held(session: Session, inputs: StepInputs, batches: Sequence[MicroBatch]) -> Held:
    uses = [use for batch in batches for use in batch.uses]
    kept = ((*tensors((use.args, use.kwargs)), *use.values.values(), *use.output_gradients.values()) for use in uses)
    of_calls = [tensor for each in kept for tensor in each]
    parameters = {memory_of(local(p)) for p in session.setup.parameters.values()}
    factors = {memory_of(t): _bytes(t) for t in of_calls}
    direction = inputs.update.direction if inputs.update is not None else None
    copies = [*session.initial.values(), *session.updates.spare, *inputs.parameter_gradients.copies]
    copies += direction.kept if isinstance(direction, Differences) else ()
    return Held(
        sum(size for memory, size in factors.items() if memory not in parameters), sum(_bytes(t) for t in copies)
    )


def _bytes(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().nbytes()  # a view keeps all of it
    except (RuntimeError, NotImplementedError):  # no plain memory
        return tensor.numel() * tensor.element_size()


def _scale_of_grad(inputs: StepInputs, device: torch.device) -> Tensor:
    """Return this rank's part of what ``.grad`` is to be divided by, to be in units of G."""
    own = [micro for micro in inputs.captured if micro.weight]
    parts = [micro.weight / sent(micro.scale.unscale, device) for micro in own]
    return torch.stack([torch.zeros((), dtype=torch.float64, device=device), *parts]).sum()


def _eigenvalues(session: Session, inputs: StepInputs, exchanges: Exchanges) -> dict[LargestEigenvalue, Eigenvalue]:
    s, weight = session.setup, inputs.header.totals.weight
    result = {}
    for kind in exchanges.eigenvalues:
        wanting = [q for q in inputs.active if q.needs.eigenvalue == kind]
        try:
            result[kind] = largest_eigenvalue(
                kind, s.world, s.bare, s.loss_fn, s.trainable, inputs.captured, weight, exchanges.confirm
            )
        except NotTwiceError as error:
            if any(q.required for q in wanting):
                raise
            session.say_once("eigenvalue", f"step {inputs.step}: {', '.join(q.name for q in wanting)}: NaN. {error}")
            result[kind] = Eigenvalue(float("nan"), "not_computed", 0)
    return result


def _sum_of_known(values: Sequence[Tensor | float | None], device: torch.device) -> Tensor | None:
    """Return the sum, float64; ``None`` if one of the values is unknown."""
    known = [sent(value, device) for value in values if value is not None]
    nothing = torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([nothing, *known]).sum() if len(known) == len(values) else None


def _backward(batches: Sequence[MicroBatch], layers: Mapping[str, Sequence[str]]) -> list[tuple[str, Tensor]]:
    """Return the extremes of gradients at the outputs of calls with parameters, by layer, in backward order."""
    found: list[tuple[str, Tensor]] = []
    for use in (use for batch in batches for use in reversed(batch.uses)):
        if use.layer.parameters and use.layer.path in layers:
            seen = map(kernels.extremes, use.output_gradients.values()) if use.extremes is None else [use.extremes]
            found += [(use.layer.path, pair) for pair in seen]
    return found


def _output_gradients(batches: Sequence[MicroBatch], leaves: Mapping[str, bool]) -> dict[str, list[Tensor]]:
    """Return the gradients at the outputs of modules."""
    gradients: dict[str, list[Tensor]] = {path: [] for path in leaves}
    for batch in batches:
        for use in batch.uses:
            if use.layer.scope in gradients:
                gradients[use.layer.path] += use.output_gradients.values()
    return gradients


def observed(captured: Sequence[CapturedMicroBatch], name: str) -> list[list[tuple[str, Tensor]]]:
    """Return what one quantity kept of the outputs: by micro-batch, in forward order."""
    return [[(path, kept[name]) for path, kept in micro.observed if name in kept] for micro in captured]
