"""How much the samples agree."""

from __future__ import annotations

import xarray as xr

from distcockpit.instruments.data import named, scale, series
from distcockpit.instruments.instrument import instrument
from distcockpit.instruments.picture import BLUE, Picture


@instrument("gradients", MeanGSNR={"mean_gsnr": "step"})
def gsnr(run: xr.DataTree, groups: dict[str, xr.Dataset]) -> Picture:
    """Mean gradient signal-to-noise ratio. Liu et al. 2020, arXiv:2001.07384."""
    (node,) = groups.values()
    lines = [series(node["mean_gsnr"], "", BLUE)]
    return Picture("gradient signal-to-noise ratio", named(node["mean_gsnr"]), lines, **scale(lines))
