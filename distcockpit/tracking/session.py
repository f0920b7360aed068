"""What lasts from step to step: the order of steps, what is on its way, and what quantities keep."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from distcockpit.capture.cover import Cover
from distcockpit.curvature.diagonals import Diagonals
from distcockpit.quantities.base import Quantity
from distcockpit.quantities.batch import Update
from distcockpit.store.writer import at_exit
from distcockpit.tracking.active import Active, Actives
from distcockpit.tracking.agreed import Setup
from distcockpit.tracking.attribution import Attribution
from distcockpit.tracking.clock import Clock
from distcockpit.tracking.packed import Layout, pack
from distcockpit.tracking.recorder import Recorder, Result, Stamp
from distcockpit.tracking.update import Start, interrupted_update
from distcockpit.tracking.userlog import UserLog
from distcockpit.world import CLOSE, TRACK, ModelsDiffer, Pending, Record, digest, record_of

logger = logging.getLogger(__name__)

LOG_SECONDS = 1.0  # rows of the user's log go to the writer at most this often


@dataclass
class Session:
    """One rank's side of a run."""

    setup: Setup
    recorder: Recorder | None  # on rank 0
    attribution: Attribution
    userlog: UserLog = field(default_factory=UserLog)
    start: Start | None = None  # the step at which an update began that is not known yet
    clock: Clock = field(default_factory=Clock)
    sizes: dict[str, dict[str, int]] = field(default_factory=dict)  # what ranks agreed on, by quantity
    initial: Mapping[str, Tensor] = field(default_factory=dict)  # the parameters at the first call of `track`
    is_inside: bool = False  # whether a step has begun and not ended
    actives: Actives = field(init=False)
    diagonals: Diagonals = field(init=False)
    settled: bool = False  # whether a tracked step was finished
    broken: bool = False  # whether a tracked step failed here after its header
    holds_from: int | None = None  # first step of the rows of a resumed run
    layouts: dict[object, Layout] = field(default_factory=dict)  # of the sums of each selection of quantities
    last_step: int = -1
    absent: frozenset[int] = frozenset()  # ranks that had run out of data at the latest exchange
    exchanged_step: int = -1  # the step of that
    joins: bool = False  # whether ranks may run out of data
    keeps_initial: bool = False
    _first_step: int | None = None  # tracked or logged, which may differ between ranks
    _first_tracked: int | None = None
    _pid: int = field(default_factory=os.getpid)
    _closed: bool = False
    part: int = field(init=False)  # a number that tells whether ranks are in the same part of the run
    _begins_again: bool = False  # whether ranks must begin another one together
    _cut: Stamp | None = None  # of an update in which the model changed
    _said: set[str] = field(default_factory=set)
    _notices: list[dict[str, Any]] = field(default_factory=list)  # what was said, and at which step
    _logs_handed_on: float = 0.0
    _memory: dict[str, dict[str, Any]] = field(default_factory=dict)
    _outstanding: list[Pending] = field(default_factory=list)
    _unread: dict[str, tuple[Layout, Pending]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.actives = Actives(self.setup.quantities)
        self.part = digest(self.setup.facts, 0)
        self.keeps_initial = self.setup.world.rank == 0 and any(q.needs.initial for q in self.setup.quantities)
        self.diagonals = Diagonals(self.setup.bare, self.setup.loss_fn)
        if not _open:
            at_exit(_close_all)
        _open[id(self)] = self

    def evaluates_again(self, step: int) -> bool:
        """True if this is another evaluation of the closure of LBFGS, at other parameters than the step began with."""
        closures = any(isinstance(each, torch.optim.LBFGS) for each in self.setup.optimizers.values())
        return closures and step == self.last_step and not self.is_inside and not self._closed

    def begin(self, step: int) -> None:
        """Check a step that begins.

        Raises:
            RuntimeError: If the cockpit is closed, or another step has not ended.
            ValueError: If the step does not grow.
        """
        if self._closed:
            raise RuntimeError(f"track(step={step}): the cockpit is closed. Construct another one with a new store.")
        if self.is_inside:
            raise RuntimeError(
                f"track(step={step}): step {self.last_step} has not ended; `track` must not be entered twice. Put "
                "all micro-batches of a step inside one `with cockpit.track(step):`."
            )
        if step <= self.last_step:
            raise ValueError(
                f"track(step={step}): steps must grow, the latest was {self.last_step}. Count optimizer steps over "
                "the whole run, not within an epoch."
            )
        self.clock.enter()
        self.begin_tracking(step)
        self.is_inside, self.last_step = True, step

    def begin_tracking(self, step: int) -> None:
        """A call of `track`, here or on the ranks that still train."""
        self.begin_segment(step)
        if self._first_tracked is None:
            self._first_tracked = step
            if self.keeps_initial and not self.initial and not self._goes_on:
                self.initial = {name: p.detach().clone() for name, p in self.setup.tracked.items()}

    def begin_segment(self, step: int) -> None:
        """The first step that is tracked or logged: a resumed run drops its rows from there."""
        if self._first_step is not None:
            return
        self._first_step = step
        if self.recorder is not None:
            # The row of an update that ended at this step will be written again, or is cut in two.
            limits = {q.name: step - 1 for q in self.setup.quantities if q.ends_updates}
            if self.start is not None:
                limits |= {q.name: self.start.stamp.step for q in self.start.displaced}
            limits["log"] = min([step, *self.userlog.entries])
            self.recorder.begin(step, limits)

    @property
    def _goes_on(self) -> bool:
        """True if the store holds rows from before this part of the run."""
        first = self._first_tracked
        return self.holds_from is not None and first is not None and self.holds_from < first

    @property
    def is_by_hand(self) -> bool:
        """True if the user listed a quantity; else all are of presets, which never end a run."""
        return any(q.required for q in self.setup.quantities)

    @property
    def may_load(self) -> bool:
        """True if no step has begun yet."""
        return self._first_step is None

    def agree_on_sizes(self, sizes: Mapping[str, Mapping[str, int]]) -> None:
        """Compare the sizes that quantities saw with the other ranks', once per quantity; all ranks call it.

        Args:
            sizes: By quantity and name.
        """
        new = {quantity: dict(seen) for quantity, seen in sizes.items() if quantity not in self.sizes}
        if not new:
            return
        for told in self.setup.world.all_gather_object(new):
            for quantity, seen in told.items():
                agreed = self.sizes.setdefault(quantity, {})
                for name, size in seen.items():
                    agreed[name] = size if agreed.get(name, size) == size else 0

    def look_at_model(self, step: int, *, is_as_it_was: bool) -> None:
        """Where the model is not the one that is tracked any more, another part of the run begins.

        Args:
            step: The step that begins.
            is_as_it_was: Whether its parameters and modules are those of this part of the run.

        Raises:
            ValueError: If it cannot be tracked as it is now.
        """
        every, modules = dict(self.setup.bare.named_parameters()), dict(self.setup.bare.named_modules())
        if self._begins_again or not is_as_it_was:
            self._begin_part(step, self.setup.as_it_is())
            return
        if any(modules[layer.path] is not layer.module for layer in self.setup.layers):  # others of the same kind
            self.setup = self.setup.as_it_is()
            self.attribution.adopt(self.setup)
        if any(p is not self.setup.every[name] for name, p in every.items()):  # load_state_dict(assign=True)
            self.setup.forget_parameters()
            self.attribution.adopt(self.setup)

    def _begin_part(self, step: int, setup: Setup) -> None:
        self.part, self._begins_again = digest(setup.facts, step), False
        cover = Cover(setup.bare, setup.layers)
        groups = {q.name: q.described_group(setup.facts) for q in setup.quantities} if self.recorder is not None else {}
        before, self.setup = self.setup, setup
        self.attribution = Attribution(setup, cover, self.attribution.check.last_checked)
        self.diagonals = Diagonals(setup.bare, setup.loss_fn)
        self.start, self.sizes, self.layouts, self._memory, self._unread = None, {}, {}, {}, {}
        if self.initial:  # a parameter's distance is from where it was when it came
            known = {name: value for name, value in self.initial.items() if setup.every.get(name) is before.every[name]}
            self.initial = {name: known.get(name, p.detach().clone()) for name, p in setup.tracked.items()}
        change = before.change_to(setup)
        if self.recorder is not None:
            parameters = {name: list(shape) for name, shape in setup.facts.shapes.items()}
            facts = {"parameters": parameters, "change": change, "started": time.time()}
            self.recorder.change(step, groups, facts, setup.facts)
        self.say_once(
            f"changed: {change}",
            f"step {step}: the model is not the one that was tracked before: {change}. Another part of the run begins: "
            "what compares with earlier steps begins anew, and what the model does not have now is NaN.",
        )

    def tell_coverage(self) -> None:
        """Rank 0 stores how each parameter is tracked, and says once which take a slow route, and what it costs."""
        if self.recorder is None:
            return
        self.recorder.describe({"coverage": self.attribution.coverage().attributes()}, at_once=False)
        if slow := self.attribution.cover.slow:
            examples = [f"'{name}' by {module}" for name, module in list(slow.items())[:3]]
            self.say_once(
                "slow",
                f"{len(slow)} of {len(self.setup.tracked)} parameters take a slow exact route: on tracked steps a part "
                "of the model is run again with one backward pass per sample. "
                f"{', '.join(examples)}{', ...' if len(slow) > 3 else ''}; cockpit.coverage() tells all, and why. "
                "exclude=[...] leaves layers out, fallback='error' refuses such routes.",
            )

    def check_health(self) -> None:
        """Check whether this rank can go on; asked before each header, so that all ranks stop together.

        Raises:
            RuntimeError: If an earlier step failed half-way, or faults of the store shall raise and there is one.
        """
        if self.broken:
            raise RuntimeError("An earlier tracked step failed on this rank after the others had sent their sums.")
        self._raise_fault()

    def _raise_fault(self) -> None:
        error = None if self.recorder is None else self.recorder.error
        if self.setup.raise_errors and error is not None:
            raise RuntimeError(f"The store could not be written: {error}") from error

    def say_once(self, topic: str, text: str) -> None:
        """Log a warning, the first time that its topic comes up; rank 0 stores it in the attribute ``notices``."""
        if topic not in self._said:
            self._said.add(topic)
            logger.warning("distcockpit: %s", text)
            if self.recorder is not None:
                self._notices.append({"step": self.last_step, "topic": topic, "text": text})
                self.recorder.describe({"notices": list(self._notices)}, at_once=True)

    def log(self, step: int, epoch: float | None, reduce: str | None, scalars: Mapping[str, float | Tensor]) -> None:
        """See ``DistCockpit.log``.

        Raises:
            RuntimeError: If the cockpit is closed.
        """
        if self._closed:
            raise RuntimeError(f"log(step={step}): the cockpit is closed. Construct another one with a new store.")
        self.userlog.check(step, reduce, scalars)
        self.begin_segment(step)
        self.userlog.add(step, epoch, reduce, scalars, time.time())
        self.hand_on_logs()

    def skip(self, step: int, error: BaseException) -> None:
        """This step is not tracked, on any rank. The run goes on.

        Args:
            step: The step.
            error: What is in the way.
        """
        self.start = None
        self._begins_again |= isinstance(error, ModelsDiffer)
        why, topic = f"{type(error).__name__}: {error}", f"skipped {type(error).__name__}"
        self.say_once(
            topic,
            f"step {step} is not tracked, nor are later ones as long as this lasts; the run goes on: {why}",
        )

    def may_try_again(self, previous: int, start: Start | None) -> None:
        """The step was left by an error of the loop's, which may catch it: the same step may come again.

        Args:
            previous: The step before.
            start: Of the update that ended where this step began.
        """
        self.last_step = previous
        self.start = None if start is None else replace(start, displaced=(), _displacement={})

    def end(self) -> None:
        """The step ends."""
        self.is_inside = False
        self.clock.leave()

    def finish_update(
        self, step: int, now: Mapping[str, Tensor] | None = None, *, is_as_it_was: bool = True
    ) -> Start | None:
        """Take the start of the update that is known at the beginning of ``step``, and record its displacement.

        Args:
            step: The step that begins.
            now: The parameters, where they are not those of this rank's model.
            is_as_it_was: Whether the model has the parameters and modules that it had when the update began.

        Returns:
            The start, or ``None`` if there is none or steps lie in between.
        """
        start, self.start = self.start, None
        self._cut = None
        if start is not None and not is_as_it_was:
            self._cut = start.stamp
            return None
        if start is None or start.stamp.step == step - 1:
            if start is not None:
                self._record_displacement(start, now=now)
            return start
        self.say_once(
            "gap",
            f"track(step={step}) came after step {start.stamp.step}: quantities over an update, such as alpha and "
            "update_size, need steps that grow by one, and have no row here.",
        )
        return None

    def ending_update(
        self, step: int, start: Start | None, active: Active, tracked: Mapping[str, Tensor], scale: float | None
    ) -> tuple[Update | None, Stamp | None]:
        """The update that ends at this step, if a quantity looks at it, and the stamp of its row.

        Args:
            step: The step.
            start: Where the update began.
            active: The quantities of the step.
            tracked: The tracked parameters as they are now.
            scale: Of the gradient scaler now.
        """
        if not any(q.starts(step - 1) for q in active.with_need("update")):
            return None, None
        if start is not None:
            parts = self.setup.facts.parts_of_updates
            return start.project(tracked, parts, scale, self.setup.block_elements), start.stamp
        stamp = Stamp(step - 1, None, time.time(), 0) if self._goes_on and step == self._first_tracked else self._cut
        if stamp is not None and stamp.step == step - 1:
            return interrupted_update(tracked, len(self.setup.facts.parts_of_updates)), stamp
        return None, None

    def keeps_values(self, starting: Active) -> bool:
        """True if this rank needs the parameters of a step at which these rows begin."""
        return starting.wants("update") or (starting.wants("displacement") and self.setup.world.rank == 0)

    def must_tell(self, step: int) -> bool:
        """True if rank 0 has run out of data, and waits for the parameters of this step: an update ended there."""
        if 0 not in self.absent or self.exchanged_step != step - 1:
            return False
        return any(q.needs.displacement and q.starts(step - 1) for q in self.setup.quantities)

    def record_displacement(self) -> None:
        """The optimizer has made its step, and no other will follow on this rank: record how far it went."""
        if self.start is not None:
            self._record_displacement(self.start)
            self.start = replace(self.start, displaced=(), _displacement={})

    def _record_displacement(
        self, start: Start, *, closing: bool = False, now: Mapping[str, Tensor] | None = None
    ) -> None:
        """Rank 0 tells the facts of an update; nothing is sent. At the end of a run there may have been none."""
        if self.recorder is None or not start.displaced:
            return
        d = start.displacement(self.setup.tracked if now is None else now)
        if closing and not any(bool(t.any()) for t in d.values()):
            return
        step, device = start.stamp.step, self.setup.device
        facts = {
            f"{q.name}/{key}": value
            for q in start.displaced
            for key, value in q.displacement(step, d, self.memory_of(q)).items()
        }
        rows = [(q, start.stamp) for q in start.displaced]
        nothing = Pending(pack({}, device))
        self.recorder.record(
            Result(start.stamp.n, rows, Layout.of({}), nothing, Layout.of(facts), Pending(pack(facts, device)))
        )

    def memory_of(self, quantity: Quantity) -> dict[str, Any]:
        """What a quantity keeps from step to step, after it has seen the latest total it asked for."""
        memory = self._memory.setdefault(quantity.name, {})
        if quantity.name in self._unread:
            layout, sums = self._unread.pop(quantity.name)
            prefix = f"{quantity.name}/"
            totals = layout.unpack(sums.result())
            quantity.learn({k[len(prefix) :]: v for k, v in totals.items() if k.startswith(prefix)}, memory)
        return memory

    def send(self, result: Result) -> None:
        """Hand the sums of a step to rank 0's recorder, and remember what this rank must wait for."""
        self._outstanding = [p for p in self._outstanding if not p.done()]
        self._outstanding.append(result.sums)
        for quantity, _ in result.quantities:
            if quantity.reads_totals:
                self._unread[quantity.name] = (result.layout, result.sums)
        if self.recorder is not None:
            self.recorder.record(result)
        self.hand_on_logs()

    def hand_on_logs(self, *, everything: bool = False, at_once: bool = False) -> None:
        """Give rank 0's recorder the rows of the user's log that will not change any more."""
        if not (everything or at_once) and time.monotonic() - self._logs_handed_on < LOG_SECONDS:
            return  # one job for many rows, so that a loop that logs at every step does not fill the writer's queue
        self._logs_handed_on = time.monotonic()
        entries = self.userlog.take_complete(everything=everything)
        if self.recorder is not None:
            self.recorder.record_logs(entries)

    def riding(self, records: Sequence[Record]) -> dict[str, Tensor]:
        """This rank's part of the user's scalars that ride in this exchange, the same names on all ranks.

        Args:
            records: The headers of all ranks.

        Raises:
            RuntimeError: If ranks logged different names, and none has run out of data in between.
        """
        world, device, mine = self.setup.world, self.setup.device, self.userlog.riding_names
        if any(record["joined"] and record["kind"] != TRACK for record in records):
            raise RuntimeError("close() was called inside `with Join(...)`, while ranks had run out of data.")
        if len({record["riding"] for record in records}) == 1:
            return self.userlog.take_riding(dict.fromkeys(mine, world.size), device)
        told = world.all_gather_object((mine, self.joins))
        if not any(joins for _, joins in told):
            rank = next(rank for rank, (names, _) in enumerate(told) if names != told[0][0])
            raise RuntimeError(
                f"Rank {rank} logged other names than rank 0: {told[rank][0]} and {told[0][0]} (step/name). "
                "log(..., reduce=...) must be called at the same steps with the same names on all ranks."
            )
        contributors = Counter(name for names, _ in told for name in names)
        own = self.userlog.take_riding(contributors, device)
        self.userlog.expect(list(contributors), time.time())
        return {name: own.get(name, torch.zeros((), dtype=torch.float64, device=device)) for name in contributors}

    def flush(self) -> None:
        """Wait until everything finished so far is in the store."""
        if self.recorder is not None:
            self.hand_on_logs(everything=not self.userlog.is_riding)
            self.recorder.flush()
            self._raise_fault()

    def close(self, *, orderly: bool) -> None:
        """Write everything and end. Only an orderly end talks with, or waits for, other ranks.

        Raises:
            RuntimeError: If faults of the store shall raise and there is one.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        _open.pop(id(self), None)
        try:
            if orderly and self.start is not None:
                self._record_last_displacement(self.start)
            self.start = None
            if orderly and (self.userlog.is_riding or self.joins):
                self._send_last_logs()
            if orderly:
                for pending in self._outstanding:
                    pending.result()
        except RuntimeError as error:  # the run is over; its other ranks ended otherwise, or are gone
            logger.warning("distcockpit: close(): %s", error)
            orderly = False
        finally:
            self.setup.world.leave_word(f"closed after step {self.last_step}")
            self.hand_on_logs(everything=True)
            if self.recorder is not None:
                self.recorder.close("closed" if orderly else "running", wait_for_ranks=orderly)
        if orderly:
            self.setup.world.close()
            self._raise_fault()

    def _record_last_displacement(self, start: Start) -> None:
        try:
            self._record_displacement(start, closing=True)
        except Exception as error:  # rank 0 alone does this, and the others are about to meet it
            logger.warning("distcockpit: the last update could not be recorded (%s).", error)

    def _send_last_logs(self) -> None:
        world, device = self.setup.world, self.setup.device
        records = world.header(record_of(CLOSE, self.last_step, riding=self.userlog.riding_digest))
        sums = {f"log/{name}": value for name, value in self.riding(records).items()}
        nothing = Pending(pack({}, device))
        self.send(Result(0, [], Layout.of(sums), world.all_reduce_async(pack(sums, device)), Layout.of({}), nothing))


_open: dict[int, Session] = {}
"""What is not closed yet, by identity; closed when the interpreter ends."""


def _close_all() -> None:
    for session in list(_open.values()):
        try:
            session.close(orderly=False)
        except Exception as error:  # the others must be closed as well
            logger.warning("distcockpit: %s", error)
