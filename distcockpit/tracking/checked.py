"""From the capture of a step to checked micro-batches; what the loop or the model cannot give is settled here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from distcockpit.capture.capture import Capture
from distcockpit.curvature.diagonals import Curvature
from distcockpit.curvature.hutchinson import TraceEstimate, quadratic_forms
from distcockpit.losses.captured import CapturedMicroBatch, check_uses
from distcockpit.losses.interpretation import Interpretation
from distcockpit.losses.mixed import unmix
from distcockpit.losses.objective import Objective
from distcockpit.quantities.base import Quantity
from distcockpit.tracking.active import Active
from distcockpit.tracking.header import BatchTotals
from distcockpit.tracking.inputs import LocalCurvature
from distcockpit.tracking.session import Session
from distcockpit.world import digest


class CheckedStep:
    """What one tracked step has, for the quantities that are active.

    Args:
        session: This rank's side of the run.
        step: The step.
        active: The quantities of the step.
        is_settled: Whether a tracked step was finished before, so that nothing ends the run any more.
    """

    def __init__(self, session: Session, step: int, active: Active, *, is_settled: bool) -> None:
        self._session, self._step, self._active, self._settled = session, step, active, is_settled
        self._setup = session.setup

    def reconcile(self, totals: BatchTotals, found: Interpretation, objective: Objective) -> None:
        """Check whether all ranks differentiate the same combination of losses."""
        captured = found.captured
        objective.settle(is_mixed=totals.is_mixed)
        if totals.is_sum:
            for micro in captured:
                micro.as_sum()
            self._session.say_once(
                "sum",
                f"step {self._step}: the loss is a sum over samples that is not divided by anything: the stored values "
                "are those of the mean, whatever the number of samples and ranks.",
            )
        if totals.is_mixed and not unmix(captured, found.times, totals.weight, self._setup.world):
            for micro in captured:
                micro.without_gradients(self._setup.tracked)
            self._session.say_once(
                "mixed",
                f"step {self._step}: parts of the loss have divisors that differ between ranks or micro-batches in "
                "different ways, such as tokens and samples, and their gradients cannot be separated: everything "
                "derived from per-sample gradients is NaN.",
            )
        if totals.owns:
            self._session.say_once(
                "owns",
                f"step {self._step}: ranks multiply their mean losses by different numbers, {totals.owns}; the stored "
                "values are those of one mean over all samples, times one number.",
            )

    def micro_batches(self, capture: Capture, versions: Mapping[str, int], mixing: str) -> Interpretation:
        """Turn what was captured into checked micro-batches.

        Args:
            capture: What was captured.
            versions: Of the tracked parameters, before the forward pass.
            mixing: Why batch norms mix samples, if they do.

        Raises:
            RuntimeError: If parameters changed meanwhile, or something that the user listed cannot be computed.
        """
        setup = self._setup
        for name, version in versions.items():
            if setup.parameters[name]._version != version:
                raise RuntimeError(
                    f"Parameter '{name}' changed inside `track`. Call optimizer.step() after the `with` block, because "
                    "per-sample gradients belong to the parameters of the forward pass. With optimizer.step(closure), "
                    "put the `with` block inside the closure. Optimizers that step during the backward pass (hooks on "
                    "parameters, overlap_with_ddp) are not supported."
                )
        found = capture.finish()
        captured = found.captured
        if capture.skips:
            self._session.say_once(
                "skipped",
                f"step {self._step}: a forward pass had no backward pass before `track` ended; its samples are "
                "not counted.",
            )
        for topic, text in found.notices.items():
            self._session.say_once(topic, f"step {self._step}: {text}")
        if found.coupled:
            for micro in captured:
                micro.without_gradients(setup.tracked)
            self.do_without_gradients(found.coupled, self._active.with_individual_gradients)
            return found
        if mixing:
            if self._active.wants("curvature", "trace", "eigenvalue"):
                raise RuntimeError(mixing)
            self.do_without_gradients(mixing, self._active.of_gradients)
            for micro in captured:
                micro.without_gradients(setup.tracked, has_losses=True)
            return found
        self._check_losses_are_known(captured, seen=capture.objective.n_roots > 0)
        required = any(q.required for q in self._active.of_gradients)
        seen = capture.parameter_gradients.signatures
        attributed = self._session.attribution.attribute(self._step, captured, seen, required=required)
        if attributed.problem:
            self._session.say_once("wrong", attributed.problem)
        if attributed.has_news:
            self._session.tell_coverage()
        check_uses(attributed.captured)
        return replace(found, captured=attributed.captured)

    def do_without(
        self, topic: str, wanting: Sequence[Quantity], because: str, error: Exception | None = None, advice: str = ""
    ) -> None:
        """Go on without something that quantities need: NaN, and one notice.

        Args:
            topic: The topic of the notice.
            wanting: The quantities that need it.
            because: What they need and why it is missing, to follow "Quantities [...]" or their names.
            error: What to raise; by default a `RuntimeError` with the reason and the advice.
            advice: What else the user can do about an error.

        Raises:
            Exception: At the first tracked step, if the user listed one of the quantities.
        """
        required = [q.name for q in wanting if q.required]
        if required and not self._settled:
            raise error or RuntimeError(f"Quantities {required} need {because}{advice}")
        names = ", ".join(q.name for q in wanting)
        need = "It needs" if len(wanting) == 1 else "They need"
        self._session.say_once(topic, f"step {self._step}: {names}: NaN. {need} {because}")

    def do_without_gradients(self, why: str, wanting: Sequence[Quantity]) -> None:
        """Go on without per-sample gradients; see `do_without`."""
        advice = " Or leave these quantities out."
        self.do_without("coupled", wanting, f"per-sample gradients, but {why.rstrip('.')}.", advice=advice)

    def _check_losses_are_known(self, captured: Sequence[CapturedMicroBatch], *, seen: bool) -> None:
        scales = [micro.scale for micro in captured if micro.batch_size]
        unseen = (
            "which sample each term of the loss belongs to cannot be seen"
            if seen
            else "what is differentiated cannot be seen from this thread"
        )
        for need, what, known in (
            ("losses", "per-sample losses", all(scale.individual is not None for scale in scales)),
            ("loss", "the loss", all(scale.total is not None for scale in scales)),
        ):
            if not known and (wanting := self._active.with_need(need)):
                self.do_without(
                    need,
                    wanting,
                    f"{what}, but {unseen}. Call cockpit.record_losses(losses) inside `track`, with one loss per "
                    f"sample. If axis {self._setup.batch_dim} of the model's inputs is not the batch, pass "
                    "batch_dim=... or track(step, batch_size=...).",
                )

    def curvatures(self, captured: Sequence[CapturedMicroBatch]) -> LocalCurvature:
        """Compute each diagonal and each estimate asked for; NaN where that fails.

        Raises:
            Exception: Whatever went wrong, at the first tracked step, if the user listed the quantity.
        """
        setup = self._setup
        diagonals: dict[Curvature, Mapping[str, Tensor]] = {}
        traces: dict[TraceEstimate, Tensor] = {}
        try:
            for kind in sorted(self._active.each("curvature"), key=lambda kind: kind.summed):
                if kind.summed and (whole := replace(kind, summed=False)) in diagonals:
                    diagonals[kind] = {name: h.sum() for name, h in diagonals[whole].items()}
                    continue
                seeds = [digest(kind.seed, self._step, setup.world.rank, i) for i in range(len(captured))]
                diagonals[kind] = self._session.diagonals.of(kind, captured, seeds)
            for estimate in self._active.each("trace"):
                seed = digest(estimate.seed, self._step)
                traces[estimate] = quadratic_forms(estimate, setup.bare, setup.loss_fn, setup.trainable, captured, seed)
        except Exception as error:
            wanting = [q for q in self._active if q.needs.curvature or q.needs.trace]
            why = f"{type(error).__name__}: {error}"
            self.do_without("curvature", wanting, f"curvature, which could not be computed: {why}", error)
            nothing = LocalCurvature.of_nothing(self._session, self._active)
            diagonals = {kind: {n: h + math.nan for n, h in hs.items()} for kind, hs in nothing.diagonals.items()}
            traces = {kind: forms + math.nan for kind, forms in nothing.traces.items()}
        return LocalCurvature(diagonals, traces)
