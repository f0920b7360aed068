"""How far the parameters went: in one step, and from where they began."""

from __future__ import annotations

import xarray as xr

from distcockpit.instruments.data import named, scale, series
from distcockpit.instruments.instrument import instrument
from distcockpit.instruments.picture import BLUE, RED, Picture


@instrument("step size", Distance={"total": "step"}, UpdateSize={"total": "step"})
def distance(run: xr.DataTree, groups: list[xr.Dataset]) -> Picture:
    """Distance from the start, and size of the update, of all parameters together."""
    looks = {"Distance": ("from the start", BLUE), "UpdateSize": ("of one step", RED)}
    lines = [series(node["total"], *looks[node.attrs["quantity"]]) for node in groups]
    return Picture("how far the parameters went", named(groups[0]["total"], "length"), lines, **scale(lines))
