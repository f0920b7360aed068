"""The largest eigenvalue of the Hessian, pooled over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import numpy as np
import oracle
import pytest
import torch
from panel_runs import meaning, track_batches
from ranks import Ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distcockpit import DistCockpit, every, open_run
from distcockpit import quantities as q
from distcockpit.curvature.lanczos import STATUS

# -- Hessian -----------------------------------------------------------------------------------------------------------


def test_eigenvalue_of_a_quadratic(tmp_path: Path) -> None:
    """The loss is 1/N sum (w x)^2: its Hessian is 2/N X^T X, whatever w is."""
    torch.manual_seed(0)
    for k, (features, which) in enumerate([(1, "LM"), (2, "LM"), (7, "LA")]):
        x = torch.randn(9, features)
        batch = (x, torch.zeros(9, 1))
        net = nn.Linear(features, 1, bias=False)
        run = track_batches(tmp_path / str(k), net, [batch], [q.HessMaxEV(which=which)], loss_fn=nn.MSELoss())
        expected = np.linalg.eigvalsh(2 / 9 * (x.T @ x).double().numpy()).max()
        np.testing.assert_allclose(run["hess_max_ev"]["hess_max_ev"][0], expected, rtol=1e-5)


def test_eigenvalue_status(tmp_path: Path) -> None:
    x, y = cases.data("sigmoid", "mean", 0)
    net = cases.initialised("sigmoid")
    few = track_batches(tmp_path / "few", net, [(x, y)], [q.HessMaxEV(max_products=3, tolerance=1e-12)])["hess_max_ev"]
    assert meaning(few["status"]) == ["not_converged"] and np.isnan(few["hess_max_ev"][0]) and few["products"][0] == 3
    bad = track_batches(tmp_path / "bad", net, [(x * torch.nan, y)], [q.HessMaxEV()])["hess_max_ev"]
    assert meaning(bad["status"]) == ["not_finite"] and np.isnan(bad["hess_max_ev"][0])
    flat = track_batches(
        tmp_path / "flat", nn.Linear(3, 1), [(x[:, :3], 100 + torch.zeros(24, 1))], [q.HessMaxEV()], loss_fn=nn.L1Loss()
    )["hess_max_ev"]
    assert meaning(flat["status"]) == ["converged"] and flat["hess_max_ev"][0] == 0


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x.reshape(len(x), 3, 4))[0][:, -1])


@pytest.mark.parametrize("kind", ["attention", "recurrent", "reused", "eval_batchnorm"])
def test_eigenvalue_of_models_that_backpack_does_not_know(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(7)
    net = Recurrent() if kind == "recurrent" else cases.initialised(kind)
    x, y = cases.data(kind, "mean", 0)
    state = {k: v.clone() for k, v in net.state_dict().items()}
    run = track_batches(tmp_path / "run", net, [(x, y)], [q.HessMaxEV()])
    expected = oracle.hess_max_ev(oracle.hessian(net, state, nn.CrossEntropyLoss(), x, y), "LM")
    np.testing.assert_allclose(run["hess_max_ev"]["hess_max_ev"][0], expected, rtol=1e-4)


def test_eigenvalue_with_batch_statistics_as_constants(tmp_path: Path) -> None:
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(12, 6), nn.BatchNorm1d(6), nn.Sigmoid(), nn.Linear(6, 5))
    x, y = cases.data("mlp", "mean", 0)
    state = {k: v.clone() for k, v in net.state_dict().items()}
    run = track_batches(tmp_path / "run", net, [(x, y)], [q.HessMaxEV()], track_batchnorm=True)
    hidden = nn.functional.linear(x, state["0.weight"], state["0.bias"])
    state |= {"1.running_mean": hidden.mean(0), "1.running_var": hidden.var(0, correction=0)}
    expected = oracle.hess_max_ev(oracle.hessian(net.eval(), state, nn.CrossEntropyLoss(), x, y), "LM")
    np.testing.assert_allclose(run["hess_max_ev"]["hess_max_ev"][0], expected, rtol=1e-4)


class NotTwice(torch.autograd.Function):
    """A function with a first derivative only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class OnlyOnce(nn.Module):
    def __init__(self, broken: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.broken = broken
        self.first, self.second = nn.Linear(12, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sigmoid(self.first(x))
        return self.second(NotTwice.apply(x) if self.broken else x * 2)


def differentiate_twice(rank: int, size: int, group: Any, store: str, broken: int) -> str:
    net, loss_fn = OnlyOnce(rank == broken), nn.CrossEntropyLoss()
    model = DistributedDataParallel(net, process_group=group)
    x, y = cases.data("mlp", "mean", 0)
    cockpit = DistCockpit(model, loss_fn, store=store, quantities=[q.HessMaxEV(), q.Loss()], schedule=every(1))
    try:
        with cockpit.track(0):
            loss_fn(cockpit(x), y).backward()
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("broken", [0, 2])
def test_a_rank_that_cannot_differentiate_twice_stops_all(ranks: Ranks, tmp_path: Path, broken: int) -> None:
    said = ranks.run(4, differentiate_twice, str(tmp_path / "run"), broken)
    assert "once_differentiable" in said[broken] and "HessMaxEV" in said[broken]
    for rank in set(range(4)) - {broken}:
        assert "1 other rank(s) failed" in said[rank]


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_a_preset_goes_on_without_the_eigenvalue(ranks: Ranks, tmp_path: Path, n_ranks: int) -> None:
    """A loop whose loss module the cockpit does not know: everything else of the preset has its rows."""
    if n_ranks == 1:
        full_without_a_loss_module(0, 1, None, str(tmp_path / "run"))
    else:
        ranks.run(n_ranks, full_without_a_loss_module, str(tmp_path / "run"))
    run = open_run(tmp_path / "run")
    assert run["norm_test"].sizes["step"] == 3 and np.isfinite(run["norm_test"]["norm_test"]).all()
    row = run["hess_max_ev"]
    assert row["hess_max_ev"].isnull().all() and (row["status"] == STATUS.index("not_computed")).all()
    assert any("hess_max_ev: NaN" in notice["text"] for notice in run.attrs["notices"])


def full_without_a_loss_module(rank: int, size: int, group: Any, store: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model = DistributedDataParallel(net, process_group=group) if size > 1 else net
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    options = {"quantities": "full", "schedule": every(1), "process_group": group}
    with DistCockpit(model, None, optimizer, store=store, **options) as cockpit:
        for step in range(3):
            optimizer.zero_grad()
            with cockpit.track(step):
                nn.functional.cross_entropy(cockpit(torch.randn(6, 4)), torch.arange(6) % 2).backward()
            optimizer.step()
