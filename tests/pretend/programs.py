"""What the tests run in a process of their own, because torch keeps a device for good."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import cases
import pytest
import torch
import torch.distributed as dist
from checks import check
from torch import Tensor, nn
from train import Spec, train
from zarr.storage import MemoryStore

from distcockpit import DistCockpit, every, open_run
from distcockpit.world import Pending
from pretend.building import DEVICE, loaded
from pretend.waits import counted


def start() -> None:
    """Make the device known, once in a process."""
    torch.set_num_threads(1)
    loaded()


def table(store: str, model: str, loss: str, curvature: bool) -> None:
    """A run on the device, each row of it against the oracle on the CPU."""
    spec = replace(Spec(store, model, loss), device=DEVICE)
    states = train(0, 1, None, spec, curvature)
    torch.__future__.set_swap_module_params_on_conversion(False)  # recurrent layers of the oracle cannot be swapped
    try:
        check(spec, states, open_run(store), curvature)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(True)
    in_order()


def in_order() -> None:
    """No stream used what it had to wait for."""
    problems = loaded().problems()
    assert not problems, problems


def waits(store: str, model: str, preset: str, layers: int = 0, steps: int = 5) -> list[tuple[str, str, int]]:
    """Where the last of some tracked steps waits: place, what for, how often. The first one checks itself."""
    torch.manual_seed(0)
    net = cases.initialised(model)
    if layers:
        net = nn.Sequential(nn.Flatten(), *(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(layers)), net)
    net = net.to(DEVICE)
    optimizer, loss_fn = torch.optim.SGD(net.parameters(), lr=0.1), nn.CrossEntropyLoss()
    with DistCockpit(net, loss_fn, optimizer, store=store, quantities=preset, schedule=every(1)) as cockpit:
        for step in range(steps):
            x, y = (t.to(DEVICE) for t in cases.data(model, "mean", step, 24))
            with counted() as seen:
                with cockpit.track(step):
                    loss_fn(cockpit(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
    in_order()
    return sorted((place, what, n) for (place, what), n in seen.items())


def autocast(store: str, kind: str) -> dict[str, Sequence[float]]:
    """The loss and the norm test of a run under autocast, and of the same on the CPU."""
    found = {}
    Product.types.clear()
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(12, 9), Product(9), nn.Linear(9, 5)).to(device)
        optimizer, loss_fn = torch.optim.SGD(net.parameters(), lr=0.1), nn.CrossEntropyLoss()
        path = f"{store}-{device}"
        with DistCockpit(net, loss_fn, optimizer, store=path, schedule=every(1)) as cockpit:
            for step in range(3):
                x, y = (t.to(device) for t in cases.data("mlp", "mean", step, 24))
                optimizer.zero_grad()
                with cockpit.track(step), torch.autocast(device, getattr(torch, kind)):
                    loss = loss_fn(cockpit(x), y)
                    loss.backward()
                optimizer.step()
        run = open_run(path)
        found[device] = [*run["loss"]["loss"].values, *run["norm_test"]["norm_test"].values]
    return found


def autocast_alike(store: str, kind: str = "bfloat16") -> None:
    """The CPU's numbers, but for the loss, which is rounded in another type; and the right type where it runs again."""
    found = autocast(store, kind)
    assert found[DEVICE] == pytest.approx(found["cpu"], rel=5e-3), found
    assert len(Product.types) > 6 and set(Product.types) == {getattr(torch, kind)}, Product.types


def several_devices() -> None:
    """A model in two parts is refused by name; one on the second device is not."""
    net = nn.Sequential(nn.Linear(4, 3).to("pretend:0"), nn.Linear(3, 2).to("pretend:1"))
    with pytest.raises(ValueError, match="'0.weight' on pretend:0, '1.weight' on pretend:1"):
        DistCockpit(net, None, store="never")
    with torch.get_device_module(DEVICE).device("pretend:1"):
        net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to("pretend:1")
        with DistCockpit(net, None, store=MemoryStore(), schedule=every(1)) as cockpit:
            for step in range(2):
                with cockpit.track(step):
                    cockpit(torch.ones(5, 4, device="pretend:1")).square().sum(1).mean().backward()
    in_order()


