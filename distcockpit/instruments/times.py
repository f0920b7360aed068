"""Where the time of a tracked step goes."""

from __future__ import annotations

import xarray as xr

from distcockpit.instruments.data import scale, series, values
from distcockpit.instruments.instrument import instrument
from distcockpit.instruments.picture import BLACK, BLUE, GREEN, ORANGE, RED, Picture

PARTS = {
    "step_seconds": ("a step", BLACK),
    "forward_seconds": ("forward pass", BLUE),
    "outside_seconds": ("outside of `track`", GREEN),
    "wait_seconds": ("waiting for ranks", ORANGE),
    "cockpit_seconds": ("cockpit overhead", RED),
}


@instrument("time", RankHealth={name: "step rank" for name in PARTS})
def times(run: xr.DataTree, groups: dict[str, xr.Dataset]) -> Picture:
    """Time of tracked steps and its parts; each is the longest over all ranks."""
    (node,) = groups.values()
    lines = [series(values(node[name]).max("rank"), *look) for name, look in PARTS.items()]
    return Picture("time of a tracked step, longest over all ranks", "time [seconds]", lines, **scale(lines))
