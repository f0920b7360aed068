"""Hugging Face transformers: a callback that puts each step of a ``Trainer`` inside ``track``.

Needs the extra ``transformers``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import TrainerCallback

from distcockpit.cockpit import DistCockpit
from distcockpit.step import TrackedStep

FILE = "distcockpit.pt"

Told = tuple[Tensor, float]
"""Sum of the loss terms of each sample, ``[B]``, and the number of terms of the micro-batch."""

Losses = Callable[[Any, Any], Iterable[Told]]


@torch.no_grad()
def usual_losses(outputs: Any, inputs: Any) -> Iterator[Told]:
    """What the losses of transformers may be the mean of: of these, the one is taken that gives the model's loss.

    Cross-entropies of classes of samples or tokens, also of the next token; squared errors; binary cross-entropies.
    """
    logits, labels = outputs.get("logits"), inputs.get("labels")
    if logits is None or labels is None:
        return
    if labels.is_floating_point() or logits.shape[-1] == 1:
        z = logits.view_as(labels) if logits.numel() == labels.numel() else logits
        for loss in (F.mse_loss, F.binary_cross_entropy_with_logits):
            if z.shape == labels.shape:
                terms = loss(z.float(), labels.float(), reduction="none")
                yield terms.flatten(1).sum(1) if terms.dim() > 1 else terms, float(terms.numel())
    elif logits.dim() == labels.dim() + 1:
        for shift in (0, 1) if labels.dim() > 1 else (0,):
            z, y = (logits[:, : logits.shape[1] - shift], labels[:, shift:]) if labels.dim() > 1 else (logits, labels)
            terms = F.cross_entropy(z.float().flatten(0, -2), y.flatten(), reduction="none").view(y.shape)
            yield terms.flatten(1).sum(1) if terms.dim() > 1 else terms, float((y != -100).sum())


class DistCockpitCallback(TrainerCallback):
    """Tracks the training of a ``Trainer``: ``Trainer(..., callbacks=[DistCockpitCallback("runs/a.zarr")])``.

    One step is one optimizer step, micro-batches included; its number is ``state.global_step``. The loss is a mean
    over tokens (or labels), of all micro-batches and ranks. A run that goes on from a checkpoint goes on in its store.

    Args:
        store: As for :class:`~distcockpit.DistCockpit`.
        losses: ``losses(outputs, inputs)`` gives what the model's loss may be the mean of: the sum of the terms of each
            sample, ``[B]``, and the number of terms. One of these must give the loss, else tracked steps raise.
            ``None`` where the training tells the losses, by ``callback.cockpit.record_losses`` in a loss of its own.
        options: The other arguments of ``DistCockpit``.

    Attributes:
        cockpit: The ``DistCockpit``, while the training runs.
    """

    cockpit: DistCockpit | None = None

    def __init__(self, store: Any, *, losses: Losses | None = usual_losses, **options: Any) -> None:
        self._store, self._losses, self._options = store, losses, options
        self._step: TrackedStep | None = None
        self._handle: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Construct the cockpit; raises as it does. An earlier training that ended with an error is left behind."""
        self._leave(KeyboardInterrupt())
        mode = "a" if state.global_step else "w-"
        optimizer = others.get("optimizer")
        self.cockpit = DistCockpit(model, None, optimizer, store=self._store, **{"mode": mode, **self._options})
        saved = _file(args, state)
        if os.path.exists(saved):
            self.cockpit.load_state_dict(torch.load(saved, weights_only=True))

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """A step begins with its first micro-batch."""
        if self.cockpit is not None:
            self._step = self.cockpit.track(state.global_step, epoch=state.epoch)
            self._step.__enter__()
            if self._step.is_tracked and self._losses is not None:
                self._handle = model.register_forward_hook(self._tell, with_kwargs=True)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """It ends before the optimizer steps."""
        self._leave()

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """The cockpit's own state goes into the checkpoint's folder."""
        if self.cockpit is not None and self._step is None:
            saved = self.cockpit.state_dict()
            if state.is_world_process_zero and os.path.isdir(os.path.dirname(_file(args, state))):
                torch.save(saved, _file(args, state))

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Close the cockpit."""
        if self.cockpit is not None:
            self.cockpit.close()
            self.cockpit = None

    def _leave(self, error: BaseException | None = None) -> None:
        step, self._step = self._step, None
        kind = None if error is None else type(error)
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        if step is not None:
            step.__exit__(kind, error, None)
        if error is not None and self.cockpit is not None:
            self.cockpit.__exit__(kind, error, None)
            self.cockpit = None

    def _tell(self, model: nn.Module, args: Any, inputs: dict[str, Any], outputs: Any) -> None:
        """A micro-batch went through the model.

        Raises:
            RuntimeError: If its loss is not what the individual losses make.
        """
        if self.cockpit is None or self._losses is None or not torch.is_grad_enabled():
            return
        given, loss = inputs.get("num_items_in_batch"), outputs.get("loss")
        made = [(*told, float(d)) for told in self._losses(outputs, inputs) for d in (given, told[1]) if d is not None]
        if made and loss is not None:
            value = float(loss.detach())
            apart = [abs(float(losses.sum()) / divisor - value) for losses, _, divisor in made]
            losses, terms, divisor = made[apart.index(min(apart))]  # of losses that are no numbers the first
            if not math.isfinite(value) or min(apart) <= 1e-6 + 1e-2 * abs(value):
                self.cockpit.record_losses(losses, weight=terms, divisor=divisor)
                return
        error = RuntimeError(
            f"DistCockpitCallback: the loss of {type(model).__name__} is not the mean of what its logits and labels "
            "make, or is computed outside of it. Pass losses=function(outputs, inputs), which gives [(the sum of the "
            "terms of each sample, their number)], or losses=None and call callback.cockpit.record_losses(losses)."
        )
        self._leave(error)
        raise error


def _file(args: Any, state: Any) -> str:
    return os.path.join(args.output_dir, f"checkpoint-{state.global_step}", FILE)
