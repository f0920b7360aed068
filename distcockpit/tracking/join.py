"""Ranks that have run out of data, under `torch.distributed.algorithms.Join`: they contribute w_r = 0.

Such a rank is inside `Join`, where its main thread answers what DDP exchanges in the forward and backward passes of the
others. The cockpit's exchanges come when these have ended, on process groups of their own; a thread answers them, so
that neither waits for the other, whatever the order of the joinables. The rank makes no optimizer steps any more: one
that still trains tells it the parameters. With them it does what a rank without samples does, and if it is rank 0, it
writes the rows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.algorithms import JoinHook

from distcockpit.capture.mixed import unmix
from distcockpit.capture.parameter_gradients import ParameterGradients
from distcockpit.curvature.hutchinson import quadratic_forms
from distcockpit.tracking.active import Active
from distcockpit.tracking.packed import pack
from distcockpit.tracking.pooling import BatchTotals, LocalCurvature, ModelState, StepInputs
from distcockpit.tracking.recorder import Stamp
from distcockpit.tracking.sending import send
from distcockpit.tracking.session import Session
from distcockpit.world import LEAVE, TRACK, RankFailed, Record, record_of

logger = logging.getLogger(__name__)

UNKNOWN = float("nan")


class Shadow(JoinHook):
    """What `Join` calls on a rank that has run out of data.

    Args:
        session: This rank's side of the run; ``None`` if the cockpit is off.
    """

    def __init__(self, session: Session | None) -> None:
        self._session = session
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def main_hook(self) -> None:
        """Another iteration of the ranks that still train."""
        if self._thread is None and self._session is not None:
            self._thread = threading.Thread(
                target=self._run, args=[self._session], name="distcockpit-join", daemon=True
            )
            self._thread.start()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks have run out of data.

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
            raise RuntimeError(f"A rank without data could not answer the others: {self._error}") from self._error

    def _run(self, session: Session) -> None:
        try:
            session.record_displacement()  # this rank's optimizer has made its last step
            while _answer(session):
                pass
        except Exception as error:
            self._error = error
            logger.warning("distcockpit: this rank has no data, and could not answer the others.", exc_info=error)
            session.setup.world.refuse(record_of(TRACK, -1, joined=1))


def _answer(session: Session) -> bool:
    """Take part in one exchange of the others; says whether they go on."""
    try:
        return _take_part(session)
    except RankFailed:  # the others leave this step out
        session.start = None
        return True


def _take_part(session: Session) -> bool:
    session.check_health()
    setup, world = session.setup, session.setup.world
    riding = session.userlog.riding_digest
    records = world.header(record_of(TRACK, -1, joined=1, model=session.part, riding=riding))
    training = [record for record in records if not record["joined"]]
    if not training or training[0]["kind"] == LEAVE:
        return False
    if training[0]["kind"] != TRACK:  # the others learn that this rank cannot take part
        return True
    step = int(training[0]["step"])
    told = share_state(session, records, None, None)
    session.begin_tracking(step)
    session.last_step = step
    start = session.finish_update(step, told.state.every)
    active = session.actives.touched(step)
    if not active:
        return True
    tracked = {name: told.state.every[name] for name in setup.tracked}
    update, start_stamp = session.ending_update(step, start, active, tracked, told.state.scale)
    starting = session.actives.of(q.starts(step) for q in setup.quantities)
    totals = BatchTotals.of(records)
    if totals.is_mixed:
        unmix([], 1, totals.weight, world)
    session.agree_on_sizes({q.name: {} for q in active.with_need("output_sizes")})
    inputs = StepInputs(
        step,
        totals,
        [],
        ParameterGradients(tracked),
        active,
        starting,
        update,
        no_curvature(session, active),
        told.state,
        told.state.every if session.keeps_values(starting) else None,
        lambda: session.clock.times_elsewhere(world.traffic()),
    )
    send(session, inputs, Stamp(step, told.epoch, time.time(), inputs.totals.n), start_stamp, told.riding)
    return True


@dataclass(frozen=True)
class Told:
    """What ranks that have run out of data must hear of a step."""

    state: ModelState
    epoch: float | None
    riding: dict[str, Tensor]  # the user's scalars, with this rank's part


def share_state(session: Session, records: Sequence[Record], state: ModelState | None, epoch: float | None) -> Told:
    """The first rank that still trains tells those that do not how the model is; all ranks call it after a header.

    Args:
        session: This rank's side of the run.
        records: The headers.
        state: The model as it is; ``None`` on ranks that do not train.
        epoch: Of the step.
    """
    setup, world = session.setup, session.setup.world
    absent = frozenset(rank for rank, record in enumerate(records) if record["joined"])
    session.absent, session.exchanged_step = absent, int(max(record["step"] for record in records))
    if absent:
        source = next(rank for rank in range(world.size) if rank not in absent)
        facts = {"facts": torch.full((2 + setup.facts.n_parameter_groups,), UNKNOWN, dtype=torch.float64)}
        if state is not None:
            known = (UNKNOWN if value is None else value for value in (epoch, state.scale, *state.learning_rates))
            facts = {"facts": torch.stack([torch.as_tensor(v, dtype=torch.float64).cpu() for v in known])}
        every = {name: p.detach() for name, p in setup.every.items()} if state is None else state.every
        buffer = pack({**facts, **every}, setup.device)
        world.broadcast(buffer, source)
        if state is None:
            parts = buffer.split([value.numel() for value in (*facts.values(), *every.values())])
            heard = zip(every.items(), parts[1:], strict=True)
            values = {name: part.view(p.shape).to(p.dtype) for (name, p), part in heard}
            epoch, scale, *rates = (None if value != value else value for value in parts[0].tolist())
            state = ModelState(values, [UNKNOWN if rate is None else rate for rate in rates], scale)
    assert state is not None  # ranks that train know theirs
    return Told(state, epoch, session.riding(records))


def no_curvature(session: Session, active: Active) -> LocalCurvature:
    """That of no samples."""
    setup = session.setup
    return LocalCurvature(
        {kind: session.diagonals.of(kind, [], []) for kind in active.each("curvature")},
        {kind: quadratic_forms(kind, setup.bare, setup.loss_fn, setup.tracked, [], 0) for kind in active.each("trace")},
    )
