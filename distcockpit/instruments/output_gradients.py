"""Gradients at the outputs of layers: their norms, and whether they change direction."""

from __future__ import annotations

import xarray as xr

from distcockpit.instruments.data import banded, left_out, named, scale
from distcockpit.instruments.instrument import instrument
from distcockpit.instruments.picture import Line, Pages, Picture


@instrument("gradients", OutputGradientGeometry={"norm": "step layer", "correlation": "step layer"})
def output_gradients(run: xr.DataTree, groups: dict[str, xr.Dataset]) -> Pages:
    """Norms, and cosines with the previous tracked step: medians and quartiles per epoch, or per part of the run."""
    (node,) = groups.values()
    pages = {}
    for field, title in {
        "norm": "output gradients by layer",
        "correlation": "change of direction of output gradients",
    }.items():
        marks = banded(node[field])
        scaled = scale([m for m in marks if isinstance(m, Line)]) if field == "norm" else {}
        pages[field] = Picture(
            title,
            named(node[field]),
            marks,
            **scaled,
            note=", ".join(filter(None, ["median and quartiles", left_out(node[field])])),
        )
    return pages
