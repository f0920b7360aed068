"""What looks wrong in a run, in words: rules on the rows of a store, each with the source it is based on.

May import: store. Does not need torch.
"""

from __future__ import annotations

import warnings

import numpy as np
import xarray as xr

from distcockpit.findings import layers, numbers, ranks, steps  # noqa: F401 - they register their rules
from distcockpit.findings.missing import missing
from distcockpit.findings.rule import RULES, WRONG, Checked, Finding
from distcockpit.store.rows import find

__all__ = ["RULES", "Checked", "Finding", "check"]


def check(run: xr.DataTree) -> Checked:
    """Apply all rules.

    Args:
        run: What `open_run` returns.

    Returns:
        What looks wrong, the most certain first, and the rules that the run lacks quantities for.
    """
    findings, unchecked = list(missing(run)), {}
    for one in RULES:
        groups = [group for kind, fields in one.needs.items() for group in find(run, kind, **fields).values()]
        if not groups:
            unchecked[one.name] = " or ".join(one.needs)
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")  # rows may be all NaN
            for group in groups:
                findings += [
                    Finding(rule=one.name, picture=one.picture, source=one.source, url=one.url, **told)
                    for told in one.apply(run, group)
                ]
    return Checked(sorted(findings, key=lambda f: f.severity != WRONG), unchecked)
