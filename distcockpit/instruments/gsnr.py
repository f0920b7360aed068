"""How much the samples agree."""

from __future__ import annotations

import xarray as xr

from distcockpit.instruments.data import named, scale, series
from distcockpit.instruments.instrument import instrument
from distcockpit.instruments.picture import BLUE, Picture


@instrument("gradients", MeanGSNR={"mean_gsnr": "step"})
def gsnr(run: xr.DataTree, groups: list[xr.Dataset]) -> Picture:
    """Mean gradient signal-to-noise ratio. Liu et al. 2020, arXiv:2001.07384."""
    lines = [series(groups[0]["mean_gsnr"], "", BLUE)]
    return Picture("gradient signal-to-noise ratio", named(groups[0]["mean_gsnr"]), lines, **scale(lines))
