"""What the table does not show of the panel: unusual numbers, ranks that differ, the ends of runs, errors."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import cases
import numpy as np
import oracle
import pytest
import torch
import xarray as xr
from ranks import Ranks
from steps import run_steps
from test_capture import mean_terms
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distcockpit import DistCockpit, every, open_run, presets
from distcockpit import quantities as q


def track_batches(
    path: Path, net: nn.Module, batches: list[tuple[Tensor, Tensor]], chosen: list[q.Quantity], **options: Any
) -> xr.DataTree:
    """Train for a step per batch, as a world of one."""
    options = {"loss_fn": nn.CrossEntropyLoss(), "optimizer": torch.optim.SGD(net.parameters(), lr=0.1), **options}
    return run_steps(path, net, batches.__getitem__, len(batches), quantities=chosen, **options).run


def meaning(array: xr.DataArray) -> list[str]:
    words = array.attrs["flag_meanings"].split()
    return [words[int(code)] for code in array.values.ravel()]


# -- unusual numbers ---------------------------------------------------------------------------------------------------


def noise_quantities() -> list[q.Quantity]:
    return [q.NormTest(), q.InnerTest(), q.OrthoTest(), q.GradientNoiseScale(), q.CABS(), q.EarlyStopping(epsilon=0.0)]


@pytest.mark.parametrize("noise", [1e-2, 1e-4])
def test_small_noise_keeps_its_precision(tmp_path: Path, noise: float) -> None:
    """Sums of float32 squares, subtracted, would lose it entirely."""
    torch.manual_seed(0)
    net, loss_fn = nn.Linear(6, 1, bias=False), nn.L1Loss()
    with torch.no_grad():
        net.weight.abs_()
    x = 100 * (1 + noise * torch.randn(64, 6))
    state = {k: v.clone() for k, v in net.state_dict().items()}
    run = track_batches(tmp_path / "run", net, [(x, torch.zeros(64, 1))], noise_quantities(), loss_fn=loss_fn)
    batch = oracle.batch(net, state, lambda z, y: ((z - y).abs().sum(), 1), x, torch.zeros(64, 1))
    for name in ("norm_test", "inner_test", "ortho_test", "early_stopping"):
        expected = getattr(oracle, name)(batch, *([0.0] if name == "early_stopping" else []))
        np.testing.assert_allclose(run[name][name][0], expected, rtol=1e-3)
    np.testing.assert_allclose(run["gradient_noise_scale"]["noise"][0], oracle.noise_scale(batch)[0], rtol=1e-3)


def test_one_sample_and_no_gradient_are_undefined(tmp_path: Path) -> None:
    names = ["norm_test", "inner_test", "ortho_test"]
    x, y = cases.data("mlp", "mean", 0)
    run = track_batches(tmp_path / "one", cases.initialised("mlp"), [(x[:1], y[:1])], noise_quantities())
    for name in [*names, "early_stopping"]:
        assert np.isnan(run[name][name][0]), name
    assert np.isnan(run["gradient_noise_scale"].to_dataset()["noise"][0])
    assert run["cabs"]["cabs"][0] == 0  # its variance is that over the batch
    net = nn.Linear(3, 1)
    batches = [(x[:, :3], net(x[:, :3]).detach())]
    run = track_batches(tmp_path / "zero", net, batches, noise_quantities(), loss_fn=nn.MSELoss())
    for name in names:
        assert np.isnan(run[name][name][0]), name


def test_equal_samples_have_no_noise(tmp_path: Path) -> None:
    x, y = cases.data("mlp", "mean", 0)
    batch = (x[:1].expand(8, -1).clone(), y[:1].expand(8).clone())
    run = track_batches(tmp_path / "run", cases.initialised("mlp"), [batch], noise_quantities())
    for name in ("norm_test", "inner_test", "ortho_test", "cabs"):
        assert 0 <= run[name][name][0] < 1e-5, name


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


# -- losses that no module tells ---------------------------------------------------------------------------------------


class ReturnsItsLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = cases.initialised("mlp")

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(x), y)


def test_the_loss_of_a_model_that_returns_it(tmp_path: Path) -> None:
    """No individual losses are needed for the loss itself, nor for what rests on it."""
    model = ReturnsItsLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = cases.data("mlp", "mean", 0)
    chosen = [q.Loss(), q.CABS(), q.RankDisagreement(), q.RankHealth()]
    with DistCockpit(model, None, optimizer, store=tmp_path / "run", quantities=chosen, schedule=every(1)) as cockpit:
        with cockpit.track(0):
            loss = cockpit(x, y)
            torch.amp.GradScaler("cpu", init_scale=512).scale(loss).backward()
    run = open_run(tmp_path / "run")
    state = {name.removeprefix("net."): v for name, v in model.state_dict().items()}
    batch = oracle.batch(model.net, state, mean_terms, x, y)
    np.testing.assert_allclose(run["loss"]["loss"][0], loss.item(), rtol=1e-6)
    np.testing.assert_allclose(run["rank_disagreement"]["loss"][0], [loss.item()], rtol=1e-6)
    np.testing.assert_allclose(run["cabs"]["cabs"][0], oracle.cabs(batch, 0.1), rtol=1e-4)


# -- outputs -----------------------------------------------------------------------------------------------------------


def alive_somewhere(rank: int, size: int, group: Any, store: str) -> None:
    """Each neuron is alive on one rank at most."""
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        net[0].weight.copy_(torch.eye(4))
    model, loss_fn = DistributedDataParallel(net, process_group=group), nn.CrossEntropyLoss()
    x = torch.zeros(3, 4)
    x[:, rank] = 1.0 if rank != 3 else -1.0
    chosen = [q.OutputActivation(), q.GradientActivation()]
    with DistCockpit(model, loss_fn, store=store, quantities=chosen, schedule=every(1)) as cockpit:
        with cockpit.track(0):
            loss_fn(cockpit(x), torch.tensor([0, 1, 0])).backward()


def test_dead_is_dead_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(4, alive_somewhere, str(tmp_path / "run"))
    run = open_run(tmp_path / "run")
    activation = run["output_activation"].to_dataset().isel(step=0)
    np.testing.assert_allclose(activation["active"], [3 / 16])  # a mean of local rates would say the same,
    np.testing.assert_allclose(activation["dead"], [1 / 4])  # a mean of local shares 3.25 / 4
    gradient = run["gradient_activation"].to_dataset().isel(step=0)
    np.testing.assert_allclose(gradient["dead"].sel(parameter="0.weight"), 1 / 4)
    np.testing.assert_allclose(gradient["active"].sel(parameter="0.weight"), 3 / 16)


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.relu, self.head = nn.Linear(3, 6), nn.ReLU(inplace=True), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.relu(self.first(x)).mean(1))


def sequences(rank: int, size: int, group: Any, store: str, lengths: list[int]) -> Tensor:
    net, loss_fn = Sequence(), nn.CrossEntropyLoss()
    model = DistributedDataParallel(net, process_group=group)
    chosen = [q.OutputActivation(), q.OutputActivation(channel_axis=-1, name="last"), q.OutputNorm()]
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(4, lengths[rank], 3, generator=generator)
    with DistCockpit(model, loss_fn, store=store, quantities=chosen, schedule=every(1)) as cockpit:
        with cockpit.track(0):
            loss_fn(cockpit(x), torch.arange(4)).backward()
    return net.relu(net.first(x)).detach()


@pytest.mark.parametrize("lengths", [[5, 5], [5, 2]])
def test_numbers_of_neurons_that_differ_between_ranks(ranks: Ranks, tmp_path: Path, lengths: list[int]) -> None:
    """Sums of different lengths would abort the processes."""
    outputs = ranks.run(2, sequences, str(tmp_path / "run"), lengths)
    run = open_run(tmp_path / "run")
    active = np.concatenate([z.numpy().ravel() != 0 for z in outputs]).mean()
    for name in ("output_activation", "last"):
        np.testing.assert_allclose(run[name]["active"][0], [active], atol=1e-12)
    alive = np.any([(z.numpy() != 0).any((0, 1)) for z in outputs], axis=0)
    assert np.isnan(run["output_activation"]["dead"][0]).all() == (lengths[0] != lengths[1])
    if lengths[0] == lengths[1]:
        np.testing.assert_allclose(run["last"]["dead"][0], [1 - alive.mean()], atol=1e-12)
    norms = np.concatenate([np.linalg.norm(z.numpy().reshape(4, -1), axis=1) for z in outputs])
    np.testing.assert_allclose(run["output_norm"]["output_norm"].sel(layer="relu")[0], norms.mean(), rtol=1e-6)


# -- the line at the start ---------------------------------------------------------------------------------------------


def test_the_line_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "distcockpit")
    chosen = [q.Loss(), q.GradHist1d(bins=100, schedule=every(100))]
    track_batches(tmp_path / "run", cases.initialised("mlp"), [cases.data("mlp", "mean", 0)], chosen, schedule=every(4))
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    # Rows of loss and learning rate: the value, and 4 coordinates; of the histogram: 101 edges, 100 counts, 5 more.
    size = 250 * 5 * 8 + 250 * 5 * 8 + 10 * (101 + 100 + 5 + 4) * 8
    assert f"up to {size / 1000:.3g} kB of rows per 1,000 steps" in line and str(tmp_path / "run") in line
    assert "every(4): loss" in line and "every(100): grad_hist_1d" in line and "learning_rate" in line


def test_the_presets_are_what_they_say(tmp_path: Path) -> None:
    """Each preset by name, on a model that BackPACK knows."""
    batches = [cases.data("cnn", "mean", step) for step in range(2)]
    for name in ("economy", "business", "full", "layers"):
        run = track_batches(tmp_path / name, cases.initialised("cnn"), batches, name)  # type: ignore[arg-type]
        assert set(run.children) == {*(x.name for x in presets.PRESETS[name]()), "learning_rate", "log"}
        for group in set(run.children) - {"log"}:
            expected = {"alpha": 1, "parameter_condition": 1}.get(group, 2)  # that one is looked at every 100th step
            assert run[group].sizes["step"] == expected, group
