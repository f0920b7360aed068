"""The effective step size: the gauge of Cockpit's panel, over time, with its distribution."""

from __future__ import annotations

import numpy as np
import pandas as pd
import xarray as xr

from distcockpit.instruments.data import distribution, named, values
from distcockpit.instruments.instrument import instrument
from distcockpit.instruments.picture import BLACK, BLUE, GREY, ORANGE, Bars, Level, Line, Picture, Zone


@instrument("step size", Alpha={"alpha": "step"})
def alpha(run: xr.DataTree, groups: dict[str, xr.Dataset]) -> Picture:
    """Alpha by step and its distribution; shaded where steps overshoot the minimum of the fit (above 0) or fall short.

    Schneider et al. 2021, arXiv:2102.06604.
    """
    (node,) = groups.values()
    data = values(node["alpha"])
    x, y = data["step"].values, data.values
    window = max(1, min(len(y) // 10, 51))
    median = pd.Series(y).rolling(window, center=True, min_periods=1).median().to_numpy()
    median = np.where(np.isfinite(y), median, np.nan)  # a gap stays a gap
    known = y[np.isfinite(y)]
    reach = max(2.0, *np.abs(np.quantile(known, [0.001, 0.999]))) if len(known) else 2.0
    bins = np.sinh(np.linspace(-np.arcsinh(reach), np.arcsinh(reach), 41))
    return Picture(
        "effective step size",
        named(node["alpha"], "α, effective step size"),
        [
            Zone(0, np.inf, ORANGE, "beyond the minimum"),
            Zone(-np.inf, 0, BLUE, "short of the minimum"),
            Level(0),
            Line(x, y, "each row", GREY, "points"),
            Line(x, median, f"rolling median of {window}", BLACK),
        ],
        scale="asinh",
        right=Bars(*distribution(y, bins)),
    )
