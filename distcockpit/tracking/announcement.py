"""The line logged at startup: what is tracked, when, where it is stored, and how much space it takes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from distcockpit.quantities.base import Quantity
from distcockpit.schedules import in_words
from distcockpit.store.schema import COORDINATES, Group

logger = logging.getLogger("distcockpit")

STEPS = 1000


def announce(quantities: Sequence[Quantity], groups: Mapping[str, Group], store: str, world_size: int) -> None:
    """Log the line at level INFO, to stderr unless the program has configured logging.

    The size is that of the rows before compression.
    """
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
    logger.info("%s", announcement(quantities, groups, store, world_size))


def announcement(quantities: Sequence[Quantity], groups: Mapping[str, Group], store: str, world_size: int) -> str:
    """Return the announcement, on one line."""
    by_schedule: dict[str, list[str]] = {}
    for quantity in quantities:
        name = f"{quantity.name} (and the step after)" if quantity.needs.update else quantity.name
        by_schedule.setdefault(in_words(quantity.schedule), []).append(name)
    what = "; ".join(f"{schedule}: {', '.join(names)}" for schedule, names in by_schedule.items())
    try:
        size = sum(n_bytes(groups[q.name]) * sum(q.starts(step) for step in range(STEPS)) for q in quantities)
        rows = f", up to {_readable(size)} of rows per {STEPS:,} steps"
    except Exception:  # a schedule that only knows fewer steps
        rows = ""
    ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
    return f"distcockpit: {ranks} -> {store}{rows}. {what}"


def n_bytes(group: Group) -> int:
    """Return the size of a row in bytes, coordinates included."""
    fields = [*group.fields.values(), *COORDINATES.values()]
    row = sum(
        np.dtype(field.dtype).itemsize * int(np.prod([group.size(dim) for dim in field.dims], dtype=np.int64))
        for field in fields
    )
    return row + np.dtype("int64").itemsize  # the step


def _readable(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            break
        size, unit = size / 1000, {"B": "kB", "kB": "MB", "MB": "GB", "GB": "TB"}[unit]
    return f"{size:.3g} {unit}"
