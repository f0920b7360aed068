"""DistCockpit, the public entry point: checks arguments, agrees with the other ranks, and hands over to the session."""

from __future__ import annotations

import logging
import operator
import os
import socket
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from zarr.abc.store import Store

from distcockpit.capture.cover import Cover
from distcockpit.capture.coverage import Coverage
from distcockpit.capture.layers import find_layers, problem_of_batchnorm
from distcockpit.capture.wrapped import wrappers
from distcockpit.farewell import Farewell
from distcockpit.notices import Notices
from distcockpit.quantities.base import Quantity
from distcockpit.replay.batch_norms import batchnorms
from distcockpit.schedules import Schedule, every
from distcockpit.sinks import Sink
from distcockpit.store.keys import check_store, keys_of, named_by_time
from distcockpit.store.options import StoreOptions
from distcockpit.store.run_store import RunStore
from distcockpit.tracking import checkpoint
from distcockpit.tracking.announcement import announce
from distcockpit.tracking.arguments import (
    RULES,
    Optimizers,
    attributes,
    available,
    bare_module,
    check,
    check_optimizers,
    check_shards,
    chosen_quantities,
    description,
    loss_module,
    memory_in_bytes,
    named_optimizers,
    options_of_store,
    segment,
)
from distcockpit.tracking.recorder import Recorder
from distcockpit.tracking.session import Session
from distcockpit.tracking.setup import Setup, model_facts
from distcockpit.tracking.shadow import JoinableCockpit
from distcockpit.tracking.sharded import last_update
from distcockpit.tracking.shutdown import in_words
from distcockpit.tracking.step import TrackedStep
from distcockpit.tracking.userlog import UserLog
from distcockpit.world import World, first_difference

logger = logging.getLogger(__name__)


