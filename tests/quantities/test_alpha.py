"""Alpha: the fit, and updates that are skipped, tiny, or of several optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import numpy as np
import oracle
import pytest
import torch
from compared_runs import N, mean_terms, quantities
from loops import shows
from torch import Tensor, nn

from distcockpit import DistCockpit, every, open_run
from distcockpit.quantities import Alpha, GradHist1d, GradNorm, MeanGSNR, UpdateSize
from distcockpit.quantities.alpha import fit_alpha


def test_fit_equals_least_squares_on_the_whitened_system() -> None:
    rng = np.random.default_rng(0)
    statuses = []
    for _ in range(200):
        norm = 10 ** rng.uniform(-4, 1)
        slopes = rng.normal([-1, 0.5], 1) * 10 ** rng.uniform(-2, 2)
        loss = rng.uniform(0.1, 5)
        means = np.array([loss, loss + norm * slopes.mean() * rng.uniform(0.5, 1.5), *slopes])
        variances = 10 ** rng.uniform(-4, 2, 4)
        value, status = fit_alpha(means, variances, norm)
        expected, mu = oracle.fit_alpha(means, variances, norm)
        statuses.append(status)
        assert (status == "concave") == (mu[2] <= 0)
        np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert 20 < statuses.count("concave") < 180  # both kinds of problems were among them


def parabola(minimum: float, norm: float) -> np.ndarray:
    return np.array([minimum**2, (norm - minimum) ** 2, -2 * minimum, 2 * (norm - minimum)])


@pytest.mark.parametrize("minimum, alpha", [(1.0, 0.0), (2.0, -0.5), (0.5, 1.0)])
def test_meaning(minimum: float, alpha: float) -> None:
    """0 at the minimum, -0.5 halfway to it, 1 mirrored beyond it."""
    value, status = fit_alpha(parabola(minimum, 1.0), np.ones(4), 1.0)
    assert status == "minimum"
    assert value == pytest.approx(alpha, abs=1e-12)


def test_conventions() -> None:
    good, variances = parabola(1.0, 1.0), np.ones(4)
    assert fit_alpha(good, variances, 0.0) == (-1.0, "no_step")
    assert fit_alpha(-good, variances, 1.0) == (-1.0, "concave")
    value, status = fit_alpha(np.array([1.0, np.nan, 1, 1]), variances, 1.0)
    assert np.isnan(value) and status == "singular"
    # A zero variance counts as 1e-10.
    zero = fit_alpha(np.array([1.0, 1.2, -1, 2]), np.array([0.0, 1, 0, 1]), 1.0)
    assert zero == fit_alpha(np.array([1.0, 1.2, -1, 2]), np.array([1e-10, 1, 1e-10, 1]), 1.0)


def test_batches_of_different_sizes_at_the_two_ends(tmp_path: Path) -> None:
    """As at the last batch of an epoch."""
    net, loss_fn = cases.initialised("sigmoid"), torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    pooled = []
    with DistCockpit(
        net, loss_fn, optimizer, store=tmp_path / "run", quantities=[Alpha()], schedule=every(1)
    ) as cockpit:
        for step, n in enumerate((24, 7, 15)):
            x, y = cases.data("sigmoid", "mean", step)
            pooled.append(oracle.batch(net, net.state_dict(), mean_terms, x[:n], y[:n]))
            optimizer.zero_grad()
            with cockpit.track(step):
                loss_fn(cockpit(x[:n]), y[:n]).backward()
            optimizer.step()
    run = open_run(tmp_path / "run")["alpha"].to_dataset()
    for step in range(2):
        expected = oracle.alpha(pooled[step], pooled[step + 1])
        for name in ("alpha", "f_start", "f_end", "slope_start", "slope_end", "f_start_variance", "slope_end_variance"):
            np.testing.assert_allclose(run[name].sel(step=step), expected[name], rtol=1e-4, err_msg=name)


# -- the update that alpha sees ----------------------------------------------------------------------------------------


def status_of(run: Any, step: int) -> tuple[str, float]:
    row = run["alpha"].to_dataset().sel(step=step)
    return row["status"].attrs["flag_meanings"].split()[int(row["status"])], float(row["alpha"])


class Memory(nn.Module):
    """Reads a state that it writes to in its next call."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.head = torch.randn(N, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        self.state.copy_(x)
        return self.head(self.state)


