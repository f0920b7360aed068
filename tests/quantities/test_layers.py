"""Quantities by layer: outputs, activations, geometry, conditions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import numpy as np
import oracle
import pytest
import torch
from compared_runs import mean_terms
from panel_runs import meaning, track_batches
from ranks import Ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distcockpit import DistCockpit, every, open_run, presets
from distcockpit import quantities as q
from distcockpit.quantities import OutputGradientGeometry

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


@pytest.mark.smoke
def test_no_matrix_no_activation(tmp_path: Path) -> None:
    """Groups whose dimensions are empty have rows all the same."""

    class Bias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(5))

        def forward(self, x: Tensor) -> Tensor:
            return x[:, :5] + self.bias

    run = track_batches(tmp_path / "run", Bias(), [cases.data("mlp", "mean", 0)], presets.layers())
    for group in set(run.children) - {"log"}:
        assert run[group].sizes["step"] == 1, group


def test_condition_of_a_matrix_without_full_rank(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(12, 4, bias=False), nn.Linear(4, 5, bias=False))
    with torch.no_grad():
        net[0].weight.fill_(1.0)
        net[1].weight.zero_()
    run = track_batches(tmp_path / "run", net, [cases.data("mlp", "mean", 0)], [q.ParameterCondition()])
    np.testing.assert_array_equal(run["parameter_condition"]["parameter_condition"][0], [np.inf, np.inf])
    np.testing.assert_allclose(run["parameter_condition"]["spectral_norm"][0], [np.sqrt(48), 0])


@pytest.mark.parametrize("condition", [1.0, 1e3, 0.9e4, 1.1e4, 1e6, 1e9])
@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
@pytest.mark.parametrize("shape", [(9, 40), (40, 9), (12, 12)])
def test_condition_numbers_are_precise(condition: float, scale: float, shape: tuple[int, int]) -> None:
    """Where squares would lose digits, overflow or vanish, too."""
    random = np.random.default_rng(0)
    n = min(shape)
    left, right = (np.linalg.qr(random.normal(size=(length, n)))[0] for length in shape)
    matrix = (left * (scale * np.geomspace(1, 1 / condition, n))) @ right.T
    row = q.ParameterCondition().finalize({"w": matrix}, 1)
    np.testing.assert_allclose(
        row["parameter_condition"], [condition], rtol=1e-7 + 50 * condition * np.finfo(float).eps
    )
    np.testing.assert_allclose(row["spectral_norm"], [scale], rtol=1e-12)


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


@pytest.mark.parametrize("kind", ["normal", "rms", "norm only", "all modules"])
def test_geometry_options(tmp_path: Path, kind: str) -> None:
    net, loss_fn = cases.initialised("sigmoid"), nn.CrossEntropyLoss()
    options: dict[str, Any] = {
        "normal": {},
        "rms": {"normalize_by_size": True},
        "norm only": {"compute_correlation": False},
        "all modules": {"skip_activation": False},
    }[kind]
    chosen, pooled = [OutputGradientGeometry(**options)], []
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=chosen, schedule=every(3)) as cockpit:
        for step, n in [(0, 24), (3, 24), (6, 20)]:
            x, y = cases.data("sigmoid", "mean", step)
            pooled.append(oracle.batch(net, net.state_dict(), mean_terms, x[:n], y[:n]))
            with cockpit.track(step):
                loss_fn(net(x[:n]), y[:n]).backward()
    data = open_run(tmp_path / "run")["output_gradient_geometry"]
    layers = ["0", "1", "2", "3", "4"] if kind == "all modules" else ["0", "2", "4"]
    assert list(data["layer"].values) == layers
    for k, batch in enumerate(pooled):
        expected = oracle.output_geometry(batch, pooled[k - 1] if k else None, kind == "rms")
        for layer in layers:
            norm, cosine = expected[layer]
            np.testing.assert_allclose(data["norm"][k].sel(layer=layer), norm, rtol=1e-4)
            if kind != "norm only":
                np.testing.assert_allclose(data["correlation"][k].sel(layer=layer), cosine, atol=1e-4)
    if kind == "norm only":
        assert "correlation" not in data
    else:
        assert list(data["previous_step"].values) == [-1, 0, 3]
        assert np.isnan(data["correlation"][2]).all()  # the shape changed