class DistCockpit(JoinableCockpit):
    """Watches a training run: on scheduled steps, statistics of the individual gradients of all ranks' samples.

    Wrap the model and call it through the cockpit; nothing else about the training changes. Every rank of the
    data-parallel group constructs one, with the same arguments; rank 0 writes the store.

    Args:
        model: ``DistributedDataParallel`` or any module. Without torch.distributed it is a world of one.
        loss_fn: The loss module, or a function such as ``F.cross_entropy``, to compute the curvature of; it is called
            as ``loss_fn(model(x), y)``. Nothing else needs it: the loss itself is found as the loop computes it.
            Curvature is unknown for a function of your own.
        optimizer: The optimizer of the model's parameters. Pass several as a list or by name, ``{"matrices": muon,
            "rest": adamw}``: besides ``alpha`` for the whole update, each then gets an alpha of its own,
            ``alpha_matrices`` (in a list, by index: ``alpha_0``). With ``torch.optim.LBFGS``, put ``with
            cockpit.track(step):`` inside the
            closure: its first call at each step is tracked.
        store: Where the Zarr store is: a path, a URL such as ``s3://bucket/run.zarr`` (extra ``remote``), or any
            ``zarr.abc.store.Store``. ``{time}`` in it is the time of the start, such as 20261124-181500.
        quantities: Name of a preset ("economy", "business", "full", "layers"), or a list of names and quantities.
        schedule: Steps to track, for quantities without a schedule of their own; 10 is ``every(10)``.
        mode: "w-" refuses an existing run, "w" replaces it, "a" resumes it, or starts one if there is none: rows of
            steps that are tracked or logged again are dropped, and the run continues; see :meth:`load_state_dict`.
        process_group: The data-parallel group; that of the DDP model by default.
        enabled: ``False``, or ``DISTCOCKPIT=off`` in the environment, makes every call a no-op.
        include: Patterns (``fnmatch``) of the names of layers to track; all by default.
        exclude: Patterns of the names of layers to leave out.
        batch_dim: The batch axis of the model's inputs. Batch axes inside the model are found by calling the model once
            with one more sample.
        fallback: What to do if only a slow route is exact (running a part of the model again, with one backward pass
            per sample, for the few parameters that need it): "warn" takes it and logs what it costs, "error" refuses
            it, no later than at the end of the first tracked step.
        memory_budget: Memory for what a tracked step computes, in bytes or as a string ("64MiB"), the same on all
            ranks: blocks of individual gradients (a quarter, at most 32 MiB, at least one sample), sums of two buckets
            of parameters at a time, and in another quarter each individual gradients kept for a second look, and copies
            of all gradients, if these fit. Not counted are inputs and output gradients of the layers, and copies of the
            parameters that quantities of updates keep.
        track_batchnorm: Track models with batch norm in training mode, treating the statistics of each local batch
            as constants. This runs tracked steps a second time.
        grad_scaler: The gradient scaler of mixed precision, to recognise the steps that it skips.
        on_error: What environment faults (disk, network) do: "warn" logs them, keeps rows and retries; "raise" raises
            at the next ``track``.
        timeout_seconds: How long a rank waits for another one in the cockpit's own collectives; after that, an error
            says which rank is missing, and where it was last seen.
        storage_options: fsspec options for a URL: credentials, endpoint.
        store_options: How long rows wait for the store, how long to wait for the store, and how much is kept in the
            meantime; see :class:`StoreOptions`.
        flat: Deprecated: store options as plain keywords, as in earlier releases (``flush_seconds=5``).
        sinks: Where rank 0 shows numbers and histograms live, in addition to the store: ``TensorBoard``, ``WandB`` of
            ``distcockpit.sinks``.

    Attributes:
        model: As it was passed.
        store: Where the run is stored; empty if the cockpit is disabled.

    Raises:
        ValueError: If an argument breaks its rule, or a layer is not supported; the message names it and a way out.
        TypeError: If an argument has the wrong type.
        FileExistsError: If ``store`` exists and the mode does not allow replacing it, or another process writes it.
        OSError: If the store cannot be written.
        RuntimeError: If the ranks disagree, or one does not respond.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: nn.Module | Callable[..., Tensor] | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Optimizers | None = None,
        *,
        store: str | os.PathLike[str] | Store = "runs/{time}.zarr",
        quantities: str | Quantity | Sequence[str | Quantity] = "economy",
        schedule: Schedule | int = every(10),  # noqa: B008 - frozen
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
        timeout_seconds: float = 1800.0,
        sinks: Sequence[Sink] = (),
        storage_options: Mapping[str, Any] | None = None,
        store_options: StoreOptions = StoreOptions(),  # noqa: B008 - frozen
        **flat: Any,
    ) -> None:
        super().__init__()
        options = options_of_store(store_options, flat, type(self))
        self.model = model
        self.store = ""
        self._session: Session | None = None
        self._tracked: TrackedStep | None = None  # the latest
        inside = wrappers(model) if isinstance(model, nn.Module) else []
        self._ddp = next((each for each in inside if isinstance(each, DistributedDataParallel)), None)
        if not enabled or os.environ.get("DISTCOCKPIT", "").lower() == "off":
            return
        if process_group is None and self._ddp is not None:
            process_group = self._ddp.process_group
        check(timeout_seconds=timeout_seconds)
        world = World(process_group, timeout_seconds)
        with _together(world):
            check(mode=mode, on_error=on_error, fallback=fallback, sinks=sinks)
            check(grad_scaler=grad_scaler, track_batchnorm=track_batchnorm, batch_dim=batch_dim)
            check(**{name: value for name, value in asdict(options).items() if name in RULES})
            budget = memory_in_bytes("memory_budget", memory_budget)
            unwritten = memory_in_bytes("unwritten_budget", options.unwritten_budget)
            check_store(store, mode)
            bare = bare_module(model)
            check_shards(bare, world.ranks, track_batchnorm=track_batchnorm)
            optimizers = named_optimizers(optimizer)
            layers = find_layers(bare, include, exclude)
            check_optimizers(optimizers, bare)
            loss_fn, function = loss_module(loss_fn)
            facts = model_facts(bare, layers, optimizers, world.size)
            chosen = chosen_quantities(quantities, schedule, optimizers, facts)
            mixing = problem_of_batchnorm(batchnorms(bare), track_batchnorm)
            chosen, missing = available(chosen, bare, loss_fn, optimizers, mixing)
            cover = Cover(bare, layers)
            cover.check(fallback == "warn")
        said = {"track_batchnorm": track_batchnorm, "batch_dim": batch_dim, "fallback": fallback}
        said["memory_budget"] = budget  # from which follows what is exchanged together
        difference = first_difference(world.all_gather_object(description(facts, chosen, loss_fn, **said)))
        if difference is not None:
            raise RuntimeError(
                f"The ranks disagree: {difference}. Construct DistCockpit with the same arguments on all ranks."
            )
        setup = Setup(
            world,
            bare,
            wrappers(model)[:-1],
            layers,
            facts,
            chosen,
            loss_fn,
            track_batchnorm,
            batch_dim,
            fallback == "warn",
            budget,
            grad_scaler,
            optimizers,
            raise_errors=on_error == "raise",
            n_groups=[len(each.param_groups) for each in optimizers.values()],
            loss_function=function,
            include=include,
            exclude=exclude,
        )
        recorder, run, name = None, None, ""
        hosts = world.all_gather_object(socket.gethostname())
        with _together(world):
            if world.rank == 0:
                groups = {q.name: q.described_group(facts) for q in chosen}
                store = named_by_time(store)
                keys = keys_of(store, storage_options, options.store_seconds, options.fsync)
                told, here = attributes(setup, cover), segment(world.size, hosts)
                with ExitStack() as started:
                    for sink in sinks:  # before there is a store, which would block the next attempt
                        sink.start()
                        started.callback(sink.close)
                    run = RunStore(keys, mode, groups, told, here, options.lock_seconds, unwritten)
                    started.pop_all()
                recorder = Recorder(run, options, facts, sinks)
                name = check_store(store)
                announce(chosen, groups, name, setup)
                for why in missing:
                    logger.warning("distcockpit: %s", why)
        first, self.store = world.all_gather_object((None if run is None else run.first_step, name))[0]
        notices = Notices() if recorder is None else recorder.notices
        self._session = Session(
            setup, recorder, cover, notices, first, last_update=last_update, farewell=Farewell(self.store)
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        self._let_ddp_notify()
        return self.model(*args, **kwargs)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._session is not None:
            self._session.shutdown.close("" if error is None else in_words(error))

    def track(
        self,
        step: int,
        *,
        epoch: float | None = None,
        weight: float | None = None,
        batch_size: int | None = None,
    ) -> TrackedStep:
        """Return the context manager for one optimizer step's forward and backward passes, micro-batches included.

        Args:
            step: Number of the step; it must increase from call to call. Quantities that span an update (alpha) need
                consecutive steps.
            epoch: Stored with the step.
            weight: The number of terms the loss is a mean over, if this cannot be seen (e.g. a custom fused loss), or
                if a sum that is not divided by anything should be reported as a mean over them: a number of tokens, for
                example.
            batch_size: Number of samples, if it is not the batch axis of the model's first tensor argument.

        Raises:
            TypeError: If an argument is not a number.
            ValueError: If an argument is out of range; on entering, if the step does not increase.
            RuntimeError: On entering or leaving, if ``track`` is nested or called after ``close``, or the ranks are at
                different steps; at the first tracked step, if you listed quantities explicitly, also if this loop or
                model does not support them, or a forward pass has no backward. Later, and if all quantities come from
                presets, a warning says so, and rows are NaN or missing.
        """
        if self._session is not None:
            check("track", step=step, epoch=epoch, weight=weight, batch_size=batch_size)
            self._let_ddp_notify()
            step = operator.index(step)
        tracked = TrackedStep(self._session, step, epoch, weight, batch_size)
        if self._session is not None and not self._session.is_inside:
            self._tracked = tracked
        return tracked

    def record_losses(self, losses: Tensor, *, weight: float | None = None, divisor: float | None = None) -> None:
        """Record the losses of the latest forward pass, if they cannot be seen.

        Call it inside ``track``, once per micro-batch, with losses that the backward pass goes through:
        ``losses = f(model(x), y); cockpit.record_losses(losses); losses.mean().backward()``.

        Args:
            losses: One loss per sample, shape ``[B]``, or the loss of the micro-batch, a scalar tensor. Factors on it
                (the scale of mixed precision, one over the number of micro-batches) are derived from the gradient that
                reaches it, so they need not be passed.
            weight: The number of terms of the micro-batch, if it is not the number of samples: tokens, for example. If
                this or ``divisor`` is a tensor on a GPU, the host waits for it.
            divisor: What the loss of the micro-batch was divided by, if it is not ``weight``: the tokens of all
                micro-batches, for example. Positive.

        Raises:
            TypeError: If an argument is not a number.
            ValueError: If the shape is wrong, or ``divisor`` is zero, or given although it can be measured.
            RuntimeError: If the losses of this forward pass are already known.
        """
        if self._session is not None and self._session.is_inside and self._tracked is not None:
            check("record_losses", weight=weight, divisor=divisor)
            self._tracked.record_losses(losses, weight, divisor)

    def log(
        self,
        data: int | Mapping[str, float | Tensor] | None = None,
        step: int | Mapping[str, float | Tensor] | None = None,
        *,
        epoch: float | None = None,
        reduce: str | None = None,
        **scalars: float | Tensor,
    ) -> None:
        """Store scalars of the training script: ``log(step, loss=loss)`` or ``log({"loss": loss}, step=step)``.

        Args:
            data: Scalars by name; or the step, if it comes first. ``"train/loss"`` is stored as ``train.loss``.
            step: Number of the step; it must not decrease from call to call. The latest one of `track` by default.
            epoch: Stored with the step.
            reduce: ``None`` stores rank 0's values. "mean" or "sum" pool the values of all ranks; these are sent along
                with the next tracked step (or ``close``) and stored then. All ranks must log the same names.
            scalars: Numbers, or tensors with one element.

        Raises:
            ValueError: If the step decreases, or a name or ``reduce`` is not allowed.
            TypeError: If a value is not a number.
        """
        if self._session is not None:
            number, named = UserLog.arguments(data, step, scalars, max(0, self._session.last_step))
            check("log", step=number, epoch=epoch)
            self._session.log(operator.index(number), epoch, reduce, named)

    def latest(self) -> dict[str, dict[str, Any]]:
        """Return the latest finished row of each quantity, by name, with its "step"; ``{}`` on ranks other than 0.

        It never blocks: rows appear here shortly after their step.
        """
        recorder = None if self._session is None else self._session.recorder
        return {} if recorder is None else recorder.latest()

    def coverage(self) -> Coverage:
        """Return how each parameter is tracked, as a table: ``print(cockpit.coverage())``.

        Before the first tracked step it shows what the layer types suggest; after that, what was found. Every rank may
        call it; the store holds rank 0's table in the attribute ``coverage``.
        """
        return Coverage() if self._session is None else self._session.attribution.coverage()

    def state_dict(self) -> dict[str, Any]:
        """Return the cockpit's own state, to be saved with a checkpoint of the model and the optimizer.

        Call it on every rank, outside of ``track``, after ``optimizer.step()``. Everything finished so far is in the
        store when it returns.

        Returns:
            Tensors on the CPU, numbers, strings, and containers of them (``torch.load(weights_only=True)`` reads it).
            Rank 0's is complete: save it, and load it on all ranks. Its size depends on the quantities: a copy of the
            parameters each for ``Alpha`` or ``UpdateSize``, for ``Distance``, for ``UpdateGeometry``, two for
            ``GradientGeometry``, and the output gradients of one batch for ``OutputGradientGeometry``.

        Raises:
            RuntimeError: If a step has not ended, or the ranks are at different steps.
        """
        return {} if self._session is None else checkpoint.save(self._session)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue as if the run had not been interrupted; call it on every rank, before the first step.

        The number of ranks may differ. The model must be that of the same checkpoint. With the state and ``mode="a"``,
        a resumed run has the same rows as an uninterrupted one. Without it there is a seam: the ``Alpha`` of the update
        in between and cosines with earlier steps are NaN, ``Distance`` is NaN from there on, and adapted bin ranges
        start over; ``status``, ``previous_step`` and ``edges`` show this.

        Args:
            state_dict: What :meth:`state_dict` returned; an empty one (from a disabled cockpit) is a no-op.

        Raises:
            RuntimeError: If a step has already been tracked, or the ranks load different states.
            ValueError: If it is not the state of a matching cockpit.
        """
        if self._session is not None and state_dict:
            checkpoint.load(self._session, state_dict)

    @property
    def _ddp_model(self) -> DistributedDataParallel:
        if self._ddp is None:
            raise TypeError(
                f"model={type(self.model).__name__}: Join needs a DistributedDataParallel model. Wrap the model in it, "
                "and pass that to DistCockpit."
            )
        return self._ddp

    @property
    def _joining_session(self) -> Session | None:
        return self._session

    def flush(self) -> None:
        """Wait until everything finished so far is in the store."""
        if self._session is not None:
            self._session.flush()

    def close(self) -> None:
        """Finish the run: write everything and mark the store as closed. Call it on every rank; twice is harmless."""
        if self._session is not None:
            self._session.shutdown.close()


@contextmanager
def _together(world: World) -> Generator[None, None, None]:
    """Raise on all ranks if one raises inside.

    Raises:
        RuntimeError: On the ranks that had no problem of their own.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    texts = world.all_gather_object(None if problem is None else str(problem))
    if problem is not None:
        raise problem
    for rank, text in enumerate(texts):
        if text is not None:
            raise RuntimeError(f"DistCockpit could not be constructed on rank {rank}: {text}")
