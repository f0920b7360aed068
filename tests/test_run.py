"""Runs as users analyse them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from construction import construct
from torch import nn
from waiting import run_program
from written import SHAPES, Written

from distcockpit import DistCockpit, every, open_run
from distcockpit import quantities as q
from distcockpit.quantities import OutputGradientGeometry
from distcockpit.run import (
    LINES,
    RANGES,
    exponential_smoothing,
    line_aggregation,
    noise_scale,
    range_aggregation,
    to_dataframe,
)


@pytest.mark.parametrize("aggregate, valid", [(line_aggregation, "IQR"), (range_aggregation, "min-max")])
def test_unknown_aggregation(tmp_path: Path, aggregate: Any, valid: str) -> None:
    construct(tmp_path).close()
    data = open_run(tmp_path / "run")["alpha"]["alpha"]
    with pytest.raises(ValueError, match=f"'average'.*{valid}"):
        aggregate(data, "average")
    with pytest.raises(ValueError, match="no epoch was stored"):
        aggregate(data)


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


@pytest.fixture
def written(tmp_path: Path) -> Written:
    chosen = [q.Alpha(), q.GradNorm(), q.GradientNoiseScale(), q.GradHist1d(bins=4), q.RankDisagreement()]
    return Written(tmp_path / "run", chosen)


def test_the_tree_has_coordinates_units_and_names(written: Written) -> None:
    run = open_run(written.rows(25).close())
    alpha = run["alpha"]["alpha"]
    assert list(alpha["step"].values) == list(range(25)) and list(alpha["epoch"].values) == [k // 10 for k in range(25)]
    assert alpha["wall_time"].dtype.kind == "M" and alpha["wall_time"].values[0] == np.datetime64(1_800_000_000, "s")
    assert (alpha["batch_size"] == 64).all()
    norm = run["grad_norm"]["grad_norm"]
    assert list(norm["parameter"].values) == list(SHAPES)
    assert list(run["gradient_noise_scale"]["layer_noise"]["layer"].values) == ["0", "2", "4"]
    assert norm.attrs["units"] == "loss / parameter" and norm.attrs["long_name"] == "norm of the mean gradient"
    assert norm.sel(parameter="2.weight").sizes == {"step": 25}


def test_data_are_read_when_they_are_used(written: Written) -> None:
    written.rows(5).close()
    assert open_run(written.path)["alpha"]["alpha"].chunks is not None  # Dask is there
    script = (
        "import sys; sys.modules['dask'] = None; import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'dask' else find(name, *a)\n"
        "from distcockpit import open_run\n"
        f"alpha = open_run({str(written.path)!r})['alpha']['alpha']\n"
        "assert alpha.chunks is None and not alpha.variable._in_memory\n"
        "assert alpha.values.shape == (5,)"
    )
    run_program(sys.executable, "-c", script)


def test_only_committed_rows_are_there(written: Written) -> None:
    written.rows(5).rows(3, commit=False)
    assert open_run(written.path)["alpha"].sizes["step"] == 5
    written.rows(1)
    assert open_run(written.path)["alpha"].sizes["step"] == 9
    written.close()


def test_statistics_of_epochs(written: Written) -> None:
    values = np.random.default_rng(0).normal(size=25)
    values[[3, 12]] = np.nan
    alpha = open_run(written.rows(25, alpha={"alpha": values}).close())["alpha"]["alpha"]
    epochs = [values[:10], values[10:20], values[20:]]
    known = [part[np.isfinite(part)] for part in epochs]
    expected = {
        "mean": [p.mean() for p in known],
        "median": [np.median(p) for p in known],
        "min": [p.min() for p in known],
        "max": [p.max() for p in known],
        "Q1": [np.quantile(p, 0.25) for p in known],
        "Q3": [np.quantile(p, 0.75) for p in known],
        "std": [p.std() for p in known],
        "IQR": [np.quantile(p, 0.75) - np.quantile(p, 0.25) for p in known],
    }
    assert set(expected) == set(LINES)
    for method, numbers in expected.items():
        found = line_aggregation(alpha, method)
        np.testing.assert_allclose(found.values, numbers, rtol=1e-12)
        assert list(found["epoch"].values) == [0, 1, 2]
    np.testing.assert_allclose(line_aggregation(alpha, 0.9), [np.quantile(p, 0.9) for p in known])
    low, high = range_aggregation(alpha, (0.1, 0.9))
    np.testing.assert_allclose(low, [np.quantile(p, 0.1) for p in known])
    np.testing.assert_allclose(high, [np.quantile(p, 0.9) for p in known])
    for wrong in ("average", 90, (0.1, 1.5)):
        with pytest.raises(ValueError, match="must be one of .*, or a number from 0 to 1"):
            (range_aggregation if isinstance(wrong, tuple) else line_aggregation)(alpha, wrong)  # type: ignore[operator]
    bands = {"std": ("mean", "std"), "Q1-Q3": ("Q1", "Q3"), "min-max": ("min", "max")}
    assert set(bands) == set(RANGES)
    for method, (a, b) in bands.items():
        low, high = range_aggregation(alpha, method)
        one, two = np.array(expected[a]), np.array(expected[b])
        wanted = (one - two, one + two) if method == "std" else (one, two)
        np.testing.assert_allclose(np.stack([low.values, high.values]), np.stack(wanted), rtol=1e-12)


@pytest.mark.parametrize("weight", [0.0, 0.9, 0.99])
def test_exponential_smoothing_is_its_formula(written: Written, weight: float) -> None:
    values = np.random.default_rng(1).normal(size=(30, 6))
    values[5, 2], values[0, 1], values[7, 3] = np.nan, np.nan, np.inf
    norm = open_run(written.rows(30, grad_norm={"grad_norm": values}).close())["grad_norm"]["grad_norm"]
    found = exponential_smoothing(norm, weight)
    for d in range(6):
        weighted = total = 0.0
        for t in range(30):
            if np.isfinite(values[t, d]):
                weighted, total = weight * weighted + values[t, d], weight * total + 1
            expected = weighted / total if total else np.nan
            assert found.values[t, d] == pytest.approx(expected, rel=1e-9, nan_ok=True)
    assert found.dims == norm.dims and found.attrs == norm.attrs and list(found["parameter"].values) == list(SHAPES)


@pytest.mark.parametrize("weight", [1.0, -0.1, 2])
def test_a_weight_that_smooths_nothing_or_all_is_refused(written: Written, weight: float) -> None:
    norm = open_run(written.rows(3).close())["grad_norm"]["total"]
    with pytest.raises(ValueError, match=rf"weight={weight}\): must be at least 0, and less than 1"):
        exponential_smoothing(norm, weight)


@pytest.mark.parametrize("source, prefix", [("samples", ""), ("ranks", "rank_"), ("layers", "layer_")])
def test_noise_scale_divides_smoothed_parts(written: Written, source: str, prefix: str) -> None:
    shape = (40, 3) if source == "layers" else (40,)
    random = np.random.default_rng(2)
    noise, signal = random.gamma(2, 50, shape), random.normal(0.5, 1, shape)
    rows = {f"{prefix}noise": noise, f"{prefix}signal": signal}
    node = open_run(written.rows(40, gradient_noise_scale=rows).close())["gradient_noise_scale"]
    found = noise_scale(node, 0.8, source)
    weights = 0.8 ** np.arange(40)[::-1]
    expected = np.tensordot(weights, noise, (0, 0)) / np.tensordot(weights, signal, (0, 0))
    np.testing.assert_allclose(found.values[-1], np.where(expected > 0, expected, np.nan), rtol=1e-9)
    assert found.attrs["units"] == "samples"
    below = node.to_dataset().assign({f"{prefix}signal": -(node[f"{prefix}signal"] ** 2)})
    assert np.isnan(noise_scale(below, 0.8, source)).all()  # no batch size is negative
    mean_of_ratios = np.nanmean(noise / signal, axis=0)
    assert not np.allclose(mean_of_ratios, expected, rtol=0.1)  # what must not be done


def test_noise_scale_of_something_else_says_what_to_pass(written: Written) -> None:
    run = open_run(written.rows(3).close())
    with pytest.raises(ValueError, match=r'pass the rows of GradientNoiseScale, run\["gradient_noise_scale"\]'):
        noise_scale(run["alpha"])
    with pytest.raises(ValueError, match=r"noise_scale\(source='steps'\): must be one of"):
        noise_scale(run["gradient_noise_scale"], source="steps")  # type: ignore[arg-type]


def test_a_table_of_a_quantity_and_of_a_run(written: Written) -> None:
    run = open_run(written.rows(4, log={"accuracy": [0.1, 0.2, 0.3, np.nan]}).close())
    table = to_dataframe(run["grad_norm"])
    assert table.index.name == "step" and list(table.index) == [0, 1, 2, 3]
    assert list(table.columns[:3]) == ["epoch", "wall_time", "batch_size"]
    assert isinstance(table["wall_time"].iloc[0], pd.Timestamp)
    for name in SHAPES:
        np.testing.assert_array_equal(table[f"grad_norm[{name}]"], run["grad_norm"]["grad_norm"].sel(parameter=name))
    np.testing.assert_array_equal(table["total"], run["grad_norm"]["total"])
    histogram = to_dataframe(run["grad_hist_1d"])
    assert [c for c in histogram if c.startswith("counts")] == [f"counts[{k}]" for k in range(4)]
    whole = to_dataframe(run)
    assert whole["log/accuracy"].isna().tolist() == [False, False, False, True]
    np.testing.assert_array_equal(whole["rank_disagreement/cosine[2]"], run["rank_disagreement"]["cosine"][:, 2])


def test_tables_of_quantities_with_other_schedules_are_joined_by_step(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", [q.Loss(), q.NormTest()])
    for step in range(6):
        at = {"wall_time": 0.0, "epoch": float("nan"), "batch_size": 1}
        written.store.append("loss", step, {"loss": float(step)}, at)
        if step % 3 == 0:
            written.store.append("norm_test", step, {"norm_test": 10.0 * step}, at)
    table = to_dataframe(open_run(written.close()))
    assert table["loss/loss"].tolist() == [0, 1, 2, 3, 4, 5]
    assert table["norm_test/norm_test"].dropna().to_dict() == {0: 0.0, 3: 30.0}


def test_no_dataset_is_changed(written: Written) -> None:
    run = open_run(written.rows(4).close())
    before = run["grad_norm"].to_dataset().copy(deep=True)
    exponential_smoothing(run["grad_norm"]["grad_norm"])
    to_dataframe(run)
    xr.testing.assert_identical(run["grad_norm"].to_dataset().load(), before.load())
