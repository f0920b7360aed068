"""Ranks side by side: which ones differ in their data, gradients or timings."""

from __future__ import annotations

import numpy as np
import xarray as xr

from distcockpit.instruments.data import columns, named, spans_decades, values
from distcockpit.instruments.instrument import instrument
from distcockpit.instruments.picture import Heat, Pages, Picture
from distcockpit.store.rows import in_blocks

RANKS = "step rank"
SHOWN = {
    "cosine": ("agreement with the pooled gradient", "min"),
    "loss": ("loss of each rank", "max"),
    "grad_norm": ("gradient norm of each rank", "max"),
    "forward_seconds": ("time in the forward pass", "max"),
    "outside_seconds": ("time outside of `track`", "max"),
    "nonfinite_gradients": ("non-finite gradient elements", "max"),
    "nonfinite_losses": ("non-finite losses", "max"),
    "local_batch_size": ("batch size of each rank", "max"),
}
"""What is shown, and which of several steps in a column of the plot: the most informative one."""

WHERE_THERE = {"nonfinite_gradients", "nonfinite_losses"}


@instrument(
    "ranks",
    RankDisagreement={"cosine": RANKS, "loss": RANKS, "grad_norm": RANKS},
    RankHealth={"step_seconds": RANKS},
    ReplicaDrift={"replica_drift": "step", "differs": "step parameter rank"},
)
def ranks(run: xr.DataTree, groups: dict[str, xr.Dataset]) -> Pages:
    """Heat maps over ranks and steps: agreement with the pooled gradient, losses, norms, times, and what went wrong."""
    pages = {}
    for field, (title, which) in SHOWN.items():
        for name, node in groups.items():
            if field in node.data_vars and node[field].dims == ("step", "rank"):
                if field not in WHERE_THERE or any((block > 0).any() for _, block in in_blocks(node[field])):
                    pages[field if field not in pages else f"{field} ({name})"] = _picture(node[field], title, which)
    for node in groups.values():
        if "differs" in node.data_vars and (node["replica_drift"].values > 0).any():
            # Few rows differ, if any: read only those.
            apart = node["differs"].isel(step=np.flatnonzero(node["replica_drift"].values > 0))
            count = values(apart).sum("parameter").assign_attrs(units="parameters")
            pages["differs"] = _picture(count, "parameters that differ from the majority", "max")
    return pages


def _picture(array: xr.DataArray, title: str, which: str) -> Picture:
    edges, cells = columns(array, which)
    note = f"each column shows the {which} of several steps" if len(cells) < array.sizes["step"] else ""
    is_length = array.attrs.get("units", "1") != "1"  # a cosine has no decades
    heat = Heat(
        edges, np.arange(cells.shape[1] + 1) - 0.5, cells.T, named(array, title), log=is_length and spans_decades(cells)
    )
    return Picture(title, "rank", [heat], note=note, whole=True)
