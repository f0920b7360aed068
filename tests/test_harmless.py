"""Watching does not change the run: same numbers, no hook left, nothing on untracked steps."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from ranks import Ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distcockpit import DistCockpit, every, open_run
from distcockpit.presets import full, layers
from distcockpit.quantities import Alpha, GradHist1d, HessTrace, MeanGSNR, OutputGradientGeometry


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(48, 12),
        nn.Sigmoid(),
        nn.Dropout(0.5),
        nn.Linear(12, 5),
    )


class WithBatchNorm(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Dropout(), nn.Flatten(), nn.Linear(108, 5)
        )


def curves(model: nn.Module, net: nn.Module, rank: int, size: int, cockpit: Any, loss_fn: Any) -> list[float]:
    """Train; the losses."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    torch.manual_seed(100 + rank)
    losses = []
    for step in range(8):
        x, y = cases.data("cnn", "mean", step)
        optimizer.zero_grad()
        with cockpit.track(step):
            loss = loss_fn(model(x[rank::size]), y[rank::size])
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [*losses, torch.rand(1).item()]


class Off:
    """No cockpit at all."""

    def track(self, step: int) -> Any:
        import contextlib

        return contextlib.nullcontext()


def everything() -> list[Any]:
    monte_carlo = HessTrace(curvature="diag_ggn_mc", name="monte_carlo", mc_samples=2)
    return [*full(), *layers(), MeanGSNR(), monte_carlo, HessTrace(curvature="diag_ggn_exact", name="exact")]


@pytest.mark.parametrize("kind", ["dropout", "batchnorm"])
def test_training_is_bit_identical(tmp_path: Path, kind: str) -> None:
    runs = []
    for watched in (False, True):
        net = network() if kind == "dropout" else WithBatchNorm()
        if watched:
            loss_fn = nn.CrossEntropyLoss()
            chosen = [q for q in everything() if kind == "dropout" or q.needs.curvature is None]
            options = {"quantities": chosen, "schedule": every(2), "track_batchnorm": kind == "batchnorm"}
            with DistCockpit(net, loss_fn, store=tmp_path / "run.zarr", **options) as cockpit:
                losses = curves(net, net, 0, 1, cockpit, loss_fn)
            assert open_run(tmp_path / "run.zarr")["mean_gsnr"].sizes["step"] == 4
        else:
            losses = curves(net, net, 0, 1, Off(), nn.CrossEntropyLoss())
        runs.append((losses, net.state_dict()))
    (plain, plain_state), (tracked, tracked_state) = runs
    assert plain == tracked  # the random number behind the last step included
    for name, value in plain_state.items():
        assert torch.equal(value, tracked_state[name]), name


def loss_curve(rank: int, size: int, group: Any, store: str | None) -> list[float]:
    net = network()
    model = DistributedDataParallel(net, process_group=group)
    if store is None:
        return curves(model, net, rank, size, Off(), nn.CrossEntropyLoss())
    loss_fn = nn.CrossEntropyLoss()
    with DistCockpit(model, loss_fn, store=store, quantities=everything(), schedule=every(2)) as cockpit:
        return curves(model, net, rank, size, cockpit, loss_fn)


def test_loss_curve_on_four_ranks(ranks: Ranks, tmp_path: Path) -> None:
    plain = ranks.run(4, loss_curve, None)
    tracked = ranks.run(4, loss_curve, str(tmp_path / "run.zarr"))
    assert plain == tracked


def hooks(module: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(m, kind)) for m in module.modules() for kind in kinds)


def tensor_hooks(tensors: list[torch.Tensor]) -> int:
    return sum(len(t._backward_hooks or ()) for t in tensors)


def test_no_hook_outside_tracked_steps(tmp_path: Path) -> None:
    net, loss_fn = network(), nn.CrossEntropyLoss()
    names = [set(vars(m)) for m in [*net.modules(), loss_fn]]
    attributes = [set(vars(p)) for p in net.parameters()]
    with DistCockpit(net, loss_fn, store=tmp_path / "run.zarr", quantities=everything(), schedule=every(4)) as cockpit:
        for step in range(8):
            x, y = cases.data("cnn", "mean", step)
            with cockpit.track(step):
                tracked = step % 4 in (0, 1)  # alpha needs the step after as well
                assert (hooks(net) + hooks(loss_fn) > 0) == tracked
                outputs = [net[0](x)]
                z = net(x)
                outputs.append(z)
                loss = loss_fn(z, y)
                assert (tensor_hooks([*outputs, loss]) > 0) == tracked
                loss.backward()
            assert hooks(net) + hooks(loss_fn) == 0
            assert tensor_hooks([*outputs, loss, *net.parameters()]) == 0
            assert names == [set(vars(m)) for m in [*net.modules(), loss_fn]]
            assert attributes == [set(vars(p)) for p in net.parameters()]


