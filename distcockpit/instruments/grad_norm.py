"""The norm of the mean gradient, overall and by parameter."""

from __future__ import annotations

import xarray as xr

from distcockpit.instruments.data import family, left_out, named, scale, series
from distcockpit.instruments.instrument import instrument
from distcockpit.instruments.picture import RED, Picture


@instrument("gradients", GradNorm={"grad_norm": "step parameter", "total": "step"})
def grad_norm(run: xr.DataTree, groups: dict[str, xr.Dataset]) -> Picture:
    """Norm of the gradient: by parameter, from the first (dark) to the last (light), and over all parameters."""
    (node,) = groups.values()
    lines = [*family(node["grad_norm"]), series(node["total"], "all", RED, "dashed")]
    return Picture(
        "gradient norm",
        named(node["total"], "norm of the mean gradient"),
        lines,
        **scale(lines),
        note=left_out(node["grad_norm"]),
    )
