"""Models sharded with `fully_shard`: loops that do odd things, and failures of one rank that cost a row and no more."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import torch
import torch.distributed as dist
from checks import run
from ranks import Ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from train import SHARDINGS, Spec, fully_sharded, make_optimizer, of_shards

from distcockpit import DistCockpit, every, open_run
from distcockpit import quantities as q
from distcockpit.quantities.alpha import STATUS

COMPARED = {"alpha": "alpha", "norm_test": "norm_test", "mean_gsnr": "mean_gsnr", "update_geometry": "correlation"}


@pytest.mark.parametrize("sharding, exclude", [("uneven 4", ["head"]), ("uneven 2", ["blocks.0"])])
def test_layers_left_out(ranks: Ranks, tmp_path: Path, sharding: str, exclude: list[str]) -> None:
    """The same rows as with DDP."""
    found = []
    for name, how in (("ddp", ""), ("sharded", "blocks of it")):
        options = {"quantities": of_shards(), "exclude": exclude}
        shards = tuple(SHARDINGS[sharding])
        spec = Spec(str(tmp_path / name), "transformer", "token_mean", shards=shards, sharded=how, options=options)
        found.append(run(ranks, spec)[1].load())
    ddp, sharded = found
    assert list(sharded["update_size"]["parameter"].values) == list(ddp["update_size"]["parameter"].values)
    for name, field in COMPARED.items():
        np.testing.assert_allclose(sharded[name][field], ddp[name][field], rtol=1e-4, atol=1e-6, err_msg=name)


# -- loops that do odd things ------------------------------------------------------------------------------------------


class Unlucky(Exception):
    pass


class Displaced(q.UpdateSize):
    """Raises on one rank, at first and once later."""

    def displacement(self, step: int, d: Mapping[str, Tensor], memory: dict[str, Any]) -> Mapping[str, Tensor]:
        if dist.get_rank() == 1 and step in (0, 3):
            raise ArithmeticError
        return super().displacement(step, d, memory)


class Reduced(q.GradientGeometry):
    """Raises on one rank, once."""

    def reduce(self, bucket: Any, memory: dict[str, Any]) -> Mapping[str, Tensor]:
        if bucket.rank == 1 and bucket.step == 3:
            raise ArithmeticError
        return super().reduce(bucket, memory)


def odd_loop(rank: int, size: int, group: Any, store: str, how: str) -> list[Tensor]:
    """Train a model with a recurrence in one of several ways, all of which update the parameters alike.

    "zeroed" inside `track` (or "in place"), one step "again", "ignored" parameters, "evaluated" between steps, and then
    memory that "runs out" on one rank; "grows" by parameters that the optimizer gets later.
    """
    net, loss_fn = cases.initialised("tokens"), nn.CrossEntropyLoss()
    ignored = [p for name, p in net.named_parameters() if "ignored" in how and "inner" in name]
    model = fully_sharded(net, "leaves, hsdp" if size == 4 else "root", group, {"ignored_params": set(ignored)})
    first, *later = net.parameters()
    optimizer = torch.optim.SGD([first] if "grows" in how else net.parameters(), lr=0.3)
    chosen = [*of_shards(), q.CompressionError(), Displaced(name="displaced"), Reduced(name="reduced")]
    if "raises" not in how:
        chosen = chosen[:-2]
    # So little that individual gradients are formed again for the next walk.
    options = {"quantities": chosen, "schedule": every(1), "process_group": group, "memory_budget": 1 << 10}
    with DistCockpit(model, loss_fn, optimizer, store=store, **options) as cockpit:
        for step in range(7):
            x, y = (each[6 * rank : 6 * rank + 6] for each in cases.data("tokens", "token_mean", step))
            if "evaluated" in how:
                with torch.no_grad():
                    model(x)  # leaves the root whole, so that no rank gathers it at the next step
            if "runs out" in how and (rank, step) == (1, 4):
                cockpit._session.ran_out_of_memory(step, "", MemoryError())
            if "grows" in how and step == 3:
                optimizer.add_param_group({"params": later, "lr": 0.1})
            tries = 2 if how == "again" and step == 3 else 1
            for k in range(tries):
                if "zeroed" not in how:
                    optimizer.zero_grad()
                try:
                    with cockpit.track(step):
                        if "zeroed" in how:
                            optimizer.zero_grad(set_to_none="in place" not in how)
                        loss_fn(cockpit(x), y).backward()
                        if k + 1 < tries:
                            raise Unlucky
                except Unlucky:
                    continue
            for p in ignored:
                dist.all_reduce(p.grad, group=group)
                p.grad /= size
            optimizer.step()
    return [p.to_local().detach().clone() if hasattr(p, "to_local") else p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize(
    "usual, odd",
    [
        ("plain", "zeroed"),
        ("plain", "zeroed in place"),
        ("plain", "again"),
        ("plain", "ignored"),
        ("plain", "evaluated"),
        ("plain", "evaluated, runs out"),
        ("grows", "grows, evaluated"),
    ],
)
def test_odd_loops(ranks: Ranks, tmp_path: Path, usual: str, odd: str) -> None:
    """Rows are those of the usual loop, and so is the training."""
    expected, found = (ranks.run(2, odd_loop, str(tmp_path / how), how) for how in (usual, odd))
    for mine, theirs in zip(found, expected, strict=True):
        assert odd == "ignored" or all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    here, there = (open_run(tmp_path / how).load() for how in (odd, usual))
    for name in set(there.children) - {"log", "time", "rank_health"}:
        if odd == "ignored" and name in ("replica_drift", "compression_error"):  # replicas, which the user averages
            continue
        assert list(here[name]["step"].values) == list(there[name]["step"].values), name
        for field, values in there[name].data_vars.items():
            np.testing.assert_allclose(here[name][field], values, rtol=1e-5, atol=1e-7, err_msg=f"{name}/{field}")


# -- failures of one rank ----------------------------------------------------------------------------------------------


def test_quantities_that_raise_on_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    """A displacement: no row where no rank knows yet what it would tell, then NaN; a gradient: no cosine with it."""
    ranks.run(4, odd_loop, str(tmp_path / "run"), "raises")
    rows = open_run(tmp_path / "run").load()
    mine, size = rows["displaced"]["update_size"], rows["update_size"]["update_size"]
    assert list(mine["step"].values) == list(size["step"].values) == [1, 2, 3, 4, 5, 6]
    assert np.isnan(mine.values).any(1).tolist() == [False, False, True, False, False, False]
    for step in (1, 2, 4, 5, 6):
        np.testing.assert_array_equal(mine.sel(step=step), size.sel(step=step))
    assert np.isfinite(size.values).all() and np.isfinite(rows["alpha"]["alpha"]).all()
    cosines = rows["reduced"]  # it has integers, which are never NaN, so there is no row at step 3
    assert list(cosines["step"].values) == [0, 1, 2, 4, 5, 6] and np.isfinite(cosines["norm"].values).all()
    assert np.isfinite(cosines["correlation"].values).all(1).tolist() == [False, True, True, False, True, True]
    assert list(cosines["previous_step"].values) == [-1, 0, 1, -1, 4, 5]


def lose_updates(rank: int, size: int, group: Any, store: str, how: str) -> None:
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    model = fully_sharded(net, how, group) if how else DistributedDataParallel(net, process_group=group)
    optimizer = make_optimizer("adamw", net)
    options = {"quantities": of_shards(), "schedule": every(1), "process_group": group}
    with DistCockpit(model, loss_fn, optimizer, store=store, **options) as cockpit:
        for step in range(7):
            x, y = cases.data("mlp", "mean", step)
            optimizer.zero_grad()
            with cockpit.track(step):
                loss_fn(cockpit(x[12 * rank : 12 * rank + 12]), y[12 * rank : 12 * rank + 12]).backward()
            optimizer.step()
            updates = cockpit._session.updates
            if (step, rank) in ((2, 1), (4, 0)) and updates.start is not None:
                updates.lose(updates.start.stamp)


@pytest.mark.parametrize("how", ["", "leaves"])
def test_a_rank_that_lost_an_update(ranks: Ranks, tmp_path: Path, how: str) -> None:
    """As if there had been no memory to keep its start: never the numbers of the other ranks alone. With DDP, too."""
    ranks.run(2, lose_updates, str(tmp_path / "run"), how)
    run = open_run(tmp_path / "run").load()
    alpha = run["alpha"]
    assert list(alpha["step"].values) == [0, 1, 2, 3, 4, 5]
    lost = [False, False, True, False, True, False]
    for field in ("alpha", "f_start", "f_start_variance", "slope_start", "slope_end"):
        assert np.isnan(alpha[field].values).tolist() == lost, field
    assert (alpha["status"].values == STATUS.index("interrupted")).tolist() == lost
    assert np.isfinite(alpha["f_end"].values).all()
    sizes, norms = run["update_size"]["update_size"], run["update_geometry"]["norm"]
    assert list(sizes["step"].values) == [0, 1, 2, 3, 5, 6]  # of rank 0, which did not know when 4 was
    assert np.isnan(sizes.values).any(1).tolist() == [False, False, bool(how), False, False, False]
    assert list(norms["step"].values) == ([0, 1, 3, 5, 6] if how else [0, 1, 2, 3, 5, 6])
    assert np.isfinite(norms).all() and np.isfinite(run["norm_test"]["norm_test"]).all()


# -- memory ------------------------------------------------------------------------------------------------------------


class Cell(nn.Module):
    """A cell that is called once per position, and has no closed form."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(4, 64), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 64)
        for k in range(x.shape[1]):
            state = self.cell(x[:, k], state)
        return self.head(state)


def hold_cells(rank: int, size: int, group: Any, store: str, length: int) -> int:
    """Train; return the bytes of the cell's parameters."""
    torch.manual_seed(0)
    net, loss_fn = Cell(), nn.CrossEntropyLoss()
    model, options = fully_sharded(net, "root", group), {"schedule": every(1), "process_group": group}
    with DistCockpit(model, loss_fn, store=store, quantities=[q.NormTest(), q.Time()], **options) as cockpit:
        for step in range(3):
            with cockpit.track(step):
                loss_fn(cockpit(torch.randn(2, length, 4)), torch.tensor([rank, 2])).backward()
    return sum(4 * p.numel() for p in net.cell.parameters())


def test_one_copy_for_all_calls_of_a_cell(ranks: Ranks, tmp_path: Path) -> None:
    """Copies of parameters for calls that are run again count as factors, once."""
    held = {}
    for length in (2, 6):
        copy, _ = ranks.run(2, hold_cells, str(tmp_path / f"{length}"), length)
        held[length] = open_run(tmp_path / f"{length}").load()["time"]["factor_bytes"].values[-1].max()
    assert held[2] > copy and held[6] - held[2] < copy
