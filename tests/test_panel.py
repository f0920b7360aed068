"""What the table does not show of the panel: unusual numbers, ranks that differ, the ends of runs, errors."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cases
import numpy as np
import oracle
import pytest
import torch
import xarray as xr
from ranks import Ranks
from test_capture import mean_terms
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distcockpit import DistCockpit, every, open_run, presets
from distcockpit import quantities as q
from distcockpit.quantities.replica_drift import digest


def track(
    path: Path, net: nn.Module, batches: list[tuple[Tensor, Tensor]], chosen: list[q.Quantity], **options: Any
) -> xr.DataTree:
    """Train for a step per batch, as a world of one."""
    loss_fn = options.pop("loss_fn", None) or nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    options = {"schedule": every(1), **options}
    with DistCockpit(net, loss_fn, optimizer, store=path, quantities=chosen, **options) as cockpit:
        for step, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            with cockpit.track(step):
                loss_fn(cockpit(x), y).backward()
            optimizer.step()
    return open_run(path)


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
    run = track(tmp_path / "run", net, [(x, torch.zeros(64, 1))], noise_quantities(), loss_fn=loss_fn)
    batch = oracle.batch(net, state, lambda z, y: ((z - y).abs().sum(), 1), x, torch.zeros(64, 1))
    for name in ("norm_test", "inner_test", "ortho_test", "early_stopping"):
        expected = getattr(oracle, name)(batch, *([0.0] if name == "early_stopping" else []))
        np.testing.assert_allclose(run[name][name][0], expected, rtol=1e-3)
    np.testing.assert_allclose(run["gradient_noise_scale"]["noise"][0], oracle.noise_scale(batch)[0], rtol=1e-3)


def test_one_sample_and_no_gradient_are_undefined(tmp_path: Path) -> None:
    names = ["norm_test", "inner_test", "ortho_test"]
    x, y = cases.data("mlp", "mean", 0)
    run = track(tmp_path / "one", cases.initialised("mlp"), [(x[:1], y[:1])], noise_quantities())
    for name in [*names, "early_stopping"]:
        assert np.isnan(run[name][name][0]), name
    assert np.isnan(run["gradient_noise_scale"].to_dataset()["noise"][0])
    assert run["cabs"]["cabs"][0] == 0  # its variance is that over the batch
    net = nn.Linear(3, 1)
    run = track(tmp_path / "zero", net, [(x[:, :3], net(x[:, :3]).detach())], noise_quantities(), loss_fn=nn.MSELoss())
    for name in names:
        assert np.isnan(run[name][name][0]), name


def test_equal_samples_have_no_noise(tmp_path: Path) -> None:
    x, y = cases.data("mlp", "mean", 0)
    batch = (x[:1].expand(8, -1).clone(), y[:1].expand(8).clone())
    run = track(tmp_path / "run", cases.initialised("mlp"), [batch], noise_quantities())
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
        run = track(tmp_path / str(k), net, [batch], [q.HessMaxEV(which=which)], loss_fn=nn.MSELoss())
        expected = np.linalg.eigvalsh(2 / 9 * (x.T @ x).double().numpy()).max()
        np.testing.assert_allclose(run["hess_max_ev"]["hess_max_ev"][0], expected, rtol=1e-5)


def test_eigenvalue_status(tmp_path: Path) -> None:
    x, y = cases.data("sigmoid", "mean", 0)
    net = cases.initialised("sigmoid")
    few = track(tmp_path / "few", net, [(x, y)], [q.HessMaxEV(max_products=3, tolerance=1e-12)])["hess_max_ev"]
    assert meaning(few["status"]) == ["not_converged"] and np.isnan(few["hess_max_ev"][0]) and few["products"][0] == 3
    bad = track(tmp_path / "bad", net, [(x * torch.nan, y)], [q.HessMaxEV()])["hess_max_ev"]
    assert meaning(bad["status"]) == ["not_finite"] and np.isnan(bad["hess_max_ev"][0])
    flat = track(
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
    run = track(tmp_path / "run", net, [(x, y)], [q.HessMaxEV()])
    expected = oracle.hess_max_ev(oracle.hessian(net, state, nn.CrossEntropyLoss(), x, y), "LM")
    np.testing.assert_allclose(run["hess_max_ev"]["hess_max_ev"][0], expected, rtol=1e-4)


def test_eigenvalue_with_batch_statistics_as_constants(tmp_path: Path) -> None:
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(12, 6), nn.BatchNorm1d(6), nn.Sigmoid(), nn.Linear(6, 5))
    x, y = cases.data("mlp", "mean", 0)
    state = {k: v.clone() for k, v in net.state_dict().items()}
    run = track(tmp_path / "run", net, [(x, y)], [q.HessMaxEV()], track_batchnorm=True)
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
    assert "steps that grow by one" in caplog.text
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
    run = track(tmp_path / "run", net, batches, [q.Distance(), q.Parameters()], schedule=every(10, 2))
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


def test_a_new_parameter_group_is_an_error(tmp_path: Path) -> None:
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
    with DistCockpit(net, loss_fn, optimizer, store=tmp_path / "run", quantities=[q.Loss()]) as cockpit:
        optimizer.add_param_group({"params": net[2].parameters(), "lr": 0.2})
        with pytest.raises(RuntimeError, match=r"2 parameter groups, but had 1 .* Construct a new one"):
            with cockpit.track(0):
                pass


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
            (loss * 512).backward()
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


# -- ranks -------------------------------------------------------------------------------------------------------------


def unhealthy(rank: int, size: int, group: Any, store: str, fault: str) -> None:
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    model = DistributedDataParallel(net, process_group=group)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    faulty = rank == 2
    with DistCockpit(
        model, loss_fn, optimizer, store=store, quantities=[q.RankHealth(), q.RankDisagreement()], schedule=every(1)
    ) as cockpit:
        for step in range(6):
            x, y = cases.data("mlp", "mean", step)
            x, y = x[rank::size], y[rank::size]
            if faulty and fault == "loader":
                time.sleep(0.15)
            if faulty and fault == "input":
                x[1, 0] = torch.nan
            if faulty and fault == "weight":
                net[2].weight.data[0, 0] = torch.inf
            optimizer.zero_grad()
            with cockpit.track(step):
                handle = net[2].register_forward_pre_hook(lambda *_: time.sleep(0.15 * (faulty and fault == "forward")))
                z = cockpit(x)
                if faulty and fault == "backward":
                    z.register_hook(lambda g: g * torch.inf)
                loss_fn(z, y).backward()
                handle.remove()
            if fault in ("loader", "forward"):
                optimizer.step()


@pytest.mark.parametrize(
    "fault, losses, output, gradient",
    [("input", 1, "0", "4"), ("weight", 6, "2", "4"), ("backward", 0, "none", "2")],
)
def test_health_names_rank_and_layer(
    ranks: Ranks, tmp_path: Path, fault: str, losses: int, output: str, gradient: str
) -> None:
    ranks.run(4, unhealthy, str(tmp_path / "run"), fault)
    row = open_run(tmp_path / "run")["rank_health"].to_dataset().isel(step=0)
    assert int(row["nonfinite_losses"].sel(rank=2)) == losses
    assert int(row["nonfinite_gradients"].sel(rank=2)) > 0
    well = row.sel(rank=[0, 1, 3])
    for name in ("nonfinite_losses", "nonfinite_gradients", "first_nonfinite_output", "first_nonfinite_gradient"):
        assert (well[name] == 0).all(), name
    assert meaning(row["first_nonfinite_output"])[2] == output
    assert meaning(row["first_nonfinite_gradient"])[2] == gradient


@pytest.mark.parametrize("fault, where", [("loader", "outside_seconds"), ("forward", "forward_seconds")])
def test_health_shows_the_slow_rank(ranks: Ranks, tmp_path: Path, fault: str, where: str) -> None:
    """It sleeps for 0.15 s; the others wait in their backward pass."""
    ranks.run(4, unhealthy, str(tmp_path / "run"), fault)
    health = open_run(tmp_path / "run")["rank_health"].to_dataset().isel(step=slice(1, None)).median("step")
    assert health[where].values.argmax() == 2 and health[where].sel(rank=2) > 0.15
    assert (health[where].sel(rank=[0, 1, 3]) < 0.1).all()
    waiting = health["track_seconds"] - health["forward_seconds"]
    assert (waiting.sel(rank=[0, 1, 3]) > 0.1).all() and waiting.sel(rank=2) < 0.1


def drift(rank: int, size: int, group: Any, store: str) -> list[str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("distcockpit").addHandler(handler)
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    net[0].requires_grad_(False)
    model = DistributedDataParallel(net, process_group=group)
    x, y = cases.data("mlp", "mean", 0)
    with DistCockpit(model, loss_fn, store=store, quantities=[q.ReplicaDrift()], schedule=every(1)) as cockpit:
        for step in range(3):
            if step and rank == 1:
                with torch.no_grad():
                    net[2].weight[3, 4] += 1e-7
            if step == 2 and rank in (0, 3):
                with torch.no_grad():
                    net[0].bias.neg_()  # frozen, and watched all the same
            with cockpit.track(step):
                loss_fn(cockpit(x), y).backward()
    logging.getLogger("distcockpit").removeHandler(handler)
    return [text for text in records if "differ" in text]


def test_drift_names_parameter_and_ranks(ranks: Ranks, tmp_path: Path) -> None:
    said = ranks.run(4, drift, str(tmp_path / "run"))
    run = open_run(tmp_path / "run")["replica_drift"].to_dataset()
    assert list(run["replica_drift"].values) == [0, 1, 2]
    np.testing.assert_array_equal(run["differs"].sel(step=1, parameter="2.weight"), [0, 1, 0, 0])
    assert run["differs"].sel(step=1).sum() == 1
    np.testing.assert_array_equal(run["differs"].sel(step=2, parameter="0.bias"), [0, 1, 1, 0])  # two against two
    assert len(said[0]) == 2 and not any(said[1:])
    assert "step 1:" in said[0][0] and "'2.weight' (ranks 1)" in said[0][0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_the_digest_sees_every_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(37, 11).to(dtype)
    first = digest(tensor)
    assert first == digest(tensor.clone()) == digest(tensor.T.contiguous().T) and 0 <= first < 2**53
    seen = {float(first)}
    for k in range(tensor.numel()):
        changed = tensor.clone()
        real = torch.view_as_real(changed).view(-1) if dtype.is_complex else changed.view(-1)
        bits = real.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[real.element_size()])
        bits[k] ^= 1 << (k % 13)
        seen.add(float(digest(changed)))
    assert len(seen) == tensor.numel() + 1
    swapped = tensor.clone()
    swapped[0], swapped[1] = tensor[1], tensor[0]
    assert digest(swapped) != first
    assert digest(torch.zeros(3)) != digest(torch.zeros(3).neg())


# -- a failure half-way ------------------------------------------------------------------------------------------------


class Fails(q.Quantity):
    """It fails on one rank, while statistics are asked for, in the walk, or when sums are taken."""

    def group(self, model: q.Model) -> q.Group:
        return q.Group({"fails": q.Field()})

    def fail(self, where: str) -> None:
        if self.name == where and torch.distributed.get_rank() == 1:
            raise MemoryError("no memory for blocks")

    def statistics(self, step: int, parameters: Any, memory: dict) -> dict:
        self.fail("statistics")
        return {"broken": self}

    def outer(self, *args: Any) -> None:
        self.fail("walk")

    block = outer

    def local(self, batch: q.LocalBatch, memory: dict) -> dict:
        self.fail("local")
        return {}

    def finalize(self, totals: Any, n: int) -> dict:
        return {"fails": 0.0}


def fail_half_way(rank: int, size: int, group: Any, store: str, where: str, eigenvalue: bool) -> list[str]:
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    model = DistributedDataParallel(net, process_group=group)
    x, y = cases.data("mlp", "mean", 0)
    chosen = [q.InnerTest(), q.MeanGSNR(), Fails(name=where)] + ([q.HessMaxEV()] if eigenvalue else [])
    cockpit = DistCockpit(model, loss_fn, store=store, quantities=chosen, schedule=every(1))
    said = []
    for step in range(2):
        try:
            with cockpit.track(step):
                loss_fn(cockpit(x), y).backward()
            said.append("went on")
        except (MemoryError, RuntimeError) as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("eigenvalue", [False, True])
@pytest.mark.parametrize("where", ["statistics", "walk", "local"])
def test_a_rank_that_fails_half_way_leaves_nobody_waiting(
    ranks: Ranks, tmp_path: Path, where: str, eigenvalue: bool
) -> None:
    """The others go on and stop at the next step, or at once where they would begin an iteration with it."""
    began = time.monotonic()
    said = ranks.run(4, fail_half_way, str(tmp_path / "run"), where, eigenvalue)
    assert time.monotonic() - began < 60
    assert said[1][0] == "no memory for blocks" and "earlier tracked step failed" in said[1][1]
    for rank in (0, 2, 3):
        if eigenvalue and where != "local":
            assert "1 rank(s) could not finish" in said[rank][0] and "earlier tracked step" in said[rank][1]
        else:
            assert said[rank][0] == "went on" and "Rank 1 could not finish" in said[rank][1]
    ranks.stop(kill=True)  # a group with an unanswered sum is of no use to the tests that follow


# -- quantities of one's own -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Reads(q.Quantity):
    """It reads an attribute of the batch, with or without asking, and returns a plain number."""

    attribute: str = "projections"
    asked: Any = ()

    @property
    def needs(self) -> q.Needs:
        return q.Needs(**dict.fromkeys(self.asked, True))

    def group(self, model: q.Model) -> q.Group:
        return q.Group({"value": q.Field()})

    def local(self, batch: q.LocalBatch, memory: dict) -> dict:
        return {"value": float(getattr(batch, self.attribute).sum())}

    def finalize(self, totals: Any, n: int) -> dict:
        return {"value": totals["value"] / n}


def test_a_need_that_was_forgotten_is_an_error(tmp_path: Path) -> None:
    batch = cases.data("mlp", "mean", 0)
    for attribute in ("projections", "squared_norms"):
        with pytest.raises(AttributeError, match=rf"Needs\({attribute}="):  # also where another quantity asked for it
            track(tmp_path / attribute, nn.Linear(12, 5), [batch], [Reads(attribute=attribute), q.OrthoTest()])
    run = track(tmp_path / "run", nn.Linear(12, 5), [batch], [Reads(asked=("projections",)), q.GradNorm()])
    np.testing.assert_allclose(run["reads"]["value"], run["grad_norm"]["total"] ** 2, rtol=1e-5)  # <g_i, G> on average


@dataclass(frozen=True, kw_only=True)
class OwnUpdate(q.Quantity):
    """It needs the update, and does not know that this takes two steps."""

    @property
    def needs(self) -> q.Needs:
        return q.Needs(update=True)

    def group(self, model: q.Model) -> q.Group:
        return q.Group({"value": q.Field()})

    def local(self, batch: q.LocalBatch, memory: dict) -> dict:
        return {} if batch.update is None else {"value": batch.once(batch.update.norm)}

    def finalize(self, totals: Any, n: int) -> dict | None:
        return {"value": totals["value"]} if "value" in totals else None


def test_an_own_quantity_of_updates_is_given_both_ends(tmp_path: Path) -> None:
    batches = [cases.data("mlp", "mean", step) for step in range(6)]
    run = track(tmp_path / "run", nn.Linear(12, 5), batches, [OwnUpdate(), q.UpdateSize()], schedule=every(3))
    assert list(run["own_update"]["step"].values) == [0, 3]
    np.testing.assert_allclose(run["own_update"]["value"], run["update_size"]["total"], rtol=1e-5)


def only_early(step: int) -> bool:
    return step < 2


def own_schedules(rank: int, size: int, group: Any, store: str) -> None:
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    model, optimizer = DistributedDataParallel(net, process_group=group), torch.optim.SGD(net.parameters(), lr=0.1)
    chosen = [
        q.Loss(schedule=only_early),
        q.GradHist1d(adapt=q.GradAbsMax(schedule=only_early)),
        # A set, whose order differs between processes.
        Reads(asked=frozenset({"losses", "projections", "squared_norms", "loss", "mean_gradient"})),
    ]
    with DistCockpit(model, loss_fn, optimizer, store=store, quantities=chosen, schedule=every(2)) as cockpit:
        for step in range(3):
            with cockpit.track(step):
                loss_fn(cockpit(torch.ones(2, 12)), torch.arange(2)).backward()


def test_schedules_of_ones_own_are_the_same_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """They are compared by name, not by address."""
    ranks.run(2, own_schedules, str(tmp_path / "run"))
    run = open_run(tmp_path / "run")
    assert list(run["loss"]["step"].values) == [0, 1] and list(run["learning_rate"]["step"].values) == [0, 1, 2]


def test_a_schedule_that_knows_few_steps(tmp_path: Path) -> None:
    planned = [True, False]
    batches = [cases.data("mlp", "mean", step) for step in range(2)]
    run = track(tmp_path / "run", nn.Linear(12, 5), batches, [q.Loss()], schedule=lambda step: planned[step])
    assert list(run["loss"]["step"].values) == [0]


# -- the line at the start ---------------------------------------------------------------------------------------------


def test_the_line_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "distcockpit")
    chosen = [q.Loss(), q.GradHist1d(bins=100, schedule=every(100))]
    track(tmp_path / "run", cases.initialised("mlp"), [cases.data("mlp", "mean", 0)], chosen, schedule=every(4))
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    # Rows of loss and learning rate: the value, and 4 coordinates; of the histogram: 101 edges, 100 counts, 5 more.
    size = 250 * 5 * 8 + 250 * 5 * 8 + 10 * (101 + 100 + 5 + 4) * 8
    assert f"up to {size / 1000:.3g} kB of rows per 1,000 steps" in line and str(tmp_path / "run") in line
    assert "every(4): loss" in line and "every(100): grad_hist_1d" in line and "learning_rate" in line


def test_the_presets_are_what_they_say(tmp_path: Path) -> None:
    """Each preset by name, on a model that BackPACK knows."""
    batches = [cases.data("cnn", "mean", step) for step in range(2)]
    for name in ("economy", "business", "full", "layers"):
        run = track(tmp_path / name, cases.initialised("cnn"), batches, name)  # type: ignore[arg-type]
        assert set(run.children) == {*(x.name for x in presets.PRESETS[name]()), "learning_rate", "log"}
        for group in set(run.children) - {"log"}:
            assert run[group].sizes["step"] == 2 - (group == "alpha"), group


# -- unusual models ----------------------------------------------------------------------------------------------------


def test_float64(tmp_path: Path) -> None:
    """Conversions to float64 are no copies there; the user's batch stays as it is."""
    net = cases.initialised("sigmoid").double()
    x, y = cases.data("sigmoid", "mean", 0)
    x = x.double()
    before, state = x.clone(), {k: v.clone() for k, v in net.state_dict().items()}
    run = track(tmp_path / "run", net, [(x, y)], [*presets.economy(), q.EarlyStopping(), q.MeanGSNR(), q.Parameters()])
    assert torch.equal(x, before)
    batch = oracle.batch(net, state, mean_terms, x, y)
    for name in ("norm_test", "inner_test", "ortho_test", "early_stopping", "mean_gsnr"):
        np.testing.assert_allclose(run[name][name][0], getattr(oracle, name)(batch), rtol=1e-9, err_msg=name)
    np.testing.assert_allclose(run["gradient_noise_scale"]["noise"][0], oracle.noise_scale(batch)[0], rtol=1e-9)
    np.testing.assert_array_equal(run["parameters"]["0.weight"][0], state["0.weight"])
    assert run["parameters"]["0.weight"].dtype == np.float64


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
    run = track(tmp_path / "run", net, [(x, y)], chosen)
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


