"""What an instrument draws, as data: marks on two axes. Rendering, with Matplotlib or Plotly, is elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[Any]

FARTHEST = 1e100
"""Values beyond it are clipped to it, except on logarithmic axes; computing axis limits would overflow otherwise."""

# Okabe and Ito 2008, "Color Universal Design": safe for colour-blind readers, and distinct in lightness when printed.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, BLACK = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#000000",
)
GREY = "#8C8C8C"
CYCLE = (BLUE, RED, GREEN, ORANGE, PURPLE, SKY, BLACK)
SEQUENTIAL = "cividis"
"""Nuñez, Anderton, Renslow 2018: looks the same with and without colour blindness, and in greyscale."""


@dataclass(frozen=True)
class Line:
    """A curve.

    Args:
        x: Shape [n].
        y: Shape [n]; gaps where it is NaN.
        label: Name in the legend; without one, it has no legend entry.
        color: Hexadecimal colour.
        style: "solid", "dashed", "dotted" or "points".
        member: Name of the layer, parameter or rank it belongs to, if it is one of many.
    """

    x: Numbers
    y: Numbers
    label: str = ""
    color: str = BLUE
    style: str = "solid"
    member: str = ""


@dataclass(frozen=True)
class Band:
    """The area between two curves."""

    x: Numbers
    low: Numbers
    high: Numbers
    label: str = ""
    color: str = BLUE
    member: str = ""


@dataclass(frozen=True)
class Heat:
    """A heat map.

    Args:
        x: Edges, shape [columns + 1].
        y: Edges, shape [rows + 1].
        z: Shape [rows, columns].
        label: What the colours mean, with the unit.
        log: Use a logarithmic colour scale; cells that are not above 0 are left empty.
    """

    x: Numbers
    y: Numbers
    z: Numbers
    label: str
    log: bool = False


@dataclass(frozen=True)
class Level:
    """A horizontal reference line."""

    y: float
    label: str = ""


@dataclass(frozen=True)
class Zone:
    """A horizontal band from ``low`` to ``high``; infinite ends reach the edge of the plot."""

    low: float
    high: float
    color: str
    label: str = ""


@dataclass(frozen=True)
class Bars:
    """A distribution next to the plot, along one of its axes."""

    edges: Numbers
    heights: Numbers


Mark = Line | Band | Heat | Level | Zone


@dataclass(frozen=True)
class Picture:
    """One set of axes.

    Args:
        title: What it shows.
        y: Label of the y-axis, with its unit.
        marks: In drawing order.
        x: Label of the x-axis.
        scale: Scale of the y-axis: "linear", "log", or "asinh", which is linear up to ``linear`` and logarithmic
            beyond.
        linear: See ``scale``.
        right: Distribution along the y-axis.
        top: Distribution along the x-axis.
        whole: True if the y-axis has integers, such as ranks.
        note: What a reader must know, such as how much is not shown.
    """

    title: str
    y: str
    marks: Sequence[Mark]
    x: str = "step"
    scale: str = "linear"
    linear: float = 1.0
    right: Bars | None = None
    top: Bars | None = None
    whole: bool = False
    note: str = ""


Pages = Mapping[str, Picture]
"""Several plots by name, shown one at a time or a few side by side."""


def empty(picture: Picture) -> bool:
    """True if there is nothing to see: no mark has a finite value."""
    for mark in picture.marks:
        if isinstance(mark, Heat) and not (np.isfinite(mark.x).all() and np.isfinite(mark.y).all()):
            continue
        values = {Line: "y", Band: "high", Heat: "z"}.get(type(mark))
        if values and np.isfinite(np.asarray(getattr(mark, values), dtype=float)).any():
            return False
    return True


def never_negative(picture: Picture) -> bool:
    """True if no curve, band or level is below 0: then the axis does not go there either."""
    for mark in picture.marks:
        values = {Line: "y", Band: "low", Level: "y"}.get(type(mark))
        if values:
            y = np.asarray(getattr(mark, values), dtype=float)
            if (y[np.isfinite(y)] < 0).any():
                return False
    return not any(isinstance(mark, Heat) for mark in picture.marks)
