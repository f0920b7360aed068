"""What an instrument draws, as data: marks on two axes. How it is drawn, on paper or on a page, is elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[Any]

FARTHEST = 1e100
"""What is beyond is drawn there, but on logarithmic axes, as the computation of their ends would overflow."""

# Okabe and Ito 2008, "Color Universal Design": told apart by colour-blind readers, and by their lightness in print.
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
"""Nuñez, Anderton, Renslow 2018: looks alike with and without colour-blindness, and in grey."""


@dataclass(frozen=True)
class Line:
    """A curve.

    Args:
        x: Shape [n].
        y: Shape [n]; gaps where it is NaN.
        label: Name in the legend; without, it is not there.
        color: Hexadecimal.
        style: "solid", "dashed", "dotted" or "points".
        member: Name of the layer, parameter or rank that it belongs to, where it is one of many.
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
    """A field of cells.

    Args:
        x: Edges, shape [columns + 1].
        y: Edges, shape [rows + 1].
        z: Shape [rows, columns].
        label: What the colours mean, with its unit.
        log: Whether colours follow the logarithm; what is not above 0 is empty.
    """

    x: Numbers
    y: Numbers
    z: Numbers
    label: str
    log: bool = False


@dataclass(frozen=True)
class Level:
    """A horizontal line that means something."""

    y: float
    label: str = ""


@dataclass(frozen=True)
class Zone:
    """A horizontal band, from ``low`` to ``high``; infinite ends reach the edge of the picture."""

    low: float
    high: float
    color: str
    label: str = ""


@dataclass(frozen=True)
class Bars:
    """A distribution beside the picture, along one of its axes."""

    edges: Numbers
    heights: Numbers


Mark = Line | Band | Heat | Level | Zone


@dataclass(frozen=True)
class Picture:
    """One set of axes.

    Args:
        title: What it shows.
        y: Label of the y-axis, with its unit.
        marks: In the order in which they are drawn.
        x: Label of the x-axis.
        scale: Of the y-axis: "linear", "log", or "asinh", which is linear up to ``linear`` and logarithmic beyond.
        linear: See ``scale``.
        right: Distribution along the y-axis.
        top: Distribution along the x-axis.
        whole: Whether the y-axis counts something, such as ranks.
        note: What a reader must know, such as how much of it is not shown.
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
"""Several pictures of which one is looked at at a time, or a few side by side; by name."""


def empty(picture: Picture) -> bool:
    """True if there is nothing to see: no mark has a finite number."""
    for mark in picture.marks:
        if isinstance(mark, Heat) and not (np.isfinite(mark.x).all() and np.isfinite(mark.y).all()):
            continue
        values = {Line: "y", Band: "high", Heat: "z"}.get(type(mark))
        if values and np.isfinite(np.asarray(getattr(mark, values), dtype=float)).any():
            return False
    return True
