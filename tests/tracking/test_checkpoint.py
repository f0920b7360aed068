"""Interrupted runs that go on: the same rows as an uninterrupted run, or a seam that says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import torch
import xarray as xr
from odd_loops import linear, six_samples
from ranks import Ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from train import everything, first_order, make_optimizer

from distcockpit import DistCockpit, every, open_run
from distcockpit import quantities as q
from distcockpit.quantities import Alpha


def test_resuming_with_optimizers_in_another_order(tmp_path: Path) -> None:
    def train_and_resume(
        folder: Path, names: tuple[str, ...], state: Any, steps: range, net: nn.Module, optimizers: Any
    ) -> Any:
        given = {name: optimizers[name] for name in names}
        options = {"quantities": [Alpha()], "schedule": every(1), "mode": "a"}
        loss_fn = nn.CrossEntropyLoss()
        with DistCockpit(net, loss_fn, given, store=folder, **options) as cockpit:
            cockpit.load_state_dict(state)
            for step in steps:
                x, y = six_samples(step)
                net.zero_grad()
                with cockpit.track(step):
                    loss_fn(cockpit(x), y).backward()
                for optimizer in given.values():
                    optimizer.step()
            return cockpit.state_dict()

    def begin() -> tuple[nn.Module, dict[str, Any]]:
        net = nn.Sequential(linear(), nn.Tanh(), linear())
        halves = {"a": net[0], "b": net[2]}
        return net, {k: torch.optim.SGD(m.parameters(), lr=0.3) for k, m in halves.items()}

    net, optimizers = begin()
    train_and_resume(tmp_path / "whole", ("a", "b"), {}, range(4), net, optimizers)
    net, optimizers = begin()
    state = train_and_resume(tmp_path / "run", ("a", "b"), {}, range(2), net, optimizers)
    train_and_resume(tmp_path / "run", ("b", "a"), state, range(2, 4), net, optimizers)
    whole, run = open_run(tmp_path / "whole"), open_run(tmp_path / "run")
    for name in ("alpha", "alpha_a", "alpha_b"):
        for field in ("alpha", "slope_start", "slope_end", "update_norm"):
            np.testing.assert_allclose(run[name][field], whole[name][field], rtol=1e-9, err_msg=f"{name} {field}")
    with pytest.raises(ValueError, match=r"optimizers \['a', 'b'\], this one has \['a', 'c'\]"):
        train_and_resume(
            tmp_path / "other", ("a", "c"), state, range(2, 3), net, {"a": optimizers["a"], "c": optimizers["b"]}
        )


CE = nn.CrossEntropyLoss


STEPS, SAVED, DIED = 9, 4, 6  # steps of the run; the last one before the checkpoint; the last one before the end


def chosen(panel: str) -> list[q.Quantity]:
    adapted = [
        q.GradHist1d(name="adapted", bins=20, adapt=q.GradAbsMax(padding=0.1)),
        q.GradHist2d(name="adapted_2d", bins=(8, 6), adapt=(q.GradAbsMax(), q.ParamAbsMax())),
        q.GradHist1d(name="sometimes", bins=10, adapt=q.GradAbsMax(schedule=every(3)), schedule=every(2)),
    ]
    random = [
        q.HessTrace(curvature="diag_ggn_mc", name="monte_carlo"),
        q.HessTrace(curvature="hutchinson", samples=3, name="estimate"),
    ]
    few = [q.Alpha(), q.Distance(), q.RankHealth(), *adapted]
    return {"all": [*everything(), *adapted, *random], "first order": [*first_order(), *adapted], "few": few}[panel]


class Interrupted(Exception):
    pass


def train_and_resume(
    rank: int, size: int, group: Any, store: str, checkpoint: str, shards: list[int], how: str, panel: str, every_n: int
) -> str:
    """A run of STEPS steps: "whole"; one that "dies" after DIED, or "resumes" from the checkpoint, or as a "seam"."""
    net = cases.initialised("mlp")
    model = net if group is None else DistributedDataParallel(net, process_group=group)
    loss_fn, optimizer = CE(), make_optimizer("adamw", net)
    first, resumes = 0, how not in ("whole", "dies")
    if resumes:
        saved = torch.load(checkpoint, weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"] + 1
    options = {"quantities": chosen(panel), "schedule": every(every_n), "mode": "a" if resumes else "w-"}
    try:
        with DistCockpit(model, loss_fn, optimizer, store=store, **options) as cockpit:
            if how == "resumes":
                cockpit.load_state_dict(saved["cockpit"])
            for step in range(first, STEPS):
                x, y = cases.data("mlp", "mean", step)
                mine = slice(sum(shards[:rank]), sum(shards[: rank + 1]))
                optimizer.zero_grad()
                with cockpit.track(step, epoch=step // 3):
                    loss = loss_fn(cockpit(x[mine]), y[mine])
                    (loss * shards[rank] * size / len(x)).backward()  # DDP's mean over ranks is that over samples
                optimizer.step()
                cockpit.log(step, reduce="mean", mean=float(step + rank))
                cockpit.log(step, reduce="sum", total=float(rank))
                cockpit.log(step, own=float(loss.detach()) if group is None else float(step))
                if step == SAVED and how != "resumes" and how != "seam":
                    saved = {
                        "model": net.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "cockpit": cockpit.state_dict(),
                        "step": step,
                    }
                    if rank == 0:
                        torch.save(saved, checkpoint)
                if step != SAVED:  # what is logged after the checkpoint is not in it
                    cockpit.log(step, later=1.0)
                if step == DIED and how == "dies":
                    raise Interrupted
    except Interrupted:
        return "died"
    return "closed"


def run_all(
    ranks: Ranks | None, tmp_path: Path, shards: list[int], how: str, panel: str = "all", every_n: int = 1
) -> None:
    store = tmp_path / ("whole" if how == "whole" else "run")
    args = (str(store), str(tmp_path / f"{how == 'whole'}.pt"), shards, how, panel, every_n)
    if ranks is None:
        train_and_resume(0, 1, None, *args)
    else:
        ranks.run(len(shards), train_and_resume, *args)


def expect_same(whole: xr.DataTree, run: xr.DataTree, tolerance: float, skip: tuple[str, ...] = ()) -> int:
    """All rows are the same, times left out; their number."""
    assert list(whole.children) == list(run.children)
    rows = 0
    for name, node in whole.children.items():
        mine = run[name].to_dataset().load()
        theirs = node.to_dataset().load()
        np.testing.assert_array_equal(mine["step"], theirs["step"], err_msg=name)
        rows += len(theirs["step"])
        for field, values in {**theirs.data_vars, "epoch": theirs["epoch"]}.items():
            if name == "time" or "seconds" in str(field) or name in skip:
                continue
            np.testing.assert_allclose(
                mine[field].values, values.values, rtol=tolerance, atol=tolerance, err_msg=f"{name}/{field}"
            )
    return rows


@pytest.mark.parametrize("every_n", [1, 2])
def test_one_process(tmp_path: Path, every_n: int) -> None:
    panel = "all" if every_n == 1 else "first order"
    for how in ("whole", "dies"):
        run_all(None, tmp_path, [24], how, panel, every_n)
    died = open_run(tmp_path / "run").load()
    assert (died.attrs["state"], died.attrs["reason"]) == ("ended", "Interrupted")
    assert died["loss"]["step"].values[-1] == DIED
    run_all(None, tmp_path, [24], "resumes", panel, every_n)
    run = open_run(tmp_path / "run")
    assert expect_same(open_run(tmp_path / "whole"), run, 0.0) > 100
    assert run.attrs["state"] == "closed" and run.attrs["generation"] == 1
    first, second = run.attrs["segments"]
    assert (first["first_step"], first["last_step"]) == (0, SAVED)
    assert (second["first_step"], second["last_step"]) == (SAVED + 1, STEPS - 1)
    assert first["world_size"] == second["world_size"] == 1 and first["hosts"] and "torch" in first["versions"]
    alpha = run["alpha"].load()
    before = [SAVED] if every_n == 1 else []  # the update over the seam is there, and is not NaN
    assert all(np.isfinite(alpha["alpha"].sel(step=before)))


@pytest.mark.parametrize("before, after", [([17, 7], [17, 7]), ([13, 6, 4, 1], [9, 15]), ([10, 14], [13, 6, 4, 1])])
def test_on_ranks(ranks: Ranks, tmp_path: Path, before: list[int], after: list[int]) -> None:
    """Also with more or fewer ranks than before: what is not about ranks is the same."""
    panel = "first order"
    run_all(ranks, tmp_path, before, "whole", panel)
    run_all(ranks, tmp_path, before, "dies", panel)
    run_all(ranks, tmp_path, after, "resumes", panel)
    whole, run = open_run(tmp_path / "whole"), open_run(tmp_path / "run")
    about_ranks = ("rank_health", "rank_disagreement", "replica_drift", "gradient_noise_scale", "log", "monte_carlo")
    about_ranks += ("output_gradient_geometry", "output_rms")
    expect_same(whole, run, 1e-6 if before != after else 1e-12, about_ranks if before != after else ())
    assert [s["world_size"] for s in run.attrs["segments"]] == [len(before), len(after)]
    health = run["rank_health"].load()
    most = max(len(before), len(after))
    assert health.sizes["rank"] == most
    norms = run["rank_disagreement"].load()["grad_norm"]
    for steps, size in ((range(SAVED + 1), len(before)), (range(SAVED + 1, STEPS), len(after))):
        there = norms.sel(step=list(steps))
        assert np.isfinite(there.isel(rank=slice(size))).all() and np.isnan(there.isel(rank=slice(size, None))).all()
    if before != after:
        cosine = run["output_gradient_geometry"].load().sel(step=SAVED + 1)
        assert np.isnan(cosine["correlation"]).all() and cosine["previous_step"] == -1


def test_without_the_state_there_is_a_seam(ranks: Ranks, tmp_path: Path) -> None:
    for how in ("whole", "dies", "seam"):
        run_all(ranks, tmp_path, [17, 7], how, "first order")
    whole, run = open_run(tmp_path / "whole").load(), open_run(tmp_path / "run").load()
    meanings = run["alpha"]["status"].attrs["flag_meanings"].split()
    status = [meanings[code] for code in run["alpha"]["status"].values]
    assert [k for k, each in zip(run["alpha"]["step"].values, status, strict=True) if each == "interrupted"] == [SAVED]
    assert np.isnan(run["alpha"]["alpha"].sel(step=SAVED))
    distance = run["distance"]
    assert np.isfinite(distance["total"].sel(step=slice(0, SAVED))).all()
    assert np.isnan(distance["total"].sel(step=slice(SAVED + 1, None))).all()
    assert list(distance["status"].values) == [0] * (SAVED + 1) + [1] * (STEPS - SAVED - 1)
    for cosine in ("gradient_geometry", "update_geometry", "output_gradient_geometry"):
        seam = run[cosine].sel(step=SAVED + 1)
        assert np.isnan(seam["correlation"]).all() and seam["previous_step"] == -1
    unchanged = ("loss", "mean_gsnr", "grad_norm", "norm_test", "update_size", "learning_rate")
    for name in unchanged:
        xr.testing.assert_allclose(
            run[name].to_dataset().drop_vars("wall_time"), whole[name].to_dataset().drop_vars("wall_time"), rtol=1e-9
        )


def test_saving_changes_nothing(tmp_path: Path) -> None:
    """The same run with a state taken after every step, before the optimizer's step as well, has the same rows."""

    def run(name: str, saves: bool) -> None:
        net, loss_fn = cases.initialised("mlp"), CE()
        optimizer = make_optimizer("sgd", net)
        with DistCockpit(
            net, loss_fn, optimizer, store=tmp_path / name, quantities=chosen("all"), schedule=every(1)
        ) as cockpit:
            for step in range(3):
                x, y = cases.data("mlp", "mean", step)
                optimizer.zero_grad()
                with cockpit.track(step):
                    loss_fn(net(x), y).backward()
                cockpit.log(step, value=step)
                if saves:
                    cockpit.state_dict()
                optimizer.step()
                if saves:
                    cockpit.state_dict()
                cockpit.log(step, after=step)

    run("plain", False)
    run("saved", True)
    expect_same(open_run(tmp_path / "plain"), open_run(tmp_path / "saved"), 0.0)


