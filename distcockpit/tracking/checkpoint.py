"""The cockpit's own state: what a resumed run needs to write the same rows as an uninterrupted one.

It comprises what quantities keep from step to step (bin ranges, gradients for cosines), the initial parameters, and an
update in progress: the parameters before it, the losses of its samples and their slopes along it, which cannot be
recomputed later. Random numbers of estimates need no state: they are derived from the seed, the step and the rank.

Rank 0's state is complete and can be loaded with any number of ranks. Another rank's state holds what that rank needs;
if each rank saves its own, each may load its own.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from distcockpit.shards import local
from distcockpit.tracking import sharded
from distcockpit.tracking.recorder import Stamp
from distcockpit.tracking.session import Session
from distcockpit.tracking.updates import Start
from distcockpit.tracking.userlog import LogEntry
from distcockpit.world import STATE, record_of

VERSION = 2

State = dict[str, Any]


def save(session: Session) -> State:
    """See ``DistCockpit.state_dict``; all ranks call it.

    Raises:
        RuntimeError: If a step has not ended, or the ranks are at different steps.
    """
    if session.is_inside:
        raise RuntimeError(
            f"state_dict(): step {session.last_step} has not ended. Call it outside of `track`, after optimizer.step()."
        )
    world, quantities = session.setup.world, session.setup.quantities
    riding = session.userlog.riding_values()
    records = world.header(record_of(STATE, session.last_step, batch_size=session.updates.start is not None))
    if absent := [rank for rank, record in enumerate(records) if record["joined"]]:
        raise RuntimeError(
            f"state_dict(): ranks {absent} have run out of data and are waiting in Join. Call it after `with "
            "Join(...)`, or while all ranks still have data."
        )
    memory = {q.name: _kept(session.memories.of(q)) for q in quantities}
    by_samples = {q.name: memory[q.name] for q in quantities if q.remembers_samples}
    kept = session.updates.start
    if session.setup.shards is not None and any(not record["batch_size"] for record in records):
        kept = None  # all ranks take part in what follows, or none
    start = None if kept is None else _start(session, kept)
    mine = {"memory": by_samples, "samples": start and start.pop("samples"), "riding": riding}
    by_rank = world.gather_object(mine) or [mine if rank == world.rank else None for rank in range(world.size)]
    if start is not None:
        start["samples"] = {rank: part["samples"] for rank, part in enumerate(by_rank) if part is not None}
    return {
        "version": VERSION,
        "world_size": world.size,
        "shard": None if session.setup.shards is None else world.rank,
        "step": session.last_step,
        "elapsed": session.clock.elapsed,
        "memory": {name: kept for name, kept in memory.items() if name not in by_samples},
        "local_memory": {
            name: {rank: part["memory"][name] for rank, part in enumerate(by_rank) if part is not None}
            for name in by_samples
        },
        "initial": _kept(session.initial),
        "start": start,
        "log": _logs(session, [part["riding"] for part in by_rank if part is not None]),
    }


def load(session: Session, state: Mapping[str, Any]) -> None:
    """See ``DistCockpit.load_state_dict``; all ranks call it.

    Raises:
        RuntimeError: If a step was tracked already, or the ranks load different states.
        ValueError: If this is not the state of a matching cockpit.
    """
    try:
        _check(session, state)
        problem = None
    except (RuntimeError, ValueError) as error:
        problem = error
    world, device = session.setup.world, session.setup.device
    # An update that no quantity needs from both ends is known to rank 0 only.
    steps = world.all_gather_object(
        (None, None) if problem else (state["step"], (state["start"] or {}).get("norm") is not None)
    )
    if problem is not None:
        raise problem
    for rank, told in enumerate(steps):
        if told[0] is None:
            raise RuntimeError(f"load_state_dict(): rank {rank} could not load its state; see the error on that rank.")
        if told != steps[0]:
            raise RuntimeError(
                f"load_state_dict(): rank {rank} loads the state saved after step {told[0]}, rank 0 the one after step "
                f"{steps[0][0]}. Load the same checkpoint on all ranks."
            )
    session.resume(state["step"], _kept(state["initial"], device) if session.keeps_initial else {})
    session.clock.go_on_from(state["elapsed"])
    same_ranks = state["world_size"] == world.size
    for q in session.setup.quantities:
        if q.remembers_samples:
            kept = state["local_memory"].get(q.name, {}).get(world.rank, {}) if same_ranks else {}
        else:
            kept = state["memory"].get(q.name, {})
        session.memories.restore(q, _kept(kept, device))
    if state["start"] is not None:
        session.updates.resume(_started(session, state["start"], same_ranks))
    if session.recorder is not None:
        session.userlog.restore([LogEntry(**entry) for entry in copy.deepcopy(state["log"])])


def _check(session: Session, state: Mapping[str, Any]) -> None:
    """Check whether this rank can load the state.

    Raises:
        RuntimeError: If a step was tracked already.
        ValueError: If this is not the state of a matching cockpit.
    """
    if not session.may_load:
        raise RuntimeError(
            f"load_state_dict(): step {session.last_step} is already tracked or logged. Call it before the first step."
        )
    if state.get("version") != VERSION:
        raise ValueError(
            f"load_state_dict(): the state has version {state.get('version')!r}, but this distcockpit reads {VERSION}. "
            "Pass it what state_dict() returned, or resume without it: the run then has a seam."
        )
    saved, now = (state["start"] or {}).get("optimizers"), list(session.setup.facts.optimizers)
    if saved is not None and sorted(saved) != sorted(now):
        raise ValueError(
            f"load_state_dict(): the state is from a run with optimizers {saved}, this one has {now}. Pass DistCockpit "
            "optimizers with the same names."
        )
    is_sharded = session.setup.shards is not None
    if (state.get("shard") is not None) != is_sharded:
        here, there = ("sharded", "unsharded") if is_sharded else ("unsharded", "sharded")
        raise ValueError(
            f"load_state_dict(): the state is that of a model that was {there}, but this one is {here}. Resume without "
            "it: the run then has a seam."
        )
    world = session.setup.world
    if is_sharded and (state["shard"], state["world_size"]) != (world.rank, world.size):
        raise ValueError(
            f"load_state_dict(): the state belongs to rank {state['shard']} of {state['world_size']}, but this is rank "
            f"{world.rank} of {world.size}. A sharded run keeps one state per rank: save and load each rank's own, "
            "with the same number of ranks, or resume without it: the run then has a seam."
        )
    every = {name: tuple(local(p).shape) for name, p in session.setup.parameters.items()}
    for kept in (state["initial"], (state["start"] or {}).get("values") or {}):
        for name, value in kept.items():
            if tuple(value.shape) not in (every.get(name), *[(0,)] * is_sharded):
                raise ValueError(
                    f"load_state_dict(): the state holds parameter '{name}' of shape {tuple(value.shape)}, but the "
                    f"model has {every.get(name, 'none')}. Load the state of a run with this model."
                )


def _start(session: Session, start: Start) -> State:
    """Return an update that began at the latest step, with what is known about this rank's samples now."""
    setup = session.setup
    looks = any(q.starts(start.stamp.step) and q.needs.update for q in setup.quantities)
    samples, norm = None, None
    if looks:
        # Training may go on, and the optimizer may step only afterwards: keep nothing of this.
        fresh = dataclasses.replace(start, _displacement=[])
        if setup.shards is not None:
            update = sharded.project(session, fresh, start.scale)
        else:
            update = fresh.project(setup.tracked, start.scale, setup)
        norm = float(update.norm)
        samples = {"losses": update.start_losses.cpu().clone(), "slopes": update.start_slopes.cpu().clone()}
        samples["inputs_changed"] = torch.tensor(update.inputs_changed, device="cpu")
    return {
        **dataclasses.asdict(start.stamp),
        "values": _kept(start.values),
        "scale": start.scale,
        "displaced": [q.name for q in start.displaced],
        "norm": norm,
        "optimizers": list(setup.facts.optimizers),
        "samples": samples,
    }


