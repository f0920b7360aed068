"""The end of a tracked step: what each quantity sees, its sums, and these on their way to become rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from distcockpit.gradients.generic import notices_of
from distcockpit.quantities.base import Quantity
from distcockpit.quantities.batch import LocalBatch, ReplicatedValue
from distcockpit.replay.devices import sent
from distcockpit.replay.memory import is_out_of_memory, release
from distcockpit.tracking.buckets import factor_of_autograds, rounded_convolutions
from distcockpit.tracking.inputs import StepInputs
from distcockpit.tracking.local_batches import local_batches
from distcockpit.tracking.packed import Layout, pack
from distcockpit.tracking.recorder import OUT_OF_MEMORY, Result, Stamp
from distcockpit.tracking.reductions import Reductions
from distcockpit.tracking.session import Session
from distcockpit.tracking.updates import Start
from distcockpit.world import COMPARE, Pending, RankFailed, record_of


def finish(session: Session, inputs: StepInputs, stamp: Stamp, start_stamp: Stamp | None) -> None:
    """From what a rank brings to a step to the rows on their way.

    Args:
        session: This rank's side of the run.
        inputs: This rank's side of the step.
        stamp: Of the step.
        start_stamp: Of the step at which the update began that ended here.

    Raises:
        RankFailed: If a rank failed and no rank has sent anything.
        RuntimeError: If the ranks' sums differ in name or length.
    """
    setup, active = session.setup, inputs.active
    rows = [q for q in active if not active.needs[q.name].displacement]
    selection = (tuple(q.name for q in rows), tuple(q.name for q in inputs.starting), inputs.update is not None)
    is_rounded = bool(rounded_convolutions(inputs, setup.device))
    if active.takes_autograds_sums and (is_rounded or factor_of_autograds(inputs) is None):
        session.keep_calls()
    agreements = session.agreements
    computed = _compute(session, inputs, rows, agreements.layout_of(selection), agreements.replicated_of(selection))
    if inputs.parameter_gradients.were_written:
        session.copy_gradients()
    for topic, text in notices_of([micro.batch for micro in inputs.captured]):
        session.say_once(topic, f"step {inputs.step}: {text}")
    agreements.agree_on_layout(selection, Layout.of(computed.sums), inputs.step)
    agreements.note_replicated(selection, Layout.of(computed.facts))
    sums, facts = computed.sums | {f"log/{k}": v for k, v in inputs.header.riding.items()}, computed.facts
    insist = setup.world.insist
    sums[f"/{OUT_OF_MEMORY}"] = insist(lambda: torch.full((), float(computed.ran_out), device=setup.device))
    stamps = dict.fromkeys(active.needs, stamp)
    if start_stamp is not None:
        stamps |= {q.name: start_stamp for q in active.with_need("update")}
    session.send(
        Result(
            stamp.n,
            [(q, stamps[q.name]) for q in rows],
            Layout.of(sums),
            setup.world.all_reduce_async(insist(lambda: pack(sums, setup.device))),
            Layout.of(facts),
            Pending(insist(lambda: pack(facts, setup.device))),
        )
    )
    starting = inputs.starting
    if starting.wants("update", "displacement") and inputs.start_values is not None:
        if not computed.seen:
            session.updates.lose(stamp)
            return
        losses = next(iter(computed.seen.values())).known_losses
        kept = [micro.batch.what_is_needed() for micro in inputs.captured] if inputs.keeps else []
        displaced = starting.with_need("displacement")
        scale, keeps = inputs.header.state.scale, setup.may_copy_parameters
        # The parameters are still what they were in the forward pass.
        start = Start(stamp, {}, losses, scale, kept, displaced, None, inputs.written, keeps_displacement=keeps)
        try:
            session.updates.begin(start, inputs.start_values)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            release(error)
            session.ran_out_of_memory(inputs.step, "What needs the update that starts here is unknown.", error)


@dataclass
class _Computed:
    """What each quantity sees, its sums, by ``quantity/name``, and what all ranks hold alike."""

    seen: Mapping[str, LocalBatch] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Tensor] = field(default_factory=dict)
    ran_out: bool = False  # of memory


def _compute(
    session: Session, inputs: StepInputs, rows: Sequence[Quantity], agreed: Layout | None, replicated: Layout | None
) -> _Computed:
    """The sums of this rank; NaN of a quantity that fails here, for the other ranks wait for them.

    Raises:
        RankFailed: If the layout of its sums is not known yet. The other ranks are told, and send nothing.
    """
    device = session.setup.device
    computed = _Computed()

    def give_up(names: Sequence[str], error: Exception) -> None:
        if agreed is None:  # the others are about to compare layouts
            session.setup.world.refuse(record_of(COMPARE, inputs.step))
            raise RankFailed from error
        why = f"{type(error).__name__}: {error}"
        if is_out_of_memory(error):
            computed.ran_out = True
            session.ran_out_of_memory(inputs.step, f"{', '.join(names)}: NaN.", error)
        else:
            text = f"step {inputs.step}: {', '.join(names)}: NaN, because of an error: {why}"
            session.say_once(f"failed {names}", text)
        unknown = torch.full((), torch.nan, dtype=torch.float64, device=device)
        for name in names:
            for values, layout in ((computed.sums, agreed), (computed.facts, replicated)):
                if layout is not None:
                    values.update({part: unknown.expand(shape) for part, shape in layout.by_owner.get(name, ())})

    reductions = Reductions(inputs.active.reducing, session.memories)
    try:
        computed.seen = local_batches(session, inputs, reductions)
    except Exception as error:
        give_up([q.name for q in rows], error)
        return computed
    for q in rows:
        try:
            if q.name in reductions.failed:
                raise reductions.failed[q.name]
            parts = q.local(computed.seen[q.name], session.memories.of(q))
            own = {f"{q.name}/{k}": sent(v, device) for k, v in parts.items() if not isinstance(v, ReplicatedValue)}
        except Exception as error:
            give_up([q.name], error)
            continue
        computed.sums |= own
        facts = {f"{q.name}/{k}": v for k, v in parts.items() if isinstance(v, ReplicatedValue)}
        computed.facts |= {k: v.value for k, v in facts.items() if v.value is not None}
    return computed
