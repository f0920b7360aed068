"""A small training run with distcockpit on, as a user would write it; runs on every rank of a test."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import cases
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distcockpit import DistCockpit, every
from distcockpit import quantities as q
from distcockpit.gradients import known
from distcockpit.gradients.factors import WHOLE
from distcockpit.tracking import setup

SHARDINGS = {
    "one": [24],
    "even 2": [12, 12],
    "uneven 2": [17, 7],
    "even 4": [6, 6, 6, 6],
    "uneven 4": [13, 6, 4, 1],
    "empty rank": [11, 0, 9, 4],
}


def everything() -> list[q.Quantity]:
    """The whole panel."""
    return [
        *first_order(),
        q.HessTrace(),
        q.HessTrace(curvature="diag_ggn_exact", name="ggn_trace"),
        q.TICDiag(),
        q.TICDiag(curvature="diag_ggn_exact", name="tic_ggn", epsilon=1e-3),
        q.TICTrace(),
        q.HessMaxEV(schedule=every(3)),  # these take the most time
        q.HessMaxEV(which="LA", name="largest_algebraic", tolerance=1e-5, schedule=every(3, 1)),
    ]


def first_order() -> list[q.Quantity]:
    return [
        q.GradHist1d(range=(-0.5, 0.5), bins=60),
        q.GradHist2d(bins=(20, 24), range=((-0.3, 0.3), (-0.4, 0.4)), keep_individual=True),
        q.MeanGSNR(),
        q.Alpha(),
        q.OutputGradientGeometry(),
        q.Loss(),
        q.GradNorm(),
        q.NormTest(),
        q.InnerTest(),
        q.OrthoTest(),
        q.CABS(),
        q.EarlyStopping(),
        q.Distance(),
        q.UpdateSize(),
        q.Parameters(),
        q.Time(),
        q.OutputNorm(),
        q.OutputNorm(normalize_by_size=True, name="output_rms"),
        q.OutputActivation(),
        q.ParameterNorm(),
        q.GradientGeometry(),
        q.GradientActivation(),
        q.UpdateGeometry(),
        q.ParameterCondition(),
        q.GradientNoiseScale(),
        q.RankDisagreement(),
        q.RankHealth(),
        q.ReplicaDrift(),
    ]


@dataclass(frozen=True)
class Spec:
    """One training run."""

    store: str
    model: str = "mlp"
    loss: str = "mean"
    optimizer: str = "sgd"
    shards: tuple[int, ...] = (24,)
    steps: int = 3
    accumulate: int = 1  # micro-batches per step; their unequal sizes come from np.array_split
    no_sync: bool = False
    factor: float = 1.0  # of a gradient scaler
    backwards: int = 1  # backward calls on parts of the same loss
    options: dict[str, Any] = field(default_factory=dict)  # of DistCockpit
    ddp: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    buckets: int = 1  # parameters are dealt out to as many
    elements: int = 0  # or to buckets of at most so many, some rows of a parameter at a time
    sharded: str = ""  # what `fully_shard` is applied to, see `fully_sharded`
    fsdp: dict[str, Any] = field(default_factory=dict)  # its options
    forms: bool = False  # all individual gradients that have closed forms are formed in the backward pass

    def chosen(self, curvature: bool = True) -> list[q.Quantity]:
        """What is tracked."""
        return of_shards() if self.sharded else everything() if curvature else first_order()


def parameter_groups(kind: str, model: nn.Module) -> list[dict[str, Any]]:
    """Matrices, and the rest at half the rate; LBFGS takes one group."""
    if kind == "lbfgs":
        return [{"params": list(model.parameters()), "lr": 0.3}]
    kinds: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for p in model.parameters():
        kinds[p.dim() > 1].append(p)
    rate = {"sgd": 0.5, "adamw": 0.02}[kind]
    return [{"params": kinds[True], "lr": rate}, {"params": kinds[False], "lr": rate / 2}]


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """A plain one."""
    groups = parameter_groups(kind, model)
    return torch.optim.SGD(groups, momentum=0.9) if kind == "sgd" else torch.optim.AdamW(groups)


def shard(spec: Spec, rank: int, step: int) -> tuple[Tensor, Tensor]:
    x, y = cases.data(spec.model, spec.loss, step, sum(spec.shards))
    first = sum(spec.shards[:rank])
    mine = slice(first, first + spec.shards[rank])
    return x[mine].to(spec.device), y[mine].to(spec.device)


def train(rank: int, size: int, group: Any, spec: Spec, curvature: bool = True) -> list[dict[str, Tensor]]:
    """Train and return the parameters and buffers before each step, and after the last."""
    smaller = 0 if spec.forms else known.SMALLER
    with bucketed(spec.buckets, spec.elements), mock.patch("distcockpit.gradients.known.SMALLER", smaller):
        return _train(rank, size, group, spec, curvature)


@contextlib.contextmanager
def bucketed(number: int, elements: int) -> Generator[None, None, None]:
    """Inside, models are dealt out to so many buckets, or to buckets of at most so many elements."""
    real = setup.buckets

    def deal(parameters: Mapping[str, Tensor], usual: int) -> list[setup.Bucket]:
        if elements:
            return real(parameters, elements)
        names = list(parameters)
        dealt = [names[k::number] for k in range(min(number, len(names)))]
        return [dict.fromkeys(each, WHOLE) for each in dealt]

    with mock.patch("distcockpit.tracking.setup.buckets", deal):
        yield


def _train(rank: int, size: int, group: Any, spec: Spec, curvature: bool) -> list[dict[str, Tensor]]:
    net = cases.initialised(spec.model).to(spec.device)
    options = {"schedule": every(1), **spec.options}
    if spec.sharded:
        model, options["process_group"] = fully_sharded(net, spec.sharded, group, spec.fsdp), group
    else:
        model = net if group is None else DistributedDataParallel(net, process_group=group, **spec.ddp)
    loss_fn, optimizer = cases.LOSSES[spec.loss].module().to(spec.device), make_optimizer(spec.optimizer, net)
    scaler = torch.amp.GradScaler(spec.device, init_scale=spec.factor, enabled=spec.factor != 1)
    states = []
    options = {"quantities": spec.chosen(curvature), **options}
    with DistCockpit(model, loss_fn, optimizer, store=spec.store, **options) as cockpit:
        for step in range(spec.steps):
            states.append(whole_state(net))
            x, y = shard(spec, rank, step)
            optimizer.zero_grad()
            with cockpit.track(step, epoch=step // 2):
                parts = list(zip(x.tensor_split(spec.accumulate), y.tensor_split(spec.accumulate), strict=True))
                for i, (part, target) in enumerate(parts):
                    # DDP synchronises one backward call per forward pass; with two, the ranks do it by hand.
                    local = (
                        group is not None
                        and not spec.sharded
                        and (spec.no_sync and i < len(parts) - 1 or spec.backwards > 1)
                    )
                    if spec.sharded and hasattr(model, "set_requires_gradient_sync"):
                        model.set_requires_gradient_sync(not spec.no_sync or i == len(parts) - 1)
                    with model.no_sync() if local else contextlib.nullcontext():
                        loss = loss_fn(cockpit(part), target) / (spec.accumulate * spec.backwards)
                        for k in range(spec.backwards):
                            scaler.scale(loss).backward(retain_graph=k < spec.backwards - 1)
            for p in net.parameters():
                if p.grad is not None:
                    if spec.sharded and not hasattr(p, "full_tensor"):  # which FSDP leaves alone
                        torch.distributed.all_reduce(p.grad, group=group)
                        p.grad /= size
                    if group is not None and spec.backwards > 1 and not spec.sharded:
                        torch.distributed.all_reduce(p.grad, group=group)
                        p.grad /= size
                    p.grad /= spec.factor
                    if cases.LOSSES[spec.loss].module().reduction == "sum":
                        p.grad /= sum(spec.shards)
            optimizer.step()
        states.append(whole_state(net))
    return states


def whole_state(net: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, put together from all ranks."""
    return {k: whole(v.detach()).cpu().clone() for k, v in net.state_dict().items()}


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


