"""A short summary of a run, in words and as data for scripts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from distcockpit.findings import check
from distcockpit.store.names import plain


def facts(run: xr.DataTree) -> dict[str, str]:
    """A few facts about a run, as committed."""
    attributes = run.attrs
    last = max((pd.Timestamp(group["wall_time"].values[-1], tz="UTC") for group in _with_rows(run)), default=None)
    newest = "" if last is None else f"{last.floor('s').to_pydatetime().astimezone():%Y-%m-%d %H:%M:%S %Z}"
    told = {
        "state": " – ".join(filter(None, map(str, (attributes.get("state", ""), attributes.get("reason", ""))))),
        "ranks": attributes.get("world_size", ""),
        "up to step": attributes.get("committed_step", ""),
        "newest row": newest,
        "quantities": len(run.children),
        "parts": len(attributes.get("segments", ())),
        "dropped rows": attributes.get("dropped_rows") or "",
        "torch": dict(attributes.get("versions", {})).get("torch", ""),
    }
    return {name: plain(value, 200) for name, value in told.items() if value != ""}


def _with_rows(run: xr.DataTree) -> list[xr.Dataset]:
    groups = [node.to_dataset() for node in run.children.values()]
    there = [g for g in groups if g.sizes.get("step") and "wall_time" in g.coords and g["wall_time"].dtype.kind == "M"]
    return [group for group in there if not np.isnat(group["wall_time"].values[-1])]


def summary(run: xr.DataTree, name: str, size: int) -> dict[str, Any]:
    """The same for scripts, with all quantities and findings; names are unchanged from the store.

    Args:
        run: What `open_run` returns.
        name: Where the run is.
        size: Its size in bytes.
    """
    quantities = {}
    for group, child in run.children.items():
        node = child.to_dataset()
        steps = node["step"].values
        quantities[group] = {
            "class": str(node.attrs.get("quantity", "")),
            "rows": len(steps),
            "first_step": int(steps[0]) if len(steps) else None,
            "last_step": int(steps[-1]) if len(steps) else None,
            "newest": {str(k): _number(v) for k, v in node.data_vars.items() if v.dims == ("step",) and len(steps)},
        }
    known = ("state", "reason", "world_size", "committed_step", "generation", "commit", "dropped_rows", "segments")
    return {
        "run": name,
        **{key: run.attrs[key] for key in (*known, "versions") if key in run.attrs},
        "bytes": size,
        "quantities": quantities,
        "findings": [finding.as_dict() for finding in check(run).findings],
    }


def _number(array: xr.DataArray) -> float | int | None:
    """The newest value; JSON has neither NaN nor infinity."""
    value = np.asarray(array.isel(step=-1)).item()
    return value if isinstance(value, int | float) and math.isfinite(value) else None
