"""Training loops as people write them. Each runs on real ranks, and every row of the store is compared with the oracle.

`python tests/helpers/loops.py` writes the table of docs/loops.md from them.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import cases
import torch
import torch.distributed as dist
import torch.nn.functional as F
from paths import ROOT
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from train import Spec, first_order, make_optimizer, parameter_groups, shard

from distcockpit import DistCockpit, every

LOOPS: dict[str, Loop] = {}


@dataclass
class Job:
    """What one rank's loop works with."""

    rank: int
    size: int
    group: Any
    spec: Spec
    net: nn.Module
    model: nn.Module
    loss_fn: nn.Module
    optimizer: Any
    cockpit: DistCockpit
    kept: dict[str, Any] = field(default_factory=dict)  # what the loop wants to remember


class Loop:
    """The plain loop, and what others change of it. The docstring of each is what docs/loops.md says."""

    row: ClassVar[str] = "plain"
    model: ClassVar[str] = "sigmoid"
    loss: ClassVar[str] = "mean"
    optimizer: ClassVar[str] = "sgd"  # whose parameter groups the loop has
    least: ClassVar[int] = 1  # samples on a rank
    ddp: ClassVar[dict[str, Any]] = {}
    told_loss: ClassVar[bool] = True  # whether DistCockpit is given the loss module

    def __init_subclass__(cls) -> None:
        LOOPS[cls.__name__] = cls()

    def wrap(self, net: nn.Module, group: Any) -> nn.Module:
        return net if group is None else DistributedDataParallel(net, process_group=group, **self.ddp)

    def make_optimizer(self, net: nn.Module, group: Any) -> Any:
        return make_optimizer(self.optimizer, net)

    def options(self, job: dict[str, Any]) -> dict[str, Any]:
        return {}

    def start(self, job: Job) -> None:
        """Before the first step."""

    def step(self, job: Job, step: int, x: Tensor, y: Tensor) -> None:
        job.optimizer.zero_grad()
        with job.cockpit.track(step, epoch=step // 2):
            self.forward_backward(job, x, y)
        job.optimizer.step()

    def forward_backward(self, job: Job, x: Tensor, y: Tensor) -> None:
        job.loss_fn(job.cockpit(x), y).backward()


def train(rank: int, size: int, group: Any, name: str, spec: Spec) -> tuple[list[dict[str, Tensor]], dict[str, Any]]:
    """States before each step and after the last, and the numbers that the loop kept."""
    loop = LOOPS[name]
    net = cases.initialised(spec.model)
    model, loss_fn = loop.wrap(net, group), cases.LOSSES[spec.loss].module()
    optimizer = loop.make_optimizer(net, group)
    states = []
    options = {"quantities": first_order(), "schedule": every(1), "process_group": group}
    options |= loop.options({"rank": rank, "group": group})
    given = loss_fn if loop.told_loss else None
    with DistCockpit(model, given, optimizer, store=spec.store, **options) as cockpit:
        job = Job(rank, size, group, spec, net, model, loss_fn, optimizer, cockpit)
        job.kept["options"] = options
        loop.start(job)
        for step in range(spec.steps):
            states.append({k: v.detach().clone() for k, v in net.state_dict().items()})
            loop.step(job, step, *shard(spec, rank, step))
    states.append({k: v.detach().clone() for k, v in net.state_dict().items()})
    return states, {k: v for k, v in job.kept.items() if isinstance(v, int | float | str)}


# -- accumulation ------------------------------------------------------------------------------------------------------


class Accumulated(Loop):
    """several micro-batches of unequal sizes, averaged by DDP each time"""

    row = "Gradient accumulation"
    least = 3  # DDP wants as many backward passes on all ranks
    sync_always = True

    def forward_backward(self, job: Job, x: Tensor, y: Tensor) -> None:
        parts = list(zip(x.tensor_split([len(x) // 3]), y.tensor_split([len(x) // 3]), strict=True))
        parts = [part for part in parts if len(part[1])]  # the mean over none is NaN
        for k, (part, target) in enumerate(parts):
            local = not self.sync_always and k < len(parts) - 1
            with job.model.no_sync() if local else contextlib.nullcontext():
                (job.loss_fn(job.cockpit(part), target) / len(parts)).backward()


class AccumulatedWithoutSync(Accumulated):
    """the same under `no_sync()`"""

    sync_always = False


class TokensOfAll(Accumulated):
    """a sum over tokens, divided by the tokens of all micro-batches: `record_losses(losses, weight=tokens)`"""

    row = "Sequences"
    model, loss, optimizer, told_loss, sync_always = "tokens", "token_mean", "adamw", False, False

    def forward_backward(self, job: Job, x: Tensor, y: Tensor) -> None:
        cut, total = max(1, len(x) // 3), int((y != -100).sum())
        for part, target in zip(x.tensor_split([cut]), y.tensor_split([cut]), strict=True):
            if len(part):
                with job.model.no_sync():
                    losses = F.cross_entropy(job.cockpit(part), target, reduction="none").sum(1)
                    job.cockpit.record_losses(losses, weight=(target != -100).sum())
                    (losses.sum() / total).backward()
        for p in job.net.parameters():
            dist.all_reduce(p.grad, group=job.group)


# -- precision, clipping -----------------------------------------------------------------------------------------------


class Scaled(Loop):
    """`GradScaler` (`grad_scaler=`)"""

    row = "Mixed precision"

    def options(self, job: dict[str, Any]) -> dict[str, Any]:
        return {"grad_scaler": torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)}

    def step(self, job: Job, step: int, x: Tensor, y: Tensor) -> None:
        scaler = job.kept["options"]["grad_scaler"]
        job.optimizer.zero_grad()
        with job.cockpit.track(step, epoch=step // 2):
            scaler.scale(job.loss_fn(job.cockpit(x), y)).backward()
        scaler.unscale_(job.optimizer)
        scaler.step(job.optimizer)
        scaler.update()


class ClippedByNorm(Loop):
    """`clip_grad_norm_` after `track`"""

    row = "Gradient clipping"

    def step(self, job: Job, step: int, x: Tensor, y: Tensor) -> None:
        job.optimizer.zero_grad()
        with job.cockpit.track(step, epoch=step // 2):
            self.forward_backward(job, x, y)
        nn.utils.clip_grad_norm_(job.net.parameters(), 0.1)
        job.optimizer.step()


# -- backward calls, losses, optimizers --------------------------------------------------------------------------------


class TwoLosses(Loop):
    """a weighted sum of losses, as one loss per sample: `record_losses`"""

    row = "Losses"
    loss, told_loss = "two", False

    def forward_backward(self, job: Job, x: Tensor, y: Tensor) -> None:
        z = job.cockpit(x)
        first, second = (F.cross_entropy(z, target, reduction="none") for target in (y, (y + 1) % 5))
        losses = first + 0.3 * second
        job.cockpit.record_losses(losses)
        losses.mean().backward()


class TwoBackwardCalls(Loop):
    """several backward calls on one loss"""

    row = "Losses"

    def forward_backward(self, job: Job, x: Tensor, y: Tensor) -> None:
        with job.model.no_sync():  # DDP synchronises once per forward pass
            loss = job.loss_fn(job.cockpit(x), y) / 2
            loss.backward(retain_graph=True)
            loss.backward()
        for p in job.net.parameters():
            dist.all_reduce(p.grad, group=job.group)
            p.grad /= job.size


class TokenMean(Loop):
    """a token mean with `ignore_index`, from the loss module"""

    row = "Sequences"
    model, loss, optimizer = "tokens", "token_mean", "adamw"


class TokenMeanByFunction(Loop):
    """the same from a function: `track(step, weight=tokens)`"""

    row = "Sequences"
    model, loss, optimizer, told_loss = "tokens", "token_mean", "adamw", False

    def step(self, job: Job, step: int, x: Tensor, y: Tensor) -> None:
        job.optimizer.zero_grad()
        tokens = int((y != -100).sum())
        with job.cockpit.track(step, epoch=step // 2, weight=tokens):
            losses = F.cross_entropy(job.cockpit(x), y, reduction="none").sum(1)
            job.cockpit.record_losses(losses)
            (losses.sum() / tokens).backward()
        job.optimizer.step()


class Fused(Loop):
    """fused"""

    row = "Optimizers"
    optimizer = "adamw"
    how: ClassVar[dict[str, Any]] = {"fused": True}

    def make_optimizer(self, net: nn.Module, group: Any) -> Any:
        return torch.optim.AdamW(parameter_groups("adamw", net), **self.how)


class Foreach(Fused):
    """foreach"""

    how: ClassVar[dict[str, Any]] = {"foreach": True}


class Zero(Fused):
    """ZeRO-1 (`ZeroRedundancyOptimizer`)"""

    def make_optimizer(self, net: nn.Module, group: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=DeprecationWarning)  # of what torch uses for this
            from torch.distributed.optim import ZeroRedundancyOptimizer
        groups = parameter_groups("adamw", net)
        return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, process_group=group, lr=0.02)


class Closure(Loop):
    """LBFGS, with `with cockpit.track(step)` inside the closure: its first call is tracked"""

    row = "Optimizers"
    optimizer = "lbfgs"

    def make_optimizer(self, net: nn.Module, group: Any) -> Any:
        return torch.optim.LBFGS(net.parameters(), lr=0.3, max_iter=4)

    def step(self, job: Job, step: int, x: Tensor, y: Tensor) -> None:
        def closure() -> Tensor:
            job.kept["calls"] = job.kept.get("calls", 0) + 1
            job.optimizer.zero_grad()
            with job.cockpit.track(step, epoch=step // 2):
                loss = job.loss_fn(job.cockpit(x), y)
                loss.backward()
            total = loss.detach().clone()
            dist.all_reduce(total, group=job.group)  # so that all ranks stop at the same call
            return total / job.size

        job.optimizer.step(closure)


class SharpnessAware(Loop):
    """two passes per step (SAM): the first is tracked"""

    row = "Optimizers"

    def step(self, job: Job, step: int, x: Tensor, y: Tensor) -> None:
        job.optimizer.zero_grad()
        with job.cockpit.track(step, epoch=step // 2):
            self.forward_backward(job, x, y)
        up = [0.05 * p.grad / p.grad.norm() for p in job.net.parameters()]
        self._move(job.net, up, 1)
        job.optimizer.zero_grad()
        job.loss_fn(job.model(x), y).backward()
        self._move(job.net, up, -1)
        job.optimizer.step()

    @torch.no_grad()
    def _move(self, net: nn.Module, by: list[Tensor], sign: int) -> None:
        for p, d in zip(net.parameters(), by, strict=True):
            p += sign * d


class SeveralOptimizers(Loop):
    """several (`optimizer={"matrices": a, "rest": b}`), each with its own α"""

    row = "Optimizers"

    def make_optimizer(self, net: nn.Module, group: Any) -> Any:
        matrices, rest = parameter_groups("sgd", net)
        return {"matrices": torch.optim.SGD([matrices], momentum=0.9), "rest": torch.optim.AdamW([rest])}

    def step(self, job: Job, step: int, x: Tensor, y: Tensor) -> None:
        for optimizer in job.optimizer.values():
            optimizer.zero_grad()
        with job.cockpit.track(step, epoch=step // 2):
            self.forward_backward(job, x, y)
        for optimizer in job.optimizer.values():
            optimizer.step()


# -- DistributedDataParallel -------------------------------------------------------------------------------------------


class StaticGraph(Loop):
    """`static_graph`"""

    row = "DDP"
    ddp: ClassVar[dict[str, Any]] = {"static_graph": True}


class BucketViews(Loop):
    """`gradient_as_bucket_view`"""

    row = "DDP"
    ddp: ClassVar[dict[str, Any]] = {"gradient_as_bucket_view": True}


class Unused(Loop):
    """`find_unused_parameters`"""

    row = "DDP"
    model, optimizer = "reused", "adamw"
    ddp: ClassVar[dict[str, Any]] = {"find_unused_parameters": True}


class LowPrecisionHook(Loop):
    """communication hooks: fp16"""

    row = "DDP"

    def wrap(self, net: nn.Module, group: Any) -> nn.Module:
        model = DistributedDataParallel(net, process_group=group)
        model.register_comm_hook(group, default_hooks.fp16_compress_hook)
        return model


class PowerSGD(Loop):
    """PowerSGD"""

    row = "DDP"

    def wrap(self, net: nn.Module, group: Any) -> nn.Module:
        model = DistributedDataParallel(net, process_group=group)
        state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return model


# -- what runs otherwise than it is written ----------------------------------------------------------------------------


class Checkpointed(Loop):
    """non-reentrant"""

    row = "Activation checkpointing"
    model = "deep"
    reentrant = False

    def start(self, job: Job) -> None:
        job.net.checkpoint = self.reentrant  # type: ignore[assignment]


class CheckpointedReentrantly(Checkpointed):
    """reentrant"""

    reentrant = True


class Compiled(Loop):
    """the model inside DDP"""

    row = "`torch.compile`"
    around = False

    def start(self, job: Job) -> None:
        torch.compiler.reset()
        graphs: list[Any] = []
        job.kept["graphs"] = graphs
        model = job.model if self.around else job.net
        compiled = torch.compile(model, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
        job.kept["compiled"] = compiled
        if not self.around:
            job.kept["compiled"] = DistributedDataParallel(compiled, process_group=job.group)

    def step(self, job: Job, step: int, x: Tensor, y: Tensor) -> None:
        model = job.kept["compiled"]
        with torch.no_grad():
            model(x)  # compiled, as at a step that is not tracked
        job.optimizer.zero_grad()
        with job.cockpit.track(step, epoch=step // 2):
            job.loss_fn(model(x), y).backward()
        job.optimizer.step()
        job.kept["compiled graphs"] = len(job.kept["graphs"])


class CompiledAround(Compiled):
    """the DDP model"""

    model, around = "deep", True


class CompiledInPlace(Compiled):
    """in place (`model.compile()`)"""

    model = "deep"

    def start(self, job: Job) -> None:
        torch.compiler.reset()
        graphs: list[Any] = []
        job.kept["graphs"] = graphs
        job.net.compile(backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
        job.kept["compiled"] = job.model


class CompiledStep(Compiled):
    """the function that computes the loss"""

    def start(self, job: Job) -> None:
        torch.compiler.reset()
        graphs: list[Any] = []
        job.kept["graphs"] = graphs

        @torch.compile(backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
        def compute(x: Tensor, y: Tensor) -> Tensor:
            return job.loss_fn(job.net(x), y)

        job.kept["compute"] = compute

    def step(self, job: Job, step: int, x: Tensor, y: Tensor) -> None:
        with torch.no_grad():
            job.kept["compute"](x, y)
        job.optimizer.zero_grad()
        with job.cockpit.track(step, epoch=step // 2):
            job.kept["compute"](x, y).backward()
        for p in job.net.parameters():
            dist.all_reduce(p.grad, group=job.group)
            p.grad /= job.size
        job.optimizer.step()
        job.kept["compiled graphs"] = len(job.kept["graphs"])


# -- functional calls --------------------------------------------------------------------------------------------------


class Functional(Loop):
    """with the parameters"""

    row = "`torch.func.functional_call`"

    def arguments(self, net: nn.Module) -> dict[str, Tensor]:
        return dict(net.named_parameters())

    def forward_backward(self, job: Job, x: Tensor, y: Tensor) -> None:
        job.loss_fn(functional_call(job.net, self.arguments(job.net), (x,)), y).backward()
        for p in job.net.parameters():
            dist.all_reduce(p.grad, group=job.group)
            p.grad /= job.size


class FunctionalOfMade(Functional):
    """with tensors that the loop makes from the parameters, inside `track`"""

    def arguments(self, net: nn.Module) -> dict[str, Tensor]:
        return {name: (2 * p).add(0) / 2 for name, p in net.named_parameters()}


# -- beside the training -----------------------------------------------------------------------------------------------


class Averages(Loop):
    """an exponential moving average of the weights, evaluated at every step"""

    row = "Evaluation"

    def start(self, job: Job) -> None:
        job.kept["ema"] = AveragedModel(job.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def step(self, job: Job, step: int, x: Tensor, y: Tensor) -> None:
        super().step(job, step, x, y)
        job.kept["ema"].update_parameters(job.net)
        with torch.no_grad():
            job.loss_fn(job.kept["ema"](x), y)


class Evaluates(Loop):
    """under `no_grad`, `inference_mode` and `eval()`, between steps and inside"""

    row = "Evaluation"

    def _evaluate(self, job: Job, x: Tensor, y: Tensor) -> None:
        job.net.eval()
        with torch.no_grad():
            job.loss_fn(job.net(x[:1]), y[:1])
        with torch.inference_mode():
            job.loss_fn(job.net(x), y)
        job.net.train()

    def step(self, job: Job, step: int, x: Tensor, y: Tensor) -> None:
        self._evaluate(job, x, y)
        job.optimizer.zero_grad()
        with job.cockpit.track(step, epoch=step // 2):
            self._evaluate(job, x, y)
            loss = job.loss_fn(job.cockpit(x), y)
            self._evaluate(job, x, y)
            loss.backward()
            self._evaluate(job, x, y)
        job.optimizer.step()


class TwoCockpits(Loop):
    """nested, on one model"""

    row = "Several cockpits"

    def start(self, job: Job) -> None:
        job.kept["inner"] = DistCockpit(
            job.model, job.loss_fn, job.optimizer, store=f"{job.spec.store}.inner", **job.kept["options"]
        )

    def step(self, job: Job, step: int, x: Tensor, y: Tensor) -> None:
        job.optimizer.zero_grad()
        inner = job.kept["inner"]
        with job.cockpit.track(step, epoch=step // 2), inner.track(step, epoch=step // 2):
            self.forward_backward(job, x, y)
        job.optimizer.step()
        if step == job.spec.steps - 1:
            inner.close()


class StaticBuffer(Loop):
    """one buffer for all batches and micro-batches, overwritten as soon as the backward pass has ended"""

    row = "Reused input buffers"
    least = 2

    def forward_backward(self, job: Job, x: Tensor, y: Tensor) -> None:
        buffer = job.kept.setdefault("buffer", torch.empty(24, 12))
        target = job.kept.setdefault("target", torch.empty(24, dtype=torch.int64))
        pieces = [(x[:1], y[:1]), (x[1:], y[1:])] if len(x) > 1 else [(x, y)]
        for part, classes in pieces:
            buffer[: len(part)].copy_(part)
            target[: len(part)].copy_(classes)
            loss = job.loss_fn(job.cockpit(buffer[: len(part)]), target[: len(part)])
            (loss * len(part) / len(x)).backward()
            buffer.numpy()[:] = 1e6  # which PyTorch does not see
            target.fill_(0)


# -- the table of docs/loops.md ---------------------------------------------------------------------------------------

SHOWN: list[tuple[str, str]] = []
ROWS = (
    "Gradient accumulation",
    "Mixed precision",
    "Gradient clipping",
    "Losses",
    "Sequences",
    "Optimizers",
    "DDP",
    "`fully_shard` (FSDP2)",
    "Activation checkpointing",
    "`torch.compile`",
    "`torch.func.functional_call`",
    "Evaluation",
    "Several cockpits",
    "Reused input buffers",
    "Frameworks",
    "Refused with an error",
)


def shows(row: str, text: str) -> Callable[[Any], Any]:
    """Marks a test of a loop that is no `Loop`; docs/loops.md says the text."""
    SHOWN.append((row, text))
    return lambda test: test


def table() -> str:
    """The table of docs/loops.md; with the tests of all other files that mark any."""
    for path in sorted(ROOT.glob("tests/**/test_*.py")):
        if "@shows(" in path.read_text():
            if str(path.parent) not in sys.path:
                sys.path.append(str(path.parent))
            importlib.import_module(path.stem)
    told = [(loop.row, re.sub(r"\s+", " ", type(loop).__doc__ or "").strip()) for loop in LOOPS.values()]
    told += sorted(set(SHOWN))  # whichever file was imported first
    assert {row for row, _ in told} == set(ROWS)
    lines = [f"| {row} | {'; '.join(text for of, text in told if of == row)} |" for row in ROWS]
    return "\n".join(["| loop | tested |", "|---|---|", *lines])


if __name__ == "__main__":
    import loops  # the tests register with the imported module, not with this one

    page = ROOT / "docs/loops.md"
    text = page.read_text()
    start = text.index("| loop | tested |")
    page.write_text(text[:start] + loops.table() + text[text.index("\n\n", start) :])
