"""How far the parameters moved: in one step, and from their initial values."""

from __future__ import annotations

import xarray as xr

from distcockpit.instruments.data import scale, side_by_side
from distcockpit.instruments.instrument import instrument
from distcockpit.instruments.picture import BLUE, RED, Picture


@instrument("step size", Distance={"total": "step"}, UpdateSize={"total": "step"})
def distance(run: xr.DataTree, groups: dict[str, xr.Dataset]) -> Picture:
    """Distance from the start, and size of each update, over all parameters."""
    looks = {"Distance": ("total", "from the start", BLUE), "UpdateSize": ("total", "per step", RED)}
    lines = side_by_side(groups, looks)
    return Picture("how far the parameters moved", "length [parameter units]", lines, **scale(lines))
