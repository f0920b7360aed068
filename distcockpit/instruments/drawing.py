"""Draws plots with Matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from distcockpit.instruments.data import thinned
from distcockpit.instruments.picture import (
    BLACK,
    FARTHEST,
    GREY,
    SEQUENTIAL,
    Band,
    Bars,
    Heat,
    Level,
    Line,
    Pages,
    Picture,
    Zone,
    empty,
)
from distcockpit.store.names import for_figure

MOST_PAGES = 6
"""Plots of one instrument in a figure; the HTML page shows all."""

MOST_NAMES = 8
DASHES = {"solid": "-", "dashed": "--", "dotted": ":", "points": "none"}


def draw(axes: Axes, picture: Picture | Pages) -> None:
    """Draw a plot, or several side by side in insets.

    Args:
        axes: Axes to draw on.
        picture: What to draw.
    """
    if isinstance(picture, Picture):
        return _draw_one(axes, picture)
    pages = {name: page for name, page in picture.items() if not empty(page)} or picture
    if len(pages) == 1:
        return _draw_one(axes, next(iter(pages.values())))
    axes.set_axis_off()
    shown = list(pages.values())[:MOST_PAGES]
    columns = 1 if len(shown) <= 2 else 2 if len(shown) <= 4 else 3
    rows = math.ceil(len(shown) / columns)
    small: dict[str, Any] = {"size": "x-small"}
    for k, page in enumerate(shown):
        row, column = divmod(k, columns)
        width, height = 1 / columns, 1 / rows
        box = (column * width, 1 - (row + 0.82) * height, width * 0.66, height * 0.62)
        inset = axes.inset_axes(box)
        _draw_one(inset, page, compact=True)
        inset.set_title(for_figure(page.title), **small)
        inset.set_xlabel(for_figure(page.x) if row == rows - 1 else "", **small)
        inset.set_ylabel(inset.get_ylabel(), **small)
    if len(pages) > len(shown):
        axes.set_title(f"{len(shown)} of {len(pages)}", fontsize="small", loc="right")
    return None


def _draw_one(axes: Axes, picture: Picture, compact: bool = False) -> None:
    axes.set_title(for_figure(picture.title))
    axes.set_xlabel(for_figure(picture.x))
    axes.set_ylabel(for_figure(picture.y))
    if picture.scale == "asinh":
        axes.set_yscale("asinh", linear_width=picture.linear)
    elif picture.scale == "log" and not empty(picture):
        axes.set_yscale("log", nonpositive="mask")
    if empty(picture):
        axes.text(0.5, 0.5, "no finite value", transform=axes.transAxes, ha="center", va="center", color=GREY)
        return
    for mark in thinned(picture.marks):
        if not isinstance(mark, Zone | Level):
            _mark(axes, mark, picture, compact)
    _behind(axes, [mark for mark in picture.marks if isinstance(mark, Zone | Level)], picture)
    axes.margins(x=0)
    if picture.note and not compact:
        axes.text(0.01, 0.01, for_figure(picture.note), transform=axes.transAxes, fontsize="x-small", color=GREY)
    heat = any(isinstance(mark, Heat) for mark in picture.marks)
    if picture.right:
        side = axes.inset_axes((1.02, 0, 0.14, 1), sharey=axes)
        _bars(side, picture.right, sideways=True)
    if picture.top:
        above = axes.inset_axes((0, 1.02, 1, 0.14), sharex=axes)
        _bars(above, picture.top)
        axes.set_title(for_figure(picture.title), y=1.17)
    if picture.whole:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if heat and not compact:
        last = axes.collections[-1]
        place = axes.inset_axes((1.18 if picture.right else 1.02, 0, 0.03, 1))
        axes.figure.colorbar(
            last, cax=place, label=for_figure(next(m.label for m in picture.marks if isinstance(m, Heat)))
        )
    if not compact and not heat:
        _legend(axes, picture)


def _mark(axes: Axes, mark: Line | Band | Heat, picture: Picture, compact: bool) -> None:
    if isinstance(mark, Line):
        y = np.clip(mark.y, -FARTHEST, FARTHEST) if picture.scale != "log" else mark.y
        look: dict[str, Any] = {"linestyle": DASHES[mark.style], "linewidth": 0.8 if compact else 1.3}
        if mark.style == "points" or len(mark.x) == 1:
            look |= {"marker": ".", "markersize": 3 if len(mark.x) > 200 else 5}
        axes.plot(mark.x, y, color=mark.color, label=mark.label or "_", **look)
    elif isinstance(mark, Band):
        axes.fill_between(
            mark.x, mark.low, mark.high, color=mark.color, alpha=0.2, linewidth=0, label=mark.label or "_"
        )
    else:
        cells = np.ma.masked_invalid(mark.z.astype(float))
        norm: Normalize = Normalize()
        if mark.log:
            cells = np.ma.masked_less_equal(cells, 0)
            norm = LogNorm() if cells.count() else Normalize()
        axes.pcolormesh(mark.x, mark.y, cells, norm=norm, cmap=SEQUENTIAL, rasterized=True)
        if compact:
            axes.figure.colorbar(axes.collections[-1], cax=axes.inset_axes((1.03, 0, 0.05, 1))).ax.tick_params(
                labelsize=5
            )
            axes.tick_params(labelsize=6)


def _behind(axes: Axes, marks: Sequence[Zone | Level], picture: Picture) -> None:
    """Draw zones and levels within the range of the data; a distant level does not squeeze the data."""
    low, high = axes.get_ylim()
    for mark in marks:
        if isinstance(mark, Level) and (mark.y > 0 or picture.scale != "log"):
            axes.axhline(mark.y, color=BLACK, linewidth=0.8, zorder=1, label=mark.label or "_")
            low, high = min(low, mark.y), max(high, mark.y)
    for mark in marks:
        if isinstance(mark, Zone) and max(mark.low, low) < min(mark.high, high):
            ends = max(mark.low, low), min(mark.high, high)
            axes.axhspan(*ends, color=mark.color, alpha=0.12, linewidth=0, zorder=0, label=mark.label or "_")
    axes.set_ylim(low, high)


def _bars(axes: Axes, bars: Bars, sideways: bool = False) -> None:
    axes.stairs(
        bars.heights,
        bars.edges,
        fill=True,
        color=GREY,
        orientation="horizontal" if sideways else "vertical",
        baseline=0,
    )
    axes.tick_params(labelleft=not sideways, labelbottom=sideways, labelsize="x-small")
    (axes.set_xticks if sideways else axes.set_yticks)([])
    axes.spines[["top", "right"]].set_visible(False)


def _legend(axes: Axes, picture: Picture) -> None:
    """Draw a legend; with many members, it shows only some, from the first to the last."""
    handles, labels = axes.get_legend_handles_labels()
    of_members = {mark.label for mark in picture.marks if isinstance(mark, Line) and mark.member}
    family = [k for k, label in enumerate(labels) if label in of_members]
    dropped: set[int] = set()
    if len(family) > MOST_NAMES:
        kept = {family[k] for k in np.linspace(0, len(family) - 1, MOST_NAMES).astype(int)}
        dropped = set(family) - kept
    entries: Mapping[str, Any] = {
        for_figure(label): handle
        for k, (handle, label) in enumerate(zip(handles, labels, strict=True))
        if k not in dropped
    }
    if dropped:
        entries = {**entries, f"and {len(dropped)} between": Line2D([], [], linestyle="")}
    if not entries:
        return
    beside = 1.18 if picture.right else 1.01
    many = bool(family) or bool(picture.right) or len(entries) > 4
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (beside, 1.0)} if many else {"loc": "best"}
    axes.legend(entries.values(), entries.keys(), fontsize="x-small", framealpha=0.8, **place)
