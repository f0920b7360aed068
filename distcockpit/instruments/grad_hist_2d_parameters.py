"""Gradient elements against parameters, separately for each parameter tensor."""

from __future__ import annotations

import xarray as xr

from distcockpit.instruments.grad_hist_2d import FIELDS, joint
from distcockpit.instruments.instrument import instrument
from distcockpit.instruments.picture import Pages


@instrument("gradients", GradHist2d={**FIELDS, "counts_per_parameter": "step parameter grad_bin param_bin"})
def grad_hist_2d_parameters(run: xr.DataTree, groups: dict[str, xr.Dataset]) -> Pages:
    """The newest histogram of each parameter, as stored by `GradHist2d(keep_individual=True)`."""
    (node,) = groups.values()
    newest = node["counts_per_parameter"].isel(step=-1)
    names = [str(name) for name in newest["parameter"].values]
    return {name: joint(node, counts, name) for name, counts in zip(names, newest.values, strict=True)}
