"""DistCockpit: the public face. It checks, agrees with the other ranks, and hands on to the session."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distcockpit.announcement import announce
from distcockpit.arguments import (
    attributes,
    bare_module,
    check_batch,
    check_choice,
    check_epoch,
    check_loss_and_optimizer,
    check_needs,
    check_options,
    check_step,
    chosen_quantities,
    description,
    memory_in_bytes,
    model_facts,
)
from distcockpit.batch_axes import BatchAxes
from distcockpit.cover import Cover
from distcockpit.coverage import Coverage, coverage
from distcockpit.layers import batchnorms, check_batchnorm, find_layers
from distcockpit.quantities.base import Quantity
from distcockpit.recorder import Recorder
from distcockpit.reduce import World, first_difference
from distcockpit.schedules import Schedule, every
from distcockpit.session import Session, Setup
from distcockpit.step import TrackedStep
from distcockpit.store import MODES, local_path

ON_ERROR = ("warn", "raise")
FALLBACK = ("warn", "error")


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
        quantities: Name of a preset ("economy", "business", "full", "layers"), or a list of quantities.
        schedule: Steps to track, for quantities without a schedule of their own.
        mode: "w-" refuses an existing run, "w" replaces one.
        process_group: The data-parallel group; that of the DDP model by default.
        enabled: ``False``, or ``DISTCOCKPIT=off`` in the environment, makes every call do nothing.
        include: Patterns (``fnmatch``) of the names of layers to track; all by default.
        exclude: Patterns of the names of layers to leave out.
        batch_dim: The batch axis of the model's inputs. Those of the layers inside are found by calling the model once
            with one sample more.
        fallback: What to do where only a slow route is exact (running a part of the model again, one backward pass per
            sample, for the few parameters concerned): "warn" takes it and says what it costs, "error" refuses, at the
            latest when the first tracked step ends.
        memory_budget: Most memory for a block of individual gradients and what it is formed from, in bytes or as a text
            ("64MiB"). A block holds at least one sample, and not more than pays (8 MiB). As much again may stay of
            what was formed, until the end of the step, or of the next one where an update is looked at from both ends.
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
        batch_dim: int = 0,
        fallback: str = "warn",
        memory_budget: int | str = "256MiB",
        track_batchnorm: bool = False,
        grad_scaler: torch.amp.GradScaler | None = None,
        on_error: str = "warn",
        flush_seconds: float = 30.0,
    ) -> None:
        self.model = model
        self._session: Session | None = None
        if not enabled or os.environ.get("DISTCOCKPIT", "").lower() == "off":
            return
        if process_group is None and isinstance(model, DistributedDataParallel):
            process_group = model.process_group
        world = World(process_group)
        with _together(world):
            check_choice("mode", mode, MODES)
            check_choice("on_error", on_error, ON_ERROR)
            check_choice("fallback", fallback, FALLBACK)
            check_options(grad_scaler, flush_seconds, track_batchnorm, batch_dim)
            budget = memory_in_bytes(memory_budget)
            path = local_path(store)
            bare = bare_module(model)
            chosen = chosen_quantities(quantities, schedule, optimizer)
            layers = find_layers(bare, include, exclude)
            check_loss_and_optimizer(loss_fn, optimizer, bare)
            check_batchnorm(batchnorms(bare), track_batchnorm)
            check_needs(chosen, bare, loss_fn, optimizer)
            facts = model_facts(bare, layers, optimizer, world.size)
            cover = Cover(bare, layers)
            cover.check(fallback == "warn")
        options = {"track_batchnorm": track_batchnorm, "batch_dim": batch_dim, "fallback": fallback}
        difference = first_difference(world.share(description(facts, chosen, loss_fn, **options)))
        if difference is not None:
            raise RuntimeError(f"The ranks disagree: {difference}. Construct DistCockpit alike on all ranks.")
        setup = Setup(
            world,
            bare,
            layers,
            facts,
            chosen,
            loss_fn,
            track_batchnorm,
            batch_dim,
            fallback == "warn",
            budget,
            grad_scaler,
            optimizer,
            frozenset(name for name, p in bare.named_parameters() if p.requires_grad),
            raise_errors=on_error == "raise",
        )
        recorder = None
        with _together(world):
            if world.rank == 0:
                groups = {q.name: q.described_group(facts) for q in chosen}
                recorder = Recorder(path, mode, groups, facts, attributes(setup, coverage(bare, cover)), flush_seconds)
                announce(chosen, groups, str(store), world.size)
        self._session = Session(setup, recorder, BatchAxes(batch_dim), cover)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.model(*args, **kwargs)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._session is not None:
            self._session.close(orderly=kind is None)

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
            step: Number of the step; it must grow from call to call. Quantities over an update (alpha) need steps
                that grow by one.
            epoch: Stored beside the step.
            weight: What the loss was divided by, where that is neither the number of samples nor known from the loss
                module: a number of tokens, for example.
            batch_size: Number of samples, where it is not the batch axis of the model's first tensor argument.

        Raises:
            TypeError: If an argument is no number.
            ValueError: If an argument is out of range; on entering, if the step does not grow, or batch norm is in
                training mode.
            RuntimeError: On entering or leaving, if ``track`` is entered twice or after ``close``, a forward pass
                has no backward, or the ranks disagree.
        """
        if self._session is not None:
            step, epoch = check_step("track", step), check_epoch("track", epoch)
            check_batch(weight, batch_size)
        return TrackedStep(self._session, step, epoch, weight, batch_size)

    def record_losses(self, losses: Tensor) -> None:
        """Hand over the individual losses of the latest forward pass, where no loss module tells them.

        Call it inside ``track``, with losses that the backward pass goes through:
        ``losses = f(model(x), y); cockpit.record_losses(losses); losses.mean().backward()``.

        Args:
            losses: One loss per sample, shape ``[B]``.

        Raises:
            ValueError: If the shape is another.
        """
        if self._session is not None and self._session.inside is not None:
            self._session.inside.record_losses(losses)

    def log(
        self, step: int, *, epoch: float | None = None, reduce: str | None = None, **scalars: float | Tensor
    ) -> None:
        """Store scalars of the training script under ``step``.

        Args:
            step: Number of the step; it must not fall from call to call.
            epoch: Stored beside the step.
            reduce: ``None`` stores rank 0's values. "mean" or "sum" pool the values of all ranks, which ride in the
                exchange of the next tracked step (or of ``close``), and are stored then; all ranks must log the same
                names.
            scalars: Numbers, or tensors with one element.

        Raises:
            ValueError: If the step falls, or a name or ``reduce`` is not allowed.
            TypeError: If a value is no number.
        """
        if self._session is not None:
            step, epoch = check_step("log", step), check_epoch("log", epoch)
            self._session.log(step, epoch, reduce, scalars)

    def latest(self) -> dict[str, dict[str, Any]]:
        """The newest finished row of each quantity, by name, with its "step"; rank 0 only, others get ``{}``.

        It never waits: rows appear here a little after their step.
        """
        recorder = None if self._session is None else self._session.recorder
        return {} if recorder is None else recorder.latest()

    def coverage(self) -> Coverage:
        """How each parameter is tracked, as a table: ``print(cockpit.coverage())``.

        Before the first tracked step it says what the kinds of the layers promise; from then on, what was found. Each
        rank may ask; the store holds rank 0's table in the attribute ``coverage``.
        """
        return Coverage() if self._session is None else self._session.coverage()

    def flush(self) -> None:
        """Wait until everything finished so far is in the store."""
        if self._session is not None:
            self._session.flush()

    def close(self) -> None:
        """Finish the run: write everything and mark the store as closed. Every rank calls it; twice is harmless."""
        if self._session is not None:
            self._session.close(orderly=True)


@contextmanager
def _together(world: World) -> Generator[None, None, None]:
    """If a rank raises inside, all do.

    Raises:
        RuntimeError: On the ranks that had no problem of their own.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    texts = world.share(None if problem is None else str(problem))
    if problem is not None:
        raise problem
    for rank, text in enumerate(texts):
        if text is not None:
            raise RuntimeError(f"DistCockpit could not be constructed on rank {rank}: {text}")
