"""Losses given by the user: through the loss module passed to the cockpit, and through ``record_losses``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from distcockpit.losses.captured import KnownLoss, LossCall, RecordedMicroBatch, Said
from distcockpit.replay.trees import map_tensors

SAID_TWICE = (
    "record_losses was called twice for one forward pass. Call it once, with the sum of the losses of each sample."
)

OnGradient = Callable[[Tensor, Callable[[Tensor], None], LossCall], None]
"""Puts a hook on a tensor, given a receiver for its gradient and the call that it belongs to."""


class LossCalls:
    """Adds losses to the micro-batches of a step.

    Args:
        loss: What is known about the loss from outside.
        micros: The micro-batches so far.
        on_gradient: Puts hooks on losses.
    """

    def __init__(self, loss: KnownLoss, micros: list[RecordedMicroBatch], on_gradient: OnGradient) -> None:
        self._loss, self._micros, self._on_gradient = loss, micros, on_gradient

    def heard(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Record a call of the loss module, which curvature will call again."""
        if not (isinstance(output, Tensor) and output.requires_grad and self._micros):
            return
        # Targets may be overwritten as soon as the loss is computed.
        args, kwargs = map_tensors(lambda t: t if t.requires_grad else t.clone(), (args, kwargs))
        micro = self._micros[-1]
        micro.losses.append(LossCall(args, kwargs, output.detach().clone(), of=micro.passes[-1]))

    def record(self, losses: Tensor, weight: float | None, divisor: float | None) -> None:
        """Record the losses of the latest forward pass, as given by the user; see ``DistCockpit.record_losses``.

        Raises:
            ValueError: If the shape is wrong, or ``divisor`` is given although it is measured.
            RuntimeError: If the model was not called, or its losses are already known.
        """
        if not self._micros:
            raise RuntimeError(
                "record_losses was called inside `track` before the model was. First call the model inside "
                "`with cockpit.track(step):`, as `cockpit(x)` or as the module passed to DistCockpit."
            )
        micro = self._micros[-1]
        if any(call.recorded for call in micro.losses):
            raise RuntimeError(SAID_TWICE)
        expected = micro.passes[-1].batch_size
        if losses.shape not in ((expected,), ()):
            raise ValueError(
                f"record_losses(losses): losses has shape {tuple(losses.shape)}, but must hold one loss for each of "
                f"the {expected} samples, shape ({expected},), or be the loss of the whole micro-batch, a scalar."
            )
        if losses.requires_grad and micro.passes[-1].went_backward:
            raise RuntimeError(
                "record_losses was called after the backward pass, so factors on the loss cannot be measured. "
                "Call it before backward(), or with losses.detach() if there is no factor."
            )
        if losses.dim() and losses.requires_grad and divisor is not None:
            raise ValueError(
                f"record_losses(divisor={divisor!r}): the divisor of per-sample losses is measured when they are "
                "differentiated. Omit it, or pass losses.detach()."
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