def _started(session: Session, state: Mapping[str, Any], same_ranks: bool) -> Start:
    setup = session.setup
    parts = {int(rank): part for rank, part in state["samples"].items() if part is not None}
    if same_ranks:
        mine = [parts[setup.world.rank]] if setup.world.rank in parts else []
    else:
        mine = list(parts.values()) if setup.world.rank == 0 else []
    nothing = torch.zeros(len(setup.facts.parts_of_updates), 0, dtype=torch.float64, device="cpu")
    losses = torch.cat([nothing[0], *(part["losses"] for part in mine)])
    slopes = torch.cat([nothing, *(part["slopes"] for part in mine)], 1)
    slopes = slopes[_order(state["optimizers"], list(setup.facts.optimizers), len(slopes))]
    quantities = {q.name: q for q in setup.quantities}
    return Start(
        Stamp(state["step"], state["epoch"], state["wall_time"], state["n"]),
        _kept(state["values"], setup.device),
        losses.to(setup.device),
        state["scale"],
        [],
        [quantities[name] for name in state["displaced"] if name in quantities],
        slopes=slopes.to(setup.device),
        norm=state["norm"],
        inputs_were_changed=any(bool(part["inputs_changed"]) for part in mine),
        keeps_displacement=setup.may_copy_parameters,  # so that all is added up in the same order
    )


def _order(saved: list[str], now: list[str], n_parts: int) -> list[int]:
    """Return where each current optimizer's part is in the saved state; parameters without optimizer come last."""
    return [*(saved.index(name) for name in now), *range(len(now), n_parts)]


def _logs(session: Session, riding: list[Mapping[str, tuple[str, float]]]) -> list[State]:
    """Return the user's log rows that may still change, with the values they would be pooled to; on rank 0.

    Everything older is committed first.
    """
    if session.recorder is None:
        return []
    session.userlog.hand_on(at_once=True)
    session.recorder.flush()
    entries = copy.deepcopy(session.userlog.entries)
    for entry in entries.values():
        entry.values = {name: float(value) for name, value in entry.values.items()}
        entry.values |= session.recorder.pooled(entry.step)
    for key, reduce in {key: reduce for part in riding for key, (reduce, _) in part.items()}.items():
        step, _, name = key.partition("/")
        values = [part[key][1] for part in riding if key in part]
        if int(step) in entries:
            entries[int(step)].values[name] = sum(values) / (len(values) if reduce == "mean" else 1)
    return [dataclasses.asdict(entry) for entry in entries.values()]


def _kept(value: Any, device: torch.device | str = "cpu") -> Any:
    """Return a copy that shares nothing with the original, in plain containers, with its tensors on ``device``."""
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    if isinstance(value, Mapping):
        return {key: _kept(each, device) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_kept(each, device) for each in value)
    return copy.deepcopy(value)
