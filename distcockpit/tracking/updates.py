"""The optimizer's step d = theta_{t+1} - theta_t: what is kept until it is complete, and what follows from it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from distcockpit.gradients.differences import Differences, squared_norms
from distcockpit.gradients.factors import WHOLE
from distcockpit.gradients.generic import notices_of
from distcockpit.gradients.statistics import Projection
from distcockpit.gradients.uses import MicroBatch
from distcockpit.gradients.walk import walk
from distcockpit.notices import Notices
from distcockpit.quantities.base import Quantity
from distcockpit.quantities.batch import ReplicatedValue, Update
from distcockpit.shards import local
from distcockpit.tracking.active import Active
from distcockpit.tracking.memories import Memories
from distcockpit.tracking.packed import Layout, pack
from distcockpit.tracking.recorder import Recorder, Result, Stamp
from distcockpit.tracking.setup import Setup
from distcockpit.world import Pending


@dataclass(frozen=True)
class Start:
    """What is kept of a step at which an update begins."""

    stamp: Stamp
    values: Mapping[str, Tensor]  # the parameters before the update
    losses: Tensor
    scale: float | None  # of the gradient scaler
    batches: Sequence[MicroBatch]  # empty if no quantity needs the update from both ends
    displaced: Sequence[Quantity]  # those that need the displacement
    slopes: Tensor | None = None  # once known: of this rank's samples along the parts of the update [K, B]
    inputs_were_changed: bool = False  # likewise: whether inputs had changed by then
    norm: float | Tensor | None = None  # likewise: the length of the update that the slopes belong to
    keeps_displacement: bool = False  # whether there is memory for it
    versions: Mapping[str, tuple[Tensor, int]] = field(default_factory=dict)  # of parameters without a copy
    _displacement: list[Differences] = field(default_factory=list)

    @property
    def inputs_changed(self) -> bool:
        """True if a kept input was overwritten."""
        written = any(tensor._version != version for tensor, version in self.versions.values())
        uses = (use for batch in self.batches for use in batch.uses)
        return self.inputs_were_changed or written or any(use.inputs_changed for use in uses)

    def displacement(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the optimizer's step, by parameter; call it once the optimizer has stepped."""
        if not self._displacement:
            before = {name: self.values[name] for name in parameters}
            self._displacement.append(Differences(parameters, before, keep=self.keeps_displacement))
        return self._displacement[0]

    def project(
        self,
        parameters: Mapping[str, Tensor],
        scale: float | None,
        setup: Setup,
    ) -> Update:
        """Return the update, and the slopes of the starting samples along it.

        Args:
            parameters: The tracked parameters as they are now.
            scale: Of the gradient scaler now.
            setup: What all ranks agreed on.
        """
        parts = setup.facts.parts_of_updates
        direction = self.displacement(parameters)
        squares = squared_norms(direction, direction)
        norm = squares.sum().sqrt()
        names = list(direction)
        each = [norm] if len(parts) == 1 else [squares[[names.index(n) for n in part]].sum().sqrt() for part in parts]
        changed = self.inputs_changed
        if self.slopes is not None:
            slopes = self.slopes
        else:
            projection = Projection(direction, len(self.losses), parts)
            for bucket in () if changed else setup.buckets:
                rows = {name: part for name, part in bucket.items() if part != WHOLE}
                walk(self.batches, self.values, list(bucket), [projection], setup.block_elements, rows=rows)
            slopes = projection.values / norm
        return Update(
            norm=norm,
            norms=torch.stack(each),
            direction=direction,
            start_losses=self.losses,
            start_slopes=slopes,
            end_slopes=slopes[:, :0],
            start_n=self.stamp.n,
            inputs_changed=changed,
            skipped=self.scale is not None and scale is not None and scale < self.scale,
            interrupted=self.norm is not None and not math.isclose(float(norm), float(self.norm), rel_tol=1e-6),
        )

    def with_slopes(self, update: Update) -> Start:
        """Return it with the slopes in place of the calls that they were computed from."""
        slopes, changed = update.start_slopes, update.inputs_changed
        return replace(self, batches=(), slopes=slopes, inputs_were_changed=changed, norm=update.norm)


