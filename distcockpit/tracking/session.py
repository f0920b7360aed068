"""One rank's side of a run: the order of its steps, the parts that they belong to, and what lasts between them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field

import torch
from torch import Tensor, nn

from distcockpit.capture.cover import Cover
from distcockpit.curvature.diagonals import Diagonals
from distcockpit.gradients.rounding import Doubts
from distcockpit.notices import Notices
from distcockpit.replay.memory import give_back, is_out_of_memory
from distcockpit.shards import is_piece
from distcockpit.tracking.active import Actives
from distcockpit.tracking.agreements import Agreements
from distcockpit.tracking.attribution import Attribution
from distcockpit.tracking.clock import Clock
from distcockpit.tracking.join import JoinedRanks
from distcockpit.tracking.memories import Memories
from distcockpit.tracking.packed import Layout, pack
from distcockpit.tracking.recorder import Recorder, Result
from distcockpit.tracking.setup import Setup
from distcockpit.tracking.shutdown import Shutdown, in_words
from distcockpit.tracking.updates import Start, Updates
from distcockpit.tracking.userlog import UserLog
from distcockpit.world import CLOSE, ModelsDiffer, Pending, Record, digest, record_of

logger = logging.getLogger("distcockpit")


@dataclass
class Session:
    """One rank's side of a run. Each of its parts belongs to an object that alone writes to it."""

    setup: Setup
    recorder: Recorder | None  # on rank 0
    cover: InitVar[Cover]
    notices: Notices
    holds_from: int | None = None  # first step of the rows of a resumed run
    clock: Clock = field(default_factory=Clock)
    joined: JoinedRanks = field(default_factory=JoinedRanks)
    memories: Memories = field(default_factory=Memories)
    initial: Mapping[str, Tensor] = field(default_factory=dict)  # the parameters at the first call of `track`
    last_step: int = -1
    is_inside: bool = False  # whether a step has begun but not ended
    is_settled: bool = False  # whether a tracked step was finished
    keeps_calls: bool = False  # whether autograd's sums do not do in this loop
    copies_gradients: bool = False  # whether this loop writes to .grad inside `track`
    doubts: Doubts = field(default_factory=Doubts)
    forms_early: bool = True  # whether no output was differentiated twice so far
    attribution: Attribution = field(init=False)
    userlog: UserLog = field(init=False)
    actives: Actives = field(init=False)
    agreements: Agreements = field(init=False)
    diagonals: Diagonals = field(init=False)
    updates: Updates = field(init=False)
    shutdown: Shutdown = field(init=False)
    part: int = field(init=False)  # a number that tells whether ranks are in the same part of the run
    keeps_initial: bool = field(init=False)
    last_update: Callable[[Session], None] = lambda session: None  # records it when the run ends
    farewell: Callable[[Clock, int, str], None] = lambda clock, rows, reason: None
    _is_broken: bool = False  # whether a tracked step failed here after its header
    _begins_again: bool = False  # whether ranks must begin another part together
    _first_step: int | None = None  # first step tracked or logged; may differ between ranks
    _first_tracked: int | None = None
    _outstanding: list[Pending] = field(default_factory=list)

    def __post_init__(self, cover: Cover) -> None:
        setup, recorder = self.setup, self.recorder
        self.attribution = Attribution(setup, cover, self.say_once)
        self.userlog = UserLog(None if recorder is None else recorder.record_logs)
        self.actives, self.agreements = Actives(setup.quantities), Agreements(setup.world)
        self.diagonals = Diagonals(setup.bare, setup.loss_fn)
        self.updates = Updates(setup, self.memories, recorder, self.notices)
        self.part = digest(setup.facts, 0)
        holds = setup.world.rank == 0 or setup.shards is not None
        self.keeps_initial = holds and any(q.needs.initial for q in setup.quantities)
        self.shutdown = Shutdown(self._end, alone=setup.world.size == 1)

    # -- the order of steps --------------------------------------------------------------------------------------------

    def evaluates_again(self, step: int) -> bool:
        """True if LBFGS evaluates its closure again, at parameters other than those the step began with."""
        closures = any(isinstance(each, torch.optim.LBFGS) for each in self.setup.optimizers.values())
        return closures and step == self.last_step and not self.is_inside and not self.shutdown.is_closed

    def begin(self, step: int) -> None:
        """Check that a step may begin.

        Raises:
            RuntimeError: If the cockpit is closed, or another step has not ended.
            ValueError: If the step does not increase.
        """
        self._check_open(f"track(step={step})")
        if self.is_inside:
            raise RuntimeError(
                f"track(step={step}): step {self.last_step} has not ended; `track` cannot be nested. Put all "
                "micro-batches of a step inside one `with cockpit.track(step):`."
            )
        if step <= self.last_step:
            raise ValueError(
                f"track(step={step}): steps must increase, but the latest was {self.last_step}. Count optimizer steps "
                "over the whole run, not per epoch."
            )
        self.clock.enter()
        self.follow(step)
        self.is_inside = True

    def follow(self, step: int) -> None:
        """Register a call of `track`, here or on the ranks that still train."""
        self._begin_segment(step)
        if self._first_tracked is None:
            self._first_tracked = step
            if self.keeps_initial and not self.initial and not self._goes_on:
                self.initial = {name: p.clone() for name, p in self.setup.own(self.setup.held).items()}
        self.last_step = step

    def finished(self) -> None:
        """A tracked step was finished."""
        self.is_settled = True

    def keep_calls(self) -> None:
        """Autograd's sums do not do in this loop: later steps keep the calls that gradients are summed up from."""
        self.keeps_calls = True

    def copy_gradients(self) -> None:
        """What autograd leaves in ``.grad`` is written to inside `track`: later steps copy it when it arrives."""
        self.copies_gradients = True

    def form_at_the_end(self) -> None:
        """This loop differentiates outputs twice: later steps form all individual gradients at their end."""
        self.forms_early = False

    def failed(self) -> None:
        """A tracked step failed here after the other ranks had sent their sums: later ones would not match."""
        self._is_broken = True

    def skip(self, step: int, error: BaseException) -> None:
        """Skip this step on all ranks; the run goes on.

        Args:
            step: The step.
            error: Why it cannot be tracked.
        """
        self.updates.forget()
        self._begins_again |= isinstance(error, ModelsDiffer)
        if is_out_of_memory(error):
            self.ran_out_of_memory(step, "The step is not tracked.", error)
            return
        self.say_once(
            f"skipped {type(error).__name__}",
            f"step {step} is not tracked, and neither are later steps while this lasts; training continues: "
            f"{type(error).__name__}: {error}",
        )

    def ran_out_of_memory(self, step: int, what: str, error: BaseException) -> None:
        """Give free memory back, use smaller blocks from now on, and say so.

        Args:
            step: The step.
            what: What is lost, a sentence.
            error: What ran out.
        """
        give_back()
        self._adopt(self.setup.with_smaller_blocks())
        self.say_once(
            f"out of memory: {what}",
            f"step {step}: out of memory ({error}). {what} Training continues, and from the next tracked step on this "
            "rank forms half as many individual gradients at a time. Pass a smaller memory_budget=, or track fewer "
            "quantities, if this comes back.",
        )

    def may_try_again(self, previous: int, start: Start | None) -> None:
        """Allow the same step again after an exception in the loop, which may catch it and retry.

        Args:
            previous: The step before.
            start: The start of the update that ended where this step began.
        """
        self.last_step = previous
        self.updates.take_back(start)

    def end(self, *, is_tracked: bool) -> None:
        """End the step."""
        self.is_inside = False
        self.clock.leave(is_tracked=is_tracked)

    def check_health(self) -> None:
        """Check whether this rank can go on; called before each header, so that all ranks stop together.

        Raises:
            RuntimeError: If an earlier step failed half-way, or on_error="raise" and the store has a fault.
        """
        if self._is_broken:
            raise RuntimeError("An earlier tracked step failed on this rank after the other ranks had sent their sums.")
        self._raise_fault()

    def _raise_fault(self) -> None:
        error = None if self.recorder is None else self.recorder.error
        if self.setup.raise_errors and error is not None:
            raise RuntimeError(f"The store could not be written: {error}") from error

    def _check_open(self, call: str) -> None:
        if self.shutdown.is_closed:
            raise RuntimeError(f"{call}: the cockpit is closed. Construct another one with a new store.")

    # -- parts of the run ----------------------------------------------------------------------------------------------

    def _begin_segment(self, step: int) -> None:
        """Register the first step that is tracked or logged: a resumed run drops its rows from there on."""
        if self._first_step is not None:
            return
        self._first_step = step
        if self.recorder is not None:
            # The row of an update that ended at this step will be written again, or the update is interrupted.
            limits = {q.name: step - 1 for q in self.setup.quantities if q.ends_updates}
            if self.updates.start is not None:
                limits |= {q.name: self.updates.start.stamp.step for q in self.updates.start.displaced}
            limits["log"] = min([step, *self.userlog.entries])
            self.recorder.begin(step, limits)

    def resume(self, step: int, initial: Mapping[str, Tensor]) -> None:
        """Go on after this step of an earlier part of the run.

        Args:
            step: The latest one.
            initial: The parameters at the first call of `track`, where they are kept.
        """
        self.last_step, self.initial = step, initial

    @property
    def may_load(self) -> bool:
        """True if no step has begun yet."""
        return self._first_step is None

    @property
    def _goes_on(self) -> bool:
        """True if the store holds rows from before this part of the run."""
        first = self._first_tracked
        return self.holds_from is not None and first is not None and self.holds_from < first

    def resumes_at(self, step: int) -> bool:
        """True if the step before this one belongs to an earlier part of the run."""
        return self._goes_on and step == self._first_tracked

    @property
    def is_by_hand(self) -> bool:
        """True if the user listed a quantity explicitly; quantities of presets alone never end a run."""
        return any(q.required for q in self.setup.quantities)

    def look_at_model(
        self,
        step: int,
        modules: Mapping[str, nn.Module],
        parameters: Mapping[str, nn.Parameter],
        *,
        is_as_it_was: bool,
    ) -> None:
        """Start a new part of the run if the model is no longer the one being tracked.

        Args:
            step: The step that begins.
            modules: Of the model now, by path.
            parameters: Likewise, by name.
            is_as_it_was: Whether its parameters and modules are those of this part of the run.

        Raises:
            ValueError: If the model cannot be tracked in its current form.
        """
        if self._begins_again or not is_as_it_was:
            self._begin_part(step, self.setup.as_it_is())
            return
        if any(
            modules[layer.path] is not layer.module for layer in self.setup.layers
        ):  # replaced by others of the same kind
            self._adopt(self.setup.as_it_is())
        before = self.setup.parameters
        changed = [name for name, p in parameters.items() if p is not before[name]]  # by load_state_dict(assign=True)
        if any(is_piece(parameters[name]) or not is_piece(before[name]) for name in changed):  # or by an evaluation
            self.setup.forget_parameters()
            self._adopt(self.setup)

    def _adopt(self, setup: Setup) -> None:
        self.setup, self.diagonals = setup, Diagonals(setup.bare, setup.loss_fn)
        self.attribution.adopt(setup)
        self.updates.adopt(setup)

    def _begin_part(self, step: int, setup: Setup) -> None:
        self.part, self._begins_again = digest(setup.facts, step), False
        groups = {q.name: q.described_group(setup.facts) for q in setup.quantities} if self.recorder is not None else {}
        cover = Cover(setup.bare, setup.layers)
        before, self.setup = self.setup, setup
        self.attribution = Attribution(setup, cover, self.say_once, self.attribution.check.last_checked)
        self.diagonals, self.agreements = Diagonals(setup.bare, setup.loss_fn), Agreements(setup.world)
        self.memories = Memories()
        self.updates.begin_part(setup, self.memories)
        if self.initial:  # measure a parameter's distance from where it was when it was added
            now, then = setup.parameters, before.parameters
            known = {name: value for name, value in self.initial.items() if now.get(name) is then[name]}
            own = setup.own(setup.held)
            self.initial = {name: known[name] if name in known else p.clone() for name, p in own.items()}
        change = before.change_to(setup)
        if self.recorder is not None:
            parameters = {name: list(shape) for name, shape in setup.facts.shapes.items()}
            facts = {"parameters": parameters, "change": change, "started": time.time()}
            self.recorder.change(step, groups, facts, setup.facts)
        self.say_once(
            f"changed: {change}",
            f"step {step}: the model is not the one that was tracked before: {change}. A new part of the run begins: "
            "comparisons with earlier steps start over, and values that do not apply to the current model are NaN.",
        )

    # -- what is said and sent -----------------------------------------------------------------------------------------

    def say_once(self, topic: str, text: str) -> None:
        """Log a warning the first time its topic comes up; rank 0 also stores it in the attribute ``notices``."""
        self.notices.once(topic, text, self.last_step)

    def tell_coverage(self) -> None:
        """Store how each parameter is tracked (on rank 0), and warn once about slow routes and their cost."""
        if self.recorder is None:
            return
        self.recorder.describe({"coverage": self.attribution.coverage().attributes()}, at_once=False)
        if slow := self.attribution.cover.slow:
            examples = [f"'{name}' by {module}" for name, module in list(slow.items())[:3]]
            self.say_once(
                "slow",
                f"{len(slow)} of {len(self.setup.tracked)} parameters take a slow exact route: on tracked steps, a "
                "part of the model is run again with one backward pass per sample. "
                f"{', '.join(examples)}{', ...' if len(slow) > 3 else ''}. cockpit.coverage() lists all of them, and "
                "why. exclude=[...] leaves layers out, and fallback='error' refuses slow routes.",
            )

    def log(self, step: int, epoch: float | None, reduce: str | None, scalars: Mapping[str, float | Tensor]) -> None:
        """See ``DistCockpit.log``.

        Raises:
            RuntimeError: If the cockpit is closed.
        """
        self._check_open(f"log(step={step})")
        self.userlog.check(step, reduce, scalars)
        self._begin_segment(step)
        self.userlog.add(step, epoch, reduce, scalars, time.time())
        self.userlog.hand_on()

    def share_logs(self, records: Sequence[Record]) -> dict[str, Tensor]:
        """This rank's part of the user's scalars that ride in the exchange of these headers; see `UserLog.share`."""
        setup = self.setup
        return self.userlog.share(setup.world, records, setup.device, joins=self.joined.is_possible)

    def send(self, result: Result) -> None:
        """Hand the sums of a step to rank 0's recorder, and remember what this rank must wait for."""
        self._outstanding = [p for p in self._outstanding if not p.done()]
        self._outstanding.append(result.sums)
        for quantity, _ in result.quantities:
            self.memories.expect(quantity, result.layout, result.sums)
        if self.recorder is not None:
            self.recorder.record(result)
        self.userlog.hand_on()

    def await_later(self, sums: Pending) -> None:
        """Remember sums that this rank must wait for before the run ends, although it has no use for them."""
        self._outstanding.append(sums)

    # -- the end -------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until everything finished so far is in the store."""
        if self.recorder is not None:
            self.userlog.hand_on(everything=not self.userlog.is_riding, at_once=True)
            self.recorder.flush()
            self._raise_fault()

    def _end(self, reason: str) -> None:
        """Write everything and finish. Only an orderly end communicates with, or waits for, other ranks.

        Args:
            reason: Why the run ended early; empty for an orderly end.

        Raises:
            RuntimeError: If on_error="raise" and the store has a fault.
        """
        orderly = not reason
        try:
            if orderly:
                self.last_update(self)
                if self.userlog.is_riding or self.joined.is_possible:
                    self._send_last_logs()
                for pending in self._outstanding:
                    pending.result()
        except RuntimeError as error:  # the run is over; the other ranks ended differently, or are gone
            logger.warning("distcockpit: close(): %s", error)
            orderly, reason = False, in_words(error)
        finally:
            self.updates.forget()
            self.setup.world.leave_word(f"closed after step {self.last_step}")
            self.userlog.hand_on(everything=True)
            if self.recorder is not None:
                self.recorder.close(reason, wait_for_ranks=orderly)
        if orderly:
            self.setup.world.close()
        if self.recorder is not None:  # last, since no rank waits for it
            self.farewell(self.clock, self.recorder.n_rows, reason)
        if orderly:
            self._raise_fault()

    def _send_last_logs(self) -> None:
        world, device = self.setup.world, self.setup.device
        records = world.header(record_of(CLOSE, self.last_step, riding=self.userlog.riding_digest))
        sums = {f"log/{name}": value for name, value in self.share_logs(records).items()}
        nothing = Pending(pack({}, device))
        self.send(Result(0, [], Layout.of(sums), world.all_reduce_async(pack(sums, device)), Layout.of({}), nothing))
