"""How pictures are drawn: axes, gaps, resumed runs, odd numbers."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
import xarray as xr
from drawn_runs import drawn, lines
from matplotlib import cbook
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from written import SHAPES, Written, model

from distcockpit import instruments, open_run
from distcockpit import quantities as q
from distcockpit.instruments import INSTRUMENTS, panel, panels, plot_run
from distcockpit.instruments.data import thin
from distcockpit.instruments.drawing import spread
from distcockpit.instruments.panel import overlay
from distcockpit.instruments.picture import CYCLE, Band, Line, Picture
from distcockpit.store import rows
from distcockpit.store.names import plain

HOSTILE = ["<img src=x onerror=alert(1)>", "$\\frac{$", "\x1b[31mred\x1b[0m", "[bold]b[/bold]", "a\u202eb", "x" * 500]


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


def test_what_is_left_out_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = model()
    many = type(facts)(shapes={f"layers.{k}.weight": (2, 2) for k in range(300)}, world_size=4)
    run = open_run(Written(tmp_path / "run", [q.GradNorm()], many).rows(30).close())
    monkeypatch.setattr(rows, "MOST_NUMBERS", 2560)
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
    figure = plot_run(run, title="the run", panel="full")
    names = [part.get_suptitle() for part in figure.subfigs]
    assert names == ["TRAINING", "STEP SIZE", "GRADIENTS", "CURVATURE", "RANKS", "TIME", "MORE"]
    titles = [a.get_title() for a in figure.axes]
    assert "effective step size" in titles and "sharpness" in titles and "losses" in titles
    figure.savefig(tmp_path / "panel.png", dpi=30)
    assert (tmp_path / "panel.png").stat().st_size > 20_000


def test_the_small_panel_begins_with_the_loss_and_ends_with_what_looks_wrong(tmp_path: Path) -> None:
    chosen = [
        q.Loss(),
        q.Alpha(),
        q.GradNorm(),
        q.NormTest(),
        q.GradHist1d(bins=4),
        q.RankDisagreement(),
        q.HessTrace(),
    ]
    rows = {"loss": {"loss": np.where(np.arange(40) < 10, 1.0, 9.0)}, "learning_rate": {"learning_rate": 0.1}}
    run = open_run(Written(tmp_path / "run", [*chosen, q.LearningRate()]).rows(40, **rows).close())
    figure = plot_run(run)
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    expected = ["losses", "effective step size", "gradient and its noise", "individual gradient elements"]
    assert titles == [*expected, "loss of each rank", "what looks wrong"]
    told = " ".join(text.get_text().replace("\n", " ") for text in figure.axes[-1].texts)
    assert "the loss jumps to 9, from 1" in told
    width, height = figure.get_size_inches()
    assert width < 8 and height < 8
    figure.savefig(tmp_path / "small.png")
    with pytest.raises(ValueError, match=r"plot_run\(panel='large'\): must be 'small' or 'full'"):
        plot_run(run, panel="large")  # type: ignore[arg-type]


def test_axes_of_what_is_never_negative_begin_at_0() -> None:
    for values, low in ((np.linspace(0, 1, 9), 0), (np.linspace(-1, 1, 9), -1.1)):
        axes = Figure().add_subplot()
        instruments.draw(axes, Picture("length", "y", [Line(np.arange(9), values)]))
        assert axes.get_ylim()[0] == pytest.approx(low)


def test_names_at_the_ends_of_curves_do_not_overlap() -> None:
    assert spread([0.1, 0.11, 0.5, 0.99, 1.0], 0.1) == pytest.approx([0.1, 0.2, 0.5, 0.9, 1.0])


def test_a_run_without_rows_says_so(tmp_path: Path) -> None:
    run = open_run(Written(tmp_path / "run", [q.Alpha()]).close())
    with pytest.raises(ValueError, match="nothing to draw yet"):
        plot_run(run)
    with pytest.raises(ValueError, match=r"alpha\(run, group=None\): shows Alpha; the run has rows of none of these"):
        drawn("alpha", run)


@pytest.mark.smoke
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


@pytest.mark.smoke
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
    written = [text.get_text() for text in drawn("grad_norm", run).texts]
    assert len(written) == 10 and written[:2] == ["256 of 300 names", "8 of 256 named"]


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
    shown = [text.get_text() for text in drawn("grad_norm", run).texts]
    assert {text.replace("\\$", "$") for text in shown} == {plain(name) for name in facts.parameters}
    assert not any(cbook.is_math_text(text) is True for text in shown)  # no dollar of a name begins a formula
    plot_run(run, title=HOSTILE[1]).savefig(tmp_path / "panel.png", dpi=25)  # Matplotlib would stumble over a formula


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
    by_layer = places["grad_norm"]
    assert not isinstance(by_layer, Picture) and list(by_layer) == ["all", *SHAPES]  # colours are for runs
    for page in by_layer.values():
        assert {mark.label: mark.color for mark in page.marks} == {"one": CYCLE[0], "two": CYCLE[1]}  # type: ignore[union-attr]
    picture = Picture(
        "x", "y [1]", [Band(np.arange(3), np.zeros(3), np.ones(3)), Line(np.arange(3), np.ones(3), "all")]
    )
    both = overlay({"one": picture, "two": picture}, {"one": CYCLE[0], "two": CYCLE[1]})
    assert isinstance(both, Picture) and [m.label for m in both.marks] == ["", "one", "", "two"]  # type: ignore[union-attr]
    assert [m.color for m in both.marks] == [CYCLE[0]] * 2 + [CYCLE[1]] * 2  # type: ignore[union-attr]
    plot_run(trees).savefig(tmp_path / "both.png", dpi=25)
