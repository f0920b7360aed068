"""Gradient elements against the parameters they belong to, for the newest row."""

from __future__ import annotations

import xarray as xr

from distcockpit.instruments.data import named
from distcockpit.instruments.instrument import instrument
from distcockpit.instruments.picture import Bars, Heat, Numbers, Picture

FIELDS = {
    "counts": "step grad_bin param_bin",
    "grad_edges": "step grad_edge",
    "param_edges": "step param_edge",
}


@instrument("gradients", GradHist2d=FIELDS)
def grad_hist_2d(run: xr.DataTree, groups: dict[str, xr.Dataset]) -> Picture:
    """Pairs of gradient element and parameter, coloured by the log of their count, with both marginals.

    Schneider et al. 2021, arXiv:2102.06604, section 3.2.
    """
    (node,) = groups.values()
    return joint(node, node["counts"].isel(step=-1).values, "gradients and parameters")


def joint(node: xr.Dataset, counts: Numbers, what: str) -> Picture:
    """The newest row of a two-dimensional histogram, counts [gradient, parameter]."""
    x, y = (node[f"{axis}_edges"].isel(step=-1).values for axis in ("param", "grad"))
    return Picture(
        f"{what}, step {int(node['step'][-1])}",
        named(node["grad_edges"], "value of a gradient element"),
        [Heat(x, y, counts, named(node["counts"], "pairs"), log=True)],
        x=named(node["param_edges"], "value of its parameter"),
        right=Bars(y, counts.sum(axis=1)),
        top=Bars(x, counts.sum(axis=0)),
    )
