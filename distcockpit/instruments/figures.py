"""Figures of whole runs: the small panel, which fits on a page, and the full one."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import matplotlib as mpl
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from distcockpit.findings import check
from distcockpit.instruments.drawing import MOST_PAGES, draw
from distcockpit.instruments.panel import SECTIONS, Place, panels
from distcockpit.instruments.picture import BLACK, GREEN, GREY, ORANGE, RED, Heat, Pages, Picture, empty
from distcockpit.store.names import for_figure, plain

SMALL = ("losses", "learning_rate", "alpha", "gradient_size", "grad_hist_1d", "ranks")
"""Instruments of the small panel."""

PAGES = ("loss", "cosine", "grad_norm", "forward_seconds")
"""Of the plots of ranks, the first one of these that there is."""

SIZE = (7.6, 7.0)
"""Of the small panel, in inches: type of 8 points stays readable on a page of 830 pixels."""


def plot_run(
    run: xr.DataTree | Mapping[str, xr.DataTree],
    title: str = "",
    panel: Literal["small", "full"] = "small",
    progress: Callable[[str], None] = lambda name: None,
) -> Figure:
    """A run as a figure.

    Args:
        run: What `open_run` returns, or several runs by name, which are overlaid.
        title: Title above the panel.
        panel: "small": loss and learning rate, α, the gradient and its noise, gradient elements, ranks, and what looks
            wrong, on one screen; "full": everything.
        progress: As for `panel`.

    Raises:
        ValueError: If there are no rows to draw, or the panel is unknown.
    """
    if panel not in ("small", "full"):
        raise ValueError(f"plot_run(panel={panel!r}): must be 'small' or 'full'.")
    runs = {"run": run} if isinstance(run, xr.DataTree) else dict(run)
    figure = _small(runs, progress) if panel == "small" else _full(runs, progress)
    if title:
        figure.suptitle(for_figure(title))
    return figure


def _small(runs: Mapping[str, xr.DataTree], progress: Callable[[str], None]) -> Figure:
    places = {place.name.split("-")[0]: place for place in reversed(panels(runs, progress, SMALL))}
    pictures = {name: picture for name in SMALL if (picture := _one(places.get(name), len(runs))) is not None}
    rate = pictures.pop("learning_rate", None)
    if not pictures:
        return _full(runs, progress)
    with mpl.rc_context({"font.size": 8, "axes.titlesize": 9, "axes.labelsize": 8}):
        n_rows = -(-(len(pictures) + 1) // 2)
        figure = Figure(figsize=(SIZE[0], SIZE[1] * n_rows / 3), layout="constrained")
        grid = figure.add_gridspec(n_rows, 2)
        cells = [grid[k // 2, k % 2] for k in range(2 * n_rows)]
        for cell, (name, picture) in zip(cells, pictures.items(), strict=False):
            if name == "losses" and rate is not None:
                rows = cell.subgridspec(2, 1, height_ratios=(3, 1), hspace=0.02)
                above = figure.add_subplot(rows[0])
                below = figure.add_subplot(rows[1], sharex=above)
                draw(above, picture)
                draw(below, rate)
                above.set_xlabel("")
                above.tick_params(labelbottom=False)
                below.set_title("")
                below.set_ylabel("rate")
            else:
                draw(figure.add_subplot(cell), replace(picture, right=None))
        _write_findings(figure.add_subplot(cells[len(pictures)]), runs)
    return figure


def _one(place: Place | None, n_runs: int) -> Picture | None:
    """The plot of an instrument that the small panel shows; heat maps of several runs would be many."""
    if place is None:
        return None
    pages = {"": place.picture} if isinstance(place.picture, Picture) else place.picture
    shown = next((pages[name] for name in PAGES if name in pages), next(iter(pages.values())))
    is_one_of_many = n_runs > 1 and any(isinstance(mark, Heat) for mark in shown.marks)
    return None if empty(shown) or is_one_of_many else shown


def _write_findings(axes: Axes, runs: Mapping[str, xr.DataTree]) -> None:
    axes.set_title("what looks wrong")
    axes.set_axis_off()
    height, room = 0.97, 0.075
    for name, run in runs.items():
        found = check(run).findings
        told = [(RED if one.severity == "wrong" else ORANGE, f"{one.severity}: {one.title}") for one in found]
        for color, words in told or [(GREEN, "nothing, by the rules that could be applied")]:
            of_run = f"{plain(name, 30)}: " if len(runs) > 1 else ""
            lines = textwrap.wrap(f"{of_run}{plain(words, 200)}", 46)
            if height - room * len(lines) < 0.05:
                axes.text(0.08, height, "and more: distcockpit info", transform=axes.transAxes, va="top", color=GREY)
                return
            axes.text(0.0, height, "●", transform=axes.transAxes, va="top", color=color)
            axes.text(0.08, height, for_figure_lines(lines), transform=axes.transAxes, va="top", color=BLACK)
            height -= room * len(lines) + 0.04


def for_figure_lines(lines: Sequence[str]) -> str:
    """Lines, each safe for Matplotlib."""
    return "\n".join(map(for_figure, lines))


def _full(runs: Mapping[str, xr.DataTree], progress: Callable[[str], None], columns: int = 4) -> Figure:
    places = panels(runs, progress)
    if not places:
        raise ValueError("plot_run(run): there is nothing to draw yet: the run has no rows with finite values.")
    pictures = [(place.section, picture) for place in places for picture in _side_by_side(place.picture)]
    sections = {name: [picture for section, picture in pictures if section == name] for name in SECTIONS}
    sections = {name: there for name, there in sections.items() if there}
    heights = [-(-len(there) // columns) for there in sections.values()]
    figure = Figure(figsize=(6.4 * columns, 3.9 * sum(heights) + 0.5 * len(heights) + 0.4), layout="constrained")
    parts = figure.subfigures(len(sections), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, (name, there), rows in zip(parts, sections.items(), heights, strict=True):
        part.suptitle(name.upper(), x=0.01, ha="left", fontweight="bold")
        grid = part.subplots(rows, -(-len(there) // rows), squeeze=False).flat
        for picture, axes in zip(there, grid, strict=False):
            draw(axes, picture)
        for axes in list(grid):
            axes.remove()
    return figure


def _side_by_side(picture: Picture | Pages) -> list[Picture]:
    return [picture] if isinstance(picture, Picture) else [p for p in picture.values() if not empty(p)][:MOST_PAGES]
