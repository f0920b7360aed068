"""Hugging Face transformers: a callback that puts each step of a ``Trainer`` inside ``track``.

Needs the extra ``transformers``.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import TrainerCallback

from distcockpit.cockpit import DistCockpit
from distcockpit.tracking.step import TrackedStep

FILE = "distcockpit.pt"


class DistCockpitCallback(TrainerCallback):
    """Tracks the training of a ``Trainer``: ``Trainer(..., callbacks=[DistCockpitCallback("runs/a.zarr")])``.

    One step is one optimizer step, micro-batches included; its number is ``state.global_step``. A run resumed from a
    checkpoint continues in its store.

    Args:
        store: As for :class:`~distcockpit.DistCockpit`.
        options: Other arguments of ``DistCockpit``.

    Attributes:
        cockpit: The ``DistCockpit``, while the training runs.
    """

    cockpit: DistCockpit | None = None

    def __init__(self, store: Any, **options: Any) -> None:
        self._store, self._options = store, options
        self._step: TrackedStep | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Construct the cockpit; raises whatever its constructor raises. Drops an earlier training that failed."""
        self._leave(KeyboardInterrupt())
        mode = "a" if state.global_step else "w-"
        optimizer = others.get("optimizer")
        self.cockpit = DistCockpit(model, None, optimizer, store=self._store, **{"mode": mode, **self._options})
        saved = _file(args, state)
        if os.path.exists(saved):
            self.cockpit.load_state_dict(torch.load(saved, weights_only=True))

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Begin a step with its first micro-batch."""
        if self.cockpit is not None:
            self._step = self.cockpit.track(state.global_step, epoch=state.epoch)
            self._step.__enter__()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """End the step before the optimizer steps."""
        self._leave()

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Save the cockpit's own state in the checkpoint folder."""
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
        if step is not None:
            step.__exit__(kind, error, None)
        if error is not None and self.cockpit is not None:
            self.cockpit.__exit__(kind, error, None)
            self.cockpit = None


def _file(args: Any, state: Any) -> str:
    return os.path.join(args.output_dir, f"checkpoint-{state.global_step}", FILE)