def test_a_state_of_another_model_is_noticed(tmp_path: Path) -> None:
    """The user forgets to load the model: the update over the seam is not the one that was saved."""
    run_all(None, tmp_path, [24], "dies", panel="few")
    saved = torch.load(tmp_path / "False.pt", weights_only=True)
    net, loss_fn = cases.initialised("mlp"), CE()
    with resume(tmp_path / "run", net, loss_fn, optimizer=make_optimizer("adamw", net)) as cockpit:
        cockpit.load_state_dict(saved["cockpit"])
        x, y = cases.data("mlp", "mean", 0)
        with pytest.raises(ValueError, match="the latest was 4"), cockpit.track(SAVED):
            pass
        with cockpit.track(SAVED + 1):
            loss_fn(net(x), y).backward()
        with pytest.raises(RuntimeError, match="Call it before the first step"):
            cockpit.load_state_dict(saved["cockpit"])
    run = open_run(tmp_path / "run").load()
    status = run["alpha"]["status"]
    assert status.attrs["flag_meanings"].split()[int(status.sel(step=SAVED))] == "interrupted"


def resume(store: Path, net: nn.Module, loss_fn: nn.Module | None = None, **options: Any) -> DistCockpit:
    options = {"quantities": chosen("few"), "schedule": every(1), "mode": "a", **options}
    return DistCockpit(net, loss_fn or CE(), store=store, **options)


