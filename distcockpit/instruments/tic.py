"""The Takeuchi information criterion: gradient noise where the loss is flat."""

from __future__ import annotations

import xarray as xr

from distcockpit.instruments.data import scale, side_by_side
from distcockpit.instruments.instrument import instrument
from distcockpit.instruments.picture import BLUE, RED, Picture


@instrument("curvature", TICDiag={"tic_diag": "step"}, TICTrace={"tic_trace": "step"})
def tic(run: xr.DataTree, groups: dict[str, xr.Dataset]) -> Picture:
    """TIC from diagonals and from traces. Thomas et al. 2020, arXiv:1906.07774."""
    looks = {"TICDiag": ("tic_diag", "from diagonals", BLUE), "TICTrace": ("tic_trace", "from traces", RED)}
    lines = side_by_side(groups, looks)
    return Picture("Takeuchi information criterion", "TIC [loss]", lines, **scale(lines))
