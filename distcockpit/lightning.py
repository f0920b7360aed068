"""Lightning: a callback that puts each optimizer step of a ``Trainer`` inside ``track``.

Needs the extra ``lightning``.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch import nn

from distcockpit.cockpit import DistCockpit
from distcockpit.tracking.step import TrackedStep


class DistCockpitCallback(pl.Callback):
    """Tracks the training of a ``LightningModule``: ``Trainer(callbacks=[DistCockpitCallback("runs/a.zarr")])``.

    One step is one optimizer step of automatic optimization, micro-batches included; its number is
    ``trainer.global_step``. A run resumed from a checkpoint continues in its store.

    Args:
        store: As for :class:`~distcockpit.DistCockpit`.
        model: Name of the submodule that is called with the batch, such as ``"net"``; by default the one that holds all
            trainable parameters, if there is one, else the ``LightningModule`` itself, called as ``self(x)``.
        loss_fn: The loss module, or its name in the ``LightningModule``; by default its only submodule that is a loss.
            A loss function needs ``callback.cockpit.record_losses(losses)`` in ``training_step``.
        options: Other arguments of ``DistCockpit``.

    Attributes:
        cockpit: The ``DistCockpit``, while the training runs.
    """

    cockpit: DistCockpit | None = None

    def __init__(
        self, store: Any, *, model: str | None = None, loss_fn: nn.Module | str | None = None, **options: Any
    ) -> None:
        self._store, self._model, self._loss_fn, self._options = store, model, loss_fn, options
        self._step: TrackedStep | None = None
        self._saved: dict[str, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Construct the cockpit; raises whatever its constructor raises.

        Raises:
            TypeError: With manual optimization, where one cannot tell which steps belong together.
        """
        if not pl_module.automatic_optimization:
            raise TypeError(
                f"DistCockpitCallback: {type(pl_module).__name__} has automatic_optimization=False, which the callback "
                "does not support. Use DistCockpit in its training_step instead: put `with cockpit.track(step):` "
                "around the forward and backward passes."
            )
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        options = {"mode": "a" if trainer.global_step else "w-", "grad_scaler": scaler, **self._options}
        self.cockpit = DistCockpit(
            _called(pl_module, self._model),
            _loss(pl_module, self._loss_fn),
            trainer.optimizers,
            store=self._store,
            **options,
        )
        if trainer.global_step:  # otherwise the saved state is from an earlier training
            self.cockpit.load_state_dict(self._saved)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin a step with its first micro-batch."""
        if self.cockpit is not None and self._step is None:
            self._step = self.cockpit.track(trainer.global_step, epoch=trainer.current_epoch)
            self._step.__enter__()

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """End the step before the optimizer steps."""
        self._leave()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Close the cockpit."""
        self._leave(KeyboardInterrupt())  # training may have ended between micro-batches
        if self.cockpit is not None:
            self._saved = self.cockpit.state_dict() if trainer.checkpoint_callbacks else {}  # saved after this, too
            self.cockpit.close()
            self.cockpit = None

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Keep what was tracked, without waiting for the other ranks."""
        self._leave(exception)
        if self.cockpit is not None:
            self.cockpit.__exit__(type(exception), exception, None)
            self.cockpit, self._saved = None, {}

    def state_dict(self) -> dict[str, Any]:
        """The cockpit's own state, saved with the checkpoint."""
        if self.cockpit is None:
            return self._saved
        return {} if self._step is not None else self.cockpit.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until the training starts."""
        self._saved = state_dict

    def _leave(self, error: BaseException | None = None) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None if error is None else type(error), error, None)


def _called(pl_module: pl.LightningModule, name: str | None) -> nn.Module:
    """The module that is called with the batch."""
    if name is not None:
        return _submodule(pl_module, "model", name)
    everything = {id(p) for p in pl_module.parameters() if p.requires_grad}
    for child in pl_module.children():
        holds = {id(p) for p in child.parameters()}
        if everything <= holds and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            return child
    return pl_module


def _loss(pl_module: pl.LightningModule, given: nn.Module | str | None) -> nn.Module | None:
    """The loss module."""
    if isinstance(given, str):
        return _submodule(pl_module, "loss_fn", given)
    found = [child for child in pl_module.children() if hasattr(child, "reduction")]
    return found[0] if given is None and len(found) == 1 else given


def _submodule(pl_module: pl.LightningModule, argument: str, name: str) -> nn.Module:
    known = dict(pl_module.named_modules())
    if name not in known:
        raise ValueError(
            f"DistCockpitCallback({argument}={name!r}): {type(pl_module).__name__} has no such submodule; it has "
            f"{[path for path, _ in pl_module.named_children()]}, and their submodules."
        )
    return known[name]
