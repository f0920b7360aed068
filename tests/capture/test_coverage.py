"""Which parameters are tracked, by which route, and what users are told of it."""

from __future__ import annotations

from pathlib import Path

import architectures
import cases
import numpy as np
import oracle
import pytest
import torch
from compared_runs import check, mean_terms, quantities, train_sigmoid
from panel_runs import track_batches
from torch import Tensor, nn

from distcockpit import DistCockpit, every, open_run, presets
from distcockpit import quantities as q
from distcockpit.capture.coverage import CALLS
from distcockpit.quantities import MeanGSNR


def test_include_and_exclude(tmp_path: Path) -> None:
    loss_fn = nn.CrossEntropyLoss()

    def step(cockpit: DistCockpit, net: nn.Module, x: Tensor, y: Tensor) -> None:
        loss_fn(net(x), y).backward()

    net, states, batches = train_sigmoid(tmp_path / "r", step, loss_fn=loss_fn, exclude=["2"], alpha=False)
    run = open_run(tmp_path / "r")
    assert list(run.attrs["parameters"]) == ["0.weight", "0.bias", "4.weight", "4.bias"]
    batch = oracle.batch(net, states[0], mean_terms, *batches[0])
    batch.gradients = {k: g for k, g in batch.gradients.items() if not k.startswith("2.")}
    np.testing.assert_allclose(run["mean_gsnr"]["mean_gsnr"][0], oracle.mean_gsnr(batch), rtol=1e-4)


def test_frozen_parameters(tmp_path: Path) -> None:
    loss_fn, net = nn.CrossEntropyLoss(), cases.initialised("cnn")
    net[0].requires_grad_(False)
    net[6].bias.requires_grad_(False)
    x, y = cases.data("cnn", "mean", 0)
    state = {k: v.clone() for k, v in net.state_dict().items()}
    with DistCockpit(net, loss_fn, store=tmp_path / "r", quantities=quantities(False), schedule=every(1)) as cockpit:
        with cockpit.track(0):
            loss_fn(net(x), y).backward()
    assert list(open_run(tmp_path / "r").attrs["parameters"]) == ["3.weight", "6.weight"]
    check(tmp_path / "r", net, [state], [(x, y)], mean_terms)


def test_coverage(tmp_path: Path) -> None:
    net = nn.Sequential(
        architectures.ClassToken(), nn.Flatten(), nn.Linear(24, 7), nn.Linear(7, 5), nn.Conv1d(1, 1, 1, bias=False)
    )
    net[2].bias.requires_grad_(False)
    loss_fn, x, y = nn.CrossEntropyLoss(), torch.randn(6, 4, 6), torch.arange(6) % 5
    net.forward = lambda x: net[4](net[3](net[2](net[1](net[0](x))))[:, None])[:, 0]
    options = {"quantities": [MeanGSNR()], "schedule": every(1), "exclude": ["3"]}
    with DistCockpit(net, loss_fn, store=tmp_path / "run", **options) as cockpit:
        before = cockpit.coverage()
        assert before["0.scale"].route == CALLS and not any(row.checked for row in before)
        with cockpit.track(0):
            loss_fn(cockpit(x), y).backward()
        after = cockpit.coverage()
    routes = {row.parameter: row.route for row in after}
    assert routes == {
        "0.token": CALLS,
        "0.positions": "closed form",
        "0.scale": "closed form",
        "0.mix.weight": "closed form",
        "0.mix.bias": "closed form",
        "2.weight": "closed form",
        "2.bias": "not tracked",
        "3.weight": "not tracked",
        "3.bias": "not tracked",
        "4.weight": "closed form",
    }
    assert after["2.bias"].why == "frozen: requires_grad is False" and after["3.bias"].why.startswith("left out")
    assert after["0.scale"].layers == ("0",) and not after["0.scale"].why
    assert all(row.checked == (row.route != "not tracked") for row in after)
    text = str(after).splitlines()
    assert len(text) == 1 + len(after) and text[1].split()[:2] == ["0.token", "1x1x6"]
    assert list(after.to_dataframe().index) == list(routes)
    assert open_run(tmp_path / "run").attrs["coverage"] == {
        row.parameter: {
            "route": row.route,
            "layers": list(row.layers),
            "checked": row.checked,
            "when": row.when,
            "why": row.why,
        }
        for row in after
    }
    with pytest.raises(KeyError, match="no parameter 'nothing'"):
        after["nothing"]


