"""Updates of sharded models. No rank knows all of one, so each takes part in every exchange, whatever it has lost."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from distcockpit.gradients import kernels
from distcockpit.gradients.differences import Differences, Gathered
from distcockpit.gradients.factors import WHOLE
from distcockpit.gradients.generic import notices_of
from distcockpit.gradients.statistics import Projection
from distcockpit.gradients.walk import walk
from distcockpit.quantities.batch import ReplicatedValue, Update
from distcockpit.replay.devices import sent
from distcockpit.replay.memory import is_out_of_memory, release
from distcockpit.shards import is_piece
from distcockpit.tracking.active import Active
from distcockpit.tracking.gathering import gather
from distcockpit.tracking.packed import Layout, pack
from distcockpit.tracking.recorder import Result, Stamp
from distcockpit.tracking.session import Session
from distcockpit.tracking.setup import Setup
from distcockpit.tracking.updates import Start
from distcockpit.world import Pending

logger = logging.getLogger("distcockpit")


def ending(
    session: Session, step: int, previous: int, start: Start | None, active: Active, scale: float | None
) -> tuple[Update | None, Stamp | None]:
    """End the update that began at the step before: record how far it went, and return it if a quantity needs it.

    All ranks call it, and exchange the same, since what is due follows from schedules. What a rank has lost is NaN.

    Args:
        session: This rank's side of the run.
        step: The step that begins.
        previous: The latest step before.
        start: What this rank kept of the update.
        active: The quantities of the step.
        scale: Of the gradient scaler now.
    """
    if previous < 0 or step != previous + 1:
        return None, None
    start = start if start is not None and start.stamp.step == previous else None
    displaced(session, previous, start)
    if not any(q.starts(previous) for q in active.with_need("update")):
        return None, None
    stamp = Stamp(previous, None, time.time(), 0) if start is None else start.stamp
    return project(session, start, scale), stamp


def project(session: Session, start: Start | None, scale: float | None) -> Update:
    """Return an update, and the slopes of this rank's starting samples along it; all ranks call it.

    Args:
        session: This rank's side of the run.
        start: What this rank kept of the update's start; if a rank lost it, the update is NaN on all.
        scale: Of the gradient scaler now.
    """
    setup = session.setup
    parts, names, world = setup.facts.parts_of_updates, list(setup.tracked), setup.world
    pieces = None if start is None else Differences(setup.held, start.values)
    own = _squares(setup, pieces)
    with session.clock.waiting():
        squares, lost = world.all_reduce(own).split([len(names), 1])
    norm, norms = world.insist(lambda: _norms(squares, [[names.index(name) for name in part] for part in parts]))
    losses = lost.new_full((1,), torch.nan) if start is None else start.losses
    direction, changed = Gathered(pieces, names, setup.device), start is not None and start.inputs_changed
    onto = world.insist(lambda: Projection(direction, len(losses), parts))
    values = {**setup.tracked, **_whole_before(setup, start)}
    for bucket in setup.buckets:
        try:
            with session.clock.waiting():
                found = gather(setup, bucket, pieces)
            direction.hold(bucket, found)
            if start is not None and not changed:
                rows = {name: part for name, part in bucket.items() if part != WHOLE}
                walk(start.batches, values, list(bucket), [onto], setup.block_elements, rows=rows)
        except Exception as error:  # the others go on with the next bucket
            if world.is_broken:
                raise
            _lost(session, "The slopes at its start are unknown.", error)
            onto.values.fill_(torch.nan)
        direction.drop(bucket)
    slopes = onto.values / norm
    if start is None:
        return Update(norm, norms, direction, losses, slopes, slopes[:, :0], 0, False, False, True)
    for topic, text in notices_of(start.batches):
        session.say_once(topic, text)
    is_another = start.norm is not None and not math.isclose(float(norm), float(start.norm), rel_tol=1e-6)
    return Update(
        norm,
        norms,
        direction,
        losses,
        slopes if start.slopes is None else start.slopes,
        slopes[:, :0],
        start.stamp.n,
        inputs_changed=changed,
        skipped=start.scale is not None and scale is not None and scale < start.scale,
        interrupted=is_another or lost[0] > 0,
    )


def displaced(session: Session, step: int, start: Start | None, *, if_moved: bool = False) -> None:
    """Record how far the optimizer's step went, for the quantities that want to know; all ranks call it.

    Args:
        session: This rank's side of the run.
        step: The step at which the update began.
        start: What this rank kept of it.
        if_moved: Whether to record nothing if no parameter has moved.
    """
    setup, world, agreements = session.setup, session.setup.world, session.agreements
    wanting = [q for q in setup.quantities if q.needs.displacement and q.starts(step)]
    if not wanting:
        return
    pieces = None if start is None else Differences(setup.held, start.values)
    if if_moved and not float(world.all_reduce(_squares(setup, pieces)).sum()):
        return  # NaN has moved
    if not session.updates.begins_recording(step):  # a step that is tried again began no other update
        return
    selection = ("displacement", *(q.name for q in wanting))
    sums: dict[str, Tensor] = {}
    facts: dict[str, Tensor] = {}
    own, is_known = {} if pieces is None else setup.own(pieces), pieces is not None
    for q in wanting if is_known else ():
        try:
            told = q.displacement(step, own, session.memories.of(q))
        except Exception as error:
            _lost(session, f"{q.name}: NaN.", error)
            is_known = False
            continue
        for key, value in told.items():
            if not isinstance(value, ReplicatedValue):
                sums[f"{q.name}/{key}"] = value
            elif value.value is not None:
                facts[f"{q.name}/{key}"] = value.value
    sums_there, facts_there = agreements.layout_of(selection), agreements.replicated_of(selection)
    if sums_there is not None and facts_there is not None and not is_known:
        is_known, nan = True, world.insist(lambda: torch.full((), torch.nan, dtype=torch.float64, device=setup.device))
        sums = {name: sums.get(name, nan.expand(shape)) for name, shape in sums_there.parts}
        facts = {name: facts.get(name, nan.expand(shape)) for name, shape in facts_there.parts}
    if not agreements.agree_on_layout(selection, Layout.of(sums) if is_known else None, step):
        return  # a rank has nothing to tell, and does not know yet how to say so
    agreements.note_replicated(selection, Layout.of(facts))
    pooled = world.all_reduce_async(world.insist(lambda: pack(sums, setup.device)))
    if session.recorder is not None and start is not None:
        rows = [(q, start.stamp) for q in wanting]
        told_here = Pending(world.insist(lambda: pack(facts, setup.device)))
        session.send(Result(start.stamp.n, rows, Layout.of(sums), pooled, Layout.of(facts), told_here))
    else:
        session.await_later(pooled)


def _whole_before(setup: Setup, start: Start | None) -> dict[str, Tensor]:
    """Return the parameters that are not sharded (``ignored_params``), as they were when an update began."""
    if start is None or setup.shards is None:
        return {}
    pieces = setup.shards.pieces
    return {name: start.values[name] for name in setup.tracked if not is_piece(pieces[name].parameter)}


def _norms(squares: Tensor, parts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return ``|d|``, and ``|d_k|`` of parts of d, from ``|d|^2`` by parameter."""
    norm = squares.sum().sqrt()
    if len(parts) == 1:
        return norm, norm.reshape(1)
    return norm, torch.stack([squares[list(part)].sum().sqrt() for part in parts])


