"""DistCockpit: the life of a tracked step. It orchestrates and computes nothing itself."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distcockpit import __version__, curvature
from distcockpit.arguments import (
    bare_module,
    check_choice,
    check_loss_and_optimizer,
    chosen_quantities,
    description,
    model_facts,
)
from distcockpit.layers import check_batchnorm, find_layers
from distcockpit.quantities.base import Quantity
from distcockpit.recorder import Recorder, Result, Stamp
from distcockpit.reduce import Layout, Pending, World, first_difference, pack
from distcockpit.schedules import Schedule, every
from distcockpit.step import Start, TrackedStep
from distcockpit.store import MODES, local_path
from distcockpit.userlog import UserLog
from distcockpit.writer import EXIT_SECONDS

ON_ERROR = ("warn", "raise")


class DistCockpit:
    """Watches a training run: on scheduled steps, statistics of the individual gradients of all ranks' samples.

    Wrap the model and call it through the cockpit; nothing else about the training changes. Every rank of the
    data-parallel group constructs one, with the same arguments; rank 0 writes the store.

    Args:
        model: ``DistributedDataParallel`` or any module. Without torch.distributed it is a world of one.
        loss_fn: The loss module, from which individual losses are derived; ``None`` where the model or a function
            computes the loss, which is then taken as a mean over samples.
        optimizer: The optimizer of the model's parameters.
        store: Folder of the Zarr store.
        quantities: Name of a preset ("economy", "business", "full"), or a list of quantities.
        schedule: Steps to track, for quantities without a schedule of their own.
        mode: "w-" refuses an existing run, "w" replaces one.
        process_group: The data-parallel group; that of the DDP model by default.
        enabled: ``False``, or ``DISTCOCKPIT=off`` in the environment, makes every call do nothing.
        include: Patterns (``fnmatch``) of the names of layers to track; all by default.
        exclude: Patterns of the names of layers to leave out.
        track_batchnorm: Track models with batch norm in training mode, treating the statistics of each local batch
            as constants. This runs tracked steps a second time.
        grad_scaler: The gradient scaler of mixed precision, to recognise the steps that it skips.
        on_error: What faults of the environment (disk) do: "warn" logs, "raise" raises at the next ``track``.
        flush_seconds: Longest time until finished rows are in the store.

    Raises:
        ValueError: If an argument breaks its rule, or a layer cannot be served; the text names it and a way out.
        TypeError: If an argument is of the wrong kind.
        FileExistsError: If ``store`` exists and the mode does not allow replacing it.
        RuntimeError: If the ranks disagree.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        store: str | os.PathLike[str],
        quantities: str | Sequence[Quantity] = "economy",
        schedule: Schedule = every(10),  # noqa: B008 - frozen
        mode: str = "w-",
        process_group: Any = None,
        enabled: bool = True,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        track_batchnorm: bool = False,
        grad_scaler: torch.amp.GradScaler | None = None,
        on_error: str = "warn",
        flush_seconds: float = 30.0,
    ) -> None:
        self.model = model
        self._enabled = enabled and os.environ.get("DISTCOCKPIT", "").lower() != "off"
        self._closed = False
        self._inside: TrackedStep | None = None
        self._last_step = -1
        if not self._enabled:
            return
        if process_group is None and isinstance(model, DistributedDataParallel):
            process_group = model.process_group
        self.world = World(process_group)
        self.loss_fn, self.grad_scaler, self.track_batchnorm = loss_fn, grad_scaler, track_batchnorm
        self._on_error = on_error
        self.checked = False  # whether a tracked step has checked itself
        self.start: Start | None = None  # the step at which an update began that is not known yet
        self.userlog = UserLog()
        self._outstanding: list[Pending] = []
        self._unread: dict[str, tuple[Layout, Pending]] = {}

        problem: Exception | None = None
        try:
            self.bare = bare_module(model)
            self.quantities = chosen_quantities(quantities, schedule)
            self.layers = find_layers(self.bare, include, exclude)
            check_loss_and_optimizer(loss_fn, optimizer, self.bare)
            check_choice("mode", mode, MODES)
            check_choice("on_error", on_error, ON_ERROR)
            check_batchnorm(self.bare, track_batchnorm)
            for quantity in self.quantities:
                if quantity.needs.curvature is not None:
                    curvature.check_support(quantity.needs.curvature, self.bare, loss_fn)
            path = local_path(store)
            self.facts = model_facts(self.bare, self.layers)
        except Exception as error:
            problem = error
        self._agree(problem, {} if problem else description(self.facts, self.quantities, loss_fn))
        self.tracked = {n: p for n, p in self.bare.named_parameters() if n in self.facts.shapes}
        self.device = next(iter(self.tracked.values())).device
        self._memory: dict[str, dict[str, Any]] = {q.name: {} for q in self.quantities}
        self._recorder = self._open_recorder(path, mode, optimizer, flush_seconds)

    # -- construction ------------------------------------------------------------------------------------------------

    def _agree(self, problem: Exception | None, description: dict[str, str]) -> None:
        """Raise on every rank if one of them has a problem, or they differ.

        Raises:
            RuntimeError: If another rank has a problem, or is constructed otherwise.
        """
        shared = self.world.share((None if problem is None else f"{problem}", description))
        if problem is not None:
            raise problem
        for rank, (text, _) in enumerate(shared):
            if text is not None:
                raise RuntimeError(f"DistCockpit could not be constructed on rank {rank}: {text}")
        difference = first_difference([description for _, description in shared])
        if difference is not None:
            raise RuntimeError(f"The ranks disagree: {difference}. Construct DistCockpit alike on all ranks.")

    def _open_recorder(
        self, path: Path, mode: str, optimizer: torch.optim.Optimizer | None, flush_seconds: float
    ) -> Recorder | None:
        attributes = {
            "versions": {"distcockpit": __version__, "torch": torch.__version__},
            "world_size": self.world.size,
            "parameters": {name: list(shape) for name, shape in self.facts.shapes.items()},
            "layers": {layer.path: layer.rule.description for layer in self.layers if layer.parameters},
            "config": {
                "quantities": [{"type": type(q).__name__, **q.options()} for q in self.quantities],
                "model": type(self.bare).__name__,
                "loss_fn": type(self.loss_fn).__name__,
                "optimizer": type(optimizer).__name__,
            },
        }
        recorder, problem = None, None
        if self.world.rank == 0:
            try:
                groups = {q.name: q.group(self.facts) for q in self.quantities}
                recorder = Recorder(path, mode, groups, attributes, flush_seconds)
            except Exception as error:
                problem = error
        self._agree(problem, {})
        return recorder

    # -- the public face -----------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.model(*args, **kwargs)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._shut(orderly=kind is None)

    def track(
        self,
        step: int,
        *,
        epoch: float | None = None,
        weight: float | None = None,
        batch_size: int | None = None,
    ) -> TrackedStep:
        """The context of one optimizer step's forward and backward passes, micro-batches included.

        Args:
            step: Number of the step; it must grow from call to call.
            epoch: Stored beside the step.
            weight: What the loss was divided by, where that is neither the number of samples nor known from the loss
                module: a number of tokens, for example.
            batch_size: Number of samples, where it is not the first axis of the model's first tensor argument.

        Raises:
            ValueError: (on entering) If the step does not grow, or batch norm is in training mode.
            RuntimeError: (on entering or leaving) If ``track`` is entered twice or after ``close``, a forward pass
                has no backward, or the ranks disagree.
        """
        return TrackedStep(self, step, epoch, weight, batch_size)

    def record_losses(self, losses: Tensor) -> None:
        """Hand over the individual losses of the latest forward pass, where no loss module tells them.

        Call it inside ``track``, with losses that the backward pass goes through:
        ``losses = f(model(x), y); cockpit.record_losses(losses); losses.mean().backward()``.

        Args:
            losses: One loss per sample, shape ``[B]``.

        Raises:
            ValueError: If the shape is another.
        """
        if self._inside is not None and self._inside.capture is not None:
            self._inside.capture.record_losses(losses)

    def log(
        self, step: int, *, epoch: float | None = None, reduce: str | None = None, **scalars: float | Tensor
    ) -> None:
        """Store scalars of the training script under ``step``.

        Args:
            step: Number of the step; it must not fall from call to call.
            epoch: Stored beside the step.
            reduce: ``None`` stores rank 0's values. "mean" or "sum" pool the values of all ranks, which ride in the
                exchange of the next tracked step (or of ``close``); all ranks must then log the same names.
            scalars: Numbers, or tensors with one element.

        Raises:
            ValueError: If the step falls, or a name or ``reduce`` is not allowed.
            TypeError: If a value is no number.
        """
        if not self._enabled:
            return
        self.userlog.add(step, epoch, reduce, scalars, time.time())
        self._hand_on_logs()

    def latest(self) -> dict[str, dict[str, Any]]:
        """The newest finished row of each quantity, by name, with its "step"; rank 0 only, others get ``{}``.

        It never waits: rows appear here a little after their step.
        """
        return self._recorder.latest() if self._enabled and self._recorder is not None else {}

    def flush(self) -> None:
        """Wait until everything finished so far is in the store."""
        if self._enabled and self._recorder is not None:
            self._hand_on_logs(everything=not self.userlog.is_riding)
            self._recorder.flush()

    def close(self) -> None:
        """Finish the run: write everything and mark the store as closed. Every rank calls it; twice is harmless."""
        self._shut(orderly=True)

    # -- between the steps ---------------------------------------------------------------------------------------------

    def begin(self, tracked: TrackedStep, step: int) -> bool:
        """Check a step that begins; says whether the cockpit is on.

        Raises:
            RuntimeError: If the cockpit is closed, another step has not ended, or the store could not be written.
            TypeError: If the step is no integer.
            ValueError: If it does not grow.
        """
        if not self._enabled:
            return False
        if self._closed:
            raise RuntimeError(f"track(step={step}): the cockpit is closed. Construct another one with a new store.")
        if self._inside is not None:
            raise RuntimeError(
                f"track(step={step}): step {self._last_step} has not ended; `track` must not be entered twice. Put "
                "all micro-batches of a step inside one `with cockpit.track(step):`."
            )
        if isinstance(step, bool) or not isinstance(step, int):
            raise TypeError(f"track(step={step!r}): must be an integer.")
        if step <= self._last_step:
            raise ValueError(
                f"track(step={step}): steps must grow, the latest was {self._last_step}. Count optimizer steps over "
                "the whole run, not within an epoch."
            )
        if self._on_error == "raise" and self._recorder is not None and self._recorder.error is not None:
            raise RuntimeError(f"The store could not be written: {self._recorder.error}") from self._recorder.error
        self._inside, self._last_step = tracked, step
        return True

    def end(self, tracked: TrackedStep) -> bool:
        """A step ends; says whether the cockpit is on."""
        if self._inside is not tracked:
            return False
        self._inside = None
        return True

    def memory_of(self, quantity: Quantity) -> dict[str, Any]:
        """What a quantity keeps from step to step, after it has seen the latest total it asked for."""
        memory = self._memory[quantity.name]
        if quantity.name in self._unread:
            layout, sums = self._unread.pop(quantity.name)
            prefix = f"{quantity.name}/"
            totals = layout.unpack(sums.result())
            quantity.learn({k[len(prefix) :]: v for k, v in totals.items() if k.startswith(prefix)}, memory)
        return memory

    def send(self, result: Result) -> None:
        """Hand the sums of a step to rank 0's recorder, and remember what this rank must wait for."""
        self._outstanding = [p for p in self._outstanding if not p.done()]
        self._outstanding += [p for p in (result.sums, result.elementwise) if p is not None]
        for quantity, _ in result.quantities:
            if quantity.reads_totals:
                self._unread[quantity.name] = (result.layout, result.sums)
        if self._recorder is not None:
            self._recorder.record(result)
        self._hand_on_logs()

    def _hand_on_logs(self, *, everything: bool = False) -> None:
        entries = self.userlog.take_complete(everything=everything)
        if self._recorder is not None:
            self._recorder.record_logs(entries)

    def _shut(self, *, orderly: bool) -> None:
        if not self._enabled or self._closed:
            return
        self._closed, self.start = True, None
        if orderly and self.userlog.is_riding:
            self._send_last_logs()
        self._hand_on_logs(everything=True)
        if orderly:
            for pending in self._outstanding:
                pending.result()
        if self._recorder is not None:
            self._recorder.close(None if orderly else EXIT_SECONDS)
        if orderly:
            self.world.close()

    def _send_last_logs(self) -> None:
        riding = {f"log/{k}": v for k, v in self.userlog.take_riding(self.world.size, self.device).items()}
        digest = float(zlib.crc32(repr(list(riding)).encode()))
        self.world.header({
            "step": self._last_step,
            "batch_size": 0,
            "weight": 0,
            "layout": digest,
            "failed": 0,
        })
        sums = self.world.sum(pack(riding, self.device))
        self.send(Result(Stamp(self._last_step, None, time.time(), 0), [], Layout.of(riding), sums, None))
