"""One rank's side of a tracked step, when the headers of all ranks are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from distcockpit.capture.parameter_gradients import ParameterGradients
from distcockpit.curvature.diagonals import Curvature
from distcockpit.curvature.hutchinson import TraceEstimate, quadratic_forms
from distcockpit.losses.captured import CapturedMicroBatch
from distcockpit.quantities.batch import Times, Update
from distcockpit.tracking.active import Active
from distcockpit.tracking.header import Header
from distcockpit.tracking.session import Session


@dataclass(frozen=True)
class LocalCurvature:
    """Curvature of the sum over this rank's micro-batches of w L."""

    diagonals: Mapping[Curvature, Mapping[str, Tensor]]
    traces: Mapping[TraceEstimate, Tensor]

    @classmethod
    def of_nothing(cls, session: Session, active: Active) -> LocalCurvature:
        """Return the curvature of no samples."""
        s = session.setup
        return cls(
            {kind: session.diagonals.of(kind, [], []) for kind in active.each("curvature")},
            {kind: quadratic_forms(kind, s.bare, s.loss_fn, s.trainable, [], 0) for kind in active.each("trace")},
        )


@dataclass(frozen=True)
class StepInputs:
    """What the sums of a step are computed from."""

    step: int
    header: Header
    captured: Sequence[CapturedMicroBatch]  # the micro-batches
    parameter_gradients: ParameterGradients  # what autograd gave the tracked parameters
    active: Active  # the quantities of this step
    starting: Active  # those of them that have a row starting here
    update: Update | None  # the update that ended here
    curvatures: LocalCurvature  # of this rank's micro-batches
    start_values: Mapping[str, Tensor] | None  # the parameters, if they are to be copied for an update that starts here
    times: Callable[[], Times]
    has_calls: bool = True  # whether the calls are kept that individual gradients are computed from
    written: bool = False  # whether a parameter that is not tracked was written to inside the step

    @property
    def keeps(self) -> bool:
        """True if the individual gradients formed here are needed again, once the update that starts here is known."""
        return self.starting.wants("update")