def interrupted_update(parameters: Mapping[str, Tensor], n_parts: int) -> Update:
    """Return an update of which only the end was seen."""
    device = next(iter(parameters.values())).device
    unknown = torch.full((n_parts,), float("nan"), dtype=torch.float64, device=device)
    one, none = unknown[:, None], unknown.new_zeros(n_parts, 0)
    return Update(
        unknown[0], unknown, {}, unknown[:1], one, none, 0, inputs_changed=False, skipped=False, interrupted=True
    )


class Updates:
    """The updates of a run. Each starts at a tracked step and is known when the next step starts.

    Args:
        setup: What all ranks agreed on.
        memories: What quantities keep.
        recorder: Where rows go, on rank 0.
        notices: Where to report missing steps.
    """

    def __init__(self, setup: Setup, memories: Memories, recorder: Recorder | None, notices: Notices) -> None:
        self._setup, self._memories = setup, memories
        self._recorder, self._notices = recorder, notices
        self._start: Start | None = None
        self._spare: Mapping[str, Tensor] = {}  # copies of parameters that are not needed any more
        self._moving: set[str] = set()  # parameters that are not trained, but change all the same
        self._cut: Stamp | None = None  # of an update that cannot be known: the model changed, or there was no memory
        self._lost: Stamp | None = None  # of an update whose start could not be kept
        self._displaced_at = -1  # the step of the latest update whose displacement was recorded

    @property
    def start(self) -> Start | None:
        """Where the update in progress began, if there is one."""
        return self._start

    @property
    def spare(self) -> Iterable[Tensor]:
        """The copies of parameters that the next start will write to."""
        return self._spare.values()

    def adopt(self, setup: Setup) -> None:
        """The model holds other tensors now, or other modules of the same kind."""
        self._setup = setup

    def begin_part(self, setup: Setup, memories: Memories) -> None:
        """Adopt a changed model, which nothing from before compares with."""
        self._setup, self._memories, self._start = setup, memories, None

    def begin(self, start: Start, parameters: Mapping[str, Tensor]) -> None:
        """Start an update.

        Args:
            start: What is kept of the step.
            parameters: As they are before the update. They are copied, or this rank's pieces of them, into the memory
                of the copies that the latest update needed, but not those that are not trained.
        """
        values, versions = {}, {}
        self._lost = start.stamp  # until all is copied
        for name, p in parameters.items():
            held = local(p)
            if not (p.requires_grad or name in self._moving):
                values[name], versions[name] = held, (p, p._version)
                continue
            spare = self._spare.get(name)
            fits = spare is not None and (spare.dtype, spare.shape, spare.device) == (
                held.dtype,
                held.shape,
                held.device,
            )
            values[name] = spare.copy_(held) if spare is not None and fits else held.clone()
        self._start, self._spare, self._lost = replace(start, values=values, versions=versions), {}, None

    def begins_recording(self, step: int) -> bool:
        """True if the displacement of the update that began at this step is to be recorded; False from then on."""
        is_new = step > self._displaced_at
        self._displaced_at = max(step, self._displaced_at)
        return is_new

    def lose(self, stamp: Stamp) -> None:
        """The update that starts at this step will not be known on this rank; the other ranks are told when it ends."""
        self._start, self._lost = None, stamp

    def resume(self, start: Start) -> None:
        """Go on with an update that began in an earlier part of the run."""
        self._start = start

    def forget(self) -> None:
        """Drop the update in progress."""
        self._start = self._lost = None

    def take_back(self, start: Start | None) -> None:
        """Restore an update whose last step may be repeated; its displacement has already been recorded."""
        self._start = None if start is None else replace(start, displaced=(), _displacement=[])

    def finish(self, step: int, now: Mapping[str, Tensor] | None = None, *, is_as_it_was: bool = True) -> Start | None:
        """Take the start of the update that is complete at the beginning of ``step``, and record its displacement.

        Args:
            step: The step that begins.
            now: The parameters, if they are not those of this rank's model.
            is_as_it_was: Whether the model has the parameters and modules that it had when the update began.

        Returns:
            The start, or ``None`` if there is none or steps were skipped in between.
        """
        start, self._start = self._start, None
        self._cut, self._lost = self._lost, None
        if start is None:
            return None
        self._spare = {name: value for name, value in start.values.items() if name not in start.versions}
        self._moving |= {name for name, (p, version) in start.versions.items() if p._version != version}
        if not is_as_it_was:
            self._cut = start.stamp
            return None
        if start.stamp.step == step - 1:
            if self._setup.shards is None:
                self._record_displacement(start, now=now)
            return start
        self._notices.once(
            "gap",
            f"track(step={step}) came after step {start.stamp.step}: quantities that span an update, such as alpha and "
            "update_size, need consecutive steps, so they have no row here.",
            step,
        )
        return None

    def ending(
        self,
        step: int,
        start: Start | None,
        active: Active,
        tracked: Mapping[str, Tensor],
        scale: float | None,
        *,
        resumes: bool,
    ) -> tuple[Update | None, Stamp | None]:
        """Return the update that ends at this step, if a quantity needs it, and the stamp of its row.

        Args:
            step: The step.
            start: Where the update began.
            active: The quantities of the step.
            tracked: The tracked parameters as they are now.
            scale: Of the gradient scaler now.
            resumes: Whether the step before belongs to an earlier part of the run.
        """
        if not any(q.starts(step - 1) for q in active.with_need("update")):
            return None, None
        if start is not None:
            update = start.project(tracked, scale, self._setup)
            for topic, text in notices_of(start.batches):
                self._notices.once(topic, f"step {step}: {text}", step)
            return update, start.stamp
        stamp = Stamp(step - 1, None, time.time(), 0) if resumes else self._cut
        if stamp is not None and stamp.step == step - 1:
            return interrupted_update(tracked, len(self._setup.facts.parts_of_updates)), stamp
        return None, None

    def needs_values(self, starting: Active) -> bool:
        """True if this rank must keep the parameters of a step at which these rows begin."""
        holds = self._setup.world.rank == 0 or self._setup.shards is not None
        return starting.wants("update") or (starting.wants("displacement") and holds)

    def record_displacement(self) -> None:
        """Record how far the optimizer's step went, when no other step follows on this rank."""
        if self._start is not None:
            self._record_displacement(self._start)
            self.take_back(self._start)

    def close(self) -> None:
        """Record the last displacement, if the optimizer has made its step since."""
        start, self._start = self._start, None
        if start is not None and self._recorder is not None and start.displaced:
            if any(bool(t.any()) for t in start.displacement(self._setup.tracked).values()):
                self._record_displacement(start)

    def _record_displacement(self, start: Start, *, now: Mapping[str, Tensor] | None = None) -> None:
        """Rank 0 tells the facts of an update; nothing is sent."""
        if self._recorder is None or not start.displaced:
            return
        d, device = start.displacement(self._setup.tracked if now is None else now), self._setup.device
        facts = {name: value for q in start.displaced for name, value in self._told(q, start.stamp.step, d)}
        nothing = Pending(pack({}, device))
        self._recorder.record(
            Result(
                start.stamp.n,
                [(q, start.stamp) for q in start.displaced],
                Layout.of({}),
                nothing,
                Layout.of(facts),
                Pending(pack(facts, device)),
            )
        )

    def _told(self, q: Quantity, step: int, d: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for key, value in q.displacement(step, d, self._memories.of(q)).items():
            told = value.value if isinstance(value, ReplicatedValue) else value
            if told is not None:
                yield f"{q.name}/{key}", told
