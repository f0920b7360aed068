"""Runs on the device whose numbers are those of the same run on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import architectures
import cases
import numpy as np
import objective_runs
import objectives
import torch
import xarray as xr
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distcockpit import DistCockpit, every, open_run, quantities
from pretend.building import DEVICE, loaded

OF_THE_MACHINE = {"time", "log"}
"""Quantities that measure the machine."""


class Checkpointed(nn.Sequential):
    """All but its last layer runs again in the backward pass."""

    def __init__(self, net: nn.Sequential, *, reentrant: bool) -> None:
        super().__init__(*net)
        self._reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        *first, last = self
        x = x.requires_grad_(x.is_floating_point() and self._reentrant)
        return last(checkpoint(nn.Sequential(*first), x, use_reentrant=self._reentrant))


def run(
    device: str,
    store: str,
    model: str = "mlp",
    preset: Any = "economy",
    wrap: Callable[[Any], nn.Module] = lambda net: net,
    micro_batches: int = 1,
    scale: float = 1.0,
    halves: bool = False,
    steps: int = 4,
    rate: float = 0.1,
) -> None:
    """Four tracked steps, possibly in two programs."""
    checkpoint, parts = {}, (range(2), range(2, steps)) if halves else (range(steps),)
    for part in parts:
        net = wrap(cases.initialised(model)).to(device)
        optimizer, loss_fn = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9), nn.CrossEntropyLoss()
        scaler = torch.amp.GradScaler(device, init_scale=scale, enabled=scale != 1)
        cockpit = DistCockpit(net, loss_fn, optimizer, store=store, quantities=preset, schedule=every(1), mode="a")
        if checkpoint:
            net.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            cockpit.load_state_dict(checkpoint["cockpit"])
        with cockpit:
            for step in part:
                x, y = (t.to(device) for t in cases.data(model, "mean", step, 24))
                optimizer.zero_grad()
                with cockpit.track(step):
                    for some, targets in zip(x.tensor_split(micro_batches), y.tensor_split(micro_batches), strict=True):
                        scaler.scale(loss_fn(cockpit(some), targets) / micro_batches).backward()
                scaler.step(optimizer)
                scaler.update()
            if part is not parts[-1]:
                states = {"model": net, "optimizer": optimizer, "cockpit": cockpit}
                checkpoint = {name: each.state_dict() for name, each in states.items()}


def compiled(net: nn.Module) -> nn.Module:
    """Traced, and run as it is."""
    net.compile(backend="eager")
    return net


WAYS: Mapping[str, Mapping[str, Any]] = {
    "economy": {},
    "business": {"preset": "business"},
    "full": {"preset": "full", "model": "sigmoid"},
    "layers": {"preset": "layers", "model": "cnn"},
    "micro-batches": {"micro_batches": 3},
    "scaler": {"scale": 2.0**10},
    "reentrant checkpoint": {"wrap": lambda net: Checkpointed(net, reentrant=True), "model": "cnn"},
    "checkpoint": {"wrap": lambda net: Checkpointed(net, reentrant=False), "model": "cnn"},
    "compiled": {"wrap": compiled, "model": "cnn"},
    "resumed": {"halves": True},
    "curvature of any model": {
        "preset": [quantities.HessTrace(curvature="hutchinson"), quantities.HessMaxEV(), quantities.TICTrace()]
    },
}


def same_way(store: str, way: str) -> None:
    """The same loop on the CPU and on the device."""
    for device in ("cpu", DEVICE):
        run(device, f"{store}-{device}", **WAYS[way])
    compare(open_run(f"{store}-cpu"), open_run(f"{store}-{DEVICE}"))


ON_THE_HOST = {"packed sequences"}
"""Models that make tensors which must be on the host, so that there can be no default device."""

MISSING = {
    "Embedding, sparse": "sparse tensors on the device",
    "EmbeddingBag, sparse": "sparse tensors on the device",
    "channels-last": "a group norm that takes channels-last memory",
}
"""What the device does not have."""


def same_architecture(store: str, name: str) -> None:
    """Two tracked steps of a model on both."""
    case = architectures.CASES[name]
    chosen = [quantities.MeanGSNR(), quantities.InnerTest(), quantities.NormTest(), quantities.GradNorm()]
    chosen += [quantities.GradHist1d(range=(-0.5, 0.5), bins=41)]
    for device in ("cpu", DEVICE):
        net, loss_fn = architectures.built(name).to(device), case.loss_fn()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        options = {"quantities": chosen, "schedule": every(1), **case.options}
        # Some of the models make their positions without naming a device, as users with a default device may.
        with warnings.catch_warnings(), torch.device("cpu" if name in ON_THE_HOST else device):
            warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
            with DistCockpit(net, loss_fn, store=f"{store}-{device}", **options) as cockpit:
                for step in range(2):
                    with torch.device("cpu"):
                        batch = {k: v.to(device) for k, v in architectures.data(name, step, 6).items()}
                    torch.manual_seed(step)
                    optimizer.zero_grad()
                    with cockpit.track(step):
                        case.train(cockpit, batch, loss_fn).backward()
                    optimizer.step()
    compare(open_run(f"{store}-cpu"), open_run(f"{store}-{DEVICE}"), case.rtol)


def same_loss(store: str, name: str) -> None:
    """Three steps with a loss as people write it, in two micro-batches."""
    objective = objectives.OBJECTIVES[name]
    chosen = [quantities.Loss(), quantities.GradNorm(), quantities.NormTest(), quantities.Alpha()]
    for device in ("cpu", DEVICE):
        net = objective_runs.initialised(objective).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=objective.rate)
        weights = mock.patch.object(objectives, "WEIGHT", objectives.WEIGHT.to(device))
        where = torch.device(device)  # of what the loss makes itself
        with weights, where, DistCockpit(net, None, optimizer, store=f"{store}-{device}", quantities=chosen) as cockpit:
            for step in range(3):
                with torch.device("cpu"):
                    batch = objective_runs.data(step)
                    known = float((batch.tokens != -100).sum()), float(objectives.WEIGHT.cpu()[batch.y].sum())
                optimizer.zero_grad()
                with cockpit.track(10 * step):
                    parts = zip(batch.x.tensor_split(2), batch.y.tensor_split(2), strict=True)
                    for x, y in ((x.to(device), y.to(device)) for x, y in parts):
                        d = objectives.Data(x, y, 2, 1, *known)
                        roots = objective.loss(objective.call(cockpit, d), d, net)
                        divisor = 2 if objective.divides else 1
                        objective.backward(
                            roots / divisor if isinstance(roots, Tensor) else [r / divisor for r in roots]
                        )
                optimizer.step()
    compare(open_run(f"{store}-cpu"), open_run(f"{store}-{DEVICE}"))


def rounded(store: str, known: bool) -> None:
    """Where the device rounds the gradients of kernels, which is known or not."""
    chosen = [quantities.GradNorm()]
    loaded().round_convolutions(True)
    try:
        for device in ("cpu", DEVICE):
            with mock.patch(
                "distcockpit.tracking.buckets.convolutions_round", lambda where: known and where.type == DEVICE
            ):
                run(device, f"{store}-{device}", "cnn", chosen, steps=3, rate=0.0)
    finally:
        loaded().round_convolutions(False)
    compare(open_run(f"{store}-cpu"), open_run(f"{store}-{DEVICE}"), 1e-5)


def compare(cpu: xr.DataTree, device: xr.DataTree, rtol: float = 2e-4) -> None:
    """Every number of both runs, and the order of streams."""
    assert set(cpu.children) == set(device.children)
    for group in sorted(set(cpu.children) - OF_THE_MACHINE):
        a, b = cpu[group].to_dataset().load(), device[group].to_dataset().load()
        assert set(a.data_vars) == set(b.data_vars) and a.sizes == b.sizes, group
        for name in a.data_vars:
            one, other = a[name].values, b[name].values
            if a[name].attrs.get("units") in ("s", "seconds") or one.dtype.kind not in "fiu":
                continue
            if "counts" in str(name):  # an element at an edge may fall on either side of it
                assert np.abs(one.astype(float) - other).sum() <= max(2, 20 * rtol * one.sum()), (group, name)
                continue
            scale = np.nanmax(np.abs(one), initial=0.0, where=np.isfinite(one)) if one.dtype.kind == "f" else 0
            np.testing.assert_allclose(
                other, one, rtol=10 * rtol, atol=rtol * float(scale), equal_nan=True, err_msg=f"{group}/{name}"
            )
    problems = loaded().problems()
    assert not problems, problems
