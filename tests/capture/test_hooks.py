"""Hooks of the package: they see what they should, change nothing, and are gone afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import numpy as np
import objectives
import pytest
import torch
from objective_runs import data
from own_quantities import Moments
from repeated_runs import SAMPLES
from torch import Tensor, nn
from torch.nn import functional as F
from watched_runs import everything, hooks, network

from distcockpit import DistCockpit, every, open_run
from distcockpit import quantities as q
from distcockpit.quantities import Alpha, GradHist1d, Loss, MeanGSNR, NormTest, OutputGradientGeometry


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


def test_an_error_leaves_no_hook(tmp_path: Path) -> None:
    norm = nn.BatchNorm1d(6)
    net, loss_fn = nn.Sequential(nn.Linear(6, 6), norm, nn.Linear(6, 6), norm, nn.Linear(6, 5)), nn.CrossEntropyLoss()
    options = {"quantities": [MeanGSNR()], "schedule": every(1), "track_batchnorm": True}
    cockpit = DistCockpit(net, loss_fn, store=tmp_path / "run", **options)
    with pytest.raises(RuntimeError, match="was called 2 times"), cockpit.track(0):
        loss_fn(cockpit(torch.randn(6, 6)), torch.arange(6) % 5).backward()
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in net.modules())


def test_hooks_of_the_user_are_called_as_without(tmp_path: Path) -> None:
    """Those on outputs and losses never more often; others only where steps check themselves."""
    net, d, calls = objectives.Net(), data(0), {"output": 0, "between": 0, "loss": 0}

    def count(what: str) -> Any:
        def hook(_: Tensor) -> None:
            calls[what] += 1

        return hook

    with DistCockpit(net, store=tmp_path / "run", quantities=[Loss(), NormTest()], schedule=every(1)) as cockpit:
        for step in range(7):
            before = dict(calls)
            with cockpit.track(step):
                z = cockpit(d.x)
                z.retain_grad()
                z.register_hook(count("output"))
                between = z * 2
                between.register_hook(count("between"))
                loss = F.cross_entropy(between, d.y)
                loss.register_hook(count("loss"))
                loss.backward()
            torch.testing.assert_close(z.grad, torch.autograd.grad(F.cross_entropy(2 * z, d.y), z)[0])
            more = {what: calls[what] - before[what] - (what == "output") for what in calls}
            assert more["loss"] == 1 and more["output"] == 1
            assert more["between"] == 1 or step in (0, 1, 3)


def test_hooks_on_parameters_stay_out_of_replays(tmp_path: Path) -> None:
    """They would scale the Hessian, and see gradients that are not the run's."""
    net, loss_fn = cases.initialised("sigmoid"), nn.CrossEntropyLoss()
    x, y = cases.data("sigmoid", "mean", 0)
    chosen, seen = [q.HessMaxEV(), q.HessTrace()], []

    def hook(gradient: Tensor) -> Tensor:
        seen.append(gradient)
        return gradient * 0.1

    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=chosen, schedule=every(1)) as cockpit:
        with cockpit.track(0):
            loss_fn(cockpit(x), y).backward()
        handle = net[0].weight.register_hook(hook)
        with cockpit.track(1):
            loss_fn(cockpit(x), y).backward()
        assert len(seen) == 1
        net.zero_grad()
        loss_fn(net(x), y).backward()
        assert len(seen) == 2 and torch.equal(net[0].weight.grad, seen[1] * 0.1)
        handle.remove()
        loss_fn(net(x), y).backward()
        assert len(seen) == 2
    run = open_run(tmp_path / "run")
    np.testing.assert_allclose(*run["hess_max_ev"]["hess_max_ev"], rtol=1e-6)
    np.testing.assert_allclose(*run["hess_trace"]["trace"], rtol=1e-6)


def test_hooks_on_parameters_do_not_matter(tmp_path: Path) -> None:
    torch.manual_seed(2)
    net, loss_fn, x, y = nn.Linear(6, 5), nn.CrossEntropyLoss(), torch.randn(SAMPLES, 6), torch.arange(SAMPLES) % 5
    net.weight.register_hook(lambda g: g * 0.5)
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=[Moments()], schedule=every(1)) as cockpit:
        with cockpit.track(0):
            loss_fn(cockpit(x), y).backward()
        assert all(row.checked for row in cockpit.coverage())
