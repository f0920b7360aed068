"""Rank 0's side: totals become rows. Everything slow here runs on the writer's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distcockpit.notices import Notices
from distcockpit.quantities.base import Quantity
from distcockpit.quantities.batch import Model
from distcockpit.sinks import Histogram, Sink, numbers_of
from distcockpit.store.options import StoreOptions
from distcockpit.store.run_store import RunStore
from distcockpit.store.schema import Group
from distcockpit.store.writer import Job, Writer
from distcockpit.tracking.packed import Layout
from distcockpit.tracking.signals import Terminated
from distcockpit.tracking.userlog import LogEntry
from distcockpit.world import Pending

FAILED, OUT_OF_MEMORY = "failed", "out_of_memory"
"""Codes of a status. The latter also names a sum that belongs to no quantity: on how many ranks memory ran out."""


@dataclass(frozen=True)
class Stamp:
    """When a step happened: what every row carries."""

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
    """Sums in flight, and facts.

    ``quantities`` pairs each quantity with the stamp of its row: that of the step, or of the step before if that is
    where an update began.
    """

    n: int
    quantities: Sequence[tuple[Quantity, Stamp]]
    layout: Layout
    sums: Pending
    facts_layout: Layout
    facts: Pending

    def is_there(self) -> bool:
        """True if nothing is in flight any more."""
        return self.sums.done() and self.facts.done()


class Recorder:
    """The store, the thread that writes it, and the latest rows.

    Args:
        store: The run's store.
        options: When to write, and how long to wait.
        model: Facts about the model.
        sinks: Where rows go in addition to the store.
    """

    def __init__(self, store: RunStore, options: StoreOptions, model: Model, sinks: Sequence[Sink] = ()) -> None:
        self._sinks, self._patience = list(sinks), options.store_seconds
        self.notices = Notices(lambda notices: self.describe({"notices": notices}, at_once=True))
        self._writer = Writer(store, options, self.notices)
        self._terminated = Terminated(lambda: self._writer.flush("terminated (SIGTERM)"))
        self.n_rows = 0  # of quantities, recorded so far
        self._latest: dict[str, dict[str, Any]] = {}
        self._model = model
        self._pooled: dict[int, dict[str, float]] = {}  # user scalars by step; only the writer's thread touches it

    @property
    def error(self) -> BaseException | None:
        """The latest fault of the writer."""
        return self._writer.error

    def latest(self) -> dict[str, dict[str, Any]]:
        """Return the latest row of each quantity."""
        return {
            name: {key: np.copy(value)[()] for key, value in row.items()} for name, row in list(self._latest.items())
        }

    def begin(self, step: int, limits: Mapping[str, int]) -> None:
        """Tell the writer the first step; see `RunStore.begin`."""

        def job(store: RunStore) -> bool:
            store.begin(step, limits)
            return False

        self._writer.submit(Job(job, insist=True))

    def change(self, step: int, groups: Mapping[str, Group], facts: Mapping[str, Any], model: Model) -> None:
        """Tell the writer that the model is a different one from this step on; see `RunStore.change`."""

        def job(store: RunStore) -> bool:
            store.change(step, groups, facts)
            self._model = model
            return False

        self._writer.submit(Job(job, insist=True))

    def record(self, result: Result) -> None:
        """Finalize and append the rows of a step, and keep the pooled user scalars that were sent with it."""
        self._writer.submit(Job(lambda store: self._record(store, result), len(result.quantities), result.is_there))

    def record_logs(self, entries: Sequence[LogEntry]) -> None:
        """Append rows of user scalars; their pooled values have already been recorded."""
        if entries:
            self._writer.submit(Job(lambda store: self._record_logs(store, entries), len(entries)))

    def describe(self, attributes: Mapping[str, Any], *, at_once: bool) -> None:
        """Replace attributes of the store's root, at once or with the next commit."""

        def job(store: RunStore) -> bool:
            store.describe(attributes)
            return at_once

        self._writer.submit(Job(job))

    def flush(self) -> bool:
        """Wait until everything is committed, or the store takes too long; return whether it is."""
        return self._writer.flush()

    def pooled(self, step: int) -> dict[str, float]:
        """Return the user scalars of a step that were pooled and wait for their row; call it after `flush`."""
        return dict(self._pooled.get(step, {}))

    def close(self, reason: str, *, wait_for_ranks: bool = True) -> None:
        """Write what has arrived, mark the run as closed or as ended for this reason, and end the thread."""
        self._writer.close(reason, wait_for_ranks=wait_for_ranks)
        self._terminated.remove()
        if self._sinks:  # after the store; an unresponsive service must not delay the end of the run
            ending = threading.Thread(target=self._tell, args=[lambda sink: sink.close()], daemon=True)
            ending.start()
            ending.join(self._patience)

    # -- on the writer's thread --------------------------------------------------------------------------------------

    def _record(self, store: RunStore, result: Result) -> bool:
        totals = _by_owner(result.layout.unpack(result.sums.result()))
        unknown = {name for name, sums in totals.items() if all(v.size and np.isnan(v).all() for v in sums.values())}
        for owner, facts in _by_owner(result.facts_layout.unpack(result.facts.result())).items():
            totals.setdefault(owner, {}).update(facts)
        ran_out = any(totals.pop("", {}).values())
        commit_due = False
        for quantity, stamp in result.quantities:
            if quantity.name in unknown and self._counts_something(quantity):
                continue  # it failed on a rank, which has said so; counts cannot be NaN, so there is no row
            try:
                commit_due |= self._append(store, quantity, stamp, totals.get(quantity.name, {}), result.n, ran_out)
            except Exception as error:  # one quantity must not take the others down with it
                self._writer.lose(1)
                self._writer.report(error, f"step {stamp.step} of {quantity.name!r} is lost")
        for name, value in totals.get("log", {}).items():
            step, _, scalar = name.partition("/")
            self._pooled.setdefault(int(step), {})[scalar] = float(value)
        return commit_due

    def _counts_something(self, quantity: Quantity) -> bool:
        """True if a row has integers that are no status."""
        fields = quantity.group(self._model).fields.values()
        return any(np.dtype(field.dtype).kind in "iub" and not field.codes for field in fields)

    def _append(
        self,
        store: RunStore,
        quantity: Quantity,
        stamp: Stamp,
        totals: dict[str, np.ndarray],
        n: int,
        ran_out: bool,
    ) -> bool:
        row = quantity.finalize(totals, n)
        if row is None:
            return False
        if ran_out and "status" in row:
            codes = quantity.group(self._model).fields["status"].codes
            if OUT_OF_MEMORY in codes and codes[int(row["status"])] == FAILED:
                row = {**row, "status": codes.index(OUT_OF_MEMORY)}
        commit_due = store.append(quantity.name, stamp.step, row, stamp.coordinates())
        self.n_rows += 1
        notice = quantity.notice(row, self._model)
        self.notices.when_new(quantity.name, notice and f"step {stamp.step}: {notice}", notice)
        self._latest[quantity.name] = {"step": stamp.step, **row}
        self._show(quantity.name, stamp, row)
        return commit_due

    def _show(self, name: str, stamp: Stamp, row: Mapping[str, Any]) -> None:
        """Pass a row to the sinks."""
        if self._sinks:
            numbers, histogram = numbers_of(row), Histogram.of(row)
            self._tell(lambda sink: sink.write(name, stamp.step, stamp.wall_time, numbers, histogram))

    def _tell(self, what: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                what(sink)
            except Exception as error:  # the row is in the store, and the run goes on
                self._sinks.remove(sink)
                name = type(sink).__name__
                self.notices.when_new(
                    f"sink {name}", f"{name} is disabled after an error and receives no more rows: {error}"
                )

    def _record_logs(self, store: RunStore, entries: Sequence[LogEntry]) -> bool:
        commit_due = False
        for entry in entries:
            values = {name: float(value) for name, value in entry.values.items()} | self._pooled.pop(entry.step, {})
            stamp = Stamp(entry.step, entry.epoch, entry.wall_time, 0)
            self._latest["log"] = {"step": entry.step, **values}
            self._show("log", stamp, values)
            commit_due |= store.append("log", entry.step, values, stamp.coordinates())
        return commit_due


def _by_owner(values: Mapping[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """Sort values named ``owner/name`` by their owners."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for full, value in values.items():
        owner, _, name = full.partition("/")
        found.setdefault(owner, {})[name] = value
    return found
