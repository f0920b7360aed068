"""Models that change during a run: another part of it begins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import torch
import xarray as xr
from changing_runs import assert_norms, go
from ranks import Ranks
from small_batches import data
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from distcockpit import DistCockpit, every, open_run, presets
from distcockpit import quantities as q
from distcockpit.instruments import plot_run
from distcockpit.quantities import GradNorm, Parameters
from distcockpit.run import verify
from distcockpit.store import run_store as writing


@pytest.mark.parametrize("chosen", [[q.GradNorm()], [q.GradNorm(), q.NormTest()]])
def test_parameters_are_replaced(tmp_path: Path, chosen: list) -> None:
    def change(step: int, net: nn.Module) -> None:
        if step == 2:
            net.load_state_dict({k: 2 * v for k, v in net.state_dict().items()}, assign=True)

    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    assert_norms(*go(tmp_path / "r", net, ((4, 5), (4, 2)), chosen, 3, change))


def test_a_module_that_is_exchanged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net, loss_fn = cases.initialised("sigmoid"), nn.CrossEntropyLoss()
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=[GradNorm()], schedule=every(1)) as cockpit:
        for step in range(3):
            x, y = cases.data("sigmoid", "mean", step)
            if step == 2:
                old, net[0] = net[0], nn.Linear(12, net[0].out_features)
                net[0].weight, net[0].bias = old.weight, old.bias
            net.zero_grad()
            with cockpit.track(step):
                loss_fn(cockpit(x), y).backward()
    assert "step 2: the model is not the one that was tracked before: '0' is replaced by another module" in caplog.text
    norms = open_run(tmp_path / "run")["grad_norm"]["grad_norm"]
    np.testing.assert_allclose(norms[2], [p.grad.norm() for p in net.parameters()], rtol=1e-5)


CHANGED_AT = 3


BEGUN_ANEW = {"distance", "learning_rate", "time", "rank_health"}  # what differs by what was before, or by the clock


class Net(nn.Module):
    """A body, a head, and something beside them that is not trained at first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.act, self.head = nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)
        self.extra = nn.Linear(5, 7).requires_grad_(False)
        self.more = nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        z = self.act(self.body(x) + self.extra(x))
        for module in self.more:
            z = z + module(z)
        return self.head(z)[:, :3]


def wider_head(net: Net) -> None:
    net.head = nn.Linear(7, 6)


def narrower_body(net: Net) -> None:
    net.body, net.extra, net.head = nn.Linear(5, 4), nn.Linear(5, 4).requires_grad_(False), nn.Linear(4, 3)


CHANGES: dict[str, Callable[[Net], Any]] = {
    "a layer is frozen": lambda net: net.body.requires_grad_(False),
    "one parameter is frozen": lambda net: net.head.bias.requires_grad_(False),
    "a layer is unfrozen": lambda net: net.extra.requires_grad_(True),
    "one frozen, one unfrozen": lambda net: (net.body.requires_grad_(False), net.extra.requires_grad_(True)),
    "another head": lambda net: setattr(net, "head", nn.Linear(7, 3)),
    "a wider head": wider_head,
    "a narrower body": narrower_body,
    "a further block": lambda net: net.more.append(nn.Sequential(nn.Linear(7, 7), nn.ReLU())),
    "another activation": lambda net: setattr(net, "act", nn.GELU()),
    "a parametrization": lambda net: parametrizations.weight_norm(net.head),
}


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.sin(torch.arange(40.0) * (1 + 0.1 * step)).view(8, 5)
    return x, torch.arange(8) % 3


