"""The sharpest direction, and the stability limit of the learning rate."""

from __future__ import annotations

import xarray as xr

from distcockpit.instruments.data import named, scale, series, values
from distcockpit.instruments.instrument import instrument
from distcockpit.instruments.picture import BLACK, RED, Line, Picture
from distcockpit.store.rows import find


@instrument("curvature", HessMaxEV={"hess_max_ev": "step"})
def max_eigenvalue(run: xr.DataTree, groups: dict[str, xr.Dataset]) -> Picture:
    """Largest eigenvalue of the Hessian, and 2 / learning rate, above which plain gradient descent is unstable.

    Cohen et al. 2021, arXiv:2103.00065.
    """
    (node,) = groups.values()
    lines = [series(node["hess_max_ev"], "largest eigenvalue", RED)]
    for other in find(run, "LearningRate", learning_rate="step param_group").values():
        rate = values(other["learning_rate"]).max("param_group")
        limit = (2 / rate.where(rate > 0)).values
        lines.append(Line(rate["step"].values, limit, "2 / learning rate", BLACK, "dashed"))
    return Picture("sharpness", named(node["hess_max_ev"]), lines, **scale(lines))
