"""From the micro-batches of a step to calls that yield all individual gradients, as verified by the step itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from distcockpit.capture.batch_axes import BatchAxes
from distcockpit.capture.cover import Cover
from distcockpit.capture.coverage import Coverage, coverage
from distcockpit.capture.second_pass import mixed_up_rows, second_pass
from distcockpit.capture.selfcheck import SelfCheck, check_outputs_tell_all, examine
from distcockpit.capture.signature import norm_of, signature
from distcockpit.losses.captured import CapturedMicroBatch
from distcockpit.replay.memory import give_back, is_out_of_memory
from distcockpit.tracking.setup import Setup


@dataclass(frozen=True)
class Attributed:
    """The micro-batches of a step, and what is new about how parameters are served."""

    captured: list[CapturedMicroBatch]
    has_news: bool = False  # whether `Attribution.coverage` changed
    problem: str = ""  # why individual gradients are unknown from here on, if they are


class Attribution:
    """Owns the routes that serve the parameters, and what steps have verified about them.

    Args:
        setup: What all ranks agreed on.
        cover: The initial routes.
        say: Reports something once per topic.
        last_checked: The last step of an earlier part of the run that verified its routes.
    """

    def __init__(self, setup: Setup, cover: Cover, say: Callable[[str, str], None], last_checked: int = -1) -> None:
        self._setup, self._say, self.cover = setup, say, cover
        self.axes = BatchAxes(setup.batch_dim, say)
        self.check = SelfCheck(dict(setup.tracked), last_checked=last_checked)
        self._early: set[str] = set()  # parameters whose individual gradients are formed in the backward pass
        self._whole = 0.0  # norm of the whole gradient at the last step that checked everything

    def adopt(self, setup: Setup) -> None:
        """Switch to the tensors, or modules of the same kind, that the model holds now."""
        self._setup, self.cover = setup, replace(self.cover, own=setup.layers)
        self.check.adopt(dict(setup.tracked))

    def coverage(self) -> Coverage:
        """How each parameter is tracked."""
        return coverage(self._setup.bare, self.cover, self.check, self._early)

    def attribute(
        self, step: int, captured: list[CapturedMicroBatch], seen: Mapping[str, Tensor], *, required: bool
    ) -> Attributed:
        """Find uses that yield all individual gradients.

        If those of the step are not enough, the step is run again: with batch statistics as constants, and with parent
        modules in place of modules that turn out not to serve their parameters.

        Args:
            step: The step.
            captured: Its micro-batches.
            seen: The signatures of what autograd gave the parameters.
            required: Whether the user explicitly listed quantities that need individual gradients.

        Raises:
            Exception: The problem, if a parameter was never served and is required.
        """
        if captured and captured[0].beside.gradients:
            beside = captured[0].beside.gradients
            seen = {name: g - signature(beside[name]) if name in beside else g for name, g in seen.items()}
        constant, live = self._setup.batch_statistics_are_constants, seen
        if constant:
            captured, seen = self._again(captured, constant)
        if self.check.is_thorough:
            self._whole = norm_of(live)
        cover, has_news, problem, checks = self.cover, False, "", False
        while names := self.check.due(captured):
            checks = True
            try:
                if constant and self.check.is_thorough:
                    check_outputs_tell_all(captured, self._again(captured, False)[1], live, self._setup.bare)
                found = examine(
                    captured,
                    seen,
                    {name: p.detach() for name, p in self._setup.every.items()},
                    self.cover.scopes,
                    names,
                    self._whole,
                    self._setup.block_elements,
                    self._setup.buckets,
                )
                unserved = found.unserved or self._mixed_up(captured, found.explained, constant)
                if not unserved:
                    self.check.passed(found, captured, step)
                    has_news = bool(found.explained)
                    break
                self._raise_cover(unserved)
                again, seen_again = self._again(captured, constant)
            except Exception as error:
                if is_out_of_memory(error):
                    self.cover = cover
                    raise
                if not self.check.was_all_right(names) and (required or not self._setup.slow_routes):
                    raise
                self.cover, has_news, problem = cover, True, self._give_up(names, step, error)
                break
            if not constant:
                again = [micro.with_others(other, unserved) for micro, other in zip(captured, again, strict=True)]
            captured = again
            seen = seen_again if constant else {**seen_again, **seen}
        if has_news:
            give_back()  # the check ran the model again
        if self.check.broken:
            for micro in captured:
                micro.without_gradients(self._setup.tracked, has_losses=True)
        uses = [use for micro in captured for use in micro.uses]
        early = {name for use in uses if use.is_formed for name in use.layer.parameters.values()}
        early -= {name for use in uses if not use.is_formed for name in use.layer.parameters.values()}
        if uses and not checks and early != self._early:
            self._early, has_news = early, True
        return Attributed(captured, has_news, problem)

    def _raise_cover(self, unserved: Mapping[str, tuple[str, list[str]]]) -> None:
        """Let parent modules serve parameters that their own modules do not serve.

        Raises:
            RuntimeError: If the model is sharded, so that no module can be run again.
        """
        if self._setup.shards is not None:
            name, (why, _) = next(iter(unserved.items()))
            raise RuntimeError(
                f"Per-sample gradients of parameter '{name}' cannot be computed from the calls of functions alone: "
                f"{why}. Other models are then run again in larger parts, but one that is sharded with fully_shard "
                "would have to be gathered for that. exclude=[...] leaves layers out."
            )
        cover = self.cover.raise_for(unserved)
        cover.check(self._setup.slow_routes)
        self.cover = cover
        self.check.failed(unserved)

    def _give_up(self, parameters: Sequence[str], step: int, error: Exception) -> str:
        """Record that what was exact at earlier steps no longer is, which is no reason to end the run."""
        right = self.check.last_checked
        since = "" if right < 0 else f" were correct at step {right}, but"
        between = "" if right < 0 else " Rows in between may be wrong."
        self.check.give_up(parameters, step)
        return (
            f"step {step}: per-sample gradients{since} are unknown now: {error} Everything derived from them is NaN "
            f"until they are known again.{between}"
        )

    def _mixed_up(
        self, captured: Sequence[CapturedMicroBatch], names: Sequence[str], constant: bool
    ) -> dict[str, tuple[str, list[str]]]:
        """Return the parameters whose calls have output rows that are not samples, with the reason."""
        if not names:
            return {}
        layers, scopes = self.cover.layers, self.cover.scopes
        mixed = mixed_up_rows(captured, self._setup.bare, layers, self.axes, self._say, constant_statistics=constant)
        failing = {name: [path for path in scopes[name] if (path, name) in mixed] for name in names}
        why = "the rows computed with it do not correspond one-to-one to samples"
        return {name: (why, paths) for name, paths in failing.items() if paths}

    def _again(
        self, captured: Sequence[CapturedMicroBatch], constant: bool
    ) -> tuple[list[CapturedMicroBatch], dict[str, Tensor]]:
        """Run a second pass of each micro-batch, and return the signatures of the gradients it gave the parameters."""
        total: dict[str, Tensor] = {}
        result = []
        for micro in captured:
            again, seen = second_pass(
                micro,
                self._setup.bare,
                self.cover.layers,
                self.axes,
                self._setup.trainable,
                constant_statistics=constant,
            )
            for name, gradient in seen.items():
                total[name] = total[name] + gradient if name in total else gradient
            result.append(again)
        return result, total
