"""Options of single quantities, and what they do with unusual numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cases
import numpy as np
import oracle
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import Ranks
from test_capture import mean_terms
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from train import everything

from distcockpit import DistCockpit, every, logspaced, open_run, presets
from distcockpit import quantities as q
from distcockpit.quantities import (
    GradAbsMax,
    GradHist1d,
    GradHist2d,
    HessTrace,
    MeanGSNR,
    OutputGradientGeometry,
    ParamAbsMax,
)
from distcockpit.quantities.base import snake_case
from distcockpit.run import LINES, RANGES, line_aggregation, range_aggregation


def adaptive() -> list[Any]:
    return [
        GradHist1d(bins=10, adapt=GradAbsMax(padding=0.1)),
        GradHist1d(bins=10, adapt=GradAbsMax(schedule=every(2, 1)), schedule=every(2), name="other_steps"),
        GradHist2d(bins=(6, 8), adapt=(GradAbsMax(), ParamAbsMax(padding=0.5))),
        GradHist2d(bins=(6, 8), adapt=(None, ParamAbsMax(min_size=50.0)), name="wide"),
    ]


def train_adaptive(rank: int, size: int, group: Any, store: str, shards: list[int]) -> list[dict]:
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    model = net if group is None else DistributedDataParallel(net, process_group=group)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    states = []
    with DistCockpit(model, loss_fn, optimizer, store=store, quantities=adaptive(), schedule=every(1)) as cockpit:
        for step in range(5):
            states.append({k: v.clone() for k, v in net.state_dict().items()})
            x, y = cases.data("mlp", "mean", step)
            mine = slice(sum(shards[:rank]), sum(shards[: rank + 1]))
            optimizer.zero_grad()
            with cockpit.track(step):
                loss_fn(model(x[mine]), y[mine]).backward()
            optimizer.step()
    return states


@pytest.mark.parametrize("shards", [[24], [17, 7]])
def test_ranges_follow_the_pooled_maximum(ranks: Ranks, tmp_path: Path, shards: list[int]) -> None:
    store = str(tmp_path / "run")
    if len(shards) == 1:
        states = train_adaptive(0, 1, None, store, shards)
    else:
        states = ranks.run(2, train_adaptive, store, shards)[0]
    run, net = open_run(store), cases.initialised("mlp")
    pooled = [oracle.batch(net, s, mean_terms, *cases.data("mlp", "mean", k)) for k, s in enumerate(states)]
    largest = [np.abs(b.flat).max() for b in pooled]
    widest = [max(np.abs(p).max() for p in b.parameters.values()) for b in pooled]

    def ends(group: str, name: str = "edges") -> np.ndarray:
        edges = run[group][name].values
        np.testing.assert_array_equal(edges[:, 0], -edges[:, -1])
        np.testing.assert_array_equal(edges[:, edges.shape[1] // 2], 0)
        return edges[:, -1]

    np.testing.assert_allclose(ends("grad_hist_1d"), [2.0, *(1.1 * m for m in largest[:4])], rtol=1e-5)
    # Measured at the steps 1 and 3, effective at the histograms of the steps 2 and 4.
    np.testing.assert_allclose(ends("other_steps"), [2.0, largest[1], largest[3]], rtol=1e-5)
    np.testing.assert_allclose(ends("grad_hist_2d", "grad_edges"), [1.0, *largest[:4]], rtol=1e-5)
    np.testing.assert_allclose(ends("grad_hist_2d", "param_edges"), [2.0, *(1.5 * m for m in widest[:4])], rtol=1e-5)
    np.testing.assert_allclose(ends("wide", "param_edges"), [2.0, 25.0, 25.0, 25.0, 25.0])
    for step, batch in enumerate(pooled):
        row = run["grad_hist_1d"].to_dataset().sel(step=step)
        assert row["counts"].sum() == batch.flat.size
        moved = np.abs(np.cumsum(row["counts"]) - np.cumsum(oracle.grad_hist_1d(batch, row["edges"].values)))
        assert moved.max() <= 2
    assert list(run["other_steps"]["step"].values) == [0, 2, 4]


def test_smallest_range(tmp_path: Path) -> None:
    """All gradients are zero: the range is min_size wide."""
    net, loss_fn = nn.Linear(3, 1, bias=False), nn.MSELoss()
    chosen = [GradHist1d(bins=4, adapt=GradAbsMax(min_size=0.5))]
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=chosen, schedule=every(1)) as cockpit:
        for step in range(2):
            with cockpit.track(step):
                loss_fn(net(torch.zeros(2, 3)), torch.zeros(2, 1)).backward()
    edges = open_run(tmp_path / "run")["grad_hist_1d"]["edges"].values
    np.testing.assert_array_equal(edges[1], [-0.25, -0.125, 0.0, 0.125, 0.25])


def test_numbers_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    net, loss_fn = nn.Linear(2, 1, bias=False), nn.MSELoss()
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[0.5, -3.0]]))
    x = torch.tensor([[1.0, 0.0], [torch.nan, 0.1], [torch.inf, 0.2], [1e3, 1e3], [-torch.inf, 0.2]])
    chosen = [
        GradHist1d(bins=2, range=(-1, 1), adapt=GradAbsMax()),
        GradHist2d(bins=(2, 2)),
        MeanGSNR(),
        OutputGradientGeometry(),
    ]
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=chosen, schedule=every(1)) as cockpit:
        for step in range(2):
            with cockpit.track(step):
                loss_fn(net(x), torch.zeros(5, 1)).backward()
    run = open_run(tmp_path / "run")
    # Individual gradients: 2 (w x) x = [1, 0], [nan, nan], [inf, inf], [-5e6, -5e6], [inf, -inf].
    row = run["grad_hist_1d"].to_dataset().sel(step=0)
    counted = {k: int(row[k]) for k in ("below", "above", "nan", "pos_inf", "neg_inf")}
    assert counted == {"below": 3, "above": 3, "nan": 2, "pos_inf": 3, "neg_inf": 1}
    np.testing.assert_array_equal(row["counts"], [3, 5])
    assert row["counts"].sum() + row["nan"] == 5 * 2
    two = run["grad_hist_2d"].to_dataset().sel(step=0)
    assert two["counts"].sum() + two["nan"] == 10
    assert int(two["param_below"]) == 5 and int(two["grad_nan"]) == 2 and int(two["grad_pos_inf"]) == 3
    np.testing.assert_allclose(run["grad_hist_1d"]["edges"][1, -1], 5e6, rtol=1e-3)  # the largest finite one
    assert np.isnan(run["mean_gsnr"]["mean_gsnr"]).all()


def test_gsnr_keeps_its_precision_when_noise_is_small(tmp_path: Path) -> None:
    """Noise of 1e-4 of the mean: raw float32 moments would lose it entirely."""
    torch.manual_seed(0)
    net, loss_fn = nn.Linear(6, 1, bias=False), nn.L1Loss()
    x = 100 * (1 + 1e-4 * torch.randn(64, 6))
    state = {k: v.clone() for k, v in net.state_dict().items()}
    chosen = [MeanGSNR(epsilon=0.0)]
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=chosen, schedule=every(1)) as cockpit:
        with cockpit.track(0):
            loss_fn(net(x), torch.full((64, 1), -1e6)).backward()
    batch = oracle.batch(net, state, lambda z, y: ((z - y).abs().sum(), 1), x, torch.full((64, 1), -1e6))
    expected = oracle.mean_gsnr(batch, epsilon=0.0)
    assert expected > 1e7
    np.testing.assert_allclose(open_run(tmp_path / "run")["mean_gsnr"]["mean_gsnr"], [expected], rtol=1e-4)


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


# -- Monte-Carlo curvature ---------------------------------------------------------------------------------------------


def monte_carlo(rank: int, size: int, group: Any, store: str, seed: int) -> Any:
    """Many estimates at fixed parameters."""
    net, loss_fn = cases.initialised("sigmoid"), nn.CrossEntropyLoss()
    model = DistributedDataParallel(net, process_group=group)
    chosen = [
        HessTrace(curvature="diag_ggn_mc", mc_samples=3, seed=seed),
        HessTrace(curvature="diag_ggn_exact", name="exact"),
    ]
    x, y = cases.data("sigmoid", "mean", 0, 12)
    x, y = x.repeat(2, 1), y.repeat(2)  # both ranks hold the same samples
    torch.manual_seed(5)
    with DistCockpit(model, loss_fn, store=store, quantities=chosen, schedule=every(1)) as cockpit:
        for step in range(150):
            with cockpit.track(step):
                loss_fn(model(x[rank * 12 : rank * 12 + 12]), y[rank * 12 : rank * 12 + 12]).backward()
    return torch.rand(3).tolist()


def test_monte_carlo_curvature(ranks: Ranks, tmp_path: Path) -> None:
    torch.manual_seed(5)
    untouched = torch.rand(3).tolist()
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        assert ranks.run(2, monte_carlo, str(tmp_path / name), seed) == [untouched, untouched]
    first, again, other = (
        open_run(tmp_path / name)["hess_trace"]["trace"].values for name in ("first", "again", "other")
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    exact = open_run(tmp_path / "first")["exact"]["trace"].values[0]
    error = first.std(0, ddof=1) / np.sqrt(len(first))
    assert (np.abs(first.mean(0) - exact) < 4.5 * error).all() and (error < 0.1 * exact).all()


def draws(rank: int, size: int, group: Any, store: str, shards: list[int]) -> None:
    """Each rank alone holds samples at one step; they are the same samples."""
    net, loss_fn = cases.initialised("sigmoid"), nn.CrossEntropyLoss(reduction="sum")
    model = DistributedDataParallel(net, process_group=group)
    x, y = cases.data("sigmoid", "sum", 0)
    chosen = [HessTrace(curvature="diag_ggn_mc")]
    with DistCockpit(model, loss_fn, store=store, quantities=chosen, schedule=every(1)) as cockpit:
        with cockpit.track(0):
            loss_fn(model(x[: shards[rank]]), y[: shards[rank]]).backward()


def test_draws_differ_between_ranks(ranks: Ranks, tmp_path: Path) -> None:
    for name, shards in (("a", [24, 0]), ("b", [0, 24])):
        ranks.run(2, draws, str(tmp_path / name), shards)
    a, b = (open_run(tmp_path / name)["hess_trace"]["trace"].values for name in "ab")
    assert (a > 0).all() and (b > 0).all() and not np.array_equal(a, b)


# -- any sharding ------------------------------------------------------------------------------------------------------


def shard_of(rank: int, size: int, group: Any, store: str, cuts: list[int], accumulate: int) -> None:
    net, loss_fn = cases.initialised("sigmoid"), nn.CrossEntropyLoss(reduction="sum")
    x, y = cases.data("sigmoid", "sum", 0)
    bounds = [0, *cuts, cases.N]
    x, y = x[bounds[rank] : bounds[rank + 1]], y[bounds[rank] : bounds[rank + 1]]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    chosen = [quantity for quantity in everything() if quantity.needs.eigenvalue is None]
    with DistCockpit(
        net, loss_fn, optimizer, store=store, quantities=chosen, schedule=every(1), process_group=group, mode="w"
    ) as cockpit:
        with cockpit.track(0):
            for part, target in zip(x.tensor_split(accumulate), y.tensor_split(accumulate), strict=True):
                loss_fn(cockpit(part), target).backward()


@given(cuts=st.lists(st.integers(0, cases.N), min_size=3, max_size=3).map(sorted), accumulate=st.integers(1, 3))
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_sharding_gives_the_same_row(ranks: Ranks, tmp_path: Path, cuts: list[int], accumulate: int) -> None:
    shard_of(0, 1, None, str(tmp_path / "one"), [cases.N], 1)
    ranks.run(4, shard_of, str(tmp_path / "four"), cuts, accumulate)
    one, four = open_run(tmp_path / "one").load(), open_run(tmp_path / "four").load()
    assert set(one.children) == set(four.children)
    compared = 0
    for name in set(one.children) - {"log", "time", "rank_disagreement", "rank_health", "replica_drift", "tic_diag"}:
        for field, alone in one[name].data_vars.items():
            together = four[name][field]
            if field.startswith("rank_"):
                continue
            compared += 1
            if np.issubdtype(alone.dtype, np.integer) and "counts" in field:
                axes = tuple(range(1, alone.ndim))
                assert alone.sum() == together.sum() > 0
                moved = np.abs(np.cumsum((alone - together).values, axis=axes[-1]))
                assert moved.max() <= 2, (name, field)
            else:
                np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-6, err_msg=f"{name}/{field}")
    assert compared > 40


# -- names, presets, schedules, epochs ---------------------------------------------------------------------------------


def test_names() -> None:
    names = {"GradHist1d": "grad_hist_1d", "CABS": "cabs", "TICDiag": "tic_diag", "HessMaxEV": "hess_max_ev"}
    names |= {"MeanGSNR": "mean_gsnr", "OutputGradientGeometry": "output_gradient_geometry", "Alpha": "alpha"}
    assert {k: snake_case(k) for k in names} == names
    assert HessTrace(name="mine").name == "mine"


def test_presets_nest() -> None:
    economy, business, full = ({q.name for q in p()} for p in (presets.economy, presets.business, presets.full))
    assert economy < business < full
    ranks = {"gradient_noise_scale", "rank_disagreement", "rank_health", "replica_drift"}
    tests = {"norm_test", "inner_test", "ortho_test"}
    steps = {"alpha", "distance", "update_size"}
    assert economy == steps | tests | ranks | {"loss", "grad_norm", "grad_hist_1d"}
    assert business - economy == {"tic_diag", "hess_trace"} and full - business == {"hess_max_ev", "grad_hist_2d"}
    assert len(presets.layers()) == 8
    schedule = every(7)
    assert all(q.schedule is schedule for q in presets.full(schedule))
    assert [q.name for q in presets.economy() + [MeanGSNR()]][-1] == "mean_gsnr"


def test_schedules() -> None:
    assert [s for s in range(20) if every(5, 3)(s)] == [3, 8, 13, 18]
    assert [s for s in range(1001) if logspaced(1, 1000, 4)(s)] == [0, 1, 10, 100, 1000]


def test_own_schedules_and_the_default(tmp_path: Path) -> None:
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    chosen = [MeanGSNR(), GradHist1d(schedule=every(3, 1)), OutputGradientGeometry(schedule=lambda step: step == 4)]
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=chosen, schedule=every(4)) as cockpit:
        for step in range(9):
            x, y = cases.data("mlp", "mean", step)
            with cockpit.track(step):
                loss_fn(net(x), y).backward()
    run = open_run(tmp_path / "run")
    steps = {name: list(run[name]["step"].values) for name in ("mean_gsnr", "grad_hist_1d", "output_gradient_geometry")}
    assert steps == {"mean_gsnr": [0, 4, 8], "grad_hist_1d": [1, 4, 7], "output_gradient_geometry": [4]}


def test_aggregation_over_epochs(tmp_path: Path) -> None:
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    with DistCockpit(
        net, loss_fn, store=tmp_path / "run", quantities=[OutputGradientGeometry()], schedule=every(1)
    ) as cockpit:
        for step in range(9):
            x, y = cases.data("mlp", "mean", step)
            with cockpit.track(step, epoch=step // 3):
                loss_fn(net(x), y).backward()
    data = open_run(tmp_path / "run")["output_gradient_geometry"]["norm"]
    values = data.values.reshape(3, 3, -1)
    definitions = {
        "mean": values.mean(1),
        "median": np.median(values, 1),
        "min": values.min(1),
        "max": values.max(1),
        "Q1": np.quantile(values, 0.25, 1),
        "Q3": np.quantile(values, 0.75, 1),
        "std": values.std(1),
        "IQR": np.quantile(values, 0.75, 1) - np.quantile(values, 0.25, 1),
    }
    assert definitions.keys() == LINES.keys()
    for method, expected in definitions.items():
        result = line_aggregation(data, method)
        assert result.dims == ("epoch", "layer") and list(result["epoch"].values) == [0, 1, 2]
        np.testing.assert_allclose(result, expected)
    bands = {
        "std": (definitions["mean"] - definitions["std"], definitions["mean"] + definitions["std"]),
        "Q1-Q3": (definitions["Q1"], definitions["Q3"]),
        "min-max": (definitions["min"], definitions["max"]),
    }
    assert bands.keys() == RANGES.keys()
    for method, (low, high) in bands.items():
        result = range_aggregation(data, method)
        np.testing.assert_allclose(result[0], low)
        np.testing.assert_allclose(result[1], high)


@dataclass(frozen=True, kw_only=True)
class OldName(q.GradNorm):
    """Written for an earlier release."""

    name: str = "old_name"

    def local(self, batch: q.LocalBatch, memory: dict[str, Any]) -> dict[str, Any]:
        return {"squares": batch.once(batch.mean_squared)}


def test_the_old_name_of_replicated_values_works_with_a_warning(tmp_path: Path) -> None:
    net, loss_fn, (x, y) = cases.initialised("mlp"), nn.CrossEntropyLoss(), cases.data("mlp", "mean", 0)
    chosen = [OldName(), q.GradNorm()]
    with (
        pytest.warns(DeprecationWarning, match="batch.replicated"),
        DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=chosen, schedule=every(1)) as cockpit,
        cockpit.track(0),
    ):
        loss_fn(net(x), y).backward()
    run = open_run(tmp_path / "run")
    assert float(run["old_name"]["total"][0]) == float(run["grad_norm"]["total"][0]) > 0
