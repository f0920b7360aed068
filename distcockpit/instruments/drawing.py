"""Draws plots with Matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.ticker import AsinhLocator, MaxNLocator

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
    never_negative,
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
    axes.set_ylabel(broken(for_figure(picture.y)))
    if picture.scale == "asinh":
        axes.set_yscale("asinh", linear_width=picture.linear)
        axes.yaxis.set_major_locator(AsinhLocator(picture.linear, numticks=7))
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


def broken(label: str, longest: int = 40) -> str:
    """A label that is longer than an axis is high, with its unit on a line of its own."""
    return "\n[".join(label.rsplit(" [", 1)) if len(label) > longest else label


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
            _inside(axes, mark.label, mark.y, "bottom")
            low, high = min(low, mark.y), max(high, mark.y)
    for mark in marks:
        if isinstance(mark, Zone) and max(mark.low, low) < min(mark.high, high):
            ends = max(mark.low, low), min(mark.high, high)
            axes.axhspan(*ends, color=mark.color, alpha=0.12, linewidth=0, zorder=0, label=mark.label or "_")
            _inside(axes, mark.label, *((high, "top") if np.isinf(mark.high) else (low, "bottom")))
    axes.set_ylim(max(low, 0) if never_negative(picture) and picture.scale != "log" else low, high)


def _inside(axes: Axes, label: str, y: float, side: str) -> None:
    """Name a zone or a level where it is."""
    look: dict[str, Any] = {"ha": "right", "va": side, "fontsize": "small", "color": "#555555", "zorder": 1.5}
    look["bbox"] = {"facecolor": "white", "alpha": 0.6, "edgecolor": "none", "pad": 1}
    axes.text(0.985, y, for_figure(label), transform=axes.get_yaxis_transform(), **look)


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
    """Draw a legend; layers, parameters and the like have their names at the ends of their curves."""
    named_inside = {mark.label for mark in picture.marks if isinstance(mark, Zone | Level)}
    found = zip(*axes.get_legend_handles_labels(), strict=True)
    curves = [(handle, label) for handle, label in found if label not in named_inside]
    of_members = {mark.label for mark in picture.marks if isinstance(mark, Line) and mark.member}
    family = [handle for handle, label in curves if label in of_members]
    is_labelled = len(family) > 1
    entries: Mapping[str, Any] = {
        for_figure(label): handle for handle, label in curves if not (is_labelled and label in of_members)
    }
    if is_labelled:
        _label_ends(axes, family)
    if len(entries) + is_labelled < 2:
        return
    beside = 1.18 if picture.right else 1.01
    many = bool(picture.right) or len(entries) > 5
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (beside, 1.0)} if many else {"loc": "best"}
    axes.legend(entries.values(), entries.keys(), fontsize="x-small", framealpha=0.8, **place)


def _label_ends(axes: Axes, curves: Sequence[Any]) -> None:
    """Write names at the right ends of curves, spread so that they do not overlap; of many, only some."""
    ends = []
    for curve in curves:
        y = np.asarray(curve.get_ydata(), dtype=float)
        known = np.flatnonzero(np.isfinite(y) & ((y > 0) | (axes.get_yscale() != "log")))
        if len(known):
            height = axes.transAxes.inverted().transform(axes.transData.transform((0, y[known[-1]])))[1]
            ends.append((float(np.clip(height, 0, 1)), curve))
    if len(ends) > MOST_NAMES:
        ends = [ends[k] for k in np.linspace(0, len(ends) - 1, MOST_NAMES).astype(int)]
        axes.text(1.02, 1.02, f"{MOST_NAMES} of {len(curves)} named", transform=axes.transAxes, fontsize="x-small")
    ends.sort(key=lambda end: end[0])
    places = spread([height for height, _ in ends], 0.055)
    for place, (height, curve) in zip(places, ends, strict=True):
        axes.annotate(
            for_figure(curve.get_label()),
            xy=(1, height),
            xytext=(1.03, place),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            fontsize="x-small",
            arrowprops={"arrowstyle": "-", "color": curve.get_color(), "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0},
        )


def spread(heights: Sequence[float], least: float) -> list[float]:
    """Rising positions at least this far apart, as near to the given ones as going up and then down gets."""
    places: list[float] = []
    for height in heights:
        places.append(max(height, places[-1] + least) if places else height)
    top = 1.0
    for k in reversed(range(len(places))):
        places[k] = min(places[k], top)
        top = places[k] - least
    return places