def test_no_matrix_no_activation(tmp_path: Path) -> None:
    """Groups whose dimensions are empty have rows all the same."""

    class Bias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(5))

        def forward(self, x: Tensor) -> Tensor:
            return x[:, :5] + self.bias

    run = track(tmp_path / "run", Bias(), [cases.data("mlp", "mean", 0)], presets.layers())
    for group in set(run.children) - {"log"}:
        assert run[group].sizes["step"] == 1, group


def test_complex_parameters_are_refused(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 3, dtype=torch.cfloat))
    with pytest.raises(ValueError, match=r"'0' .*complex parameter 'weight'.*exclude=\['0'\]"):
        DistCockpit(net, store=tmp_path / "run", quantities=[q.GradNorm()])


def test_hooks_on_parameters_stay_out_of_replays(tmp_path: Path) -> None:
    """They would scale the Hessian, and see gradients that are not the run's."""
    net, loss_fn = cases.initialised("sigmoid"), nn.CrossEntropyLoss()
    x, y = cases.data("sigmoid", "mean", 0)
    chosen, seen = [q.HessMaxEV(), q.HessTrace()], []

    def hook(gradient: Tensor) -> Tensor:
        seen.append(gradient)
        return gradient * 0.1

    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=chosen, schedule=every(1)) as cockpit:
        with cockpit.track(0):
            loss_fn(cockpit(x), y).backward()
        handle = net[0].weight.register_hook(hook)
        with cockpit.track(1):
            loss_fn(cockpit(x), y).backward()
        assert len(seen) == 1
        net.zero_grad()
        loss_fn(net(x), y).backward()
        assert len(seen) == 2 and torch.equal(net[0].weight.grad, seen[1] * 0.1)
        handle.remove()
        loss_fn(net(x), y).backward()
        assert len(seen) == 2
    run = open_run(tmp_path / "run")
    np.testing.assert_allclose(*run["hess_max_ev"]["hess_max_ev"], rtol=1e-6)
    np.testing.assert_allclose(*run["hess_trace"]["trace"], rtol=1e-6)


