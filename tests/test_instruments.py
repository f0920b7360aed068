"""Instruments: what is on the axes is what is in the store."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import cases
import matplotlib as mpl
import numpy as np
import pytest
import xarray as xr
from matplotlib import cbook
from matplotlib.axes import Axes
from matplotlib.collections import FillBetweenPolyCollection, QuadMesh
from matplotlib.colors import LogNorm, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle, StepPatch
from torch import nn
from train import everything
from written import SHAPES, Written, model

from distcockpit import DistCockpit, every, instruments, open_run
from distcockpit import quantities as q
from distcockpit.findings import check
from distcockpit.instruments import INSTRUMENTS, panel, panels, plot_run
from distcockpit.instruments.data import thin
from distcockpit.instruments.panel import overlay
from distcockpit.instruments.picture import CYCLE, Band, Line, Picture
from distcockpit.store import rows
from distcockpit.store.names import plain

STEPS = 24
HOSTILE = ["<img src=x onerror=alert(1)>", "$\\frac{$", "\x1b[31mred\x1b[0m", "[bold]b[/bold]", "a\u202eb", "x" * 500]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> xr.DataTree:
    """A real run with the whole panel."""
    path = tmp_path_factory.mktemp("instruments") / "run.zarr"
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    import torch

    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    chosen = [*everything(), q.HessTrace(curvature="hutchinson", samples=3, name="estimate")]
    with DistCockpit(net, loss_fn, optimizer, store=path, quantities=chosen, schedule=every(1)) as cockpit:
        for step in range(STEPS):
            x, y = cases.data("mlp", "mean", step)
            optimizer.zero_grad()
            with cockpit.track(step, epoch=step // 8):
                loss = loss_fn(net(x), y)
                loss.backward()
            optimizer.step()
            cockpit.log(step, epoch=step // 8, train_loss=loss, accuracy=step / STEPS, **{"val_f1": 1 - step / STEPS})
    return open_run(path)


def drawn(name: str, run: xr.DataTree, group: str | None = None) -> Axes:
    axes = Figure().add_subplot()
    INSTRUMENTS[name](axes, run, group)
    axes.figure.canvas.draw()  # type: ignore[attr-defined]
    return axes


def lines(axes: Axes) -> dict[str, tuple[Any, Any]]:
    found = {str(line.get_label()): line.get_data() for line in axes.get_lines()}
    return {name: data for name, data in found.items() if not name.startswith("_")}


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
        assert re.search(r"\[.+\]$|^rank$", each.get_ylabel()), each.get_ylabel()
        assert each.get_xlabel() in ("step", "value of its parameter [1]", "")
    assert INSTRUMENTS[name].__doc__ and INSTRUMENTS[name].section in instruments.panel.__globals__["SECTIONS"]


def test_alpha(run: xr.DataTree) -> None:
    axes, alpha = drawn("alpha", run), run["alpha"]["alpha"]
    x, y = lines(axes)["each row"]
    np.testing.assert_array_equal(x, alpha["step"])
    np.testing.assert_array_equal(y, alpha)
    (level,) = [line for line in axes.get_lines() if line.get_label() == "to the minimum"]
    assert list(level.get_ydata()) == [0, 0]
    zones = {str(p.get_label()): p for p in axes.patches if isinstance(p, Rectangle)}
    low, high = axes.get_ylim()
    assert zones["too far"].get_y() == 0 and zones["too far"].get_height() == pytest.approx(high)
    assert zones["short"].get_y() == pytest.approx(low) and zones["short"].get_height() == pytest.approx(-low)
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


def test_two_groups_of_a_class_are_both_shown(tmp_path: Path) -> None:
    chosen = [
        q.RankDisagreement(name="a"),
        q.RankDisagreement(name="b"),
        q.Loss(name="x"),
        q.Loss(name="y"),
        q.TICDiag(),
        q.TICDiag(name="z"),
    ]
    places = {p.name: p.picture for p in panel(open_run(Written(tmp_path / "run", chosen).rows(12).close()))}
    assert {"cosine", "cosine (b)"} <= set(places["ranks"])  # type: ignore[arg-type]
    assert [m.label for m in places["losses"].marks] == ["pooled loss", "pooled loss (y)"]  # type: ignore[union-attr]
    assert [m.label for m in places["tic"].marks] == ["from diagonals", "from diagonals (z)"]  # type: ignore[union-attr]


def test_a_quantity_of_ones_own_with_the_name_of_an_instrument(tmp_path: Path) -> None:
    chosen = [q.Loss(), q.OutputNorm(name="losses")]
    places = [p.name for p in panel(open_run(Written(tmp_path / "run", chosen).rows(12).close()))]
    assert sorted(places) == ["losses", "more-losses"]


def test_losses_that_are_logged_now_and_then_are_seen(tmp_path: Path) -> None:
    now_and_then = np.where(np.arange(40) % 10 == 0, 2.0, np.nan)
    run = open_run(Written(tmp_path / "run", [q.Loss()]).rows(40, log={"val_loss": now_and_then}).close())
    x, y = lines(drawn("losses", run))["val_loss"]
    assert list(x) == [0, 10, 20, 30] and list(y) == [2, 2, 2, 2]


def test_what_is_left_out_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = model()
    many = type(facts)(shapes={f"layers.{k}.weight": (2, 2) for k in range(300)}, world_size=4)
    run = open_run(Written(tmp_path / "run", [q.GradNorm()], many).rows(30).close())
    monkeypatch.setattr(rows, "MOST_NUMBERS", 2560)
    monkeypatch.setattr(rows.portion, "__defaults__", (2560,))
    picture = INSTRUMENTS["grad_norm"].pictures(run)["grad_norm"]
    assert isinstance(picture, Picture)
    assert picture.note == "256 of 300 names, 10 of 30 rows, evenly spaced" and len(picture.marks[0].x) == 10  # type: ignore[union-attr]


def test_a_log_and_a_linear_run_are_both_seen(tmp_path: Path) -> None:
    trees = {}
    for name, values in (("a", np.geomspace(0.01, 1, 20)), ("b", np.linspace(-3, -1, 20))):
        trees[name] = open_run(Written(tmp_path / name, [q.Loss()]).rows(20, loss={"loss": values}).close())
    (place,) = panels(trees)
    assert isinstance(place.picture, Picture) and place.picture.scale == "asinh"


def test_quantities_without_an_instrument_are_shown(run: xr.DataTree) -> None:
    places = {place.name: place for place in panel(run)}
    for name in ("output_norm", "output_rms", "parameter_norm", "update_geometry", "parameter_condition", "time"):
        assert places[f"more-{name}"].section == "more"
    pages = places["more-update_geometry"].picture
    assert not isinstance(pages, Picture)
    found = {line.label: line.y for line in pages["norm"].marks}  # type: ignore[union-attr]
    for name, y in found.items():
        np.testing.assert_array_equal(y, run["update_geometry"]["norm"].sel(parameter=name))  # type: ignore[arg-type]
    shown = {place.removeprefix("more-") for place in places}
    kinds = {kind for one in INSTRUMENTS.values() for kind in one.needs}
    for name, node in run.children.items():
        assert name in shown or node.attrs.get("quantity", name) in kinds, name


def test_the_panel_is_laid_out_like_a_cockpit(run: xr.DataTree, tmp_path: Path) -> None:
    figure = plot_run(run, title="the run")
    names = [part._suptitle.get_text() for part in figure.subfigs]  # type: ignore[attr-defined]
    assert names == ["STEP SIZE", "GRADIENTS", "CURVATURE", "RANKS", "PERFORMANCE", "MORE"]
    titles = [a.get_title() for a in figure.axes]
    assert "effective step size" in titles and "sharpness" in titles and "losses" in titles
    figure.savefig(tmp_path / "panel.png", dpi=30)
    assert (tmp_path / "panel.png").stat().st_size > 20_000


def test_a_run_without_rows_says_so(tmp_path: Path) -> None:
    run = open_run(Written(tmp_path / "run", [q.Alpha()]).close())
    with pytest.raises(ValueError, match="nothing to draw yet"):
        plot_run(run)
    with pytest.raises(ValueError, match=r"alpha\(run, group=None\): shows Alpha; the run has rows of none of these"):
        drawn("alpha", run)


def test_a_run_of_nothing_but_nan_is_drawn(tmp_path: Path) -> None:
    chosen = [
        q.GradHist2d(),
        q.Alpha(),
        q.GradNorm(),
        q.HessTrace(),
        q.OutputGradientGeometry(),
        q.RankDisagreement(),
        q.GradHist1d(),
    ]
    written = Written(tmp_path / "run", chosen)
    nothing = {name: {f: np.nan for f, one in g.fields.items() if one.fill != 0} for name, g in written.groups.items()}
    run = open_run(written.rows(20, **nothing).close())
    for one in INSTRUMENTS.values():
        for name in one.pictures(run):
            drawn(one.name, run, name)
    plot_run(run).savefig(tmp_path / "panel.png", dpi=25)


def test_infinities_and_signs_are_drawn(tmp_path: Path) -> None:
    values = np.array([1e-320, -1e30, np.inf, -np.inf, np.nan, 0.0, 1.0, 1.5e308])
    run = open_run(
        Written(tmp_path / "run", [q.HessMaxEV(), q.Alpha(), q.Loss()])
        .rows(8, hess_max_ev={"hess_max_ev": values}, alpha={"alpha": values}, loss={"loss": values})
        .close()
    )
    plot_run(run).savefig(tmp_path / "p.png", dpi=30)


def test_many_points_become_as_many_as_a_screen_shows() -> None:
    x, y = np.arange(1_000_000), np.random.default_rng(0).normal(size=1_000_000)
    y[654_321], y[123_456], y[500_000:500_400] = 1e6, -1e6, np.nan
    few, low = thin(x, y, 2000)
    assert len(few) <= 4010 and (np.diff(few) > 0).all()
    assert np.nanmax(low) == 1e6 and np.nanmin(low) == -1e6 and few[np.nanargmax(low)] == 654_321
    np.testing.assert_array_equal(y[few], low)
    same = thin(x[:100], y[:100], 2000)
    np.testing.assert_array_equal(same[1], y[:100])
    axes = Figure().add_subplot()
    instruments.draw(axes, Picture("many", "y [1]", [Line(x, y)]))
    drawn_points = axes.get_lines()[0].get_ydata()
    assert len(drawn_points) <= 4010 and np.nanmax(drawn_points) == 1e6
    gap = np.full(100_000, np.nan)
    assert np.isnan(thin(x[:100_000], gap, 2000)[1]).all()


def test_hundreds_of_layers_are_drawn(tmp_path: Path) -> None:
    facts = model()
    many = type(facts)(shapes={f"layers.{k}.weight": (2, 2) for k in range(300)}, world_size=4)
    run = open_run(Written(tmp_path / "run", [q.GradNorm(), q.ReplicaDrift()], many).rows(12).close())
    found = lines(drawn("grad_norm", run))
    assert len(found) == 257 and "layers.0.weight" in found and "layers.299.weight" in found
    legend = drawn("grad_norm", run).get_legend()
    assert legend is not None and len(legend.get_texts()) < 12


def luminance(color: str) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


# Machado, Oliveira, Fernandes 2009, severity 1.0.
BLINDNESS = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


@pytest.mark.parametrize("kind", BLINDNESS)
def test_colours_of_curves_differ_for_the_colour_blind(kind: str) -> None:
    seen = [np.clip(np.array(BLINDNESS[kind]) @ to_rgb(color), 0, 1) for color in CYCLE]
    apart = [np.linalg.norm(a - b) for k, a in enumerate(seen) for b in seen[:k]]
    assert min(apart) > 0.08 and np.linalg.norm(seen[0] - seen[1]) > 0.35  # the first two, which are used most


def test_colours_of_heat_maps_and_depth_are_ordered_in_print() -> None:
    from distcockpit.instruments.data import SEQUENTIAL, depth_colors

    for colors in (depth_colors(10), [mpl.colors.to_hex(c) for c in mpl.colormaps[SEQUENTIAL](np.linspace(0, 1, 10))]):
        assert (np.diff([luminance(c) for c in colors]) > 0).all()


def test_names_are_drawn_as_they_are_read(tmp_path: Path) -> None:
    names = dict(zip(SHAPES, HOSTILE, strict=True))
    facts = model(lambda name: f"{names.get(name, HOSTILE[1])}{name}")
    chosen = [q.GradNorm(), q.HessTrace(), q.OutputGradientGeometry(), q.GradHist2d(keep_individual=True)]
    run = open_run(Written(tmp_path / "run", chosen, facts).rows(12).close())
    legend = drawn("grad_norm", run).get_legend()
    assert legend is not None
    shown = [text.get_text() for text in legend.get_texts()]
    assert [text.replace("\\$", "$") for text in shown[:6]] == [plain(name) for name in facts.parameters]
    assert not any(cbook.is_math_text(text) is True for text in shown)  # no dollar of a name begins a formula
    plot_run(run, title=HOSTILE[1]).savefig(tmp_path / "panel.png", dpi=25)  # Matplotlib would stumble over a formula


def test_what_plain_keeps() -> None:
    assert plain("layer.0.weight") == "layer.0.weight" and plain("層.weight") == "層.weight"
    assert plain("a\x1b[31m\nb\u202ec\u2028") == "a\ufffd[31m\ufffdb\ufffdc\ufffd"
    assert len(plain("x" * 500)) == 120 and plain("x" * 500).startswith("x" * 60 + "…")


def test_runs_are_drawn_over_each_other(tmp_path: Path) -> None:
    trees = {}
    for k, name in enumerate(("one", "two")):
        written = Written(
            tmp_path / name, [q.Alpha(), q.Loss(), q.GradHist1d(bins=4), q.GradNorm(), q.RankDisagreement()]
        )
        trees[name] = open_run(written.rows(20 + k, loss={"loss": 1.0 + k}).close())
    places = {place.name: place.picture for place in panels(trees)}
    losses = places["losses"]
    assert isinstance(losses, Picture)
    found = {mark.label: (mark.y, mark.color) for mark in losses.marks}  # type: ignore[union-attr]
    assert list(found) == ["one", "two"] and (found["one"][0] == 1).all() and (found["two"][0] == 2).all()
    assert found["one"][1] != found["two"][1] and len(found["two"][0]) == 21
    histograms = places["grad_hist_1d"]
    assert not isinstance(histograms, Picture) and list(histograms) == ["one", "two"]
    alpha = places["alpha"]
    assert isinstance(alpha, Picture) and {
        m.label.split(":")[0] for m in alpha.marks if "row" in getattr(m, "label", "")
    } == {"one", "two"}
    assert set(places["ranks"]) >= {"cosine, one", "cosine, two"}  # type: ignore[arg-type]
    picture = Picture(
        "x", "y [1]", [Band(np.arange(3), np.zeros(3), np.ones(3)), Line(np.arange(3), np.ones(3), "all")]
    )
    both = overlay({"one": picture, "two": picture}, {"one": CYCLE[0], "two": CYCLE[1]})
    assert isinstance(both, Picture) and [m.label for m in both.marks] == ["", "one", "", "two"]  # type: ignore[union-attr]
    assert [m.color for m in both.marks] == [CYCLE[0]] * 2 + [CYCLE[1]] * 2  # type: ignore[union-attr]
    plot_run(trees).savefig(tmp_path / "both.png", dpi=25)
