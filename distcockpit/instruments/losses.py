"""Losses: of the pooled batch, and those the user logged."""

from __future__ import annotations

import xarray as xr

from distcockpit.instruments.data import scalars, scale, series
from distcockpit.instruments.instrument import instrument
from distcockpit.instruments.picture import CYCLE, Picture


@instrument("training", Loss={"loss": "step"}, log={})
def losses(run: xr.DataTree, groups: dict[str, xr.Dataset]) -> Picture:
    """The pooled loss, and everything logged under a name that contains "loss"."""
    found: list[tuple[xr.DataArray, str]] = []
    for name, node in groups.items():
        if node.attrs.get("quantity") == "Loss":
            found.append((node["loss"], "pooled loss" if not found else f"pooled loss ({name})"))
        else:
            found += [(array.dropna("step"), key) for key, array in scalars(node).items() if "loss" in key.lower()]
    lines = [series(array, name, CYCLE[k % len(CYCLE)]) for k, (array, name) in enumerate(found)]
    return Picture("losses", "loss", lines, **scale(lines))
