"""`torch.distributed.algorithms.Join`: how a rank that has run out of data still answers the others.

Such a rank is inside `Join`, where its main thread answers what DDP exchanges in the forward and backward passes of the
others. The cockpit's exchanges come when these have ended, on process groups of their own; a thread answers them, so
that neither waits for the other, whatever the order of the joinables. The rank makes no optimizer steps any more: one
that still trains broadcasts the parameters. With them it does what a rank without samples does, and if it is rank 0, it
writes the rows.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from typing import Any

import torch
from torch.distributed.algorithms import Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from distcockpit.capture.parameter_gradients import ParameterGradients
from distcockpit.losses.mixed import unmix
from distcockpit.tracking.finish import finish
from distcockpit.tracking.header import Header
from distcockpit.tracking.inputs import LocalCurvature, StepInputs
from distcockpit.tracking.recorder import Stamp
from distcockpit.tracking.session import Session
from distcockpit.world import LEAVE, TRACK, RankFailed, record_of

logger = logging.getLogger("distcockpit")


class JoinableCockpit(Joinable):
    """What `Join` asks of a cockpit. Abstract."""

    @property
    @abstractmethod
    def _ddp_model(self) -> DistributedDataParallel:
        """The DDP model, without which there is no `Join`."""

    @property
    @abstractmethod
    def _joining_session(self) -> Session | None:
        """This rank's side of the run; ``None`` if the cockpit is off."""

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Support ``with Join([ddp, cockpit]):``, in either order: ranks that run out of data contribute nothing."""
        if self._joining_session is not None:
            self._joining_session.joined.expect()
        return Shadow(self._joining_session)

    @property
    def join_device(self) -> torch.device:
        """The device of the DDP model."""
        return self._ddp_model.join_device

    @property
    def join_process_group(self) -> Any:
        """The process group of the DDP model."""
        return self._ddp_model.join_process_group

    def _let_ddp_notify(self) -> None:
        """Let the DDP model notify `Join` of each iteration, which is the first joinable's job, since it knows best.

        Raises:
            RuntimeError: If the DDP model is not one of the joinables.
        """
        mine: Any = self._join_config
        if not (mine.enable and mine.is_first_joinable):
            return
        if not self._ddp_model._join_config.enable:
            raise RuntimeError("Join([cockpit]): the DDP model is missing. Write `with Join([ddp, cockpit]):`.")
        self._ddp_model._join_config = mine
        self._join_config = mine._replace(is_first_joinable=False)


class Shadow(JoinHook):
    """The hook that `Join` calls on a rank that has run out of data.

    Args:
        session: This rank's side of the run; ``None`` if the cockpit is off.
    """

    def __init__(self, session: Session | None) -> None:
        self._session = session
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def main_hook(self) -> None:
        """Handle another iteration of the ranks that still train."""
        if self._thread is None and self._session is not None:
            self._thread = threading.Thread(
                target=self._run, args=[self._session], name="distcockpit-join", daemon=True
            )
            self._thread.start()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Finish, once all ranks have run out of data.

        Raises:
            RuntimeError: If this rank could not answer the others.
        """
        if self._session is None:
            return
        if self._thread is None:
            self._session.setup.world.header(record_of(LEAVE, 0))
        else:
            self._thread.join()
        if self._error is not None:
            raise RuntimeError(
                f"A rank that had run out of data could not answer the other ranks: {self._error}"
            ) from self._error

    def _run(self, session: Session) -> None:
        try:
            session.updates.record_displacement()  # this rank's optimizer has made its last step
            while _answer(session):
                pass
        except Exception as error:
            self._error = error
            logger.warning(
                "distcockpit: this rank has run out of data and could not answer the other ranks.", exc_info=error
            )
            session.setup.world.refuse(record_of(TRACK, -1, joined=1))


def _answer(session: Session) -> bool:
    """Take part in one exchange with the other ranks; return whether they go on."""
    try:
        return _take_part(session)
    except RankFailed:  # the others skip this step
        session.updates.forget()
        return True


def _take_part(session: Session) -> bool:
    session.check_health()
    setup, world = session.setup, session.setup.world
    riding = session.userlog.riding_digest
    records = world.header(record_of(TRACK, -1, joined=1, model=session.part, riding=riding))
    training = [record for record in records if not record["joined"]]
    if not training or training[0]["kind"] == LEAVE:
        return False
    if training[0]["kind"] != TRACK:  # the others find out that this rank cannot take part
        return True
    step = int(training[0]["step"])
    header = Header.of(session, records, None, None)
    totals, state = header.totals, header.state
    session.follow(step)
    start = session.updates.finish(step, state.every)
    active = session.actives.touched(step)
    if not active:
        return True
    tracked, resumes = {name: state.every[name] for name in setup.tracked}, session.resumes_at(step)
    update, start_stamp = session.updates.ending(step, start, active, tracked, state.scale, resumes=resumes)
    starting = session.actives.of(q.starts(step) for q in setup.quantities)
    if totals.is_mixed:
        unmix([], 1, totals.weight, world)
    session.agreements.agree_on_sizes({q.name: {} for q in active.with_need("output_sizes")})
    inputs = StepInputs(
        step,
        header,
        [],
        ParameterGradients(tracked),
        active,
        starting,
        update,
        LocalCurvature.of_nothing(session, active),
        state.every if session.updates.needs_values(starting) else None,
        lambda: session.clock.times_elsewhere(world.traffic()),
    )
    finish(session, inputs, Stamp(step, header.epoch, time.time(), totals.n), start_stamp)
    return True
