"""A tracked step: from the forward pass to the sums sent off."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from torch import Tensor, nn

from distcockpit.capture.capture import Capture, undisturbed
from distcockpit.capture.eager import eagerly
from distcockpit.capture.layers import problem_of_batchnorm
from distcockpit.capture.parameter_gradients import ParameterGradients
from distcockpit.gradients.factors import WHOLE
from distcockpit.gradients.rounding import calls_by_parameter, sums_over_sequences
from distcockpit.losses.captured import CapturedMicroBatch, KnownLoss
from distcockpit.quantities.batch import Update
from distcockpit.replay.batch_norms import training
from distcockpit.replay.memory import is_out_of_memory, release
from distcockpit.tracking import sharded
from distcockpit.tracking.active import Active
from distcockpit.tracking.checked import CheckedStep
from distcockpit.tracking.finish import finish
from distcockpit.tracking.header import Header, ModelState
from distcockpit.tracking.inputs import StepInputs
from distcockpit.tracking.local_batches import observed
from distcockpit.tracking.recorder import Stamp
from distcockpit.tracking.session import Session
from distcockpit.tracking.setup import Setup
from distcockpit.tracking.updates import Start
from distcockpit.world import TRACK, RankFailed, digest, record_of


class _NotTracked(Exception):
    """A step that cannot be tracked, known to all ranks in time; its cause says why."""


class TrackedStep:
    """The context manager that ``DistCockpit.track`` returns; a no-op on untracked steps."""

    def __init__(
        self,
        session: Session | None,
        step: int,
        epoch: float | None,
        weight: float | None,
        batch_size: int | None,
    ) -> None:
        self._maybe_session, self._step = session, step
        self._epoch = None if epoch is None else float(epoch)
        self._weight, self._batch_size = weight, batch_size
        self._active = Active([])
        self._ending: tuple[Update | None, Stamp | None] = None, None
        self._versions: dict[str, int] = {}
        self._capture: Capture | None = None
        self._fault: BaseException | None = None  # why the step is not tracked
        self._mixing = ""  # why batch norms mix samples, if they do
        self._is_awaited = False  # by a rank that has joined
        self._start: Start | None = None
        self._eager = ExitStack()

    def __enter__(self) -> Self:
        if self._maybe_session is not None and self._maybe_session.evaluates_again(self._step):
            self._maybe_session = None
        if self._maybe_session is not None:
            self._session = self._maybe_session
            self._previous = self._session.last_step
            self._settled = self._session.is_settled
            self._session.begin(self._step)
            try:
                with undisturbed():
                    self._begin()
            except BaseException as error:
                if not self._may_skip(error):
                    self._leave()
                    raise
                if self._capture is not None:
                    self._capture.stop()
                release(error)
                self._capture, self._fault = None, error
            self._session.clock.begin()
        return self

    @property
    def _setup(self) -> Setup:
        return self._session.setup

    def _leave(self) -> None:
        self._eager.close()
        if self._capture is not None:
            self._capture.let_go()
        self._session.end(is_tracked=self._capture is not None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._maybe_session is None:
            return
        self._session.clock.end()
        try:
            if self._capture is not None:
                self._capture.stop()
                if kind is None:
                    with undisturbed():
                        self._finish_or_skip(self._capture)
            elif self._fault is not None and kind is None:
                self._setup.world.refuse(record_of(TRACK, self._step))
                self._session.skip(self._step, self._fault)
            elif self._is_awaited and kind is None:
                self._header(0)
            if error is not None:
                self._setup.world.note(error)
                self._session.may_try_again(self._previous, self._start)
        finally:
            self._leave()

    @property
    def is_tracked(self) -> bool:
        """True if anything is tracked at this step."""
        return self._capture is not None

    def record_losses(self, losses: Tensor, weight: float | None = None, divisor: float | None = None) -> None:
        """See ``DistCockpit.record_losses``."""
        if self._capture is not None:
            self._capture.record_losses(losses, weight, divisor)

    # -- before the forward pass ---------------------------------------------------------------------------------------

    def _begin(self) -> None:
        session = self._session
        setup, self._active = session.setup, session.actives.touched(self._step)
        modules: dict[str, nn.Module] = {}
        parameters: dict[str, nn.Parameter] = {}
        is_as_it_was = True
        if self._active or session.updates.start:
            modules, parameters = dict(setup.bare.named_modules()), dict(setup.bare.named_parameters())
            is_as_it_was = setup.is_as_it_was(modules, parameters)
        self._start = start = session.updates.finish(self._step, is_as_it_was=is_as_it_was)
        if setup.shards is not None:
            scale = setup.loss_scale()
            self._ending = sharded.ending(session, self._step, self._previous, start, self._active, scale)
        self._is_awaited = session.joined.wait_for_parameters(self._step, setup.quantities)
        if not self._active:
            return
        session.look_at_model(self._step, modules, parameters, is_as_it_was=is_as_it_was)
        setup = session.setup
        setup.world.leave_word(f"in tracked step {self._step}")
        self._eager.enter_context(eagerly())
        attribution = session.attribution
        watched = attribution.check.begin()
        self._checked = CheckedStep(session, self._step, self._active, is_settled=self._settled)
        self._mixing = problem_of_batchnorm(setup.batchnorms, setup.track_batchnorm)
        if self._mixing and not self._settled:
            self._checked.do_without_gradients(self._mixing, self._active.of_gradients)
        resumes, scale = session.resumes_at(self._step), setup.loss_scale()
        if self._ending[0] is None:
            start_here = None if setup.shards is not None else start
            self._ending = session.updates.ending(
                self._step, start_here, self._active, setup.tracked, scale, resumes=resumes
            )
        if start is not None and self._ending[0] is not None:
            self._start = start = start.with_slopes(self._ending[0])
        self._starting = session.actives.of(q.starts(self._step) for q in setup.quantities)
        self._versions = {name: p._version for name, p in setup.parameters.items()}
        leaves = setup.facts.leaves
        observers = {
            q.name: (q.observe, frozenset(q.observed_layers(leaves))) for q in self._starting.with_need("outputs")
        }
        gradients = self._active.wants("output_gradients")
        norms = {path for path, _ in training(setup.batchnorms)}
        everything = gradients or bool(observers)
        wants_sums = self._active.takes_autograds_sums or self._active.wants("averaged")
        in_grad = setup.sums_are_in_grad and not (session.copies_gradients or self._active.wants("averaged"))
        summed = setup.tracked if wants_sums and (in_grad or setup.may_copy_parameters) else {}
        if self._active.wants("averaged") and setup.shards is None:
            summed = setup.tracked
        check = attribution.check
        has_sums = not wants_sums or (summed and not check.broken and not setup.batch_statistics_are_constants)
        self._keeps_calls = bool(watched) or self._active.wants_calls or not has_sums or session.keeps_calls
        self._capture = Capture(
            setup.bare,
            [layer for layer in attribution.cover.layers if everything or layer.parameters or layer.path in norms],
            KnownLoss(setup.loss_fn, self._weight, scale or 1.0, setup.loss_function),
            attribution.axes,
            thorough=check.is_thorough,
            keeps_calls=self._keeps_calls,
            output_gradients=gradients,
            observers=observers,
            batch_size=self._batch_size,
            parameter_gradients=ParameterGradients(
                setup.tracked,
                checked=watched,
                summed=summed,
                in_grad=in_grad,
                keep_left=self._active.wants("averaged"),
                held=None if setup.shards is None else setup.trainable,
            ),
            wrappers=setup.wrappers,
            settled=self._settled,
            goes_on=self._settled or not session.is_by_hand,
            tracked={name: p for name, p in setup.tracked.items() if p.requires_grad},
            shards=setup.shards,
            forms=self._settled and session.forms_early and not (watched or setup.batch_statistics_are_constants),
        )
        self._capture.start()

    # -- after the backward pass ---------------------------------------------------------------------------------------

    def _may_skip(self, error: BaseException) -> bool:
        """True if an error only costs this step: earlier steps were fine, or nothing was listed explicitly."""
        return isinstance(error, Exception) and (self._settled or not self._session.is_by_hand)

    def _finish_or_skip(self, capture: Capture) -> None:
        """Finish the step, or skip it on all ranks.

        Raises:
            Exception: Whatever went wrong, if it is among the first tracked steps or the other ranks could not be told.
        """
        if capture.came_again:
            self._session.form_at_the_end()
        try:
            self._finish(capture)
        except _NotTracked as skipped:
            error = skipped.__cause__
            assert error is not None
            if not self._may_skip(error):
                raise error from None
            self._session.skip(self._step, error)

    def _finish(self, capture: Capture) -> None:
        session, setup = self._session, self._setup
        try:
            session.check_health()
        except Exception:
            setup.world.refuse(record_of(TRACK, self._step))
            raise
        try:
            versions = {name: version for name, version in self._versions.items() if name in setup.facts.shapes}
            found = self._checked.micro_batches(capture, versions, self._mixing)
            captured = found.captured
            curvatures = self._checked.curvatures(captured)
            sizes = {q.name: q.sizes(observed(captured, q.name)) for q in self._active.with_need("output_sizes")}
        except Exception as error:
            if is_out_of_memory(error):
                release(error)
            setup.world.refuse(record_of(TRACK, self._step))
            raise _NotTracked from error
        try:
            header = self._header(
                sum(c.batch_size for c in captured),
                weight=sum(c.weight for c in captured),
                of_sum=sum(c.scale.of_sum for c in captured),
                is_sum=float(found.is_sum),
                own=found.own,
                coefficient=found.coefficient,
                mix=found.mix,
                rounds=float(self._rounds(captured)),
            )
        except RankFailed as error:
            raise _NotTracked from error
        self._checked.reconcile(header.totals, found, capture.objective)
        session.agreements.agree_on_sizes(sizes)
        update, start_stamp = self._ending
        inputs = StepInputs(
            self._step,
            header,
            captured,
            capture.parameter_gradients,
            self._active,
            self._starting,
            update,
            curvatures,
            setup.parameters if session.updates.needs_values(self._starting) else None,
            lambda: session.clock.times(capture.forward_seconds, setup.world.traffic()),
            self._keeps_calls,
            any(setup.parameters[name]._version != version for name, version in self._versions.items()),
        )
        try:
            finish(session, inputs, Stamp(self._step, self._epoch, time.time(), header.totals.n), start_stamp)
        except RankFailed as error:
            raise _NotTracked from error.__cause__ or error
        except BaseException:
            session.failed()
            raise
        session.finished()

    def _rounds(self, captured: Sequence[CapturedMicroBatch]) -> bool:
        """True if autograd's sums may serve on this rank where squared norms are subtracted."""
        if not (self._active.takes_autograds_sums and self._active.subtracts_squares):
            return False
        rows = dict.fromkeys(self._setup.tracked, WHOLE)
        calls = calls_by_parameter([micro.batch for micro in captured])
        return bool(sums_over_sequences(calls, rows))

    def _header(self, batch_size: int, **numbers: float) -> Header:
        """The first exchange."""
        session = self._session
        record = record_of(
            TRACK,
            self._step,
            batch_size=batch_size,
            model=session.part,
            layout=digest([q.name for q in self._active], self._ending[0] is not None),
            riding=session.userlog.riding_digest,
            **numbers,
        )
        with session.clock.waiting():
            records = self._setup.world.header(record)
        return Header.of(session, records, ModelState.of(self._setup), self._epoch)
