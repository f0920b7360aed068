"""The sums of a tracked step: computed, agreed on, packed, and sent on their way."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from distcockpit.packed import Layout, pack
from distcockpit.pooling import Side, look
from distcockpit.quantities.batch import Fact
from distcockpit.recorder import Result, Stamp
from distcockpit.reduce import COMPARE, Pending, World, record_of
from distcockpit.session import Session
from distcockpit.update import Start


def send(session: Session, side: Side, stamp: Stamp, start_stamp: Stamp | None, riding: Mapping[str, Tensor]) -> None:
    """Everything of this rank that is summed over ranks.

    Args:
        session: This rank's side of the run.
        side: This rank's side of the step.
        stamp: Of the step.
        start_stamp: Of the step at which the update began that ended here.
        riding: The user's scalars, by ``step/name``.

    Raises:
        RuntimeError: If the ranks' sums differ in names or lengths.
    """
    setup, active = session.setup, side.active
    rows = [q for q in active if not active.needs[q.name].displacement]
    key = (tuple(q.name for q in rows), tuple(q.name for q in side.starting), side.update is not None)
    agreed = session.layouts.get(key)
    try:
        seen = look(session, side)
        parts = {f"{q.name}/{k}": v for q in rows for k, v in q.local(seen[q.name], session.memory_of(q)).items()}
        sums = {
            name: torch.as_tensor(value, dtype=torch.float64, device=setup.device)
            for name, value in parts.items()
            if not isinstance(value, Fact)
        }
    except Exception:
        if agreed is None:  # the others are about to compare
            setup.world.refuse(record_of(COMPARE, side.step))
        raise
    session.layouts[key] = _agreed(setup.world, Layout.of(sums), agreed, side.step)
    sums |= {f"log/{name}": value for name, value in riding.items()}
    facts = {name: v.value for name, v in parts.items() if isinstance(v, Fact) and v.value is not None}
    stamps = dict.fromkeys(active.needs, stamp)
    if start_stamp is not None:
        stamps |= {q.name: start_stamp for q in active.with_need("update")}
    session.send(
        Result(
            stamp.n,
            [(q, stamps[q.name]) for q in rows],
            Layout.of(sums),
            setup.world.sum(pack(sums, setup.device)),
            Layout.of(facts),
            Pending(pack(facts, setup.device)),
        )
    )
    if side.starting.wants("update", "displacement") and side.start_values is not None:
        losses = next(iter(seen.values())).known_losses
        kept = [micro.batch.what_is_needed() for micro in side.captured] if side.starting.wants("update") else []
        displaced = side.starting.with_need("displacement")
        session.start = Start(stamp, side.start_values, losses, side.present.scale, kept, displaced)


def _agreed(world: World, mine: Layout, known: Layout | None, step: int) -> Layout:
    """The layout of the sums, if all ranks have it; they compare where it is new. Backends abort where lengths differ.

    Raises:
        RuntimeError: If a rank has another one.
    """
    if mine == known:
        return mine
    world.header(record_of(COMPARE, step))  # a rank for which nothing is new would be at another one
    told = [dict(layout.parts) for layout in world.share(mine)]
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
