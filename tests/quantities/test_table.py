"""Quantities x cases x shardings: what the store holds is what one process with the whole batch computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import numpy as np
import oracle
import pytest
import torch
from checks import check, run
from compared_runs import mean_terms
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import Ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from train import SHARDINGS, Spec, everything

from distcockpit import DistCockpit, every, open_run
from distcockpit import quantities as q

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


# -- any sharding ------------------------------------------------------------------------------------------------------


def shard_of(rank: int, size: int, group: Any, store: str, cuts: list[int], accumulate: int) -> None:
    net, loss_fn = cases.initialised("sigmoid"), nn.CrossEntropyLoss(reduction="sum")
    x, y = cases.data("sigmoid", "sum", 0)
    bounds = [0, *cuts, cases.N]
    x, y = x[bounds[rank] : bounds[rank + 1]], y[bounds[rank] : bounds[rank + 1]]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    chosen = [quantity for quantity in everything() if quantity.needs.eigenvalue is None]
    with DistCockpit(
        net, loss_fn, optimizer, store=store, quantities=chosen, schedule=every(1), process_group=group, mode="w"
    ) as cockpit:
        with cockpit.track(0):
            for part, target in zip(x.tensor_split(accumulate), y.tensor_split(accumulate), strict=True):
                loss_fn(cockpit(part), target).backward()


@given(cuts=st.lists(st.integers(0, cases.N), min_size=3, max_size=3).map(sorted), accumulate=st.integers(1, 3))
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_sharding_gives_the_same_row(ranks: Ranks, tmp_path: Path, cuts: list[int], accumulate: int) -> None:
    shard_of(0, 1, None, str(tmp_path / "one"), [cases.N], 1)
    ranks.run(4, shard_of, str(tmp_path / "four"), cuts, accumulate)
    one, four = open_run(tmp_path / "one").load(), open_run(tmp_path / "four").load()
    assert set(one.children) == set(four.children)
    compared = 0
    for name in set(one.children) - {"log", "time", "rank_disagreement", "rank_health", "replica_drift", "tic_diag"}:
        for field, alone in one[name].data_vars.items():
            together = four[name][field]
            if field.startswith("rank_"):
                continue
            compared += 1
            if np.issubdtype(alone.dtype, np.integer) and "counts" in field:
                axes = tuple(range(1, alone.ndim))
                assert alone.sum() == together.sum() > 0
                moved = np.abs(np.cumsum((alone - together).values, axis=axes[-1]))
                assert moved.max() <= 2, (name, field)
            else:
                np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-6, err_msg=f"{name}/{field}")
    assert compared > 40


SOME = ("one", "uneven 2", "uneven 4", "empty rank")


@pytest.mark.parametrize(
    "model, optimizer, sharding",
    [
        *(("sigmoid", "sgd", sharding) for sharding in SHARDINGS),
        *((model, "sgd", sharding) for model in ("mlp", "cnn") for sharding in SOME),
        *(("sigmoid", "adamw", sharding) for sharding in ("one", "uneven 4")),
    ],
)
def test_panel(ranks: Ranks, tmp_path: Path, model: str, optimizer: str, sharding: str) -> None:
    # The mean loss of an empty batch is NaN, so a run with an empty rank uses the sum.
    loss = "sum" if sharding == "empty rank" else "mean"
    spec = Spec(str(tmp_path / "run.zarr"), model, loss, optimizer, tuple(SHARDINGS[sharding]))
    check(spec, *run(ranks, spec))


BUCKETS = {"3": {"buckets": 3}, "each": {"buckets": 100}, "rows": {"elements": 20}}


@pytest.mark.parametrize("how", BUCKETS)
@pytest.mark.parametrize("sharding", ["one", "uneven 4", "empty rank"])
@pytest.mark.parametrize("model, loss", [("cnn", "mean"), ("tokens", "token_mean"), ("tied", "token_mean")])
def test_buckets(ranks: Ranks, tmp_path: Path, model: str, loss: str, sharding: str, how: str) -> None:
    """Layers whose weight and bias are walked apart, in an order that is not that of the model; some rows at a time."""
    loss = "sum" if (loss, sharding) == ("mean", "empty rank") else loss
    spec = Spec(str(tmp_path / "run.zarr"), model, loss, "sgd", tuple(SHARDINGS[sharding]), **BUCKETS[how])
    curvature = model == "cnn" and how != "each"
    check(spec, *run(ranks, spec, curvature), curvature=curvature)


@pytest.mark.parametrize("sharding", ["one", "uneven 2", "uneven 4"])
@pytest.mark.parametrize("loss", ["mse", "class_weights"])
def test_losses(ranks: Ranks, tmp_path: Path, loss: str, sharding: str) -> None:
    spec = Spec(str(tmp_path / "run.zarr"), "sigmoid", loss, "sgd", tuple(SHARDINGS[sharding]))
    curvature = loss == "mse"
    check(spec, *run(ranks, spec, curvature), curvature=curvature)


@pytest.mark.parametrize("sharding", ["one", "uneven 2", "uneven 4"])
@pytest.mark.parametrize(
    "model, loss",
    [
        ("tokens", "token_mean"),
        ("attention", "mean"),
        ("reused", "mean"),
        ("scaled", "mean"),
        ("eval_batchnorm", "mean"),
    ],
)
def test_layers(ranks: Ranks, tmp_path: Path, model: str, loss: str, sharding: str) -> None:
    ddp = {"find_unused_parameters": True} if model == "reused" else {}
    spec = Spec(str(tmp_path / "run.zarr"), model, loss, "adamw", tuple(SHARDINGS[sharding]), ddp=ddp)
    check(spec, *run(ranks, spec, False), curvature=False)


@pytest.mark.parametrize("loss, sharding", [("mean", "one"), ("mean", "uneven 4"), ("sum", "uneven 4")])
@pytest.mark.parametrize(
    "loop",
    [
        {"factor": 1024.0},
        {"accumulate": 2},
        {"accumulate": 3, "no_sync": True},
        {"backwards": 2},
        {"accumulate": 2, "factor": 512.0, "backwards": 2},
    ],
    ids=lambda loop: "-".join(f"{k}={v}" for k, v in loop.items()),
)
def test_loops(ranks: Ranks, tmp_path: Path, loss: str, loop: dict, sharding: str) -> None:
    shards = tuple(max(3, s) for s in SHARDINGS[sharding]) if loss == "mean" else tuple(SHARDINGS[sharding])
    spec = Spec(str(tmp_path / "run.zarr"), "sigmoid", loss, "sgd", shards, **loop)
    check(spec, *run(ranks, spec))