def test_an_exception_inside_track_leaves_nothing_behind(tmp_path: Path) -> None:
    net, loss_fn = network(), nn.CrossEntropyLoss()
    chosen = [MeanGSNR(), Alpha(), OutputGradientGeometry(), GradHist1d()]
    cockpit = DistCockpit(net, loss_fn, store=tmp_path / "run.zarr", quantities=chosen, schedule=every(1))
    for step in range(3):
        x, y = cases.data("cnn", "mean", step)
        with pytest.raises(KeyError) if step == 1 else pytest.MonkeyPatch.context(), cockpit.track(step):
            loss = loss_fn(net(x), y)
            loss.backward()
            if step == 1:
                raise KeyError("the user's own")
        assert hooks(net) + hooks(loss_fn) + tensor_hooks([loss, *net.parameters()]) == 0
    cockpit.close()
    run = open_run(tmp_path / "run.zarr")
    assert list(run["mean_gsnr"]["step"].values) == [0, 2]
    assert list(run["alpha"]["step"].values) == []  # neither pair of steps is whole
    assert run.attrs["state"] == "closed"


def test_leaving_with_an_exception_keeps_what_was_tracked(tmp_path: Path) -> None:
    net, loss_fn = network(), nn.CrossEntropyLoss()
    x, y = cases.data("cnn", "mean", 0)
    with pytest.raises(KeyError), DistCockpit(net, loss_fn, store=tmp_path / "run.zarr", schedule=every(1)) as cockpit:
        for step in range(2):
            with cockpit.track(step):
                loss_fn(net(x), y).backward()
        raise KeyError("after two steps")
    assert open_run(tmp_path / "run.zarr")["grad_hist_1d"].sizes["step"] == 2


@pytest.mark.parametrize("switch", ["argument", "environment"])
def test_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    if switch == "environment":
        monkeypatch.setenv("DISTCOCKPIT", "off")
    net, loss_fn = network(), nn.CrossEntropyLoss()
    options = {"enabled": False} if switch == "argument" else {}
    with DistCockpit(net, loss_fn, store=tmp_path / "run.zarr", **options) as cockpit:
        x, y = cases.data("cnn", "mean", 0)
        for step in (0, 0):  # nothing is checked either
            with cockpit.track(step):
                assert hooks(net) == 0
                loss_fn(cockpit(x), y).backward()
            cockpit.record_losses(torch.ones(3))
            cockpit.log(step, value=1.0)
        assert cockpit.latest() == {}
        cockpit.flush()
    assert not (tmp_path / "run.zarr").exists()


@pytest.mark.parametrize("model", ["cnn", "attention"])
def test_tracked_steps_keep_nothing_alive(tmp_path: Path, model: str) -> None:
    """Not even until the garbage collector comes: it comes seldom where few objects hold much memory."""
    net, loss_fn = cases.initialised(model), nn.CrossEntropyLoss()
    chosen = [q for q in everything() if not isinstance(q, HessTrace)]
    counts = []
    gc.collect()
    gc.disable()
    try:
        with DistCockpit(net, loss_fn, store=tmp_path / "run.zarr", quantities=chosen, schedule=every(1)) as cockpit:
            for step in range(20):
                x, y = cases.data(model, "mean", step)
                with cockpit.track(step):
                    loss_fn(net(x), y).backward()
                if step in (4, 19):  # behind several steps that check themselves
                    cockpit.flush()
                    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
                    counts.append(Counter(f"{type(t).__name__} {t.dtype} {tuple(t.shape)}" for t in tensors))
                    del tensors
    finally:
        gc.enable()
    grown = counts[1] - counts[0]
    assert grown.total() < 15, grown  # not one for each of the steps in between


class Sizes(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.largest = max(self.largest, leaf.numel())
        return result


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_nothing_holds_all_individual_gradients(tmp_path: Path, kind: str) -> None:
    """No operation of a tracked step returns as many elements as the largest layer's individual gradients have."""
    torch.manual_seed(0)
    if kind == "linear":
        net, x = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 5)), torch.randn(64, 256)
    else:
        net = nn.Sequential(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 4, 5))
        x = torch.randn(512, 32, 4, 4)  # more than one block
    chosen = [q for q in everything() if q.needs.curvature is None]
    loss_fn, y = nn.CrossEntropyLoss(), torch.arange(len(x)) % 5
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=chosen, schedule=every(1)) as cockpit:
        for step in range(2):
            with Sizes() as sizes, cockpit.track(step):
                loss_fn(net(x), y).backward()
            assert 0 < sizes.largest < len(x) * net[0].weight.numel()


def test_a_closed_cockpit_is_forgotten(tmp_path: Path) -> None:
    """Its store, its thread and its model: nothing that was registered with Python holds them."""
    net, loss_fn = network(), nn.CrossEntropyLoss()
    x, y = cases.data("cnn", "mean", 0)
    cockpit = DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=[MeanGSNR()], schedule=every(1))
    with cockpit.track(0):
        loss_fn(net(x), y).backward()
    assert cockpit._session is not None and cockpit._session.recorder is not None
    held = [weakref.ref(cockpit._session), weakref.ref(cockpit._session.recorder._writer._store), weakref.ref(net)]
    cockpit.close()
    del cockpit, net
    gc.collect()
    assert [ref() for ref in held] == [None, None, None]
