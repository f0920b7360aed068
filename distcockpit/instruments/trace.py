"""The trace of the curvature, overall and by parameter."""

from __future__ import annotations

import xarray as xr

from distcockpit.instruments.data import family, left_out, named, scale, series, values
from distcockpit.instruments.instrument import instrument
from distcockpit.instruments.picture import RED, Band, Line, Picture


@instrument("curvature", HessTrace={"trace": "step parameter", "total": "step"})
def trace(run: xr.DataTree, groups: dict[str, xr.Dataset]) -> Picture:
    """Trace of the Hessian or its approximation: by parameter, and over all; estimates have standard errors."""
    (node,) = groups.values()
    lines: list[Line] = [*family(node["trace"]), series(node["total"], "all", RED, "dashed")]
    bands = []
    if "total_standard_error" in node.data_vars:
        total, error = values(node["total"]), values(node["total_standard_error"])
        low, high = (total - error).values, (total + error).values
        bands = [Band(total["step"].values, low, high, "± one standard error", RED)]
    kind = str(dict(node.attrs.get("options", {})).get("curvature", "")).strip("'\"")
    title = f"curvature trace ({kind})" if kind else "curvature trace"
    return Picture(title, named(node["total"], "trace"), [*bands, *lines], **scale(lines), note=left_out(node["trace"]))
