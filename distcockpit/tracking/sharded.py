"""Updates of sharded models. No rank knows all of one, so each takes part in every exchange, whatever it has lost."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from distcockpit.gradients import kernels
from distcockpit.gradients.differences import Differences, Gathered
from distcockpit.gradients.factors import WHOLE
from distcockpit.gradients.generic import notices_of
from distcockpit.gradients.statistics import Projection
from distcockpit.gradients.walk import walk
from distcockpit.quantities.batch import ReplicatedValue, Update
from distcockpit.replay.memory import insist, is_out_of_memory, release
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
    squares = _squares(setup, pieces)
    world.all_reduce(squares)
    norm, norms = insist(lambda: _norms(squares, [[names.index(name) for name in part] for part in parts]))
    losses = squares[:0] if start is None else start.losses
    direction, changed = Gathered(pieces, names, setup.device), start is not None and start.inputs_changed
    onto = insist(lambda: Projection(direction, len(losses), parts))
    for bucket in setup.buckets:
        try:
            direction.hold(bucket, gather(setup, bucket, pieces))
            if start is not None and not changed:
                rows = {name: part for name, part in bucket.items() if part != WHOLE}
                walk(start.batches, setup.tracked, list(bucket), [onto], setup.block_elements, rows=rows)
        except Exception as error:  # the others go on with the next bucket
            if world.is_broken:
                raise
            _lost(session, "The slopes at its start are unknown.", error)
            onto.values.fill_(torch.nan)
        direction.drop(bucket)
    slopes = onto.values / norm
    if start is None:
        return Update(norm, norms, direction, losses, slopes, slopes[:, :0], 0, False, False)
    for topic, text in notices_of(start.batches):
        session.say_once(topic, text)
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
        interrupted=start.norm is not None and not math.isclose(float(norm), float(start.norm), rel_tol=1e-6),
    )


def displaced(session: Session, step: int, start: Start | None, *, if_moved: bool = False) -> None:
    """Record how far the optimizer's step went, for the quantities that want to know; all ranks call it.

    Args:
        session: This rank's side of the run.
        step: The step at which the update began.
        start: What this rank kept of it.
        if_moved: Whether to record nothing if no parameter has moved.
    """
    setup, world = session.setup, session.setup.world
    wanting = [q for q in setup.quantities if q.needs.displacement and q.starts(step)]
    if not wanting:
        return
    pieces = None if start is None else Differences(setup.held, start.values)
    if if_moved:
        moved = _squares(setup, pieces).sum().reshape(1)
        if not float(world.all_reduce(moved)):
            return
    sums: dict[str, Tensor] = {}
    facts: dict[str, Tensor] = {}
    for q in wanting:
        try:
            told = q.displacement(step, _own(setup, pieces), session.memories.of(q))
        except Exception as error:
            _lost(session, f"{q.name}: NaN.", error)
            told = insist(lambda q=q: q.displacement(step, _own(setup, None), session.memories.of(q)))  # type: ignore[misc]
        for key, value in told.items():
            if not isinstance(value, ReplicatedValue):
                sums[f"{q.name}/{key}"] = value
            elif value.value is not None:
                facts[f"{q.name}/{key}"] = value.value
    pooled = world.all_reduce_async(insist(lambda: pack(sums, setup.device)))
    if session.recorder is not None and start is not None:
        rows = [(q, start.stamp) for q in wanting]
        told_here = Pending(pack(facts, setup.device))
        session.send(Result(start.stamp.n, rows, Layout.of(sums), pooled, Layout.of(facts), told_here))
    else:
        session.await_later(pooled)


def _norms(squares: Tensor, parts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return ``|d|``, and ``|d_k|`` of parts of d, from ``|d|^2`` by parameter."""
    norm = squares.sum().sqrt()
    if len(parts) == 1:
        return norm, norm.reshape(1)
    return norm, torch.stack([squares[list(part)].sum().sqrt() for part in parts])


def _own(setup: Setup, pieces: Differences | None) -> Mapping[str, Tensor]:
    """Return what this rank answers for of an update; NaN if it is lost."""
    if pieces is None:
        nothing = torch.full((), torch.nan, device=setup.device)
        return setup.own({name: nothing.expand(value.shape) for name, value in setup.held.items()})
    return setup.own(pieces)


def _squares(setup: Setup, pieces: Differences | None) -> Tensor:
    """Return this rank's part of ``|d|^2`` by parameter: float64 ``[parameters]``, NaN if it is lost."""
    try:
        own = _own(setup, pieces)
        return torch.stack([kernels.squared_norm(own[name]).to(setup.device) for name in setup.tracked])
    except Exception as error:
        if is_out_of_memory(error):
            release(error)
        count = len(setup.tracked)
        return insist(lambda: torch.full((count,), torch.nan, dtype=torch.float64, device=setup.device))


def _lost(session: Session, what: str, error: Exception) -> None:
    if is_out_of_memory(error):
        release(error)
        session.ran_out_of_memory(session.last_step, what, error)
    else:
        text = f"step {session.last_step}: the update that ended here. {what} {type(error).__name__}: {error}"
        session.say_once(f"update {what}", text)


def last_update(session: Session) -> None:
    """Record the displacement of the last update of the run, if the optimizer has made its step since."""
    try:
        if session.setup.shards is None:
            session.updates.close()
        else:
            displaced(session, session.last_step, session.updates.start, if_moved=True)
    except Exception as error:
        if session.setup.world.is_broken:
            raise
        logger.warning("distcockpit: the last update could not be recorded (%s).", error)  # others wait for this rank