@functools.cache
def two_by_two() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def fully_sharded(net: nn.Module, how: str, group: Any, options: Mapping[str, Any] | None = None) -> nn.Module:
    """Apply `fully_shard`.

    Args:
        net: The model.
        how: "leaves", "blocks" or "root" say what is sharded by itself, besides the root; of a transformer its blocks
            are. Then "hsdp", "last axis" where that is divisible, "grouped", "in part", "ignored", and "checkpointed"
            (and "reentrant") or "compiled" blocks.
        group: The ranks.
        options: Of `fully_shard`.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # as it does without a cockpit
    mesh = two_by_two() if "hsdp" in how else DeviceMesh.from_group(group, "cpu")
    options = {"mesh": mesh, **(options or {})}
    if "last axis" in how:
        size = mesh.size(-1)
        options["shard_placement_fn"] = lambda p: Shard(p.dim() - 1) if p.shape[-1] % size == 0 else Shard(0)
    inside: list[nn.Module] = []
    if isinstance(net, cases.Transformer) and "root" not in how:
        inside = list(net.blocks)
        if "checkpointed" in how:
            net.checkpoint = "reentrant" in how
        for block in net.blocks if "compiled" in how else ():
            block.compile(backend="eager")
        if "ignored" in how:  # and the user's own business from then on
            options["ignored_params"] = {net.positions}
    elif "leaves" in how:
        inside = [m for m in net.modules() if m is not net and not any(m.children())]
    elif "blocks" in how:
        inside = list(net.children())
    for module in inside:
        if any(True for _ in module.parameters()):
            fully_shard(module, **options)
    if "grouped" in how:
        fully_shard([net.norm, net.head], **options)
    return net if "in part" in how else fully_shard(net, **options)


def of_shards() -> list[q.Quantity]:
    """What a sharded model has."""
    return [each for each in first_order() if not isinstance(each, q.ParameterCondition)]
