"""What only many ranks show, and what happens when one of them fails or differs."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import cases
import numpy as np
import oracle
import pytest
import torch
from ranks import Ranks
from test_capture import mean_terms
from test_panel import meaning
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distcockpit import DistCockpit, every, open_run
from distcockpit import quantities as q
from distcockpit.quantities.replica_drift import digest

# -- ranks -------------------------------------------------------------------------------------------------------------


SLOW = 2.0  # seconds


def unhealthy(rank: int, size: int, group: Any, store: str, fault: str) -> None:
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    model = DistributedDataParallel(net, process_group=group)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    faulty = rank == 2
    with DistCockpit(
        model, loss_fn, optimizer, store=store, quantities=[q.RankHealth(), q.RankDisagreement()], schedule=every(1)
    ) as cockpit:
        for step in range(4):
            x, y = cases.data("mlp", "mean", step)
            x, y = x[rank::size], y[rank::size]
            if faulty and fault == "loader":
                time.sleep(SLOW)
            if faulty and fault == "input":
                x[1, 0] = torch.nan
            if faulty and fault == "weight":
                net[2].weight.data[0, 0] = torch.inf
            optimizer.zero_grad()
            with cockpit.track(step):
                handle = net[2].register_forward_pre_hook(lambda *_: time.sleep(SLOW * (faulty and fault == "forward")))
                z = cockpit(x)
                if faulty and fault == "backward":
                    z.register_hook(lambda g: g * torch.inf)
                loss_fn(z, y).backward()
                handle.remove()
            if fault in ("loader", "forward"):
                optimizer.step()


@pytest.mark.parametrize(
    "fault, losses, output, gradient",
    [("input", 1, "0", "4"), ("weight", 6, "2", "4"), ("backward", 0, "none", "2")],
)
def test_health_names_rank_and_layer(
    ranks: Ranks, tmp_path: Path, fault: str, losses: int, output: str, gradient: str
) -> None:
    ranks.run(4, unhealthy, str(tmp_path / "run"), fault)
    row = open_run(tmp_path / "run")["rank_health"].to_dataset().isel(step=0)
    assert int(row["nonfinite_losses"].sel(rank=2)) == losses
    assert int(row["nonfinite_gradients"].sel(rank=2)) > 0
    well = row.sel(rank=[0, 1, 3])
    for name in ("nonfinite_losses", "nonfinite_gradients", "first_nonfinite_output", "first_nonfinite_gradient"):
        assert (well[name] == 0).all(), name
    assert meaning(row["first_nonfinite_output"])[2] == output
    assert meaning(row["first_nonfinite_gradient"])[2] == gradient


@pytest.mark.parametrize("fault, where", [("loader", "outside_seconds"), ("forward", "forward_seconds")])
def test_health_shows_the_slow_rank(ranks: Ranks, tmp_path: Path, fault: str, where: str) -> None:
    """It sleeps, for longer than any scheduler lets a process wait; the others wait in their backward pass."""
    ranks.run(4, unhealthy, str(tmp_path / "run"), fault)
    health = open_run(tmp_path / "run")["rank_health"].to_dataset().isel(step=slice(1, None)).median("step")
    assert health[where].values.argmax() == 2 and health[where].sel(rank=2) >= SLOW
    waiting = health["track_seconds"] - health["forward_seconds"]
    assert (waiting.sel(rank=[0, 1, 3]) > SLOW / 2).all() and waiting.values.argmin() == 2


def drift(rank: int, size: int, group: Any, store: str) -> list[str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("distcockpit").addHandler(handler)
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    net[0].requires_grad_(False)
    model = DistributedDataParallel(net, process_group=group)
    x, y = cases.data("mlp", "mean", 0)
    with DistCockpit(model, loss_fn, store=store, quantities=[q.ReplicaDrift()], schedule=every(1)) as cockpit:
        for step in range(3):
            if step and rank == 1:
                with torch.no_grad():
                    net[2].weight[3, 4] += 1e-7
            if step == 2 and rank in (0, 3):
                with torch.no_grad():
                    net[0].bias.neg_()  # frozen, and watched all the same
            with cockpit.track(step):
                loss_fn(cockpit(x), y).backward()
    logging.getLogger("distcockpit").removeHandler(handler)
    return [text for text in records if "differ" in text]


def test_drift_names_parameter_and_ranks(ranks: Ranks, tmp_path: Path) -> None:
    said = ranks.run(4, drift, str(tmp_path / "run"))
    run = open_run(tmp_path / "run")["replica_drift"].to_dataset()
    assert list(run["replica_drift"].values) == [0, 1, 2]
    np.testing.assert_array_equal(run["differs"].sel(step=1, parameter="2.weight"), [0, 1, 0, 0])
    assert run["differs"].sel(step=1).sum() == 1
    np.testing.assert_array_equal(run["differs"].sel(step=2, parameter="0.bias"), [0, 1, 1, 0])  # two against two
    assert len(said[0]) == 2 and not any(said[1:])
    assert "step 1:" in said[0][0] and "'2.weight' (ranks 1)" in said[0][0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_the_digest_sees_every_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(37, 11).to(dtype)
    first = digest(tensor)
    assert first == digest(tensor.clone()) == digest(tensor.T.contiguous().T) and 0 <= first < 2**53
    seen = {float(first)}
    for k in range(tensor.numel()):
        changed = tensor.clone()
        real = torch.view_as_real(changed).view(-1) if dtype.is_complex else changed.view(-1)
        bits = real.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[real.element_size()])
        bits[k] ^= 1 << (k % 13)
        seen.add(float(digest(changed)))
    assert len(seen) == tensor.numel() + 1
    swapped = tensor.clone()
    swapped[0], swapped[1] = tensor[1], tensor[0]
    assert digest(swapped) != first
    assert digest(torch.zeros(3)) != digest(torch.zeros(3).neg())


# -- a failure half-way ------------------------------------------------------------------------------------------------


class Fails(q.Quantity, q.Statistic):
    """It fails on one rank, while statistics are asked for, in the walk, or when sums are taken."""

    def group(self, model: q.Model) -> q.Group:
        return q.Group({"fails": q.Field()})

    def fail(self, where: str) -> None:
        if self.name == where and torch.distributed.get_rank() == 1:
            raise MemoryError("no memory for blocks")

    def statistics(self, step: int, parameters: Any, memory: dict) -> dict:
        self.fail("statistics")
        return {"broken": self}

    def outer(self, *args: Any) -> None:
        self.fail("walk")

    block = outer

    def local(self, batch: q.LocalBatch, memory: dict) -> dict:
        self.fail("local")
        return {}

    def finalize(self, totals: Any, n: int) -> dict:
        return {"fails": 0.0}


def fail_half_way(rank: int, size: int, group: Any, store: str, where: str, eigenvalue: bool) -> list[str]:
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    model = DistributedDataParallel(net, process_group=group)
    x, y = cases.data("mlp", "mean", 0)
    chosen = [q.InnerTest(), q.MeanGSNR(), Fails(name=where)] + ([q.HessMaxEV()] if eigenvalue else [])
    cockpit = DistCockpit(model, loss_fn, store=store, quantities=chosen, schedule=every(1))
    said = []
    for step in range(2):
        try:
            with cockpit.track(step):
                loss_fn(cockpit(x), y).backward()
            said.append("went on")
        except (MemoryError, RuntimeError) as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("eigenvalue", [False, True])
@pytest.mark.parametrize("where", ["statistics", "walk", "local"])
def test_a_rank_that_fails_half_way_leaves_nobody_waiting(
    ranks: Ranks, tmp_path: Path, where: str, eigenvalue: bool
) -> None:
    """The others hear of it at once: at a first step they compare their sums, and before an iteration they ask."""
    said = ranks.run(4, fail_half_way, str(tmp_path / "run"), where, eigenvalue)
    assert said[1] == ["no memory for blocks"] * 2
    for rank in (0, 2, 3):
        words = "1 rank(s) could not finish" if eigenvalue and where != "local" else "Rank 1 could not finish"
        assert [words in each for each in said[rank]] == [True, True], said[rank]


# -- what a tool for one process reports on each rank ------------------------------------------------------------------


def single_process_tool(rank: int, size: int, group: Any, shards: list[int]) -> dict[str, float]:
    """BackPACK's individual gradients beside DDP's p.grad, put together as a tool that knows of one process does."""
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad

    net, loss_fn = extend(cases.initialised("sigmoid")), extend(nn.CrossEntropyLoss())
    model = DistributedDataParallel(net, process_group=group)
    x, y = cases.data("sigmoid", "mean", 0, sum(shards))
    mine = slice(sum(shards[:rank]), sum(shards[: rank + 1]))
    with backpack(BatchGrad()):
        loss = loss_fn(model(x[mine].requires_grad_()), y[mine])
        loss.backward()
    b = shards[rank]
    individual = torch.cat([p.grad_batch.flatten(1) * b for p in net.parameters()], 1).double()
    mean = torch.cat([p.grad.flatten() for p in net.parameters()]).double()
    variance = (individual.square().sum() - b * mean @ mean) / (b - 1)
    projections = individual @ mean
    along = (projections.square().sum() - b * (mean @ mean) ** 2) / (b - 1)
    return {
        "loss": loss.item(),
        "grad_norm": mean.norm().item(),
        "norm_test": (variance / b / (mean @ mean)).sqrt().item(),
        "inner_test": (along / b).abs().sqrt().item() / (mean @ mean).item(),
        "mean_gsnr": (mean**2 / (individual.square().mean(0) - mean**2 + 1e-5)).mean().item(),
    }


def pooled(rank: int, size: int, group: Any, store: str, shards: list[int]) -> None:
    net, loss_fn = cases.initialised("sigmoid"), nn.CrossEntropyLoss()
    model = DistributedDataParallel(net, process_group=group)
    x, y = cases.data("sigmoid", "mean", 0, sum(shards))
    mine = slice(sum(shards[:rank]), sum(shards[: rank + 1]))
    chosen = [q.Loss(), q.GradNorm(), q.NormTest(), q.InnerTest(), q.MeanGSNR()]
    with DistCockpit(model, loss_fn, store=store, quantities=chosen, schedule=every(1)) as cockpit, cockpit.track(0):
        loss_fn(cockpit(x[mine]), y[mine]).backward()


def test_a_tool_for_one_process_is_wrong_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    """Uneven batches, 5 and 9 samples: no rank has the truth, the pooled numbers are the truth."""
    shards = [5, 9]
    wrong = ranks.run(2, single_process_tool, shards)
    ranks.run(2, pooled, str(tmp_path / "run"), shards)
    run, net = open_run(tmp_path / "run"), cases.initialised("sigmoid")
    batch = oracle.batch(net, net.state_dict(), mean_terms, *cases.data("sigmoid", "mean", 0, 14))
    truth = {
        "loss": batch.losses.mean(),
        "grad_norm": np.linalg.norm(batch.flat.mean(0)),
        **{name: getattr(oracle, name)(batch) for name in ("norm_test", "inner_test", "mean_gsnr")},
    }
    alone = single_process_tool_alone()
    for name, expected in truth.items():
        ours = run["grad_norm"]["total"] if name == "grad_norm" else run[name][name]
        np.testing.assert_allclose(ours[0], expected, rtol=1e-4, err_msg=name)
        np.testing.assert_allclose(alone[name], expected, rtol=1e-4, err_msg=name)  # the tool is right by itself
        for rank in wrong:
            assert abs(rank[name] / expected - 1) > 5e-3, (name, rank[name], expected)  # 50 times the tolerance
    assert wrong[0]["norm_test"] == pytest.approx(3.46, abs=0.01)  # the README quotes these three
    assert wrong[1]["norm_test"] == pytest.approx(2.48, abs=0.01)
    assert truth["norm_test"] == pytest.approx(2.04, abs=0.01)


def single_process_tool_alone() -> dict[str, float]:
    """The same tool where it belongs."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        return single_process_tool(0, 1, None, [14])
    finally:
        torch.distributed.destroy_process_group()