def default_group(number: int, port: int, folder: str) -> None:
    """The group of `init_process_group()`, which chooses the backend itself; DDP does not take it on such a device."""
    start()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(number), "WORLD_SIZE": "2"}
    dist.init_process_group()
    x, y = cases.data("mlp", "mean", 0, 24)
    mine, whole = slice(15 * number, 15 + 9 * number), cases.initialised("mlp")
    net = cases.initialised("mlp").to(DEVICE)
    with DistCockpit(net, None, store=f"{folder}/run", schedule=every(1)) as cockpit, cockpit.track(0):
        nn.functional.cross_entropy(cockpit(x[mine].to(DEVICE)), y[mine].to(DEVICE)).backward()
    in_order()
    if number == 0:
        loss = nn.functional.cross_entropy(whole(x), y)
        gradients = torch.autograd.grad(loss, list(whole.parameters()))
        run = open_run(f"{folder}/run")
        assert run["loss"]["loss"].values == pytest.approx([loss.item()], rel=1e-5)
        norm = torch.stack([g.norm() for g in gradients]).norm().item()
        assert run["grad_norm"]["total"].values == pytest.approx([norm], rel=1e-4)
    dist.destroy_process_group()


def dead_peer(number: int, port: int, folder: str, how: str) -> None:
    """Rank 1 exits or hangs before the sums of a step; rank 0 writes down what it is told."""
    start()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(number), "WORLD_SIZE": "2"}
    dist.init_process_group("pretend_ccl")
    net, told = cases.initialised("mlp").to(DEVICE), []
    try:
        with DistCockpit(net, None, store=f"{folder}/run", schedule=every(1), timeout_seconds=6) as cockpit:
            for step in range(9):
                x, y = (t.to(DEVICE) for t in cases.data("mlp", "mean", step, 24))
                if step == 2 and number == 1:
                    dist.all_reduce = lambda *a, **k: os._exit(1) if how == "exits" else time.sleep(10**6)
                with cockpit.track(step):
                    nn.functional.cross_entropy(cockpit(x), y).backward()
    except RuntimeError as error:
        told.append(str(error))
    Path(folder, f"told{number}").write_text("".join(told))
    os._exit(0)


def nobody_waits() -> None:
    """A sum whose step failed is freed before it has arrived."""
    for _ in range(3):
        Pending(torch.ones(4, device=DEVICE) * 2)
    in_order()


def training_is_unchanged(store: str) -> None:
    """Dropout draws the same numbers on the device, with a cockpit that runs modules again and without one."""
    ends = []
    for enabled in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(12, 9), Scaling(9), nn.Dropout(0.4), nn.Linear(9, 5)).to(DEVICE)
        optimizer, loss_fn = torch.optim.SGD(net.parameters(), lr=0.1), nn.CrossEntropyLoss()
        options: dict[str, Any] = {"quantities": "full", "schedule": every(1), "enabled": enabled}
        with DistCockpit(net, loss_fn, optimizer, store=store, **options) as cockpit:
            for step in range(3):
                x, y = (t.to(DEVICE) for t in cases.data("mlp", "mean", step, 24))
                optimizer.zero_grad()
                with cockpit.track(step):
                    loss_fn(cockpit(x), y).backward()
                optimizer.step()
        ends.append([p.cpu() for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True)), "the training was changed"


class Product(nn.Module):
    """A product of matrices without a closed form."""

    types: ClassVar[list[torch.dtype]] = []  # of all its results

    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, n, n) / n)

    def forward(self, x: Tensor) -> Tensor:
        """Each output is a quadratic form of the inputs."""
        result = torch.einsum("ni,nj,ijk->nk", x, x, self.weight)
        self.types.append(result.dtype)
        return result


