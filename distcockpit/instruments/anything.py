"""Any quantity without its own instrument: custom quantities, and those whose arrays speak for themselves."""

from __future__ import annotations

import numpy as np
import xarray as xr

from distcockpit.instruments.data import (
    MOST_COLUMNS,
    MOST_MEMBERS,
    edges_of,
    family,
    left_out,
    named,
    scale,
    series,
    some,
    spans_decades,
    values,
)
from distcockpit.instruments.picture import BLUE, Heat, Pages, Picture
from distcockpit.store.rows import few

MOST_CURVES = 64
"""Maximum number of curves without names: more become a heat map."""


def anything(name: str, node: xr.Dataset) -> Pages:
    """A plot for each array: one curve, a curve per name, or for larger arrays the newest row as a heat map."""
    arrays = {str(name): a for name, a in node.data_vars.items() if a.dtype.kind in "fiu" and a.dims[:1] == ("step",)}
    floats = {name: a for name, a in arrays.items() if a.dtype.kind == "f"}
    return {field: _picture(f"{name}: {a.attrs.get('long_name', field)}", a) for field, a in (floats or arrays).items()}


def _picture(title: str, array: xr.DataArray) -> Picture:
    note = left_out(array)
    if array.ndim == 2 and array.dims[1] not in array.coords and array.shape[1] > MOST_CURVES:
        rows = values(few(some(array), MOST_COLUMNS))
        edges = edges_of(rows["step"].values), np.arange(rows.shape[1] + 1) - 0.5
        heat = Heat(*edges, rows.values.T, named(array), log=spans_decades(rows.values))
        return Picture(title, str(array.dims[1]), [heat], note=note)
    if array.ndim <= 2:
        lines = [series(array, "", BLUE)] if array.ndim == 1 else family(array)
        return Picture(title, named(array), lines, **scale(lines), note=note)
    newest = array.isel(step=-1)
    cut = newest.isel({dim: slice(MOST_MEMBERS) for dim in newest.dims})
    cells = cut.values.reshape(cut.shape[0], -1)[:, :MOST_COLUMNS]
    note = "" if cells.size == newest.size else f"the first {cells.shape[0]} × {cells.shape[1]} cells of {newest.shape}"
    y, x = (np.arange(n + 1) - 0.5 for n in cells.shape)
    heat = Heat(x, y, cells, named(array), log=spans_decades(cells))
    return Picture(
        f"{title}, step {int(array['step'][-1])}",
        str(newest.dims[0]),
        [heat],
        x=" × ".join(map(str, newest.dims[1:])),
        note=note,
    )
