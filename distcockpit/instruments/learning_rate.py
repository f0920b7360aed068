"""Learning rates."""

from __future__ import annotations

import xarray as xr

from distcockpit.instruments.data import family, named, scale
from distcockpit.instruments.instrument import instrument
from distcockpit.instruments.picture import Picture


@instrument("training", LearningRate={"learning_rate": "step param_group"})
def learning_rate(run: xr.DataTree, groups: dict[str, xr.Dataset]) -> Picture:
    """The learning rate of each parameter group."""
    (node,) = groups.values()
    rates = node["learning_rate"]
    lines = family(rates)
    return Picture("learning rate", named(rates), lines, **scale(lines))
