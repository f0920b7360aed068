"""A run with the whole panel, drawn."""

from __future__ import annotations

from typing import Any

import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from distcockpit.instruments import INSTRUMENTS

STEPS = 24


def drawn(name: str, run: xr.DataTree, group: str | None = None) -> Axes:
    axes = Figure().add_subplot()
    INSTRUMENTS[name](axes, run, group)
    axes.figure.canvas.draw()  # type: ignore[attr-defined]
    return axes


def lines(axes: Axes) -> dict[str, tuple[Any, Any]]:
    found = {str(line.get_label()): line.get_data() for line in axes.get_lines()}
    return {name: data for name, data in found.items() if not name.startswith("_")}
