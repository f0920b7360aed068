"""The batch size that suits the learning rate, and the one that was used."""

from __future__ import annotations

import xarray as xr

from distcockpit.instruments.data import batch_size, named, scale, series
from distcockpit.instruments.instrument import instrument
from distcockpit.instruments.picture import BLUE, Picture


@instrument("step size", CABS={"cabs": "step"})
def cabs(run: xr.DataTree, groups: dict[str, xr.Dataset]) -> Picture:
    """The batch size suggested by CABS, next to the one that was used. Balles et al. 2017, arXiv:1612.05086."""
    (node,) = groups.values()
    lines = [series(node["cabs"], "suggested by CABS", BLUE), *batch_size(node)]
    return Picture("batch size for this learning rate", named(node["cabs"], "batch size"), lines, **scale(lines))