def test_inputs_of_layers_that_the_model_overwrites(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, loss_fn = Memory(), nn.CrossEntropyLoss()
    with DistCockpit(net, loss_fn, store=tmp_path / "r", quantities=quantities(), schedule=every(1)) as cockpit:
        for step in range(2):
            x, y = cases.data("sigmoid", "mean", step)
            with torch.no_grad():
                net.head.weight += 0.01
                net.state.zero_()
            with cockpit.track(step):
                loss_fn(net(x), y).backward()
    status, alpha = status_of(open_run(tmp_path / "r"), 0)
    assert status == "inputs_changed" and np.isnan(alpha)


def test_no_step_and_too_few_samples(tmp_path: Path) -> None:
    net, loss_fn = cases.initialised("sigmoid"), nn.CrossEntropyLoss()
    with DistCockpit(net, loss_fn, store=tmp_path / "r", quantities=quantities(), schedule=every(1)) as cockpit:
        for step, n in enumerate([N, N, 1]):
            x, y = cases.data("sigmoid", "mean", step)
            with cockpit.track(step):
                loss_fn(net(x[:n]), y[:n]).backward()
    run = open_run(tmp_path / "r")
    assert status_of(run, 0) == ("no_step", -1.0)
    assert status_of(run, 1)[0] == "fewer_than_two_samples"


def test_pairs_of_steps(tmp_path: Path) -> None:
    """every(5) touches 0, 1, 5, 6; a pair that is torn by a gap in the steps leaves no row."""
    net, loss_fn = cases.initialised("sigmoid"), nn.CrossEntropyLoss()
    with DistCockpit(
        net, loss_fn, store=tmp_path / "r", quantities=[Alpha(), MeanGSNR()], schedule=every(5)
    ) as cockpit:
        for step in [0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11]:
            x, y = cases.data("sigmoid", "mean", step)
            with cockpit.track(step):
                loss_fn(net(x), y).backward()
    run = open_run(tmp_path / "r")
    assert list(run["alpha"]["step"].values) == [0, 10]
    assert list(run["mean_gsnr"]["step"].values) == [0, 5, 10]


@shows("Mixed precision", "steps that `GradScaler` skips: α is NaN, with the status `step_skipped`")
@pytest.mark.parametrize("together", [True, False], ids=["one optimizer", "two"])
def test_skipped_steps(tmp_path: Path, together: bool) -> None:
    """With two optimizers, only the one whose gradients overflow is skipped."""
    net, loss_fn = cases.initialised("sigmoid"), nn.CrossEntropyLoss()
    halves = [list(net.parameters())] if together else [list(net[0].parameters()), list(net[2:].parameters())]
    optimizers = [torch.optim.SGD(half, lr=0.5) for half in halves]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, backoff_factor=0.5)
    options = {"quantities": [Alpha(), UpdateSize(), GradNorm()], "schedule": every(1), "grad_scaler": scaler}
    with DistCockpit(net, loss_fn, optimizers, store=tmp_path / "run", **options) as cockpit:
        for step in range(4):
            x, y = cases.data("sigmoid", "mean", step)
            for optimizer in optimizers:
                optimizer.zero_grad()
            with cockpit.track(step):
                scaler.scale(loss_fn(cockpit(x), y)).backward()
            if step == 1:
                net[4].weight.grad[0, 0] = torch.inf
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
    run = open_run(tmp_path / "run")

    def statuses(name: str) -> list[str]:
        status = run[name]["status"]
        return [status.attrs["flag_meanings"].split()[int(k)] for k in status.values]

    last = "alpha" if together else "alpha_1"
    assert statuses(last)[1] == "step_skipped" and "step_skipped" not in statuses(last)[::2]
    assert np.isnan(run[last]["alpha"].values[1]) and np.isfinite(run[last]["alpha"].values[[0, 2]]).all()
    assert (run["update_size"]["total"].values[[0, 2]] > 0).all() and np.isfinite(run["grad_norm"]["total"]).all()
    if together:
        assert run["update_size"]["total"].values[1] == 0
    else:
        assert "step_skipped" not in statuses("alpha") + statuses("alpha_0")


@pytest.mark.parametrize("chosen", ["alone", "beside histograms"])
@pytest.mark.parametrize("shape", ["one product", "sequences"])
def test_large_parameters_are_walked_some_rows_at_a_time(tmp_path: Path, shape: str, chosen: str) -> None:
    """A small budget makes buckets of rows: 90,000 elements do not fit into one."""
    alphas = []
    for budget in ("1MB", "256MiB"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(100, 900), nn.Tanh(), nn.Linear(900, 100, bias=False), nn.Linear(100, 3))
        optimizer, store = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), tmp_path / budget
        beside = [] if chosen == "alone" else [GradHist1d()]
        options = {"quantities": [Alpha(), *beside], "schedule": every(1), "memory_budget": budget}
        with DistCockpit(net, nn.MSELoss(), optimizer, store=store, **options) as cockpit:
            for step in range(5):
                x = torch.randn(*((4,) if shape == "one product" else (4, 7)), 100)
                optimizer.zero_grad()
                with cockpit.track(step):
                    nn.functional.mse_loss(cockpit(x), torch.ones_like(x[..., :3])).backward()
                optimizer.step()
        alphas.append(open_run(store)["alpha"]["alpha"].values)
    assert len(alphas[0]) == 4 and np.isfinite(alphas[0]).all()
    np.testing.assert_allclose(*alphas, rtol=1e-5)
