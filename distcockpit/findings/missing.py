"""What was not measured: a run without rows, and quantities that have no number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import xarray as xr

from distcockpit.findings.rule import LOOK, WINDOW, Finding, some

SOURCE = "By definition: what has no number cannot be checked"


def missing(run: xr.DataTree) -> Iterator[Finding]:
    """Say that nothing was tracked, or which quantities are NaN in the newest rows, with what the run noticed."""
    quantities = {str(name): node for name, node in run.children.items() if node.attrs.get("quantity")}
    tracked = {name: node for name, node in quantities.items() if node.sizes.get("step")}
    noticed = " ".join(str(dict(notice).get("text", "")) for notice in list(run.attrs.get("notices", ()))[:3])
    common: dict[str, Any] = {"rule": "quantities without a number", "severity": LOOK, "source": SOURCE}
    if quantities and not tracked:
        words = noticed or (
            "No step was tracked yet. The forward and backward passes belong inside `with cockpit.track(step):`, at "
            "steps that the schedule names."
        )
        yield Finding(title="nothing was tracked", words=words, picture="", **common)
        return
    unknown = [name for name, node in tracked.items() if _is_unknown(node.to_dataset())]
    if unknown and noticed:  # some are NaN by their definition, as of a single sample, and nobody noticed anything
        words = f"They are NaN in the newest rows: {some(unknown)}. {noticed}"
        title = f"{len(unknown)} of {len(tracked)} quantities have no number"
        yield Finding(title=title, words=words, picture=unknown[0], **common)


def _is_unknown(group: xr.Dataset) -> bool:
    """True if the first array of the group, which is what it is about, holds no number in the newest rows."""
    for array in group.data_vars.values():
        if array.dims[:1] == ("step",) and array.dtype.kind == "f":
            return not np.isfinite(array[-WINDOW:].values).any()
    return False
