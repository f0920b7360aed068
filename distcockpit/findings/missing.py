"""What was not measured: a run without rows, and quantities that have no number."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import xarray as xr

from distcockpit.findings.rule import LOOK, WINDOW, Finding, some

MOST = 3
"""Notices that are repeated."""

SOURCE = "By definition: what has no number cannot be checked"


def missing(run: xr.DataTree) -> Iterator[Finding]:
    """Say that nothing was tracked, or which quantities are NaN in the newest rows, with what the run noticed."""
    quantities = {str(name): node for name, node in run.children.items() if node.attrs.get("quantity")}
    tracked = {name: node for name, node in quantities.items() if node.sizes.get("step")}
    noticed = [str(dict(notice).get("text", "")) for notice in run.attrs.get("notices", ())]
    common: dict[str, Any] = {"rule": "quantities without a number", "severity": LOOK, "source": SOURCE}
    if quantities and not tracked:
        words = " ".join(noticed[:MOST]) or (
            "No step was tracked yet. The forward and backward passes belong inside `with cockpit.track(step):`, at "
            "steps that the schedule names."
        )
        yield Finding(title="nothing was tracked", words=words, picture="", **common)
        return
    # Only those that a notice names: others are NaN by their definition, as of a batch of one sample.
    reasons = {
        name: [text for text in noticed if "NaN" in text and re.search(rf"\b{name}\b", text)] for name in tracked
    }
    unknown = [name for name, node in tracked.items() if reasons[name] and _is_unknown(node.to_dataset())]
    if unknown:
        told = list(dict.fromkeys(text for name in unknown for text in reasons[name]))
        words = f"They are NaN in the newest rows: {some(unknown)}. {' '.join(told[:MOST])}"
        title = f"{len(unknown)} of {len(tracked)} quantities have no number"
        yield Finding(title=title, words=words, picture=unknown[0], **common)


def _is_unknown(group: xr.Dataset) -> bool:
    """True if the first array of the group, which is what it is about, holds no number in the newest rows."""
    for array in group.data_vars.values():
        if array.dims[:1] == ("step",) and array.dtype.kind == "f":
            return not np.isfinite(array[-WINDOW:].values).any()
    return False