def test_settings_of_the_backend_do_not_matter(tmp_path: Path) -> None:
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    try:
        run = track(tmp_path / "run", nn.Linear(12, 5), [cases.data("mlp", "mean", 0)], [q.HessMaxEV()])
    finally:
        torch.backends.cudnn.conv.fp32_precision = before
    assert run["hess_max_ev"]["status"][0] == 0 and torch.backends.cudnn.enabled


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


def test_condition_of_a_matrix_without_full_rank(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(12, 4, bias=False), nn.Linear(4, 5, bias=False))
    with torch.no_grad():
        net[0].weight.fill_(1.0)
        net[1].weight.zero_()
    run = track(tmp_path / "run", net, [cases.data("mlp", "mean", 0)], [q.ParameterCondition()])
    np.testing.assert_array_equal(run["parameter_condition"]["parameter_condition"][0], [np.inf, np.inf])
    np.testing.assert_allclose(run["parameter_condition"]["spectral_norm"][0], [np.sqrt(48), 0])


def test_no_update_without_a_step_of_the_optimizer(tmp_path: Path) -> None:
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    x, y = cases.data("mlp", "mean", 0)
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=[q.UpdateSize()], schedule=every(1)) as cockpit:
        for step in range(2):
            with cockpit.track(step):
                loss_fn(cockpit(x), y).backward()
    run = open_run(tmp_path / "run")["update_size"]
    assert list(run["step"].values) == [0] and run["total"][0] == 0  # the second may still have been to come


