"""From a run to what a picture needs: which groups there are, their numbers, and as many of them as a screen shows."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import matplotlib as mpl
import numpy as np
import xarray as xr
from matplotlib.colors import to_hex

from distcockpit.instruments.picture import BLACK, SEQUENTIAL, Band, Line, Numbers

MOST_POINTS = 30_000
"""Of all curves of a picture; ten curves have two for each column of a plot on a large screen."""

MOST_NUMBERS = 4_000_000
"""Numbers that are read for one picture: 32 MB."""


MOST_COLUMNS = 400
"""Columns of a heat map over steps."""

MOST_MEMBERS = 256
"""Curves of one picture; of more names, as many at equal distances."""


def find(run: xr.DataTree, kind: str, **fields: str) -> dict[str, xr.Dataset]:
    """The groups of a class of quantities that have rows, by name.

    Args:
        run: A run.
        kind: Name of the class, ``"HessTrace"``; the groups may have any names.
        fields: Arrays that the group must have, with their dimensions, ``trace="step parameter"``.
    """

    def fits(node: xr.DataTree) -> bool:
        there = node.data_vars
        return bool(node.sizes.get("step")) and all(
            name in there and there[name].dims == tuple(dims.split()) and there[name].dtype.kind in "fiu"
            for name, dims in fields.items()
        )

    return {
        name: node.to_dataset()
        for name, node in run.children.items()
        if node.attrs.get("quantity", name) == kind and fits(node)
    }


def named(array: xr.DataArray, what: str = "") -> str:
    """The label of an axis: what it is and its unit."""
    return f"{what or array.attrs.get('long_name', array.name)} [{array.attrs.get('units', '1')}]"


def thinned(lines: Sequence[Line]) -> list[Line]:
    """Curves with no more points than a screen shows."""
    most = max(100, MOST_POINTS // max(1, 2 * len(lines)))
    return [replace(line, x=x, y=y) for line in lines for x, y in [thin(line.x, line.y, min(most, 2000))]]


def thin(x: Numbers, y: Numbers, most: int) -> tuple[Numbers, Numbers]:
    """The lowest and the highest point of each stretch, in their order.

    Args:
        x: Shape [n].
        y: Shape [n].
        most: Number of stretches.
    """
    if len(y) <= 2 * most:
        return x, y
    edges = np.linspace(0, len(y), most + 1).astype(int)
    known = np.isfinite(y)
    low = np.where(known, y, np.inf)
    high = np.where(known, y, -np.inf)
    kept = []
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        kept += sorted({start + int(np.argmin(low[start:end])), start + int(np.argmax(high[start:end]))})
    index = np.array(kept)
    return x[index], y[index]


def few(array: xr.DataArray, most: int) -> xr.DataArray:
    """At most so many rows, at equal distances, first and last among them; as stored, not read yet."""
    rows = array.sizes["step"]
    return array if rows <= most else array.isel(step=np.linspace(0, rows - 1, most).astype(int))


def values(array: xr.DataArray) -> xr.DataArray:
    """The numbers, step first; fewer rows of what would be too many to read."""
    across = max(1, array.size // max(1, array.sizes["step"]))
    return few(array.transpose("step", ...), max(1, MOST_NUMBERS // across)).load()


def some(array: xr.DataArray) -> xr.DataArray:
    """As many names along the second dimension as can be drawn."""
    dim, n = array.dims[1], array.shape[1]
    return array if n <= MOST_MEMBERS else array.isel({dim: np.linspace(0, n - 1, MOST_MEMBERS).astype(int)})


def members(array: xr.DataArray) -> list[str]:
    """Names along the second dimension: of layers and parameters; ranks and the like are numbers."""
    dim = array.dims[1]
    return [str(v) for v in array[dim].values] if dim in array.coords else [f"{dim} {k}" for k in range(array.shape[1])]


def depth_colors(n: int) -> list[str]:
    """From the first layer, dark, to the last."""
    return [to_hex(c) for c in mpl.colormaps[SEQUENTIAL](np.linspace(0, 0.92, n))]


def series(array: xr.DataArray, label: str, color: str, style: str = "solid") -> Line:
    """A number per step as a curve."""
    data = values(array)
    return Line(data["step"].values, data.values.astype(float), label, color, style)


def family(array: xr.DataArray) -> list[Line]:
    """An array [step, names] as a curve per name, coloured by depth."""
    data = values(some(array))
    names = members(data)
    rows = zip(names, depth_colors(len(names)), data.values.astype(float).T, strict=True)
    return [Line(data["step"].values, y, name, color, member=name) for name, color, y in rows]


def side_by_side(groups: Mapping[str, xr.Dataset], looks: Mapping[str, tuple[str, str, str]]) -> list[Line]:
    """A curve of each group.

    Args:
        groups: By name.
        looks: By class of quantity the field, its label and colour; a second group of a class is dashed, and named.
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