class Scaling(nn.Module):
    """No function that has a closed form, so that it is run again."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(n))

    def forward(self, x: Tensor) -> Tensor:
        """Scaled, and a few elements dropped."""
        return nn.functional.dropout(torch.sinh(self.scale) * x, 0.2, self.training)


def rank(number: int, size: int, store: str, port: int, backend: str) -> None:
    """One of several ranks with DDP; each collective of a tensor on the device goes to the group of the device."""
    start()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(number), "WORLD_SIZE": str(size)}
    dist.init_process_group(backend)
    try:
        spec = replace(Spec(store, "mlp", "mean", shards=((17, 7), (13, 6, 4, 1))[size > 2]), device=DEVICE)
        states = train(number, size, dist.group.WORLD, spec, curvature=False)
        if number == 0:
            check(replace(spec, device="cpu"), states, open_run(store), curvature=False)
        in_order()
    finally:
        dist.destroy_process_group()


def like_an_accelerator() -> None:
    """What the device refuses, and what is not there yet."""
    x = torch.randn(4, 3, device=DEVICE)
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(4, 3)
    with pytest.raises(RuntimeError, match="device"):
        torch.addmm(x, torch.ones(4, 2), torch.ones(2, 3))
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()
    with pytest.raises(RuntimeError, match="generator"):
        x.normal_(generator=torch.Generator())
    view = x[1:].t()
    view.zero_()
    assert x[1:].abs().sum().item() == 0 and x[0].abs().sum().item() > 0
    module = torch.get_device_module(DEVICE)
    host = torch.empty(3, pin_memory=True)
    with module.stream(module.Stream(DEVICE)) as side:
        host.copy_(x[0], non_blocking=True)
        event = module.Event()
        event.record(side)
    assert host.isnan().all() and not event.query()
    event.synchronize()
    assert torch.equal(host, x[0].cpu()) and event.query()
    source = torch.ones(3).pin_memory()
    there = source.to(DEVICE, non_blocking=True)
    source.zero_()
    with pytest.raises(RuntimeError, match="overwritten before"):
        there + 1
    torch.manual_seed(1)
    first, state = torch.rand(3, device=DEVICE), torch.get_rng_state()
    torch.rand(3)
    assert not torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    assert torch.equal(first.cpu(), torch.rand(3, device=DEVICE).cpu())
    assert loaded().problems() == []
    stray_streams()
    with counted() as seen:
        for wait in (x.sum().item, x.cpu, x.nonzero, lambda: torch.tensor([1.0], device=DEVICE), lambda: x[x > 0]):
            wait()
        torch.zeros(3, device=DEVICE) + 1
    assert sum(seen.values()) == 5, seen


def stray_streams() -> None:
    """What is out of order between streams is seen: reads, writes, and memory that is freed too early."""
    module, library = torch.get_device_module(DEVICE), loaded()
    x, side = torch.ones(4, device=DEVICE), module.Stream(DEVICE)

    def on_side(call: Callable[[], Any], waits: bool = True) -> None:
        if waits:
            side.wait_stream(module.current_stream())
        with module.stream(side):
            call()

    on_side(lambda: x + 1)
    assert library.problems() == []
    x.add_(1)  # while the other stream may still read it
    assert "overwrites" in library.problems()[0]
    module.current_stream().wait_stream(side)
    on_side(lambda: x + 1, waits=False)
    assert "does not wait" in library.problems()[0]
    y = x * 2
    on_side(partial(torch.add, y, 1))
    del y
    assert "memory is freed" in library.problems()[0]
    y = x * 2
    on_side(partial(torch.add, y, 1))
    y.record_stream(side)
    del y
    assert library.problems() == []
    module.current_stream().wait_stream(side)  # before x is freed
