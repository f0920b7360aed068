"""The scalars that a training script logs: checked, merged by step, and pooled if requested."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from distcockpit.replay.devices import sent
from distcockpit.replay.memory import insist
from distcockpit.store.schema import COORDINATES, NAME
from distcockpit.world import TRACK, Record, World, digest

REDUCTIONS = (None, "mean", "sum")
RESERVED = ("step", "zarr.json", *COORDINATES)
SECONDS = 1.0  # rows are handed on at most this often: a loop may log at every step


@dataclass
class LogEntry:
    """Scalars of one step, which become one row of the store."""

    step: int
    epoch: float | None
    wall_time: float
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Riding:
    """A scalar that waits for the next exchange between ranks."""

    step: int
    name: str
    reduce: str
    value: Tensor | float


class UserLog:
    """One rank's log calls. Rank 0 collects entries; values to be pooled wait on every rank.

    Args:
        record: Takes rows that will not change any more; on rank 0.
    """

    def __init__(self, record: Callable[[Sequence[LogEntry]], None] | None = None) -> None:
        self._record, self._handed_on = record, 0.0
        self.entries: dict[int, LogEntry] = {}  # not handed on yet, by step
        self._riding: list[Riding] = []
        self._last_step = -1
        self._written_step = -1

    def check(self, step: int, reduce: str | None, scalars: Mapping[str, Any]) -> None:
        """Check whether `add` may be called with these arguments.

        Raises:
            ValueError: If the step decreases or is already written, or a name or ``reduce`` is not allowed.
        """
        if step < self._last_step:
            raise ValueError(f"log(step={step}): steps must not decrease, but the latest was {self._last_step}.")
        if step <= self._written_step:
            raise ValueError(
                f"log(step={step}): its row is already in the store, because flush() was called. Log a later step."
            )
        if reduce not in REDUCTIONS:
            raise ValueError(f"log(reduce={reduce!r}): must be one of {list(REDUCTIONS)}.")
        for name, value in scalars.items():
            _check(name, value)

    @staticmethod
    def arguments(data: object, step: object, scalars: Mapping[str, Any], latest: int) -> tuple[Any, dict[str, Any]]:
        """Sort the arguments of a call of ``DistCockpit.log``, which takes step and scalars in either order.

        Args:
            data: The first argument.
            step: The second one.
            scalars: What was passed by name.
            latest: The latest step, used if none is passed.

        Returns:
            The step, and the scalars by name. A slash, which would be a path in the store, becomes a dot.

        Raises:
            TypeError: If there are two steps, or two dictionaries.
        """
        if isinstance(step, Mapping) or (step is None and data is not None and not isinstance(data, Mapping)):
            data, step = step, data
        if not (data is None or isinstance(data, Mapping)) or isinstance(step, Mapping):
            raise TypeError(
                f"log({data!r}, {step!r}): takes one step and one dictionary of scalars, such as log({{'loss': 0.5}}, "
                "step=10), or scalars by name, such as log(10, loss=0.5)."
            )
        named = {**(data or {}), **scalars}
        return latest if step is None else step, {str(name).replace("/", "."): v for name, v in named.items()}

    def add(
        self, step: int, epoch: float | None, reduce: str | None, scalars: Mapping[str, Any], wall_time: float
    ) -> None:
        """Add the scalars of one call, which have been checked; see ``DistCockpit.log``."""
        self._last_step = step
        entry = self.entries.setdefault(step, LogEntry(step, None, wall_time))
        entry.epoch = float(epoch) if epoch is not None else entry.epoch
        kept = {n: v.detach().clone() if isinstance(v, Tensor) else float(v) for n, v in scalars.items()}
        if reduce is None:
            entry.values.update(kept)
        else:
            self._riding += [Riding(step, name, reduce, value) for name, value in kept.items()]

    @property
    def riding_digest(self) -> int:
        """A number that differs if the names differ; 0 if there are none."""
        return digest([f"{r.step}/{r.name}" for r in self._riding]) if self._riding else 0

    def share(self, world: World, records: Sequence[Record], device: torch.device, *, joins: bool) -> dict[str, Tensor]:
        """Return this rank's part of the scalars sent with this exchange, by ``step/name``, alike on all ranks.

        Args:
            world: The ranks.
            records: Their headers.
            device: Where to put the values.
            joins: Whether ranks may run out of data.

        Raises:
            RuntimeError: If ranks logged different names, and none has run out of data.
        """
        mine = [f"{r.step}/{r.name}" for r in self._riding]
        if any(record["joined"] and record["kind"] != TRACK for record in records):
            raise RuntimeError(
                "close() was called inside `with Join(...)`, while some ranks had run out of data. Call it after the "
                "`with` block."
            )
        if len({record["riding"] for record in records}) == 1:
            return self._take_riding(dict.fromkeys(mine, world.size), device)
        theirs = world.all_gather_object((mine, joins))
        if not any(joins for _, joins in theirs):
            rank = next(rank for rank, (names, _) in enumerate(theirs) if names != theirs[0][0])
            raise RuntimeError(
                f"Rank {rank} logged different names than rank 0: {theirs[rank][0]} versus {theirs[0][0]} (step/name). "
                "Call log(..., reduce=...) at the same steps with the same names on all ranks."
            )
        contributors = Counter(name for names, _ in theirs for name in names)
        own = self._take_riding(contributors, device)
        for step in (int(name.partition("/")[0]) for name in contributors):
            if step > self._written_step:  # a row for what only others logged
                self.entries.setdefault(step, LogEntry(step, None, time.time()))
                self._last_step = max(self._last_step, step)
        return {name: own.get(name, torch.zeros((), dtype=torch.float64, device=device)) for name in contributors}

    def _take_riding(self, contributors: Mapping[str, int], device: torch.device) -> dict[str, Tensor]:
        """Return the waiting values, divided by the number of ranks that logged each one for a mean."""
        sums = insist(
            lambda: {
                f"{r.step}/{r.name}": sent(r.value, device).reshape(())
                / (contributors[f"{r.step}/{r.name}"] if r.reduce == "mean" else 1)
                for r in self._riding
            }
        )
        self._riding.clear()
        return sums

    def riding_values(self) -> dict[str, tuple[str, float]]:
        """Return what waits for an exchange: by ``step/name``, how it is pooled, and this rank's value."""
        return {f"{r.step}/{r.name}": (r.reduce, float(r.value)) for r in self._riding}

    def restore(self, entries: Sequence[LogEntry]) -> None:
        """Continue with rows that were not complete."""
        self.entries = {entry.step: entry for entry in entries}
        self._last_step = max(self.entries, default=-1)

    @property
    def is_riding(self) -> bool:
        """True if values wait for an exchange."""
        return bool(self._riding)

    def hand_on(self, *, everything: bool = False, at_once: bool = False) -> None:
        """Record rows that will not change any more: older than the latest step and than everything waiting."""
        if not (everything or at_once) and time.monotonic() - self._handed_on < SECONDS:
            return
        self._handed_on = time.monotonic()
        open_from = min([r.step for r in self._riding] + [self._last_step])
        done = [step for step in sorted(self.entries) if everything or step < open_from]
        if done:
            self._written_step = done[-1]
        complete = [self.entries.pop(step) for step in done]
        if self._record is not None:
            self._record(complete)


def _check(name: str, value: Any) -> None:
    if name in RESERVED or not NAME.fullmatch(name):
        raise ValueError(
            f"log({name}=...): the name must consist of letters, digits, '_', '-', '.' and '/', start with a "
            f"letter, a digit or a single '_', and not be one of {list(RESERVED)}: it names an array in the group "
            "'log'."
        )
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return
    if not isinstance(value, Real):
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise TypeError(f"log({name}={what}): must be a number or a tensor with one element.")