def train_and_change(
    change: Callable[[Net], Any], begun: int, steps: int = 7, seed: int = 1, **options: Any
) -> tuple[Net, list[float]]:
    """Watched from step ``begun`` on; the norms of the gradients that the optimizer got."""
    net, norms = Net(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    cockpit = None
    for step in range(steps):
        if step == CHANGED_AT:
            torch.manual_seed(seed)
            change(net)
            known = {id(p) for p in optimizer.param_groups[0]["params"]}
            optimizer.param_groups[0]["params"] += [p for p in net.parameters() if id(p) not in known]
        if step == begun:
            cockpit = DistCockpit(net, optimizer=optimizer, schedule=every(1), **options)
        optimizer.zero_grad()
        x, y = batch(step)
        if cockpit is None:
            F.cross_entropy(net(x), y).backward()
        else:
            with cockpit.track(step):
                F.cross_entropy(cockpit(x), y).backward()
        norms.append(float(sum(p.grad.square().sum() for p in net.parameters() if p.grad is not None)) ** 0.5)
        optimizer.step()
    assert cockpit is not None
    cockpit.close()
    return net, norms


@pytest.mark.filterwarnings("ignore:.*is left out")
@pytest.mark.parametrize("name", CHANGES)
def test_rows_are_those_of_a_cockpit_that_began_there(tmp_path: Path, name: str) -> None:
    chosen = [*presets.business(), *presets.layers(), Parameters()]
    chosen = [q for q in chosen if q.name not in ("tic_diag", "hess_trace")]
    options: dict[str, Any] = {"quantities": chosen}
    tracked, norms = train_and_change(CHANGES[name], 0, store=tmp_path / "whole", **options)
    plain, _ = train_and_change(CHANGES[name], 0, store="", enabled=False)
    assert all(torch.equal(a, b) for a, b in zip(tracked.parameters(), plain.parameters(), strict=True))
    train_and_change(CHANGES[name], CHANGED_AT, store=tmp_path / "later", **options)
    assert verify(tmp_path / "whole") == []
    whole = xr.open_datatree(tmp_path / "whole", engine="zarr")  # warnings are errors in these tests
    later = open_run(tmp_path / "later")
    for group in later.children.keys() - {"log"} - BEGUN_ANEW:
        both = whole[group].to_dataset().sel(step=slice(CHANGED_AT, None)), later[group].to_dataset()
        assert list(both[0]["step"].values) == list(both[1]["step"].values), group
        for array in both[1].data_vars:
            there, here = both[1][array], both[0][array]
            for dim in there.dims[1:]:
                if dim in there.coords:
                    here = here.sel({dim: there[dim].values})
                else:
                    here = here.isel({dim: slice(there.sizes[dim])})
            np.testing.assert_allclose(here.values, there.values, rtol=1e-5, atol=1e-7, err_msg=f"{group}/{array}")
    np.testing.assert_allclose(whole["grad_norm"]["total"], norms, rtol=1e-5)
    # What the model does not have is NaN, before and after; the coordinate names all that there ever was.
    names = [n for n, p in Net().named_parameters() if p.requires_grad]
    now = [n for n, p in tracked.named_parameters() if p.requires_grad]
    by_parameter = whole["grad_norm"]["grad_norm"]
    assert list(by_parameter["parameter"].values) == list(dict.fromkeys([*names, *now]))
    is_there = by_parameter.notnull()
    for part, has in ((is_there[:CHANGED_AT], names), (is_there[CHANGED_AT:], now)):
        assert part.all("step").values.tolist() == part.any("step").values.tolist()
        assert list(part["parameter"].values[part.all("step").values]) == [
            n for n in part["parameter"].values if n in has
        ]
    before, after = whole.attrs["segments"]
    assert (before["first_step"], before["last_step"]) == (0, CHANGED_AT - 1)
    assert (after["first_step"], after["last_step"]) == (CHANGED_AT, 6) and after["change"]
    assert list(before["parameters"]) == names and sorted(after["parameters"]) == sorted(now)
    alpha = whole["alpha"].sel(step=CHANGED_AT - 1)
    assert np.isnan(alpha["alpha"]) and alpha["status"] == alpha["status"].attrs["flag_meanings"].split().index(
        "interrupted"
    )
    assert plot_run(open_run(tmp_path / "whole")).axes


def unfreeze_on(
    rank: int, size: int, group: Any, path: str, who: list[int], until: int = 5, fails: bool = False
) -> list[float]:
    """Rank by rank the norms of its gradients, where the extra layer is unfrozen on some ranks at step 3.

    Args:
        rank: Of this process.
        size: Number of ranks.
        group: Of them.
        path: The store.
        who: The ranks that unfreeze it.
        until: When it is frozen again.
        fails: Whether rank 0 cannot finish step 3.
    """
    net, norms = Net(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with DistCockpit(net, optimizer=optimizer, store=path, schedule=every(1), process_group=group) as cockpit:
        for step in range(7):
            if rank in who and step in (CHANGED_AT, until):
                net.extra.requires_grad_(step == CHANGED_AT)
            net.zero_grad()
            x, y = batch(step)
            mine = slice(0, 5) if rank == 0 else slice(5, 8)
            with cockpit.track(step):
                z = cockpit(x[mine])
                for _ in range(2 if fails and rank == 0 and step == CHANGED_AT else 0):
                    cockpit.record_losses(F.cross_entropy(z, y[mine], reduction="none"))
                F.cross_entropy(z, y[mine]).backward()
            norms.append(float(sum(p.grad.square().sum() for p in net.parameters() if p.grad is not None)))
    return norms


def test_all_ranks_change(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, unfreeze_on, str(tmp_path / "two"), [0, 1])
    alone, expected = Net(), []
    for step in range(7):
        alone.extra.requires_grad_(CHANGED_AT <= step < 5)
        alone.zero_grad()
        x, y = batch(step)
        F.cross_entropy(alone(x), y).backward()
        gradients = [p.grad for p in alone.parameters() if p.grad is not None]
        expected.append(float(sum(g.square().sum() for g in gradients)) ** 0.5)
    run = open_run(tmp_path / "two")
    np.testing.assert_allclose(run["grad_norm"]["total"], expected, rtol=1e-5)
    assert [part["first_step"] for part in run.attrs["segments"]] == [0, 3, 5]
    assert not run["norm_test"]["norm_test"].isnull().any()


def test_one_rank_changes_alone(ranks: Ranks, tmp_path: Path) -> None:
    """Such steps are left out on all ranks, and the run goes on."""
    norms = ranks.run(2, unfreeze_on, str(tmp_path / "run"), [1])
    assert [len(each) for each in norms] == [7, 7]
    run = open_run(tmp_path / "run")
    assert run["grad_norm"]["step"].values.tolist() == [0, 1, 2, 5, 6]
    assert not run["grad_norm"]["total"].isnull().any()
    (notice,) = [each for each in run.attrs["notices"] if each["topic"].startswith("skipped")]
    assert notice["step"] == 3 and "must change on all ranks between the same steps" in notice["text"]


def test_a_change_that_another_fault_hides(ranks: Ranks, tmp_path: Path) -> None:
    """The models are alike again when ranks next meet, but what quantities keep is not."""
    ranks.run(2, unfreeze_on, str(tmp_path / "run"), [1], 4, True)
    run = open_run(tmp_path / "run")
    assert run["grad_norm"]["step"].values.tolist() == [0, 1, 2, 5, 6]
    assert not run["grad_norm"]["total"].isnull().any()


def test_a_run_that_changed_is_resumed(tmp_path: Path) -> None:
    """From a checkpoint in the second part, with its model: the rows are those of an uninterrupted run."""

    def loop(path: Path, stops: int | None) -> None:
        net, begun = Net(), 0
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        saved: dict[str, Any] = {}
        for _ in range(2):
            with DistCockpit(net, optimizer=optimizer, store=path, schedule=every(1), mode="a") as cockpit:
                cockpit.load_state_dict(saved)
                for step in range(begun, 9):
                    if step == stops and not saved:
                        break
                    if step == CHANGED_AT:
                        net.extra.requires_grad_(True)
                    optimizer.zero_grad()
                    x, y = batch(step)
                    with cockpit.track(step):
                        F.cross_entropy(cockpit(x), y).backward()
                    optimizer.step()
                    begun = step + 1
                saved = cockpit.state_dict()
            if stops is None:
                return

    loop(tmp_path / "whole", None)
    loop(tmp_path / "resumed", 5)
    whole, resumed = open_run(tmp_path / "whole"), open_run(tmp_path / "resumed")
    for name in whole.children.keys() - {"log", "time", "rank_health"}:
        xr.testing.assert_equal(
            whole[name].to_dataset().drop_vars("wall_time"), resumed[name].to_dataset().drop_vars("wall_time")
        )
    assert [part["first_step"] for part in resumed.attrs["segments"]] == [0, 3, 5]
    assert not whole["distance"]["total"].isnull().any()


def test_a_model_that_changes_at_every_step(tmp_path: Path) -> None:
    """A layer is frozen at every other step: rows are right, and the list of parts is short."""
    net, norms = Net(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with DistCockpit(net, optimizer=optimizer, store=tmp_path / "run", schedule=every(1)) as cockpit:
        for step in range(120):
            net.body.requires_grad_(step % 2 == 0)
            x, y = batch(step)
            optimizer.zero_grad()
            with cockpit.track(step):
                F.cross_entropy(cockpit(x), y).backward()
            norms.append(float(sum(p.grad.square().sum() for p in net.parameters() if p.grad is not None)) ** 0.5)
            optimizer.step()
    run = open_run(tmp_path / "run")
    np.testing.assert_allclose(run["grad_norm"]["total"], norms, rtol=1e-5)
    assert len(run.attrs["segments"]) == writing.MOST_PARTS + 1 and len(run.attrs["notices"]) == 2
    assert run.attrs["segments"][-1]["last_step"] == 119


class Making(Net):
    """Makes a module anew in each forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        self.act = nn.Tanh()
        return super().forward(x)


def test_modules_that_are_made_anew_all_the_time(tmp_path: Path) -> None:
    """They hold no parameters and are of one kind: that is no change. Their outputs at a tracked step are not seen."""
    net = Making()
    with DistCockpit(net, store=tmp_path / "run", schedule=every(1), quantities=["economy", "layers"]) as cockpit:
        for step in range(5):
            x, y = batch(step)
            with cockpit.track(step):
                F.cross_entropy(cockpit(x), y).backward()
    run = open_run(tmp_path / "run")
    assert len(run.attrs["segments"]) == 1 and "notices" not in run.attrs
    assert not run["norm_test"]["norm_test"].isnull().any()
    norms = run["output_norm"]["output_norm"]
    assert not norms.sel(layer=["body", "head"]).isnull().any()


def test_an_activation_of_the_same_kind_takes_the_place_of_another(tmp_path: Path) -> None:
    net = Net()
    with DistCockpit(net, store=tmp_path / "run", schedule=every(1), quantities="layers") as cockpit:
        for step in range(4):
            if step == 2:
                net.act = nn.Tanh()
            x, y = batch(step)
            with cockpit.track(step):
                F.cross_entropy(cockpit(x), y).backward()
    run = open_run(tmp_path / "run")
    norms = run["output_norm"]["output_norm"].sel(layer=["body", "act", "head", "extra"])
    assert not norms.isnull().any() and len(run.attrs["segments"]) == 1


def test_layers_frozen_on_the_way(tmp_path: Path) -> None:
    net, x, y = data()
    loss_fn = nn.CrossEntropyLoss()
    with DistCockpit(net, loss_fn, store=tmp_path / "run", schedule=every(1)) as cockpit:
        net[0].weight.requires_grad_(False)
        with cockpit.track(0):
            loss_fn(net(x), y).backward()
    norms = open_run(tmp_path / "run")["grad_norm"]["grad_norm"][0]
    expected = [np.nan if p.grad is None else p.grad.norm() for p in net.parameters()]
    np.testing.assert_allclose(norms, expected, rtol=1e-5)
    assert np.isnan(norms).sum() == 1
