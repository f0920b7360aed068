"""Named selections of quantities; each is a function that returns a list, to be extended with ``+``."""

from __future__ import annotations

from distcockpit.quantities import (
    Alpha,
    GradHist1d,
    GradHist2d,
    HessTrace,
    MeanGSNR,
    OutputGradientGeometry,
    Quantity,
)
from distcockpit.schedules import Schedule


def economy(schedule: Schedule | None = None) -> list[Quantity]:
    """What costs little: step size and gradient histogram."""
    return [Alpha(schedule=schedule), GradHist1d(schedule=schedule)]


def business(schedule: Schedule | None = None) -> list[Quantity]:
    """Economy and the curvature."""
    return [*economy(schedule), HessTrace(schedule=schedule)]


def full(schedule: Schedule | None = None) -> list[Quantity]:
    """Everything."""
    return [
        *business(schedule),
        GradHist2d(schedule=schedule),
        MeanGSNR(schedule=schedule),
        OutputGradientGeometry(schedule=schedule),
    ]


PRESETS = {"economy": economy, "business": business, "full": full}


def preset(name: str) -> list[Quantity]:
    """The preset of that name.

    Raises:
        ValueError: If there is none.
    """
    if name not in PRESETS:
        raise ValueError(f"quantities={name!r}: must be one of {list(PRESETS)}, or a list of quantities.")
    return PRESETS[name]()
