"""Ranks that run out of data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import torch
from ranks import Ranks
from torch import nn
from torch.distributed.algorithms import Join
from torch.nn.parallel import DistributedDataParallel
from train import everything

from distcockpit import DistCockpit, every, open_run
from distcockpit import quantities as q

EPOCHS = 2


def train_epochs(
    rank: int,
    size: int,
    group: Any,
    store: str,
    shards: list[list[int]],
    order: str,
    every_n: int,
    joins: bool,
    panel: str,
) -> list[dict[str, Any]]:
    """``shards``: for each step of an epoch the batch size of each rank; with Join, 0 is a rank without data.

    Without Join such a rank trains with an empty batch. Returns parameters after each epoch.
    """
    net = cases.initialised("mlp")
    model = DistributedDataParallel(net, process_group=group)
    # With momentum, replicas differ after Join: ranks that were absent miss it.
    loss_fn, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.5)
    states: list[dict[str, Any]] = []
    options = {"quantities": chosen(panel), "schedule": every(every_n)}
    with DistCockpit(model, loss_fn, optimizer, store=store, **options) as cockpit:
        for epoch in range(EPOCHS):

            def steps(epoch: int) -> None:
                for k, sizes in enumerate(shards):
                    step = epoch * len(shards) + k
                    if joins and not sizes[rank]:
                        return
                    x, y = cases.data("mlp", "mean", step, sum(sizes))
                    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
                    optimizer.zero_grad()
                    with cockpit.track(step, epoch=epoch):
                        loss = loss_fn(cockpit(x[mine]), y[mine])
                        (
                            loss * sizes[rank] * size / len(x) if sizes[rank] else 0 * cockpit.model(x[:0]).sum()
                        ).backward()
                    optimizer.step()
                    cockpit.log(step, reduce="mean", mean=float(rank), other=1.0)
                    cockpit.log(step, reduce="sum", total=1.0)

            if joins:
                both: list[Any] = [model, cockpit] if order == "ddp first" else [cockpit, model]
                with Join(both):
                    steps(epoch)
            else:
                steps(epoch)
            states.append({k: v.clone() for k, v in net.state_dict().items()})
    return states


def chosen(panel: str) -> list[q.Quantity]:
    adapted = q.GradHist1d(name="adapted", bins=20, adapt=q.GradAbsMax())
    few = [q.Alpha(), q.UpdateSize(), q.Distance(), q.MeanGSNR(), q.ParameterNorm(), q.OutputActivation(), q.Loss()]
    return [*(each for each in everything() if each.name != "time"), adapted] if panel == "all" else [*few, adapted]


SHARDS = {
    "rank 1 first": [[9, 5], [8, 6], [7, 0], [6, 0]],
    "rank 0 first": [[9, 5], [0, 6], [0, 7], [0, 8]],
    "one after the other": [[5, 4, 3, 2], [5, 0, 3, 2], [0, 0, 3, 2], [0, 0, 0, 9], [0, 0, 0, 7]],
    "all together": [[5, 4], [3, 2]],
}


@pytest.mark.parametrize(
    "case, order",
    [(case, "ddp first") for case in SHARDS] + [(case, "cockpit first") for case in ("rank 0 first", "rank 1 first")],
)
def test_rows_are_those_of_empty_batches(ranks: Ranks, tmp_path: Path, case: str, order: str) -> None:
    shards = SHARDS[case]
    size, every_n = len(shards[0]), 1 if order == "ddp first" else 2
    panel = "all" if size == 4 and every_n == 1 else "few"
    expected = ranks.run(size, train_epochs, str(tmp_path / "plain"), shards, order, every_n, False, panel)
    joined = ranks.run(size, train_epochs, str(tmp_path / "join"), shards, order, every_n, True, panel)
    for epoch in range(EPOCHS):
        for name, value in expected[0][epoch].items():
            np.testing.assert_allclose(joined[0][epoch][name], value, atol=1e-6)
    plain, run = open_run(tmp_path / "plain").load(), open_run(tmp_path / "join").load()
    rows = 0
    for name, node in plain.children.items():
        mine, theirs = run[name].to_dataset(), node.to_dataset()
        np.testing.assert_array_equal(mine["step"], theirs["step"], err_msg=name)
        np.testing.assert_array_equal(mine["epoch"], theirs["epoch"], err_msg=name)
        rows += theirs.sizes["step"]
        for field, values in theirs.data_vars.items():
            if "seconds" in str(field) or name == "log":
                continue
            np.testing.assert_allclose(mine[field], values, rtol=1e-5, atol=1e-5, err_msg=f"{name}/{field}")
    assert rows > 20


def test_logs_of_the_ranks_that_are_there(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, train_epochs, str(tmp_path / "run"), SHARDS["rank 0 first"], "ddp first", 1, True, "few")
    log = open_run(tmp_path / "run")["log"].load()
    there = [[0, 1], [1], [1], [1]] * EPOCHS
    np.testing.assert_array_equal(log["step"], range(len(there)))
    np.testing.assert_allclose(log["mean"], [np.mean(who) for who in there])
    np.testing.assert_allclose(log["total"], [len(who) for who in there])


def without_ddp(rank: int, size: int, group: Any, store: str) -> list[str]:
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    model = DistributedDataParallel(net, process_group=group)
    said = []
    with DistCockpit(model, loss_fn, store=store, quantities=[q.Loss()], schedule=every(1)) as cockpit:
        try:
            with Join([cockpit]):
                with cockpit.track(0):
                    pass
        except RuntimeError as error:
            said.append(str(error))
    with DistCockpit(net, loss_fn, store=f"{store}2", quantities=[q.Loss()], process_group=group) as cockpit:
        try:
            Join([model, cockpit])
        except TypeError as error:
            said.append(str(error))
    with DistCockpit(model, loss_fn, store=f"{store}3", enabled=False) as cockpit:
        x, y = cases.data("mlp", "mean", 0)
        with Join([cockpit, model]):
            for step in range(2 + rank):
                with cockpit.track(step):
                    loss_fn(cockpit(x), y).backward()
        said.append("off")
    return said


def test_the_ddp_model_belongs_to_it(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks.run(2, without_ddp, str(tmp_path / "run")):
        assert "Join([ddp, cockpit])" in said[0] and "DistributedDataParallel" in said[1] and said[2] == "off"


def micro_batches(rank: int, size: int, group: Any, store: str) -> int:
    """Two micro-batches per step, the first without synchronisation."""
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    model = DistributedDataParallel(net, process_group=group)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with DistCockpit(
        model, loss_fn, optimizer, store=store, quantities=[q.Loss(), q.MeanGSNR()], schedule=every(1)
    ) as cockpit:
        with Join([cockpit, model]):
            for step in range(2 + 2 * rank):
                x, y = cases.data("mlp", "mean", step)
                optimizer.zero_grad()
                with cockpit.track(step):
                    with model.no_sync():
                        loss_fn(cockpit(x[:9]), y[:9]).backward()
                    loss_fn(cockpit(x[9:]), y[9:]).backward()
                optimizer.step()
    return step


def saves_inside(rank: int, size: int, group: Any, store: str) -> str:
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    model = DistributedDataParallel(net, process_group=group)
    said = ""
    with DistCockpit(model, loss_fn, store=store, quantities=[q.Loss()], schedule=every(1)) as cockpit:
        with Join([model, cockpit]):
            for step in range(2 + rank):
                x, y = cases.data("mlp", "mean", step)
                with cockpit.track(step):
                    loss_fn(cockpit(x), y).backward()
                try:
                    cockpit.state_dict()
                except RuntimeError as error:
                    said = str(error)
        assert cockpit.state_dict()["step"] == 2
    return said


def test_a_state_needs_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(2, saves_inside, str(tmp_path / "run"))
    assert first == "" and "ranks [0] have run out of data" in second and "after `with Join(...)`" in second
    assert list(open_run(tmp_path / "run")["loss"]["step"].values) == [0, 1, 2]


def test_micro_batches(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, micro_batches, str(tmp_path / "run"))
    run = open_run(tmp_path / "run").load()
    assert list(run["loss"]["batch_size"].values) == [48, 48, 24, 24]
    assert np.isfinite(run["mean_gsnr"]["mean_gsnr"]).all()


FAULT_AT, LEFT = 3, 2  # the step of what happens, and how many steps the first rank has data for


def train_with(rank: int, size: int, group: Any, store: str, what: str, joins: bool) -> int:
    """Two epochs of five steps; the first rank runs out of data in both. Says how many steps this rank made."""
    net = cases.initialised("mlp")
    model, steps = DistributedDataParallel(net, process_group=group), 0
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    weight = torch.linspace(0.5, 2.0, net(cases.data("mlp", "mean", 0)[0][:1]).shape[1])
    chosen = [q.GradNorm(), q.NormTest(), q.Loss()]
    with DistCockpit(model, optimizer=optimizer, store=store, quantities=chosen, schedule=every(1)) as cockpit:
        for epoch in range(2):
            with Join([model, cockpit], enable=joins):
                for k in range(5):
                    step, sizes = 5 * epoch + k, [0 if k >= LEFT else 6, 7, 3, 5]
                    if joins and not sizes[rank]:
                        break
                    if what == "the model changes" and (step == FAULT_AT or rank == 0 and step == 5):
                        net[1] = nn.GELU()
                    x, y = cases.data("mlp", "mean", step, sum(sizes))
                    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
                    optimizer.zero_grad()
                    with cockpit.track(step):
                        z = cockpit(x[mine])
                        loss = nn.functional.cross_entropy(z, y[mine], weight=weight) if sizes[rank] else 0 * z.sum()
                        if what == "two divisors" and sizes[rank]:
                            loss = loss + nn.functional.mse_loss(z, x[mine, : z.shape[1]])
                        for _ in range(2 if what == "a step is left out" and rank == 1 and step == FAULT_AT else 0):
                            cockpit.record_losses(nn.functional.cross_entropy(z, y[mine], reduction="none"))
                        loss.backward()
                    steps += 1  # nothing is learned, so that all rows are about the same parameters
    return steps


@pytest.mark.parametrize("what", ["two divisors", "a step is left out", "the model changes"])
def test_what_happens_while_a_rank_has_no_data(ranks: Ranks, tmp_path: Path, what: str) -> None:
    made = ranks.run(4, train_with, str(tmp_path / "run"), what, True)
    assert made == [4, 10, 10, 10]
    run = open_run(tmp_path / "run").load()
    steps = run["grad_norm"]["step"].values.tolist()
    assert steps[:3] == [0, 1, 2] and not run["grad_norm"]["total"].isnull().any()
    if what == "two divisors":
        ranks.run(4, train_with, str(tmp_path / "plain"), what, False)
        plain = open_run(tmp_path / "plain").load()
        for quantity, field in (("grad_norm", "total"), ("norm_test", "norm_test"), ("loss", "loss")):
            np.testing.assert_allclose(run[quantity][field], plain[quantity][field], rtol=1e-6)
        assert steps == list(range(10))
    elif what == "a step is left out":
        assert steps == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    else:  # those at which the models differed are left out
        assert steps == [0, 1, 2, 5, 6, 7, 8, 9]