def test_the_notice_of_a_slow_route(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net, loss_fn = architectures.built("mixture of experts"), nn.CrossEntropyLoss()
    batch = architectures.data("mixture of experts", 0, 6)
    options = {"quantities": [MeanGSNR()], "schedule": every(1)}
    with caplog.at_level("WARNING"), DistCockpit(net, loss_fn, store=tmp_path / "run", **options) as cockpit:
        for step in range(2):
            with cockpit.track(step):
                loss_fn(cockpit(batch["x"]), batch["y"]).backward()
    (notice,) = [r.getMessage() for r in caplog.records if "slow" in r.getMessage()]
    for words in ("4 of 8 parameters", "one backward pass per sample", "'body' (Experts)", "fallback='error'"):
        assert words in notice


class Odd(nn.Module):
    """A number, an empty parameter, names that a store has for itself, and one that begins with an underscore."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self._inner = nn.Linear(12, 5)
        self.step = nn.Parameter(torch.tensor(1.5))
        self.w = nn.Parameter(torch.randn(5, 2) / 5)
        self.w_0 = nn.Parameter(torch.zeros(5))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self._inner(x) * self.step + (self.w + self.empty.sum()).sum(1) + self.w_0


def test_odd_parameters(tmp_path: Path) -> None:
    net = Odd()
    x, y = cases.data("mlp", "mean", 0)
    state = {k: v.clone() for k, v in net.state_dict().items()}
    chosen = [*presets.economy(), *presets.layers(), q.Parameters(), q.CABS(), q.HessMaxEV(), q.MeanGSNR()]
    run = track_batches(tmp_path / "run", net, [(x, y)], chosen)
    for group in set(run.children) - {"log", "alpha"}:
        assert run[group].sizes["step"] == 1, group
    batch = oracle.batch(net, state, mean_terms, x, y)
    for name in ("norm_test", "inner_test", "ortho_test", "mean_gsnr"):
        np.testing.assert_allclose(run[name][name][0], getattr(oracle, name)(batch), rtol=1e-4, err_msg=name)
    stored = run["parameters"].to_dataset()
    assert set(stored.data_vars) == {"_inner.weight", "_inner.bias", "step_", "w", "w_0"}
    for name in ("_inner.weight", "w", "w_0"):
        np.testing.assert_array_equal(stored[name][0], state[name])
    assert stored["step_"][0] == 1.5
    expected = oracle.hess_max_ev(oracle.hessian(net, state, nn.CrossEntropyLoss(), x, y), "LM")
    np.testing.assert_allclose(run["hess_max_ev"]["hess_max_ev"][0], expected, rtol=1e-4)


def test_complex_parameters_are_refused(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 3, dtype=torch.cfloat))
    with pytest.raises(ValueError, match=r"'0' .*complex parameter 'weight'.*exclude=\['0'\]"):
        DistCockpit(net, store=tmp_path / "run", quantities=[q.GradNorm()])


@pytest.mark.parametrize("model", cases.MODELS)
def test_accumulation_takes_no_other_route(tmp_path: Path, model: str) -> None:
    """Also if the model itself owns parameters, such as positions."""
    loss = "token_mean" if model in cases.ON_TOKENS else "mean"
    routes = []
    for parts in (1, 2, 3):
        net, loss_fn = cases.initialised(model), cases.LOSSES[loss].module()
        x, y = cases.data(model, loss, 0, 21)
        options = {"quantities": [MeanGSNR()], "schedule": every(1)}
        with DistCockpit(net, loss_fn, store=tmp_path / f"{parts}", **options) as cockpit:
            with cockpit.track(0):
                for some, target in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True):
                    loss_fn(net(some), target).backward()
            routes.append({row.parameter: (row.route, row.checked) for row in cockpit.coverage()})
    assert routes[0] == routes[1] == routes[2]
