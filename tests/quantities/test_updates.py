"""Quantities of the optimizer's step: distance, size, geometry."""

from __future__ import annotations

from pathlib import Path

import cases
import numpy as np
import oracle
import pytest
import torch
from compared_runs import mean_terms
from panel_runs import track_batches
from torch import nn

from distcockpit import DistCockpit, every, open_run
from distcockpit import quantities as q

# -- updates -----------------------------------------------------------------------------------------------------------


def parameters_of(net: nn.Module) -> dict[str, np.ndarray]:
    return {name: p.detach().double().numpy().copy() for name, p in net.named_parameters()}


def moved(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> list[float]:
    return [float(np.linalg.norm(b[name] - a[name])) for name in a]


@pytest.mark.parametrize("n", [1, 3])
def test_updates_are_those_of_the_tracked_steps(tmp_path: Path, n: int) -> None:
    """The step after a tracked one need not be tracked; the last update is completed at close."""
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    chosen = [q.UpdateSize(), q.UpdateGeometry(), q.Distance()]
    states = []
    with DistCockpit(net, loss_fn, optimizer, store=tmp_path / "run", quantities=chosen, schedule=every(n)) as cockpit:
        for step in range(4):
            states.append(parameters_of(net))
            optimizer.zero_grad()
            with cockpit.track(step):
                x, y = cases.data("mlp", "mean", step)
                loss_fn(net(x), y).backward()
            optimizer.step()
    states.append(parameters_of(net))
    run, steps = open_run(tmp_path / "run"), list(range(0, 4, n))
    assert list(run["update_size"]["step"].values) == list(run["update_geometry"]["step"].values) == steps
    expected = [moved(states[s], states[s + 1]) for s in steps]
    np.testing.assert_allclose(run["update_size"]["update_size"], expected, rtol=1e-5)
    np.testing.assert_allclose(run["update_size"]["total"], np.linalg.norm(expected, axis=1), rtol=1e-5)
    np.testing.assert_allclose(run["update_geometry"]["norm"], expected, rtol=1e-5)
    for k, s in enumerate(steps[1:], start=1):
        before = steps[k - 1]
        for name in states[0]:
            d = [states[t + 1][name] - states[t][name] for t in (before, s)]
            cosine = run["update_geometry"]["correlation"].sel(step=s, parameter=name)
            np.testing.assert_allclose(cosine, oracle.cosine(*d), atol=1e-5)
        assert run["update_geometry"]["previous_step"].sel(step=s) == before
    np.testing.assert_allclose(run["distance"]["distance"], [moved(states[0], states[s]) for s in steps], rtol=1e-5)


def test_no_update_across_a_gap_or_an_exception(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def steps(cockpit: DistCockpit, numbers: list[int]) -> None:
        for step in numbers:
            optimizer.zero_grad()
            with cockpit.track(step):
                x, y = cases.data("mlp", "mean", step)
                loss_fn(net(x), y).backward()
            optimizer.step()

    chosen = [q.UpdateSize()]
    with DistCockpit(net, loss_fn, optimizer, store=tmp_path / "gap", quantities=chosen, schedule=every(1)) as cockpit:
        steps(cockpit, [0, 1, 5, 6])
    assert list(open_run(tmp_path / "gap")["update_size"]["step"].values) == [0, 5, 6]
    assert "need consecutive steps" in caplog.text
    with pytest.raises(KeyError):
        with DistCockpit(net, loss_fn, store=tmp_path / "raised", quantities=chosen, schedule=every(1)) as cockpit:
            steps(cockpit, [0, 1])
            raise KeyError
    assert list(open_run(tmp_path / "raised")["update_size"]["step"].values) == [0]


def test_distance_begins_at_the_first_step_of_all(tmp_path: Path) -> None:
    """Not at the first that is scheduled."""
    net = cases.initialised("mlp")
    first = parameters_of(net)
    batches = [cases.data("mlp", "mean", step) for step in range(3)]
    run = track_batches(tmp_path / "run", net, batches, [q.Distance(), q.Parameters()], schedule=every(10, 2))
    at = {name: run["parameters"][name][0].values for name in first}
    assert list(run["distance"]["step"].values) == [2]
    np.testing.assert_allclose(run["distance"]["distance"][0], moved(first, at), rtol=1e-5)


# -- the optimizer -----------------------------------------------------------------------------------------------------


def test_learning_rates_are_recorded_unasked(tmp_path: Path) -> None:
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    groups = [{"params": net[0].parameters(), "lr": 0.5}, {"params": net[2].parameters(), "lr": torch.tensor(0.25)}]
    optimizer = torch.optim.SGD(groups)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    chosen = [q.Loss(schedule=every(2)), q.CABS(schedule=every(3))]
    states = []
    with DistCockpit(net, loss_fn, optimizer, store=tmp_path / "run", quantities=chosen, schedule=every(1)) as cockpit:
        for step in range(5):
            states.append({k: v.clone() for k, v in net.state_dict().items()})
            x, y = cases.data("mlp", "mean", step)
            optimizer.zero_grad()
            with cockpit.track(step):
                loss_fn(net(x), y).backward()
            optimizer.step()
            scheduler.step()
    run = open_run(tmp_path / "run")
    assert list(run["learning_rate"]["step"].values) == [0, 2, 3, 4]  # wherever anything is tracked
    rates = np.array([[0.5, 0.25]]) / (1 + np.array([[0, 2, 3, 4]]).T)
    np.testing.assert_allclose(run["learning_rate"]["learning_rate"], rates, rtol=1e-6)
    batch = oracle.batch(net, states[3], mean_terms, *cases.data("mlp", "mean", 3))
    names = [n for n, _ in net.named_parameters()]
    expected = [oracle.cabs(batch, 0.5 / 4, names[:2]), oracle.cabs(batch, 0.25 / 4, names[2:4])]
    np.testing.assert_allclose(run["cabs"]["per_group"].sel(step=3), expected, rtol=1e-4)
    np.testing.assert_allclose(run["cabs"]["cabs"].sel(step=3), sum(expected), rtol=1e-4)  # 4.* is in no group


def test_a_parameter_group_that_is_gone(tmp_path: Path) -> None:
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD([{"params": net[k].parameters()} for k in (0, 2)], lr=0.1)
    with DistCockpit(net, loss_fn, optimizer, store=tmp_path / "run", quantities=[q.Loss()], schedule=1) as cockpit:
        for step in range(2):
            x, y = cases.data("mlp", "mean", step)
            with cockpit.track(step):
                loss_fn(cockpit(x), y).backward()
            del optimizer.param_groups[1:]
    run = open_run(tmp_path / "run")
    assert np.isnan(run["learning_rate"]["learning_rate"]).values.tolist() == [[False, False], [False, True]]


def test_a_group_without_learning_rate(tmp_path: Path) -> None:
    net, loss_fn = nn.Linear(12, 5), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = None
    x, y = cases.data("mlp", "mean", 0)
    with DistCockpit(net, loss_fn, optimizer, store=tmp_path / "run", quantities=[q.CABS()]) as cockpit:
        with cockpit.track(0):
            loss_fn(cockpit(x), y).backward()
    run = open_run(tmp_path / "run")
    assert np.isnan(run["learning_rate"]["learning_rate"]).all() and np.isnan(run["cabs"]["cabs"]).all()


def test_no_update_without_a_step_of_the_optimizer(tmp_path: Path) -> None:
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    x, y = cases.data("mlp", "mean", 0)
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=[q.UpdateSize()], schedule=every(1)) as cockpit:
        for step in range(2):
            with cockpit.track(step):
                loss_fn(cockpit(x), y).backward()
    run = open_run(tmp_path / "run")["update_size"]
    assert list(run["step"].values) == [0] and run["total"][0] == 0  # the second may still have been to come
