"""A tracked step: from the forward pass to the sums on their way."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from distcockpit import curvature
from distcockpit.capture import Capture
from distcockpit.captured import Captured, Loss
from distcockpit.gradients.statistics import Moments, Projection, Statistic
from distcockpit.gradients.uses import MicroBatch
from distcockpit.gradients.walk import walk
from distcockpit.layers import check_batchnorm, training_batchnorms
from distcockpit.quantities.base import LocalBatch, Quantity, Update
from distcockpit.recorder import Result, Stamp
from distcockpit.reduce import HEADER, Layout, Pending, pack
from distcockpit.replay import batch_statistics, replayed
from distcockpit.selfcheck import check_gradients, check_losses, check_positions
from distcockpit.session import Session, digest


@dataclass(frozen=True)
class Start:
    """What is kept of a step at which an update begins, until the update is known."""

    stamp: Stamp
    batches: Sequence[MicroBatch]
    values: Mapping[str, Tensor]  # the parameters before the update
    losses: Tensor
    scale: float | None  # of the gradient scaler

    @property
    def inputs_changed(self) -> bool:
        """Whether a kept input was overwritten."""
        return any(use.inputs_changed for batch in self.batches for use in batch.uses)


class TrackedStep:
    """The context that ``DistCockpit.track`` returns. On an untracked step it does nothing."""

    def __init__(
        self,
        session: Session | None,
        step: int,
        epoch: float | None,
        weight: float | None,
        batch_size: int | None,
    ) -> None:
        self._maybe_session, self._step, self._epoch = session, step, epoch
        self._weight, self._batch_size = weight, batch_size
        self._active: list[Quantity] = []
        self._update: Update | None = None
        self._start_stamp: Stamp | None = None
        self._values: dict[str, Tensor] | None = None
        self._versions: dict[str, int] = {}
        self._capture: Capture | None = None

    def __enter__(self) -> Self:
        if self._maybe_session is not None:
            self._session, self._setup = self._maybe_session, self._maybe_session.setup
            self._session.begin(self, self._step)
            try:
                self._begin()
            except BaseException:
                self._session.end()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._maybe_session is None:
            return
        self._session.end()
        if self._capture is not None:
            self._capture.stop()
            if kind is None:
                self._finish(self._capture)

    def record_losses(self, losses: Tensor) -> None:
        """See ``DistCockpit.record_losses``."""
        if self._capture is not None:
            self._capture.record_losses(losses)

    # -- before the forward pass ---------------------------------------------------------------------------------------

    def _begin(self) -> None:
        setup = self._setup
        self._active = [q for q in setup.quantities if q.touches(self._step)]
        start, self._session.start = self._session.start, None
        if not self._active:
            return
        self._session.check_trainable(self._step)
        check_batchnorm(setup.bare, setup.track_batchnorm)
        updates = [q for q in self._active if q.needs.update]
        if start is not None and start.stamp.step != self._step - 1:
            self._session.say_once(
                "gap",
                f"track(step={self._step}) came after step {start.stamp.step}: quantities over an update, such as "
                "alpha, need steps that grow by one, and have no row here.",
            )
        if start is not None and start.stamp.step == self._step - 1 and any(q.starts(self._step - 1) for q in updates):
            self._start_stamp, self._update = start.stamp, self._project_start(start)
        if any(q.starts(self._step) for q in updates):
            self._values = {name: p.detach().clone() for name, p in setup.bare.named_parameters()}
        self._versions = {name: p._version for name, p in setup.tracked.items()}
        outputs = any(q.needs.output_gradients for q in self._active)
        norms = {path for path, _ in training_batchnorms(setup.bare)}
        self._capture = Capture(
            setup.bare,
            [layer for layer in setup.layers if outputs or layer.parameters or layer.path in norms],
            Loss(setup.loss_fn, self._weight, setup.loss_scale() or 1.0),
            replay=setup.track_batchnorm or any(q.needs.curvature for q in self._active),
            batch_size=self._batch_size,
            watch=self._session.unchecked,
        )
        self._capture.start()

    def _project_start(self, start: Start) -> Update:
        """The update that began at ``start``, and the slopes of the start's samples along it."""
        setup = self._setup
        direction = {name: p.detach() - start.values[name] for name, p in setup.tracked.items()}
        norm = torch.stack([d.double().square().sum() for d in direction.values()]).sum().sqrt()
        changed = start.inputs_changed
        slopes = Projection(direction, len(start.losses))
        if not changed:
            walk(start.batches, start.values, list(setup.tracked), [slopes])
        scale = setup.loss_scale()
        return Update(
            norm=norm,
            direction=direction,
            start_losses=start.losses,
            start_slopes=slopes.values / norm,
            end_slopes=slopes.values[:0],
            start_n=start.stamp.n,
            inputs_changed=changed,
            skipped=start.scale is not None and scale is not None and scale < start.scale,
        )

    # -- after the backward pass ---------------------------------------------------------------------------------------

    def _finish(self, capture: Capture) -> None:
        setup = self._setup
        riding = self._session.userlog.take_riding(setup.world.size, setup.device)
        record = {name: 0.0 for name in HEADER} | {"step": self._step}
        try:
            self._session.check_health()
            captured = self._captured(capture)
            curvatures = self._curvatures(captured)
        except Exception:
            self._report_failure(record)
            raise
        record["batch_size"] = sum(c.batch_size for c in captured)
        record["weight"] = sum(c.weight for c in captured)
        record["layout"] = digest([q.name for q in self._active], self._update is not None, list(riding))
        records = setup.world.header(record)
        n, weight = int(sum(r["batch_size"] for r in records)), sum(r["weight"] for r in records)
        stamp = Stamp(self._step, self._epoch, time.time(), n)
        try:
            self._send(captured, curvatures, stamp, n / weight if weight else 0.0, weight, riding)
        except BaseException:
            # The other ranks sent their sums, and this one did not: from now on they would not match.
            self._session.broken = True
            raise

    def _report_failure(self, record: dict[str, float]) -> None:
        """Let the other ranks fail too, instead of waiting for this one."""
        try:
            self._setup.world.header({**record, "failed": 1})
        except RuntimeError:
            pass  # this rank's own error is the one to show

    def _captured(self, capture: Capture) -> list[Captured]:
        setup = self._setup
        captured = capture.finish()
        for name, version in self._versions.items():
            if setup.tracked[name]._version != version:
                raise RuntimeError(
                    f"Parameter '{name}' changed inside `track`. Call optimizer.step() after the `with` block: the "
                    "individual gradients belong to the parameters of the forward pass."
                )
        if any(q.needs.losses for q in self._active):
            for micro in captured:
                if micro.scale.individual is None and micro.batch_size:
                    raise RuntimeError(
                        f"Quantities {[q.name for q in self._active if q.needs.losses]} need individual losses. Give "
                        "DistCockpit the loss module (loss_fn=...), or call cockpit.record_losses(losses) inside "
                        "`track`, with one loss per sample."
                    )
        if self._session.unchecked and any(c.weight for c in captured):
            check_losses(captured)
            check_positions(captured)
        if training_batchnorms(setup.bare):
            return [self._with_constant_statistics(c) if c.batch_size else c for c in captured]
        self._check_gradients(captured, capture.parameter_gradients)
        return captured

    def _check_gradients(self, captured: Sequence[Captured], seen: Mapping[str, Tensor]) -> None:
        setup, unchecked = self._setup, self._session.unchecked
        if unchecked and any(c.weight for c in captured):
            for name in check_gradients(captured, seen, setup.bare, setup.layers, unchecked):
                del unchecked[name]

    def _with_constant_statistics(self, captured: Captured) -> Captured:
        """The same micro-batch, differentiated with its batch statistics as constants.

        Raises:
            RuntimeError: If there is no loss module to run again.
        """
        setup = self._setup
        loss_fn = setup.loss_fn
        if loss_fn is None:
            raise RuntimeError("track_batchnorm=True needs the loss module: DistCockpit(loss_fn=...).")
        statistics = batch_statistics(captured, setup.bare)
        again = Capture(setup.bare, setup.layers, Loss(loss_fn), replay=True, batch_size=captured.batch_size)
        again.start()
        try:
            with replayed(setup.bare, loss_fn, captured, statistics) as loss:
                gradients = torch.autograd.grad(loss, list(setup.tracked.values()), allow_unused=True)
        finally:
            again.stop()
        (result,) = again.finish()
        seen = {name: g.double() for name, g in zip(setup.tracked, gradients, strict=True) if g is not None}
        self._check_gradients([result], seen)
        return replace(result, scale=replace(result.scale, weight=captured.scale.weight))

    def _send(
        self,
        captured: Sequence[Captured],
        curvatures: Mapping[curvature.Curvature, Mapping[str, Tensor]],
        stamp: Stamp,
        samples_per_weight: float,
        weight: float,
        riding: Mapping[str, Tensor],
    ) -> None:
        """Everything that is summed: computed, packed, and sent on its way."""
        setup = self._setup
        batches = [micro.scaled(samples_per_weight) for micro in captured]
        losses = torch.cat([micro.individual_losses(samples_per_weight, setup.device) for micro in captured])
        parameters = {name: p.detach() for name, p in setup.tracked.items()}
        statistics = {q.name: q.statistics(self._step, parameters, self._session.memory_of(q)) for q in self._active}
        shared: list[Statistic] = []
        moments = projection = None
        if any(q.needs.elementwise for q in self._active):
            shared.append(moments := Moments(parameters))
        if self._update is not None:
            shared.append(projection := Projection(self._update.direction, len(losses)))
        values = {name: p.detach() for name, p in setup.bare.named_parameters()}
        own = [statistic for wanted in statistics.values() for statistic in wanted.values()]
        walk(batches, values, list(parameters), shared + own)
        if self._update is not None and projection is not None:
            self._update = self._update.ending(projection.values / self._update.norm)
        outputs = _output_gradients(batches, setup.facts.leaves)

        def seen_by(quantity: Quantity) -> LocalBatch:
            return LocalBatch(
                model=setup.facts,
                step=self._step,
                n=stamp.n,
                local_n=len(losses),
                rank=setup.world.rank,
                world_size=setup.world.size,
                losses=losses,
                parameters=parameters,
                statistics=statistics[quantity.name],
                output_gradients=outputs,
                curvature={k: {n: h / (weight or 1.0) for n, h in hs.items()} for k, hs in curvatures.items()},
                update=self._update if quantity.starts(self._step - 1) else None,
            )

        sums = {
            f"{q.name}/{key}": torch.as_tensor(value, dtype=torch.float64, device=setup.device)
            for q in self._active
            for key, value in q.local(seen_by(q), self._session.memory_of(q)).items()
        }
        sums |= {f"log/{name}": value for name, value in riding.items()}
        rows = [(q, self._start_stamp if q.needs.update and self._start_stamp else stamp) for q in self._active]
        self._session.send(
            Result(
                stamp,
                rows,
                Layout.of(sums),
                setup.world.sum(pack(sums, setup.device)),
                None if moments is None else self._send_elementwise(moments),
            )
        )
        if self._values is not None:
            self._session.start = Start(stamp, batches, self._values, losses, setup.loss_scale())

    def _send_elementwise(self, moments: Moments) -> Pending:
        parts = {"first": moments.first, "second": moments.second}
        flat = {f"{kind}/{name}": t for kind, tensors in parts.items() for name, t in tensors.items()}
        return self._setup.world.sum(pack(flat, self._setup.device))

    def _curvatures(self, captured: Sequence[Captured]) -> dict[curvature.Curvature, dict[str, Tensor]]:
        """Each diagonal that is asked for: the sum over this rank's micro-batches of w h."""
        setup, result = self._setup, {}
        for kind in {q.needs.curvature for q in self._active if q.needs.curvature is not None}:
            seeds = [digest(kind.seed, self._step, setup.world.rank, i) for i in range(len(captured))]
            assert setup.loss_fn is not None  # checked at construction
            result[kind] = curvature.diagonal(kind, setup.bare, setup.loss_fn, captured, seeds)
        return result


def _output_gradients(batches: Sequence[MicroBatch], leaves: Mapping[str, bool]) -> dict[str, list[Tensor]]:
    gradients: dict[str, list[Tensor]] = {path: [] for path in leaves}
    for batch in batches:
        for use in batch.uses:
            if use.layer.path in gradients:
                gradients[use.layer.path] += use.output_gradients.values()
    return gradients