def test_another_run_is_refused(tmp_path: Path) -> None:
    run_all(None, tmp_path, [24], "dies", panel="few")
    net = cases.initialised("mlp")
    wider = nn.Sequential(nn.Linear(12, 17), nn.Sigmoid(), nn.Linear(17, 5))
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    for options, words in (
        ({"net": wider}, "parameter '0.weight' = \\[16, 12\\], this one has \\[17, 12\\]"),
        ({"quantities": [q.Alpha()]}, "quantity 'distance'"),
        ({"quantities": [*chosen("few")[:3], q.GradHist1d(name="adapted", bins=21)]}, "quantity 'adapted'.*'20'.*'21'"),
    ):
        with pytest.raises(ValueError, match=words):
            model = options.pop("net", net)
            resume(tmp_path / "run", model, optimizer=make_optimizer("adamw", model), **options)
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before
    with pytest.raises(ValueError, match="quantity 'learning_rate'.*this one has nothing"):  # the optimizer brings them
        resume(tmp_path / "run", net)


def test_resuming_what_is_not_there_begins_it(tmp_path: Path) -> None:
    net, loss_fn = cases.initialised("mlp"), CE()
    for first in (0, 3):
        with resume(tmp_path / "run", net, loss_fn, schedule=every(1 + first)) as cockpit:  # when it tracks may change
            for step in range(first, first + 3):
                x, y = cases.data("mlp", "mean", step)
                with cockpit.track(step):
                    loss_fn(net(x), y).backward()
    run = open_run(tmp_path / "run").load()
    assert list(run["distance"]["step"].values) == [0, 1, 2, 4] and len(run.attrs["segments"]) == 2


