"""The norm of the gradient beside its standard error: signal and noise in the same unit."""

from __future__ import annotations

import numpy as np
import xarray as xr

from distcockpit.instruments.data import named, scale, series, values
from distcockpit.instruments.instrument import instrument
from distcockpit.instruments.picture import BLUE, RED, Line, Picture


@instrument("gradients", GradNorm={"total": "step"}, NormTest={"norm_test": "step"})
def gradient_size(run: xr.DataTree, groups: dict[str, xr.Dataset]) -> Picture:
    """Norm of the gradient of all parameters, and its standard error over samples: noise dominates where it is higher.

    The standard error is the norm times the norm test. Byrd et al. 2012.
    """
    norms = {name: node["total"] for name, node in groups.items() if node.attrs.get("quantity") == "GradNorm"}
    tests = [node["norm_test"] for node in groups.values() if node.attrs.get("quantity") == "NormTest"]
    if not norms:
        return Picture("gradient and its noise", "", [])
    norm = next(iter(norms.values()))
    lines = [series(norm, "norm of the gradient", BLUE)]
    if tests:
        length, test = values(norm), values(tests[0])
        steps, of_norm, of_test = np.intersect1d(length["step"].values, test["step"].values, return_indices=True)
        lines.append(Line(steps, length.values[of_norm] * test.values[of_test], "its standard error", RED))
    return Picture("gradient and its noise", named(norm, "length"), lines, **scale(lines))