def edges_of(steps: Numbers) -> Numbers:
    """Edges of the columns of a heat map: half-way between the rows."""
    x = np.asarray(steps, dtype=float)
    if len(x) == 1:
        return np.array([x[0] - 0.5, x[0] + 0.5])
    middle = (x[1:] + x[:-1]) / 2
    return np.concatenate([[2 * x[0] - middle[0]], middle, [2 * x[-1] - middle[-1]]])


def windows(data: xr.DataArray, most: int = 60) -> list[slice]:
    """Stretches of rows to be summed up as one: epochs, where they have several rows, else parts of equal length."""
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
    """Edges and counts of finite values; those beyond the ends count in the last bins."""
    counts, _ = np.histogram(np.clip(values[np.isfinite(values)], edges[0], edges[-1]), edges)
    return edges, counts


def scale(lines: Sequence[Line], through_zero: bool = False) -> dict[str, Any]:
    """The scale of the y-axis: logarithmic for curves that span much, linear around 0 where some are not above it."""
    parts = [np.abs(line.y[np.isfinite(line.y)]) for line in lines]
    sizes = np.concatenate(parts) if parts else np.empty(0)
    positive = sizes[sizes > 0]
    if not len(positive) or positive.max() < 10 * np.quantile(positive, 0.02):
        return {}
    if not through_zero and all((line.y[np.isfinite(line.y)] > 0).all() for line in lines):
        return {"scale": "log"}
    return {"scale": "asinh", "linear": float(np.quantile(positive, 0.1))}


def batch_size(node: xr.Dataset) -> list[Line]:
    """The batch size that was used."""
    if "batch_size" not in node.coords:
        return []
    size = node["batch_size"].astype(float)
    return [Line(size["step"].values, size.values, "batch size", BLACK, "dashed")]


def banded(array: xr.DataArray) -> list[Line | Band]:
    """An array [step, names]: by name the median of each window as a curve, the quartiles as a band around it."""
    data = values(some(array))
    names, steps = members(data), data["step"].values.astype(float)
    cuts = windows(data)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a window may be NaN altogether
        low, middle, high = np.stack([np.nanquantile(data.values[cut], [0.25, 0.5, 0.75], axis=0) for cut in cuts], 1)
    x = np.array([steps[cut].mean() for cut in cuts])
    marks: list[Line | Band] = []
    for k, (name, color) in enumerate(zip(names, depth_colors(len(names)), strict=True)):
        marks += [
            Band(x, low[:, k], high[:, k], color=color, member=name),
            Line(x, middle[:, k], name, color, member=name),
        ]
    return marks


def columns(array: xr.DataArray, which: str, most: int = 800) -> tuple[Numbers, Numbers]:
    """Edges of columns, and the least or the greatest of an array [step, rank] within each."""
    data = values(array)
    reduce = {"min": np.fmin, "max": np.fmax}[which]
    starts = np.unique(np.linspace(0, len(data), min(most, len(data)) + 1).astype(int)[:-1])
    return edges_of(data["step"].values[starts]), reduce.reduceat(data.values, starts, axis=0)
