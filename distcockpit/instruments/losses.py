"""Losses: of the whole batch, and those that the user logged."""

from __future__ import annotations

import xarray as xr

from distcockpit.instruments.data import scale, series
from distcockpit.instruments.instrument import instrument
from distcockpit.instruments.picture import CYCLE, Picture


@instrument("performance", Loss={"loss": "step"}, log={})
def losses(run: xr.DataTree, groups: dict[str, xr.Dataset]) -> Picture:
    """The pooled loss, and what was logged under a name with "loss" in it."""
    found = []
    for node in groups.values():
        if node.attrs.get("quantity") == "Loss":
            found.append((node["loss"], "pooled loss"))
        else:
            found += [(array, str(name)) for name, array in node.data_vars.items() if "loss" in str(name).lower()]
    lines = [series(array, name, CYCLE[k % len(CYCLE)]) for k, (array, name) in enumerate(found)]
    return Picture("losses", "loss [loss]", lines, **scale(lines))
