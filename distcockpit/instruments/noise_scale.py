"""The gradient noise scale, and the actual batch size."""

from __future__ import annotations

import numpy as np
import xarray as xr

from distcockpit import run as reading
from distcockpit.instruments.data import batch_size, scale
from distcockpit.instruments.instrument import instrument
from distcockpit.instruments.picture import BLUE, RED, Line, Picture

WEIGHT = 0.95
PARTS = {name: "step" for name in ("noise", "signal", "rank_noise", "rank_signal")}


@instrument("gradients", GradientNoiseScale=PARTS)
def noise_scale(run: xr.DataTree, groups: dict[str, xr.Dataset]) -> Picture:
    """Gradient noise scale, from smoothed parts, estimated from samples and from ranks, next to the batch size.

    McCandlish et al. 2018, arXiv:1812.06162.
    """
    (node,) = groups.values()
    ratios = {
        "from samples": (reading.noise_scale(node, WEIGHT, "samples"), BLUE, "solid"),
        "from ranks": (reading.noise_scale(node, WEIGHT, "ranks"), RED, "dashed"),
    }
    known = np.isfinite(node["noise"].values)  # smoothing carries on where a row has no number; the curve does not
    lines = [
        Line(ratio["step"].values, np.where(known, ratio.values, np.nan), label, color, style)
        for label, (ratio, color, style) in ratios.items()
    ]
    lines += batch_size(node)
    note = f"both parts smoothed with weight {WEIGHT}"
    return Picture("gradient noise scale", "noise / signal [samples]", lines, **scale(lines), note=note)
