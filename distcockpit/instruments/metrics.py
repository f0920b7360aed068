"""Anything else the user logged: accuracies and the like."""

from __future__ import annotations

import xarray as xr

from distcockpit.instruments.data import named, scalars, series
from distcockpit.instruments.instrument import instrument
from distcockpit.instruments.picture import BLUE, Pages, Picture


@instrument("training", log={})
def metrics(run: xr.DataTree, groups: dict[str, xr.Dataset]) -> Pages:
    """One picture for each logged scalar that is not a loss."""
    (node,) = groups.values()
    found = {name: array.dropna("step") for name, array in scalars(node).items() if "loss" not in name.lower()}
    return {name: Picture(name, named(array), [series(array, name, BLUE)]) for name, array in found.items()}