def _squares(setup: Setup, pieces: Differences | None) -> Tensor:
    """Return this rank's part of ``|d|^2`` by parameter, and 1 if it is lost: float64 ``[parameters + 1]``.

    NaN, which leaves NaN on all ranks, if it is lost.
    """
    try:
        if pieces is not None:
            own = setup.own(pieces)
            squares = [kernels.squared_norm(own[name]).to(setup.device) for name in setup.tracked]
            return torch.stack([*squares, squares[0].new_zeros(())])
    except Exception as error:
        if is_out_of_memory(error):
            release(error)
    lost = [torch.nan] * len(setup.tracked) + [1.0]
    return setup.world.insist(lambda: sent(lost, setup.device))


def _lost(session: Session, what: str, error: Exception) -> None:
    if is_out_of_memory(error):
        release(error)
        session.ran_out_of_memory(session.last_step, what, error)
    else:
        text = f"step {session.last_step}: the update that ended here. {what} {type(error).__name__}: {error}"
        session.say_once(f"update {what}", text)


def last_update(session: Session) -> None:
    """Record the displacement of the last update of the run, if the optimizer has made its step since."""
    step, start = session.last_step, session.updates.start
    try:
        if session.setup.shards is None:
            session.updates.close()
        else:
            displaced(session, step, start if start is not None and start.stamp.step == step else None, if_moved=True)
    except Exception as error:
        if session.setup.world.is_broken:
            raise
        logger.warning("distcockpit: the last update could not be recorded (%s).", error)  # others wait for this rank
