"""The three tests of whether a batch is large enough, in one plot."""

from __future__ import annotations

import xarray as xr

from distcockpit.instruments.data import scale, side_by_side
from distcockpit.instruments.instrument import instrument
from distcockpit.instruments.picture import BLUE, GREEN, RED, Level, Picture


@instrument(
    "gradients", NormTest={"norm_test": "step"}, InnerTest={"inner_test": "step"}, OrthoTest={"ortho_test": "step"}
)
def gradient_tests(run: xr.DataTree, groups: dict[str, xr.Dataset]) -> Picture:
    """Relative standard error of the gradient: in all directions, along it, and across it; at 1 it equals the gradient.

    Byrd et al. 2012 (norm test); Bollapragada et al. 2018, arXiv:1710.11258 (inner product and orthogonality test).
    """
    looks = {
        "NormTest": ("norm_test", "norm test: in all directions", BLUE),
        "InnerTest": ("inner_test", "inner product test: along the gradient", RED),
        "OrthoTest": ("ortho_test", "orthogonality test: across the gradient", GREEN),
    }
    lines = side_by_side(groups, looks)
    return Picture(
        "noise of the batch gradient",
        "relative standard error of the gradient",
        [Level(1, "as large as the gradient"), *lines],
        **scale(lines),
    )