class Tokens(nn.Module):
    """The second half sees [B T, C], which begins with the batch axis only by chance."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.act, self.b, self.act2 = nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU()
        self.c = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        h = self.act(self.a(x))
        return self.c(self.act2(self.b(h).reshape(n * t, 4)).reshape(n, t, 4).mean(1))


def token_outputs(rank: int, size: int, group: Any, store: str, shapes: list[tuple[int, int]]) -> Tensor:
    net, loss_fn = Tokens(), nn.CrossEntropyLoss(reduction="sum")
    model = DistributedDataParallel(net, process_group=group)
    chosen = [q.OutputActivation(channel_axis=-1), q.OutputNorm(), q.RankHealth()]
    x = torch.randn(*shapes[rank], 5, generator=torch.Generator().manual_seed(rank))
    with DistCockpit(model, loss_fn, store=store, quantities=chosen, schedule=every(1), exclude=["b"]) as cockpit:
        with cockpit.track(0):
            loss_fn(cockpit(x), torch.arange(len(x)) % 3).backward()
        net.b.weight.data[0, 0] = torch.inf
        with cockpit.track(1):
            loss_fn(cockpit(x), torch.arange(len(x)) % 3).backward()
    return torch.relu(net.a(x)).detach()


@pytest.mark.parametrize("shapes", [[(4, 2), (3, 2)], [(4, 2), (0, 2)], [(4, 1), (3, 2)]])
def test_outputs_of_which_only_some_begin_with_the_batch(
    ranks: Ranks, tmp_path: Path, shapes: list[tuple[int, int]]
) -> None:
    first = ranks.run(2, token_outputs, str(tmp_path / "run"), shapes)
    run = open_run(tmp_path / "run")
    row = run["output_activation"].to_dataset().sel(step=0)
    active = torch.cat([z.flatten(0, 1) for z in first]) > 0
    np.testing.assert_allclose(row["active"].sel(layer="act"), active.float().mean(), rtol=1e-6)
    np.testing.assert_allclose(row["dead"].sel(layer="act"), (~active.any(0)).float().mean())
    norm = run["output_norm"]["output_norm"].sel(step=0)
    norms = torch.cat([z.flatten(1).norm(dim=1) for z in first])
    np.testing.assert_allclose(norm.sel(layer="act"), norms.mean(), rtol=1e-5)
    for value in (row["active"].sel(layer="act2"), row["dead"].sel(layer="act2"), norm.sel(layer="act2")):
        assert np.isnan(value)
    health = run["rank_health"].to_dataset().sel(step=1)
    assert meaning(health["first_nonfinite_output"])[0] == "act2"  # without a batch axis; b is left out


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
