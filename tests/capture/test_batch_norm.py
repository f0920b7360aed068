"""Batch norm in training mode: statistics as constants, or a clear refusal."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import architectures
import cases
import numpy as np
import oracle
import pytest
import torch
from compared_runs import mean_terms, quantities
from construction import CE, construct, first_order
from default_loops import C, V, train_default
from ranks import Ranks
from small_batches import data, one_step
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from distcockpit import DistCockpit, every, open_run
from distcockpit.quantities import MeanGSNR, NormTest

# -- batch norm with its statistics as constants -----------------------------------------------------------------------


class ConstantStatistics(nn.Module):
    """Batch norm as the oracle sees it: given statistics."""

    def __init__(self, inner: nn.BatchNorm2d, mean: Tensor, var: Tensor) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = inner.weight, inner.bias, inner.eps
        self.mean, self.var = mean, var

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean.to(x.dtype), self.var.to(x.dtype), self.weight, self.bias, False, 0, self.eps)


def batchnorm_net() -> nn.Sequential:
    torch.manual_seed(11)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Sigmoid(), nn.Flatten(), nn.Linear(108, 5))


def train_batchnorm(rank: int, size: int, group: Any, store: str, shards: list[int]) -> None:
    net, loss_fn = batchnorm_net(), nn.CrossEntropyLoss()
    model = DistributedDataParallel(net, process_group=group) if group is not None else net
    options = {"quantities": quantities(), "schedule": every(1), "track_batchnorm": True}
    with DistCockpit(model, loss_fn, store=store, **options) as cockpit:
        for step in range(2):
            x, y = cases.data("cnn", "mean", step)
            first = sum(shards[:rank])
            with cockpit.track(step):
                loss_fn(model(x[first : first + shards[rank]]), y[first : first + shards[rank]]).backward()
            if step == 0:
                with torch.no_grad():
                    for p in net.parameters():
                        p += 0.05 * torch.sin(torch.arange(p.numel()).view_as(p))


@pytest.mark.parametrize("shards", [[24], [17, 7]])
def test_batchnorm_statistics_as_constants(ranks: Ranks, tmp_path: Path, shards: list[int]) -> None:
    store = str(tmp_path / "r")
    train_batchnorm(0, 1, None, store, shards) if len(shards) == 1 else ranks.run(2, train_batchnorm, store, shards)
    run, pooled = open_run(store), []
    for step in range(2):
        net = batchnorm_net()
        if step:
            with torch.no_grad():
                for p in net.parameters():
                    p += 0.05 * torch.sin(torch.arange(p.numel()).view_as(p))
        x, y = cases.data("cnn", "mean", step)
        parts = []
        for rank, b in enumerate(shards):
            part = slice(sum(shards[:rank]), sum(shards[:rank]) + b)
            var, mean = torch.var_mean(net[0](x[part]).detach().double(), (0, 2, 3), correction=0)
            constant = copy.deepcopy(net)
            constant[1] = ConstantStatistics(net[1], mean, var)
            parts.append(oracle.batch(constant, constant.state_dict(), mean_terms, x[part], y[part]))
        pooled.append(
            oracle.Batch(
                losses=np.concatenate([p.losses for p in parts]),
                gradients={k: np.concatenate([p.gradients[k] for p in parts]) for k in parts[0].gradients},
                outputs={},
                parameters=parts[0].parameters,
            )
        )
    assert [k for k in pooled[0].gradients] == list(run.attrs["parameters"])
    np.testing.assert_allclose(run["mean_gsnr"]["mean_gsnr"], [oracle.mean_gsnr(b) for b in pooled], rtol=1e-4)
    np.testing.assert_allclose(run["alpha"]["alpha"][0], oracle.alpha(*pooled)["alpha"], rtol=1e-3)


@pytest.mark.parametrize("quantities", ["economy", "full"])
def test_batch_norm_in_training_mode(tmp_path: Path, quantities: str, caplog: pytest.LogCaptureFixture) -> None:
    """Individual gradients are not defined, and a notice says what to do; all else is tracked."""

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3))

    loss_fn, tracked = nn.CrossEntropyLoss(), net()
    with caplog.at_level("WARNING"):
        options = {"quantities": quantities, "loss_fn": loss_fn}
        done = train_default(tracked, lambda model: loss_fn(model(V), C), tmp_path / "run", **options)
    plain = net()
    train_default(plain, lambda model: loss_fn(model(V), C), tmp_path / "none", enabled=False)
    for name, value in plain.state_dict().items():
        assert torch.equal(tracked.state_dict()[name], value)
    run = open_run(tmp_path / "run")
    np.testing.assert_allclose(run["loss"]["loss"], done.losses, rtol=1e-6)
    assert run["norm_test"]["norm_test"].isnull().all() and not run["update_size"]["update_size"].isnull().any()
    (notice,) = [each for each in run.attrs["notices"] if each["topic"] == "coupled"]
    assert notice["step"] == 0 and "track_batchnorm=True" in notice["text"] and "norm_test" in notice["text"]
    with pytest.raises(ValueError, match=r"Layer '1' \(BatchNorm1d\) is in training mode"):
        train_default(net(), lambda model: loss_fn(model(V), C), tmp_path / "hand", quantities=[NormTest()])


def test_batch_norm_message_comes_before_the_forward_pass(tmp_path: Path) -> None:
    net, loss_fn = nn.Sequential(nn.Linear(12, 5), nn.BatchNorm1d(5)).eval(), CE()
    cockpit = construct(tmp_path, net, loss_fn, schedule=every(1), quantities=first_order)
    net.train()
    with pytest.raises(RuntimeError, match="training mode"), cockpit.track(0):
        raise AssertionError("the body must not run")
    cockpit.close()


def test_batch_norm_that_trains_for_a_while(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net, loss_fn = nn.Sequential(nn.Linear(12, 5), nn.BatchNorm1d(5)).eval(), CE()
    cockpit = construct(tmp_path, net, loss_fn, schedule=every(1), quantities=first_order)
    x, y = cases.data("mlp", "mean", 0)
    with cockpit.track(0):
        loss_fn(net(x), y).backward()
    net.train()
    with caplog.at_level("WARNING"), cockpit.track(1):
        loss_fn(net(x), y).backward()
    assert "step 1: mean_gsnr: NaN" in caplog.text and "training mode" in caplog.text
    net.eval()
    with cockpit.track(2):
        loss_fn(net(x), y).backward()
    cockpit.close()
    assert list(np.isnan(open_run(tmp_path / "run")["mean_gsnr"]["mean_gsnr"].values)) == [False, True, False]


class Auxiliary(nn.Module):
    """Keeps a part of its loss to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 5)
        self.penalty = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.norm(self.first(x))
        self.penalty = z.square().square().mean()
        return self.head(z)