def test_resuming_from_the_first_step_leaves_no_seam(tmp_path: Path) -> None:
    """The run died before its first checkpoint, and begins again: nothing of the old one is left."""
    run_all(None, tmp_path, [24], "dies", panel="few")
    net, loss_fn = cases.initialised("mlp"), CE()
    optimizer = make_optimizer("adamw", net)
    with resume(tmp_path / "run", net, loss_fn, optimizer=optimizer) as cockpit:
        for step in range(2):
            x, y = cases.data("mlp", "mean", step)
            with cockpit.track(step):
                loss_fn(net(x), y).backward()
            optimizer.step()
    run = open_run(tmp_path / "run").load()
    assert list(run["distance"]["status"].values) == [0, 0] and run["distance"]["total"].values[1] > 0
    assert list(run["alpha"]["step"].values) == [0] and list(run["log"]["step"].values) == []


def test_a_call_that_raises_cuts_nothing(tmp_path: Path) -> None:
    run_all(None, tmp_path, [24], "dies", panel="few")
    before = json.loads((tmp_path / "run/zarr.json").read_text())
    net = cases.initialised("mlp")
    cockpit = resume(tmp_path / "run", net, optimizer=make_optimizer("adamw", net))
    for call in ({"lr": "a"}, {"reduce": "max", "lr": 1.0}, {"step\\x": 1.0}):
        with pytest.raises((TypeError, ValueError)):
            cockpit.log(0, **call)
    cockpit.close()
    assert json.loads((tmp_path / "run/zarr.json").read_text()) == before


