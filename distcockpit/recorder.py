"""Rank 0's side: totals become rows. Everything here that takes time runs on the writer's thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from distcockpit.quantities.base import Quantity, Shard
from distcockpit.reduce import Layout, Pending
from distcockpit.schema import Group
from distcockpit.store import RunStore
from distcockpit.userlog import LogEntry
from distcockpit.writer import Writer


@dataclass(frozen=True)
class Stamp:
    """When a step was: what every row carries."""

    step: int
    epoch: float | None
    wall_time: float
    n: int

    def coordinates(self) -> dict[str, Any]:
        """The row's coordinates."""
        epoch = float("nan") if self.epoch is None else float(self.epoch)
        return {"wall_time": self.wall_time, "epoch": epoch, "batch_size": self.n}


@dataclass(frozen=True)
class Result:
    """The sums of a tracked step, on their way.

    ``quantities`` holds each quantity with the stamp of its row: that of the step, or of the step before, where an
    update began.
    """

    stamp: Stamp
    quantities: Sequence[tuple[Quantity, Stamp]]
    layout: Layout
    sums: Pending
    elementwise: Pending | None


class Recorder:
    """The store, the thread that writes it, and the newest rows.

    Args:
        path: Folder of the store.
        mode: As for ``DistCockpit``.
        groups: The groups of the quantities.
        attributes: Attributes of the store's root.
        flush_seconds: Longest time between commits.
    """

    def __init__(
        self,
        path: Path,
        mode: str,
        groups: Mapping[str, Group],
        attributes: Mapping[str, Any],
        flush_seconds: float,
    ) -> None:
        self._writer = Writer(RunStore(path, mode, groups, attributes), flush_seconds)
        self._latest: dict[str, dict[str, Any]] = {}
        self._pooled: dict[int, dict[str, float]] = {}  # user scalars by step; belongs to the writer's thread

    @property
    def error(self) -> BaseException | None:
        """The latest fault of the writer."""
        return self._writer.error

    def latest(self) -> dict[str, dict[str, Any]]:
        """The newest row of each quantity."""
        return {name: dict(row) for name, row in list(self._latest.items())}

    def record(self, result: Result) -> None:
        """Finalize and append the rows of a step, and the pooled user scalars that rode with it."""
        self._writer.submit(lambda store: self._record(store, result))

    def record_logs(self, entries: Sequence[LogEntry]) -> None:
        """Append rows of user scalars; what was pooled for their steps has been recorded before."""
        if entries:
            self._writer.submit(lambda store: self._record_logs(store, entries))

    def flush(self) -> None:
        """Wait until all is committed."""
        self._writer.flush()

    def close(self, state: str, timeout: float | None) -> None:
        """Write what is there, with this state of the run, and end the thread."""
        self._writer.close(state, timeout)

    # -- on the writer's thread --------------------------------------------------------------------------------------

    def _record(self, store: RunStore, result: Result) -> bool:
        totals = result.layout.unpack(result.sums.result())
        shard = None
        if result.elementwise is not None:
            first, second = np.split(result.elementwise.result(), 2)
            shard = Shard(result.stamp.n, first, second)
        commit_due = False
        for quantity, stamp in result.quantities:
            try:
                commit_due |= self._append(store, quantity, stamp, _part(totals, quantity.name), shard, result.stamp.n)
            except Exception as error:  # one quantity must not take the others with it
                self._writer.report(error, f"step {stamp.step} of {quantity.name!r} is lost")
        for name, value in _part(totals, "log").items():
            step, _, scalar = name.partition("/")
            self._pooled.setdefault(int(step), {})[scalar] = float(value)
        return commit_due

    def _append(
        self,
        store: RunStore,
        quantity: Quantity,
        stamp: Stamp,
        totals: dict[str, np.ndarray],
        shard: Shard | None,
        n: int,
    ) -> bool:
        if quantity.needs.elementwise and shard is not None:
            totals |= quantity.elementwise(shard)
        row = quantity.finalize(totals, n)
        if row is None:
            return False
        commit_due = store.append(quantity.name, stamp.step, row, stamp.coordinates())
        self._latest[quantity.name] = {"step": stamp.step, **{name: np.copy(value)[()] for name, value in row.items()}}
        return commit_due

    def _record_logs(self, store: RunStore, entries: Sequence[LogEntry]) -> bool:
        commit_due = False
        for entry in entries:
            values = {name: float(value) for name, value in entry.values.items()} | self._pooled.pop(entry.step, {})
            stamp = Stamp(entry.step, entry.epoch, entry.wall_time, 0)
            self._latest["log"] = {"step": entry.step, **values}
            commit_due |= store.append("log", entry.step, values, stamp.coordinates())
        return commit_due


def _part(totals: Mapping[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    prefix = f"{name}/"
    return {key[len(prefix) :]: value for key, value in totals.items() if key.startswith(prefix)}
