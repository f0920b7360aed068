"""From the rows of a run to marks: curves, bands and cells, thinned to what a screen can show."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import matplotlib as mpl
import numpy as np
import xarray as xr
from matplotlib.colors import to_hex

from distcockpit.instruments.picture import BLACK, CYCLE, FARTHEST, SEQUENTIAL, Band, Line, Mark, Numbers
from distcockpit.store.names import in_words
from distcockpit.store.rows import across, in_blocks, portion

MOST_POINTS = 30_000
"""In all curves of a plot together; with ten curves, that is two points per pixel column on a large screen."""

MOST_COLUMNS = 400
"""Columns of a heat map over steps."""

MOST_CELLS = 200_000
"""Cells of a heat map."""

PER_STEP = ("epoch", "wall_time", "batch_size")

MOST_SIZES = 20_000
"""Points that the choice of a scale looks at, of each curve."""

MOST_MEMBERS = 256
"""Curves of one plot; with more names, this many evenly spaced ones are shown."""


def named(array: xr.DataArray, what: str = "") -> str:
    """An axis label: what it is, and its unit in words where it has one."""
    what, unit = what or str(array.attrs.get("long_name", array.name)), in_words(str(array.attrs.get("units", "1")))
    return what if not unit or unit in what.split() else f"{what} [{unit}]"


def thinned(marks: Sequence[Mark]) -> list[Mark]:
    """Marks whose curves have no more points than a screen can show."""
    lines = sum(isinstance(mark, Line) for mark in marks)
    most = min(2000, max(100, MOST_POINTS // max(1, 2 * lines)))
    return [_thinned(mark, most) for mark in marks]


def _thinned(mark: Mark, most: int) -> Mark:
    if isinstance(mark, Line):
        x, y = thin(mark.x, mark.y, most)
        return replace(mark, x=x, y=y)
    if isinstance(mark, Band) and len(mark.x) > most:
        starts = np.linspace(0, len(mark.x), most + 1).astype(int)[:-1]
        low, high = np.fmin.reduceat(mark.low, starts), np.fmax.reduceat(mark.high, starts)
        return replace(mark, x=mark.x[starts], low=low, high=high)
    return mark


def thin(x: Numbers, y: Numbers, most: int) -> tuple[Numbers, Numbers]:
    """The lowest and the highest point of each stretch, in order, with gaps and both ends kept.

    Args:
        x: Shape [n].
        y: Shape [n].
        most: Number of stretches.
    """
    if len(y) <= 2 * most:
        return x, y
    width = -(-len(y) // most)
    starts = np.arange(0, len(y), width)

    def stretches(values: Numbers, filling: Any) -> Numbers:
        padded = np.full(len(starts) * width, filling)
        padded[: len(values)] = values
        return padded.reshape(len(starts), width)

    known = np.isfinite(y)
    lowest = stretches(np.where(known, y, np.inf), np.inf).argmin(axis=1)
    highest = stretches(np.where(known, y, -np.inf), -np.inf).argmax(axis=1)
    of_gaps = stretches(known, True)
    gaps = np.flatnonzero(~of_gaps.all(axis=1))  # a gap stays a gap
    kept = [[0, len(y) - 1], starts + lowest, starts + highest, starts[gaps] + of_gaps[gaps].argmin(axis=1)]
    index = np.unique(np.concatenate(kept))
    return x[index], y[index]


def values(array: xr.DataArray, *coordinates: str) -> xr.DataArray:
    """The numbers, step first; with fewer rows if there are too many to read, which `left_out` reports.

    Args:
        array: With the dimension ``step``.
        coordinates: Which of ``epoch``, ``wall_time`` and ``batch_size`` to read as well.
    """
    unread = [name for name in PER_STEP if name in array.coords and name not in coordinates]
    return portion(array.drop_vars(unread).transpose("step", ...)).load()


def left_out(array: xr.DataArray) -> str:
    """What a plot of an array [step, names] leaves out, in words."""
    shown = some(array) if array.ndim > 1 else array
    rows, all_rows = portion(shown).sizes["step"], array.sizes["step"]
    words = (
        [f"{shown.shape[1]} of {array.shape[1]} names"] if shown.ndim > 1 and shown.shape[1] < array.shape[1] else []
    )
    return ", ".join([*words, *([f"{rows} of {all_rows} rows, evenly spaced"] if rows < all_rows else [])])


def some(array: xr.DataArray) -> xr.DataArray:
    """The array with as many names along the second dimension as can be drawn."""
    dim, n = array.dims[1], array.shape[1]
    return array if n <= MOST_MEMBERS else array.isel({dim: np.linspace(0, n - 1, MOST_MEMBERS).astype(int)})


def members(array: xr.DataArray) -> list[str]:
    """Names along the second dimension: of layers and parameters; ranks and the like are numbered."""
    dim = array.dims[1]
    return [str(v) for v in array[dim].values] if dim in array.coords else [f"{dim} {k}" for k in range(array.shape[1])]


def depth_colors(n: int) -> list[str]:
    """Colours from the first layer (dark) to the last (light)."""
    return [to_hex(c) for c in mpl.colormaps[SEQUENTIAL](np.linspace(0, 0.92, n))]


def series(array: xr.DataArray, label: str, color: str, style: str = "solid") -> Line:
    """A number per step as a curve."""
    data = values(array)
    return Line(data["step"].values, data.values.astype(float), label, color, style)


def family(array: xr.DataArray) -> list[Line]:
    """An array [step, names] as a curve per name: layers and parameters coloured by depth, others apart."""
    data = values(some(array))
    names = members(data)
    by_depth = array.dims[1] in ("layer", "parameter") or len(names) > len(CYCLE)
    colors = depth_colors(len(names)) if by_depth else CYCLE[: len(names)]
    rows = zip(names, colors, data.values.astype(float).T, strict=True)
    return [Line(data["step"].values, y, name, color, member=name) for name, color, y in rows]


def side_by_side(groups: Mapping[str, xr.Dataset], looks: Mapping[str, tuple[str, str, str]]) -> list[Line]:
    """One curve per group.

    Args:
        groups: By name.
        looks: By quantity class, the field, its label and colour; a second group of a class is dashed and named.
    """
    lines, seen = [], set()
    for name, node in groups.items():
        kind = node.attrs["quantity"]
        field, label, color = looks[kind]
        again = kind in seen
        lines.append(
            series(node[field], f"{label} ({name})" if again else label, color, "dashed" if again else "solid")
        )
        seen.add(kind)
    return lines


def scalars(node: xr.Dataset) -> dict[str, xr.DataArray]:
    """The numbers per step of a group."""
    return {str(n): a for n, a in node.data_vars.items() if a.dims == ("step",) and a.dtype.kind in "fiu"}


def edges_of(steps: Numbers) -> Numbers:
    """Edges of the columns of a heat map: halfway between the rows."""
    x = np.asarray(steps, dtype=float)
    if len(x) == 1:
        return np.array([x[0] - 0.5, x[0] + 0.5])
    middle = (x[1:] + x[:-1]) / 2
    return np.concatenate([[2 * x[0] - middle[0]], middle, [2 * x[-1] - middle[-1]]])


def windows(data: xr.DataArray, most: int = 60) -> list[slice]:
    """Windows of rows to summarize: epochs if they have several rows, otherwise parts of equal length."""
    rows = data.sizes["step"]
    epoch = data["epoch"].values if "epoch" in data.coords else np.full(rows, np.nan)
    starts = np.flatnonzero(np.diff(epoch, prepend=np.nan) != 0)
    if np.isfinite(epoch).all() and 3 <= len(starts) <= min(rows // 2, most):
        ends = np.append(starts[1:], rows)
    else:
        n = max(1, min(most, rows // 4))
        bounds = np.linspace(0, rows, n + 1).astype(int)
        starts, ends = bounds[:-1], bounds[1:]
    return [slice(int(start), int(end)) for start, end in zip(starts, ends, strict=True)]


def distribution(values: Numbers, edges: Numbers) -> tuple[Numbers, Numbers]:
    """Edges and counts of finite values; values beyond the ends count in the edge bins."""
    counts, _ = np.histogram(np.clip(values[np.isfinite(values)], edges[0], edges[-1]), edges)
    return edges, counts


def scale(lines: Sequence[Line], through_zero: bool = False) -> dict[str, Any]:
    """The scale of the y-axis: logarithmic for curves with a wide range, linear around 0 if some are not above it."""
    parts = [np.abs(y[np.isfinite(y)]) for y in (line.y[:: max(1, len(line.y) // MOST_SIZES)] for line in lines)]
    sizes = np.concatenate(parts) if parts else np.empty(0)
    positive = sizes[sizes > 0]
    if not len(positive) or positive.max() < 10 * np.quantile(positive, 0.02):
        return {}
    if not through_zero and all((line.y[np.isfinite(line.y)] > 0).all() for line in lines):
        return {"scale": "log"}
    return {"scale": "asinh", "linear": max(float(np.quantile(positive, 0.1)), 1 / FARTHEST)}


def spans_decades(cells: Numbers) -> bool:
    """True if colours on a linear scale would show only the largest cells."""
    known = cells[np.isfinite(cells)]
    return bool(len(known) and (known > 0).all() and known.max() > 10 * known.min())


def batch_size(node: xr.Dataset) -> list[Line]:
    """The actual batch size."""
    if "batch_size" not in node.coords:
        return []
    size = node["batch_size"].astype(float)
    return [Line(size["step"].values, size.values, "batch size", BLACK, "dashed")]


def banded(array: xr.DataArray) -> list[Line | Band]:
    """An array [step, names]: for each name, the median of each window as a curve, with the quartiles as a band."""
    data = values(some(array), "epoch")
    names, steps = members(data), data["step"].values.astype(float)
    cuts = windows(data)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a window may be all NaN
        low, middle, high = np.stack([np.nanquantile(data.values[cut], [0.25, 0.5, 0.75], axis=0) for cut in cuts], 1)
    x = np.array([steps[cut].mean() for cut in cuts])
    marks: list[Line | Band] = []
    for k, (name, color) in enumerate(zip(names, depth_colors(len(names)), strict=True)):
        marks += [
            Band(x, low[:, k], high[:, k], color=color, member=name),
            Line(x, middle[:, k], name, color, member=name),
        ]
    return marks


def columns(array: xr.DataArray, which: str) -> tuple[Numbers, Numbers]:
    """Edges of columns, and the minimum or maximum of an array [step, rank] within each; every row is read."""
    kinds: dict[str, Any] = {"min": np.fmin, "max": np.fmax}
    reduce = kinds[which]
    rows, edges = array.sizes["step"], edges_of(array["step"].values)
    most = max(100, min(800, MOST_CELLS // across(array)))
    starts = np.unique(np.linspace(0, rows, min(most, rows) + 1).astype(int)[:-1])
    cells = []
    for begin, block in in_blocks(array, starts):
        inside = starts[(starts >= begin) & (starts < begin + len(block))] - begin
        cells.append(reduce.reduceat(block, inside, axis=0))
    return np.append(edges[starts], edges[-1]), np.concatenate(cells)