def mismatched(rank: int, size: int, group: Any, store: str) -> list[str]:
    said = []
    net, loss_fn = cases.initialised("mlp"), CE()
    cockpit = DistCockpit(net, loss_fn, store=store, quantities=[q.Alpha()], schedule=every(1), process_group=group)
    states = []
    for step in range(3):
        x, y = cases.data("mlp", "mean", step)
        with cockpit.track(step):
            loss_fn(net(x), y).backward()
        states.append(cockpit.state_dict())
    try:
        if rank == 0:
            cockpit.state_dict()
        else:
            with cockpit.track(3):
                loss_fn(net(x), y).backward()
    except RuntimeError as error:
        said.append(str(error))
    cockpit = DistCockpit(
        net, loss_fn, store=f"{store}2", quantities=[q.Alpha()], schedule=every(1), process_group=group
    )
    try:
        cockpit.load_state_dict(states[rank])
    except RuntimeError as error:
        said.append(str(error))
    cockpit.close()
    return said


def own_states(rank: int, size: int, group: Any, store: str) -> None:
    """Each rank saves and loads its own state; the length of an update is known to rank 0 alone."""
    net, loss_fn = cases.initialised("mlp"), CE()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    options = {"quantities": [q.UpdateSize()], "schedule": every(1), "process_group": group, "mode": "a"}
    state: dict[str, Any] = {}
    for first in (0, 2):
        with DistCockpit(net, loss_fn, optimizer, store=store, **options) as cockpit:
            cockpit.load_state_dict(state)
            for step in range(first, first + 2):
                x, y = cases.data("mlp", "mean", step)
                optimizer.zero_grad()
                with cockpit.track(step):
                    loss_fn(net(x), y).backward()
                optimizer.step()
            state = cockpit.state_dict()


def test_each_rank_may_load_its_own_state(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, own_states, str(tmp_path / "run"))
    sizes = open_run(tmp_path / "run")["update_size"]["total"].load()
    assert list(sizes["step"].values) == [0, 1, 2, 3] and (sizes > 0).all()


def test_ranks_that_do_different_things(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks.run(2, mismatched, str(tmp_path / "run")):
        assert "rank 0 calls state_dict() after step 2, rank 1 tracks step 3" in said[0]
        assert "rank 1 loads the state saved after step 1, rank 0 the one after step 0" in said[1]
    ranks.stop(kill=True)
