"""The line logged at startup: what is tracked, when, where it is stored, and how much space and memory it takes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from distcockpit.quantities.base import Quantity
from distcockpit.schedules import in_words
from distcockpit.shards import local
from distcockpit.store.schema import COORDINATES, Group
from distcockpit.tracking.setup import Setup

logger = logging.getLogger("distcockpit")

STEPS = 1000


def announce(quantities: Sequence[Quantity], groups: Mapping[str, Group], store: str, setup: Setup) -> None:
    """Log the line at level INFO, to stderr unless the program has configured logging.

    The size is that of the rows before compression, the memory that of rank 0.
    """
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
    logger.info("%s", announcement(quantities, groups, store, setup))


def announcement(quantities: Sequence[Quantity], groups: Mapping[str, Group], store: str, setup: Setup) -> str:
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
    ranks = f"{setup.world.size} rank{'s' if setup.world.size > 1 else ''}"
    memory = f"up to {_readable(setup.memory_budget)} (memory_budget)"
    if copies := copied_bytes(quantities, setup):
        memory += f" + {_readable(copies)} for copies of parameters"
    return f"distcockpit: {ranks} -> {store}{rows}. Memory: {memory} + inputs and output gradients of layers. {what}"


def copied_bytes(quantities: Sequence[Quantity], setup: Setup) -> int:
    """Return the size of the copies of parameters that rank 0 keeps: the initial ones, and those before an update."""
    initial = [p for p in setup.held.values() if any(q.needs.initial for q in quantities)]
    updated = any(q.needs.update or q.needs.displacement for q in quantities)
    before = [local(p) for p in setup.parameters.values() if updated and p.requires_grad]
    return sum(p.numel() * p.element_size() for p in (*initial, *before))


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
