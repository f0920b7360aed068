"""The sums of a tracked step: computed, agreed on, packed, and sent on their way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from distcockpit.quantities.base import Quantity
from distcockpit.quantities.batch import LocalBatch, ReplicatedValue
from distcockpit.tracking.packed import Layout, pack
from distcockpit.tracking.pooling import StepInputs, look
from distcockpit.tracking.recorder import Result, Stamp
from distcockpit.tracking.session import Session
from distcockpit.tracking.update import Start
from distcockpit.world import COMPARE, Pending, RankFailed, World, record_of


def send(
    session: Session, inputs: StepInputs, stamp: Stamp, start_stamp: Stamp | None, riding: Mapping[str, Tensor]
) -> None:
    """Everything of this rank that is summed over ranks.

    Args:
        session: This rank's side of the run.
        inputs: This rank's side of the step.
        stamp: Of the step.
        start_stamp: Of the step at which the update began that ended here.
        riding: The user's scalars, by ``step/name``.

    Raises:
        RankFailed: If a rank failed, and no rank has sent anything.
        RuntimeError: If the ranks' sums differ in names or lengths.
    """
    setup, active = session.setup, inputs.active
    rows = [q for q in active if not active.needs[q.name].displacement]
    key = (tuple(q.name for q in rows), tuple(q.name for q in inputs.starting), inputs.update is not None)
    agreed = session.layouts.get(key)
    seen, sums, facts = _seen(session, inputs, rows, agreed)
    session.layouts[key] = _agreed(setup.world, Layout.of(sums), agreed, inputs.step)
    sums |= {f"log/{name}": value for name, value in riding.items()}
    stamps = dict.fromkeys(active.needs, stamp)
    if start_stamp is not None:
        stamps |= {q.name: start_stamp for q in active.with_need("update")}
    session.send(
        Result(
            stamp.n,
            [(q, stamps[q.name]) for q in rows],
            Layout.of(sums),
            setup.world.all_reduce_async(pack(sums, setup.device)),
            Layout.of(facts),
            Pending(pack(facts, setup.device)),
        )
    )
    if inputs.starting.wants("update", "displacement") and inputs.start_values is not None and seen:
        losses = next(iter(seen.values())).known_losses
        kept = [micro.batch.what_is_needed() for micro in inputs.captured] if inputs.starting.wants("update") else []
        displaced = inputs.starting.with_need("displacement")
        session.start = Start(stamp, inputs.start_values, losses, inputs.state.scale, kept, displaced)


def _seen(
    session: Session, inputs: StepInputs, rows: Sequence[Quantity], agreed: Layout | None
) -> tuple[Mapping[str, LocalBatch], dict[str, Tensor], dict[str, Tensor]]:
    """What each quantity sees, its sums and its facts: of one that fails here, NaN, for the others wait for them.

    Raises:
        RankFailed: If it is not known yet what its sums look like. The other ranks learn of it and send none.
    """
    device = session.setup.device
    sums: dict[str, Tensor] = {}
    facts: dict[str, Tensor] = {}

    def give_up(names: Sequence[str], error: Exception) -> None:
        if agreed is None:  # the others are about to compare
            session.setup.world.refuse(record_of(COMPARE, inputs.step))
            raise RankFailed from error
        why = f"{type(error).__name__}: {error}"
        session.say_once(f"failed {names}", f"step {inputs.step}: {', '.join(names)}: NaN, because of an error: {why}")
        unknown = torch.full((), torch.nan, dtype=torch.float64, device=device)
        for name in names:
            sums.update({part: unknown.expand(shape) for part, shape in agreed.by_owner.get(name, ())})

    try:
        seen = look(session, inputs)
    except Exception as error:
        give_up([q.name for q in rows], error)
        return {}, sums, facts
    for q in rows:
        try:
            parts = {f"{q.name}/{k}": v for k, v in q.local(seen[q.name], session.memory_of(q)).items()}
            own = {
                k: torch.as_tensor(v, dtype=torch.float64, device=device)
                for k, v in parts.items()
                if not isinstance(v, ReplicatedValue)
            }
        except Exception as error:
            give_up([q.name], error)
            continue
        sums |= own
        facts |= {k: v.value for k, v in parts.items() if isinstance(v, ReplicatedValue) and v.value is not None}
    return seen, sums, facts


def _agreed(world: World, mine: Layout, known: Layout | None, step: int) -> Layout:
    """The layout of the sums, if all ranks have it; they compare where it is new. Backends abort where lengths differ.

    Raises:
        RuntimeError: If a rank has another one.
    """
    if mine == known:
        return mine
    world.header(record_of(COMPARE, step))  # a rank for which nothing is new would be at another one
    told = [dict(layout.parts) for layout in world.all_gather_object(mine)]
    for rank, there in enumerate(told):
        for name in dict.fromkeys([*told[0], *there]):
            if told[0].get(name) != there.get(name):
                quantity, _, part = name.partition("/")
                raise RuntimeError(
                    f"Quantity '{quantity}' at step {step}: the sum '{part}' has shape {there.get(name, 'nothing')} on "
                    f"rank {rank}, and {told[0].get(name, 'nothing')} on rank 0. Names and shapes of what local() "
                    "returns must be the same on all ranks, also on one without samples."
                )
    return mine