def test_a_loss_that_the_outputs_do_not_tell(tmp_path: Path) -> None:
    net, loss_fn, x, y = Auxiliary(), nn.CrossEntropyLoss(), torch.randn(8, 6), torch.arange(8) % 5
    options = {"quantities": [MeanGSNR()], "schedule": every(1), "track_batchnorm": True}
    cockpit = DistCockpit(net, loss_fn, store=tmp_path / "run", **options)
    with pytest.raises(RuntimeError, match="does not come from the model's outputs alone.*Return everything"):
        with cockpit.track(0):
            (loss_fn(cockpit(x), y) + net.penalty).backward()
    cockpit = DistCockpit(net, loss_fn, store=tmp_path / "without", **options)
    with cockpit.track(0):
        loss_fn(cockpit(x), y).backward()


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_batch_norm_of_other_types(tmp_path: Path, dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    net, loss_fn = architectures.built("BatchNorm, track_batchnorm").to(dtype), nn.CrossEntropyLoss()
    options = {"quantities": [MeanGSNR()], "schedule": every(1), "track_batchnorm": True}
    with caplog.at_level("WARNING"), DistCockpit(net, loss_fn, store=tmp_path / "run", **options) as cockpit:
        with cockpit.track(0):
            batch = architectures.data("BatchNorm, track_batchnorm", 0, 6)
            loss_fn(cockpit(batch["x"].to(dtype)), batch["y"]).backward()
    assert not caplog.records


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["affine", "no affine", "frozen"])
def test_batch_norm_without_parameters(tmp_path: Path, kind: str) -> None:
    _, x, y = data()
    norm = nn.BatchNorm1d(6, affine=kind != "no affine")
    norm.requires_grad_(kind == "affine")
    net, loss_fn = nn.Sequential(nn.Linear(6, 6), norm, nn.Linear(6, 5)), nn.CrossEntropyLoss()
    run = one_step(tmp_path, lambda c: loss_fn(net(x), y).backward(), net, loss_fn, track_batchnorm=True)
    assert float(run["mean_gsnr"]["mean_gsnr"][0]) > 1e-3


def test_batch_norm_flags_are_restored(tmp_path: Path) -> None:
    _, x, y = data()
    net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 5)).eval()
    loss_fn = nn.CrossEntropyLoss()
    one_step(tmp_path, lambda c: loss_fn(net(x), y).backward(), net, loss_fn, track_batchnorm=True)
    assert not net[1].training and net[1].running_mean is None
