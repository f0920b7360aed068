"""Each picture shows the numbers of the run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from drawn_runs import STEPS, drawn, lines
from matplotlib.axes import Axes
from matplotlib.collections import FillBetweenPolyCollection, QuadMesh
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle, StepPatch
from written import Written, model

from distcockpit import instruments, open_run
from distcockpit import quantities as q
from distcockpit.findings import check
from distcockpit.instruments import INSTRUMENTS
from distcockpit.instruments.panel import SECTIONS
from distcockpit.instruments.picture import Picture
from distcockpit.store import rows


def mesh(axes: Axes) -> Any:
    (cells,) = [c for c in axes.collections if isinstance(c, QuadMesh)]
    return cells


@pytest.mark.parametrize("name", INSTRUMENTS)
def test_each_works_alone_and_carries_units(name: str, run: xr.DataTree) -> None:
    if name in ("ranks",):
        return  # one process has no ranks to tell apart: below
    axes = drawn(name, run)
    every_axes = [a for a in [axes, *axes.child_axes] if a.get_ylabel() and a.axison]
    assert every_axes
    for each in every_axes:
        assert not re.search(r"\[(1|s|B|.*[/^].*)\]", each.get_ylabel()), each.get_ylabel()  # units are in words
        assert each.get_xlabel() in ("step", "value of its parameter", "")
    assert INSTRUMENTS[name].__doc__ and INSTRUMENTS[name].section in SECTIONS


def test_alpha(run: xr.DataTree) -> None:
    axes, alpha = drawn("alpha", run), run["alpha"]["alpha"]
    x, y = lines(axes)["each row"]
    np.testing.assert_array_equal(x, alpha["step"])
    np.testing.assert_array_equal(y, alpha)
    assert [0, 0] in [list(line.get_ydata()) for line in axes.get_lines()]  # a step to the minimum
    zones = {str(p.get_label()): p for p in axes.patches if isinstance(p, Rectangle)}
    low, high = axes.get_ylim()
    assert zones["beyond the minimum"].get_y() == 0 and zones["beyond the minimum"].get_height() == pytest.approx(high)
    assert zones["short of the minimum"].get_y() == pytest.approx(low) and zones[
        "short of the minimum"
    ].get_height() == pytest.approx(-low)
    (side,) = axes.child_axes
    (bars,) = [p for p in side.patches if isinstance(p, StepPatch)]
    counts, edges, _ = bars.get_data()
    finite = alpha.values[np.isfinite(alpha.values)]
    np.testing.assert_array_equal(counts, np.histogram(np.clip(finite, edges[0], edges[-1]), edges)[0])
    assert counts.sum() == len(finite) > 10 and side.get_ylim() == axes.get_ylim()


@pytest.mark.parametrize(
    "name, label, group, field",
    [
        ("distance", "from the start", "distance", "total"),
        ("distance", "per step", "update_size", "total"),
        ("gradient_tests", "norm test: in all directions", "norm_test", "norm_test"),
        ("gradient_tests", "inner product test: along the gradient", "inner_test", "inner_test"),
        ("gradient_tests", "orthogonality test: across the gradient", "ortho_test", "ortho_test"),
        ("grad_norm", "all", "grad_norm", "total"),
        ("cabs", "suggested by CABS", "cabs", "cabs"),
        ("cabs", "batch size", "cabs", "batch_size"),
        ("early_stopping", "criterion", "early_stopping", "early_stopping"),
        ("tic", "from diagonals", "tic_diag", "tic_diag"),
        ("tic", "from traces", "tic_trace", "tic_trace"),
        ("max_eigenvalue", "largest eigenvalue", "hess_max_ev", "hess_max_ev"),
        ("trace", "all", "hess_trace", "total"),
        ("losses", "pooled loss", "loss", "loss"),
        ("losses", "train_loss", "log", "train_loss"),
        ("noise_scale", "batch size", "gradient_noise_scale", "batch_size"),
    ],
)
def test_curves(run: xr.DataTree, name: str, label: str, group: str, field: str) -> None:
    x, y = lines(drawn(name, run))[label]
    np.testing.assert_array_equal(x, run[group]["step"])
    np.testing.assert_array_equal(y, run[group][field])
    assert np.isfinite(y).any()


@pytest.mark.parametrize(
    "name, group, field", [("grad_norm", "grad_norm", "grad_norm"), ("trace", "estimate", "trace")]
)
def test_a_curve_for_each_parameter(run: xr.DataTree, name: str, group: str, field: str) -> None:
    found, array = lines(drawn(name, run, group)), run[group][field]
    for parameter in array["parameter"].values:
        np.testing.assert_array_equal(found[parameter][1], array.sel(parameter=parameter))


def test_the_gradient_is_beside_its_standard_error(run: xr.DataTree) -> None:
    found = lines(drawn("gradient_size", run))
    norm = run["grad_norm"]["total"].values
    np.testing.assert_array_equal(found["norm of the gradient"][1], norm)
    np.testing.assert_allclose(found["its standard error"][1], norm * run["norm_test"]["norm_test"].values)


def test_rows_without_a_number_are_gaps(tmp_path: Path) -> None:
    """Also where smoothing or a median could carry on."""
    broken = np.where(np.arange(40) < 30, 1.0, np.nan)
    rows = {"gradient_noise_scale": {"noise": broken, "signal": broken}, "alpha": {"alpha": broken}}
    run = open_run(Written(tmp_path / "run", [q.GradientNoiseScale(), q.Alpha()]).rows(40, **rows).close())
    for name, label in (("noise_scale", "from samples"), ("alpha", "rolling median of 4")):
        np.testing.assert_array_equal(np.isfinite(lines(drawn(name, run))[label][1]), np.arange(40) < 30)


def test_the_trace_has_its_standard_error(run: xr.DataTree) -> None:
    axes, node = drawn("trace", run, "estimate"), run["estimate"]
    (band,) = [c for c in axes.collections if isinstance(c, FillBetweenPolyCollection)]
    ends = band.get_paths()[0].vertices[:, 1]
    assert ends.max() == pytest.approx(float((node["total"] + node["total_standard_error"]).max()))
    assert ends.min() == pytest.approx(float((node["total"] - node["total_standard_error"]).min()))


def test_sharpness_is_beside_what_the_learning_rate_can_stand(run: xr.DataTree) -> None:
    _, limit = lines(drawn("max_eigenvalue", run))["2 / learning rate"]
    np.testing.assert_allclose(limit, 20)


def test_metrics_have_a_picture_each(run: xr.DataTree) -> None:
    insets = {a.get_title(): a for a in drawn("metrics", run).child_axes}
    for name in ("accuracy", "val_f1"):
        np.testing.assert_array_equal(insets[name].get_lines()[0].get_ydata(), run["log"][name])


def test_noise_scale(run: xr.DataTree) -> None:
    _, y = lines(drawn("noise_scale", run))["from samples"]
    node, weights = run["gradient_noise_scale"], 0.95 ** np.arange(STEPS)[::-1]
    expected = float((weights * node["noise"].values).sum() / (weights * node["signal"].values).sum())
    assert y[-1] == pytest.approx(expected) if expected > 0 else np.isnan(y[-1])


def test_histogram_over_time(run: xr.DataTree) -> None:
    cells, node = mesh(drawn("grad_hist_1d", run)), run["grad_hist_1d"]
    counts = node["counts"].values.T
    assert isinstance(cells.norm, LogNorm)
    np.testing.assert_array_equal(cells.get_array().filled(0), counts)
    np.testing.assert_array_equal(np.ma.getmaskarray(cells.get_array()), counts == 0)
    np.testing.assert_array_equal(cells.get_coordinates()[:, 0, 1], node["edges"].values[-1])


def test_histogram_with_adapted_range_keeps_its_counts(tmp_path: Path) -> None:
    edges = np.linspace(-1, 1, 5) * (1 + np.arange(6))[:, None]
    counts = np.random.default_rng(0).integers(0, 1000, (6, 4))
    rows = {"grad_hist_1d": {"counts": counts, "edges": edges}}
    run = open_run(Written(tmp_path / "run", [q.GradHist1d(bins=4)]).rows(6, **rows).close())
    cells = mesh(drawn("grad_hist_1d", run))
    found = cells.get_array().filled(0).T
    np.testing.assert_allclose(found.sum(axis=1), counts.sum(axis=1))
    np.testing.assert_allclose(found[-1], counts[-1])  # the widest range is the picture's
    np.testing.assert_allclose(found[0, :2].sum(), counts[0, :2].sum())  # what is below 0 stays there
    assert found[0, 0] == 0


def test_two_dimensional_histogram_with_marginals(run: xr.DataTree) -> None:
    axes, node = drawn("grad_hist_2d", run), run["grad_hist_2d"]
    counts = node["counts"].values[-1]
    np.testing.assert_array_equal(mesh(axes).get_array().filled(0), counts)
    bars = [p.get_data() for a in axes.child_axes for p in a.patches if isinstance(p, StepPatch)]
    np.testing.assert_array_equal(bars[0].values, counts.sum(axis=1))
    np.testing.assert_array_equal(bars[0].edges, node["grad_edges"].values[-1])
    np.testing.assert_array_equal(bars[1].values, counts.sum(axis=0))
    np.testing.assert_array_equal(bars[1].edges, node["param_edges"].values[-1])


def test_two_dimensional_histogram_of_each_parameter(run: xr.DataTree) -> None:
    pages = INSTRUMENTS["grad_hist_2d_parameters"].pictures(run)["grad_hist_2d"]
    node = run["grad_hist_2d"]["counts_per_parameter"].isel(step=-1)
    assert not isinstance(pages, Picture) and list(pages) == list(node["parameter"].values)
    insets = [a for a in drawn("grad_hist_2d_parameters", run).child_axes if a.get_title()]
    assert len(insets) == 6 and len(pages) >= 6
    for inset, name in zip(insets, list(pages)[:6], strict=True):
        assert name in inset.get_title()
        np.testing.assert_array_equal(mesh(inset).get_array().filled(0), node.sel(parameter=name))


def test_output_gradients_have_bands(run: xr.DataTree) -> None:
    node = run["output_gradient_geometry"]
    norm, correlation = drawn("output_gradients", run).child_axes
    for k, layer in enumerate(node["layer"].values):
        _, y = lines(norm)[layer]
        epochs = node["norm"].values[:, k].reshape(3, 8)
        np.testing.assert_allclose(y, np.median(epochs, axis=1))
        band = [c for c in norm.collections if isinstance(c, FillBetweenPolyCollection)][k]
        low, high = np.quantile(epochs, [0.25, 0.75], axis=1)
        vertices = band.get_paths()[0].vertices[:, 1]
        assert vertices.min() == pytest.approx(low.min()) and vertices.max() == pytest.approx(high.max())
    assert "cosine" in correlation.get_ylabel()


def test_ranks_are_heat_maps_of_rank_and_step(tmp_path: Path) -> None:
    cosine = np.random.default_rng(0).uniform(-1, 1, (30, 4))
    bad = np.zeros((30, 4), dtype=int)
    bad[17, 2] = 5
    rows = {"rank_disagreement": {"cosine": cosine}, "rank_health": {"nonfinite_gradients": bad}}
    run = open_run(Written(tmp_path / "run", [q.RankDisagreement(), q.RankHealth()]).rows(30, **rows).close())
    pages = INSTRUMENTS["ranks"].pictures(run)["ranks"]
    assert not isinstance(pages, Picture)
    assert "nonfinite_gradients" in pages and "nonfinite_losses" not in pages  # what never happened is not shown
    for name, values in (("cosine", cosine), ("nonfinite_gradients", bad)):
        axes = Figure().add_subplot()
        instruments.draw(axes, pages[name])
        np.testing.assert_array_equal(mesh(axes).get_array(), values.T)
        assert axes.get_ylabel() == "rank"


def test_replicas_that_drift_are_seen_by_rank(tmp_path: Path) -> None:
    differs = np.zeros((30, 6, 4), dtype=int)
    differs[20:, 1:3, 2] = 1
    rows = {"differs": differs, "replica_drift": differs.any(axis=2).sum(axis=1)}
    run = open_run(Written(tmp_path / "run", [q.ReplicaDrift()]).rows(30, replica_drift=rows).close())
    pages = INSTRUMENTS["ranks"].pictures(run)["ranks"]
    assert not isinstance(pages, Picture)
    (heat,) = pages["differs"].marks
    np.testing.assert_array_equal(heat.z, differs[20:].sum(axis=1).T)  # type: ignore[union-attr]
    assert heat.x[0] == 19.5  # type: ignore[union-attr]


def test_a_rank_that_breaks_for_one_step_of_many_is_seen(tmp_path: Path) -> None:
    bad = np.zeros((3000, 4), dtype=int)
    bad[1717, 2] = 5
    run = open_run(
        Written(tmp_path / "run", [q.RankHealth()]).rows(3000, rank_health={"nonfinite_losses": bad}).close()
    )
    pages = INSTRUMENTS["ranks"].pictures(run)["ranks"]
    assert not isinstance(pages, Picture)
    (heat,) = pages["nonfinite_losses"].marks
    assert heat.z.shape[1] < 1000 and heat.z.max() == 5 and heat.z[2].max() == 5  # type: ignore[union-attr]
    column = int(heat.z[2].argmax())  # type: ignore[union-attr]
    assert heat.x[column] <= 1717 <= heat.x[column + 1] and heat.x[-1] == 2999.5  # type: ignore[union-attr]


def test_every_row_of_many_ranks_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are read in blocks, not at distances."""
    monkeypatch.setattr(rows, "MOST_NUMBERS", 1000)
    for step in (1231, 1232, 1999):
        bad = np.zeros((2000, 32), dtype=int)
        bad[step, 30] = 7
        written = Written(tmp_path / f"run{step}", [q.RankHealth()], model(ranks=32))
        run = open_run(written.rows(2000, rank_health={"nonfinite_losses": bad}).close())
        pages = INSTRUMENTS["ranks"].pictures(run)["ranks"]
        assert not isinstance(pages, Picture)
        (heat,) = pages["nonfinite_losses"].marks
        (column,) = np.flatnonzero(heat.z[30])  # type: ignore[union-attr]
        assert heat.x[column] <= step <= heat.x[column + 1]  # type: ignore[union-attr]
        assert "at step" in check(run).findings[0].title or "from step" in check(run).findings[0].title


def test_losses_that_are_logged_now_and_then_are_seen(tmp_path: Path) -> None:
    now_and_then = np.where(np.arange(40) % 10 == 0, 2.0, np.nan)
    run = open_run(Written(tmp_path / "run", [q.Loss()]).rows(40, log={"val_loss": now_and_then}).close())
    x, y = lines(drawn("losses", run))["val_loss"]
    assert list(x) == [0, 10, 20, 30] and list(y) == [2, 2, 2, 2]
