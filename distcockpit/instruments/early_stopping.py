"""The early-stopping criterion: is the gradient more than noise?"""

from __future__ import annotations

import xarray as xr

from distcockpit.instruments.data import named, scale, series
from distcockpit.instruments.instrument import instrument
from distcockpit.instruments.picture import BLUE, ORANGE, Level, Mark, Picture, Zone


@instrument("gradients", EarlyStopping={"early_stopping": "step"})
def early_stopping(run: xr.DataTree, groups: dict[str, xr.Dataset]) -> Picture:
    """The evidence-based criterion: above 0, the gradient is what noise alone would produce.

    Mahsereci et al. 2017, arXiv:1703.09580.
    """
    (node,) = groups.values()
    line = series(node["early_stopping"], "criterion", BLUE)
    marks: list[Mark] = [Zone(0, float("inf"), ORANGE, "only noise"), Level(0), line]
    return Picture("early stopping", named(node["early_stopping"]), marks, **scale([line], through_zero=True))
