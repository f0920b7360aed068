"""Losses as a step tells them: by calls of the loss module, and by what the user records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from distcockpit.captured import Loss, LossCall, Micro, returned_any
from distcockpit.losscheck import at_outputs, check_samples
from distcockpit.losses import Decomposition, decompose
from distcockpit.trees import map_tensors

TOLD_TWICE = (
    "{} for the same forward pass, so that the losses of its samples are told twice. Tell them once: by the loss "
    "module (loss_fn=...), or loss_fn=None and one record_losses(losses) per forward pass, with their weighted sum."
)

OnGradient = Callable[[Tensor, Callable[[Tensor], None], LossCall], None]
"""Puts a hook on a tensor: what receives its gradient, and the call that it belongs to."""


class LossCalls:
    """Adds losses to the micro-batches of a step.

    Args:
        loss: What is known of the loss from outside.
        micros: The micro-batches so far.
        thorough: Whether to look if samples have losses of their own.
        batch_dim: The batch axis of the model's inputs.
        on_gradient: Puts hooks on losses.
    """

    def __init__(
        self, loss: Loss, micros: list[Micro], thorough: bool, batch_dim: int, on_gradient: OnGradient
    ) -> None:
        self._loss, self._micros, self._on_gradient = loss, micros, on_gradient
        self._thorough, self._batch_dim = thorough, batch_dim

    def heard(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        """The loss module was called.

        Raises:
            TypeError: If it returned no tensor.
            RuntimeError: If the losses are known already, or samples have none of their own.
        """
        if not isinstance(output, Tensor):
            raise TypeError(
                f"loss_fn={type(module).__name__} returned {type(output).__name__}: must be a tensor. Pass "
                "loss_fn=None and call cockpit.record_losses(losses) with one loss per sample."
            )
        if not output.requires_grad:
            return
        micro = self._current(f"{type(module).__name__} was called")
        owners = [forward for forward in micro.passes if returned_any(forward, (args, kwargs))]
        forward = owners[0] if len(owners) == 1 else micro.passes[-1]
        with torch.no_grad():
            parts = decompose(module, args, kwargs, forward.batch_size, forward.output, self._batch_dim)
        if any(call.recorded for call in micro.losses):
            raise RuntimeError(TOLD_TWICE.format(f"{type(module).__name__} was called after record_losses"))
        gradients: dict[int, Tensor] = {}
        if self._thorough and not micro.is_one_batch:
            if parts.individual is not None:
                check_samples(module, args, kwargs, forward, self._batch_dim)
            gradients = at_outputs(output, forward)
        # Targets may be overwritten as soon as the loss is there.
        args, kwargs = map_tensors(lambda t: t if t.requires_grad else t.clone(), (args, kwargs))
        of = forward if len(owners) == 1 else None
        call = LossCall(args, kwargs, parts, output.detach().clone(), of=of, at_outputs=gradients)
        micro.losses.append(call)
        self._on_gradient(output, call.receive, call)

    def record(self, losses: Tensor, weight: float | None, divisor: float | None) -> None:
        """Losses of the latest forward pass, as the user says; see ``DistCockpit.record_losses``.

        Raises:
            ValueError: If the shape is another, or ``divisor`` is given where it is measured.
            RuntimeError: If they are known already.
        """
        micro = self._current("record_losses was called")
        if micro.losses:
            raise RuntimeError(TOLD_TWICE.format("record_losses was called after the loss module, or twice"))
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
        parts = Decomposition(total, individual, divisor, is_sum=False)
        call = LossCall((), {}, parts, losses.detach().clone(), weight=weight)
        micro.losses.append(call)
        if losses.requires_grad:
            self._on_gradient(losses, call.receive, call)

    def _current(self, event: str) -> Micro:
        if not self._micros:
            raise RuntimeError(
                f"{event} inside `track` before the model was. Call the model through the cockpit, `cockpit(x)`, or "
                "call the very module that was given to DistCockpit, inside `with cockpit.track(step)`."
            )
        return self._micros[-1]
