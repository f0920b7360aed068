"""Losses as the user says them: by the loss module given to the cockpit, and by ``record_losses``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from distcockpit.capture.captured import KnownLoss, LossCall, RecordedMicroBatch, Said
from distcockpit.replay.trees import map_tensors

SAID_TWICE = (
    "record_losses was called twice for one forward pass. Call it once, with the sum of the losses of each sample."
)

OnGradient = Callable[[Tensor, Callable[[Tensor], None], LossCall], None]
"""Puts a hook on a tensor: what receives its gradient, and the call that it belongs to."""


class LossCalls:
    """Adds losses to the micro-batches of a step.

    Args:
        loss: What is known of the loss from outside.
        micros: The micro-batches so far.
        on_gradient: Puts hooks on losses.
    """

    def __init__(self, loss: KnownLoss, micros: list[RecordedMicroBatch], on_gradient: OnGradient) -> None:
        self._loss, self._micros, self._on_gradient = loss, micros, on_gradient

    def heard(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """The loss module was called: curvature will call it again."""
        if not (isinstance(output, Tensor) and output.requires_grad and self._micros):
            return
        # Targets may be overwritten as soon as the loss is there.
        args, kwargs = map_tensors(lambda t: t if t.requires_grad else t.clone(), (args, kwargs))
        micro = self._micros[-1]
        micro.losses.append(LossCall(args, kwargs, output.detach().clone(), of=micro.passes[-1]))

    def record(self, losses: Tensor, weight: float | None, divisor: float | None) -> None:
        """Losses of the latest forward pass, as the user says; see ``DistCockpit.record_losses``.

        Raises:
            ValueError: If the shape is another, or ``divisor`` is given where it is measured.
            RuntimeError: If the model was not called, or they are known already.
        """
        if not self._micros:
            raise RuntimeError(
                "record_losses was called inside `track` before the model was. Call the model through the cockpit, "
                "`cockpit(x)`, or call the very module that was given to DistCockpit, inside "
                "`with cockpit.track(step)`."
            )
        micro = self._micros[-1]
        if any(call.recorded for call in micro.losses):
            raise RuntimeError(SAID_TWICE)
        expected = micro.passes[-1].batch_size
        if losses.shape not in ((expected,), ()):
            raise ValueError(
                f"record_losses(losses): losses has shape {tuple(losses.shape)}, but must hold one loss for each of "
                f"the {expected} samples, shape ({expected},), or be the loss of all of them, without axes."
            )
        if losses.requires_grad and micro.passes[-1].went_backward:
            raise RuntimeError(
                "record_losses was called after the backward pass, so that factors on the loss cannot be measured. "
                "Call it before backward(), or with losses.detach() if there is no factor."
            )
        if losses.dim() and losses.requires_grad and divisor is not None:
            raise ValueError(
                f"record_losses(divisor={divisor!r}): what individual losses are divided by is measured where they are "
                "differentiated. Leave it out, or give losses.detach()."
            )
        individual = losses.detach().double() if losses.dim() else None
        given = self._loss.weight if weight is None else weight
        weight = float(expected if given is None else given)
        divisor = weight if divisor is None else float(divisor)
        total = losses.detach().double() * divisor if individual is None else individual.sum()
        said = Said(total, individual, divisor, weight)
        call = LossCall((), {}, losses.detach().clone(), said, micro.passes[-1])
        micro.losses.append(call)
        if losses.requires_grad:
            self._on_gradient(losses, call.receive, call)
