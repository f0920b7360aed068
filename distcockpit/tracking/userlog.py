"""The scalars that a training script logs: checked, merged by step, pooled where asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from distcockpit.store.schema import COORDINATES, NAME
from distcockpit.world import digest

REDUCTIONS = (None, "mean", "sum")
RESERVED = ("step", "zarr.json", *COORDINATES)


@dataclass
class LogEntry:
    """Scalars of one step; on their way to one row of the store."""

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
    """One rank's log calls. Rank 0 collects entries; values to be pooled wait on every rank."""

    def __init__(self) -> None:
        self.entries: dict[int, LogEntry] = {}  # not handed on yet, by step
        self._riding: list[Riding] = []
        self._last_step = -1
        self._written_step = -1

    def check(self, step: int, reduce: str | None, scalars: Mapping[str, Any]) -> None:
        """Check whether `add` may be called with these.

        Raises:
            ValueError: If the step falls or is written already, or a name or ``reduce`` is not allowed.
        """
        if step < self._last_step:
            raise ValueError(f"log(step={step}): steps must not fall; the latest was {self._last_step}.")
        if step <= self._written_step:
            raise ValueError(f"log(step={step}): its row is already in the store, since flush() came in between.")
        if reduce not in REDUCTIONS:
            raise ValueError(f"log(reduce={reduce!r}): must be one of {list(REDUCTIONS)}.")
        for name, value in scalars.items():
            _check(name, value)

    def add(
        self, step: int, epoch: float | None, reduce: str | None, scalars: Mapping[str, Any], wall_time: float
    ) -> None:
        """Take the scalars of one call, see ``DistCockpit.log``; they were checked."""
        self._last_step = step
        entry = self.entries.setdefault(step, LogEntry(step, epoch, wall_time))
        entry.epoch = epoch if epoch is not None else entry.epoch
        kept = {n: v.detach().clone() if isinstance(v, Tensor) else float(v) for n, v in scalars.items()}
        if reduce is None:
            entry.values.update(kept)
        else:
            self._riding += [Riding(step, name, reduce, value) for name, value in kept.items()]

    def expect(self, names: Sequence[str], wall_time: float) -> None:
        """Other ranks pool these scalars, named ``step/name``; make rows for them where there are none."""
        for name in names:
            step = int(name.partition("/")[0])
            if step > self._written_step:
                self.entries.setdefault(step, LogEntry(step, None, wall_time))
                self._last_step = max(self._last_step, step)

    @property
    def riding_digest(self) -> int:
        """A number that differs where the names differ; 0 if there are none."""
        return digest(self.riding_names) if self._riding else 0

    def take_riding(self, contributors: Mapping[str, int], device: torch.device) -> dict[str, Tensor]:
        """The values that ride in this exchange, as sums by ``step/name``, already divided for a mean.

        Args:
            contributors: Number of ranks that logged each.
            device: Where the sums shall be.
        """
        sums = {
            f"{r.step}/{r.name}": torch.as_tensor(r.value, dtype=torch.float64, device=device).reshape(())
            / (contributors[f"{r.step}/{r.name}"] if r.reduce == "mean" else 1)
            for r in self._riding
        }
        self._riding.clear()
        return sums

    def riding_values(self) -> dict[str, tuple[str, float]]:
        """What waits for an exchange: by ``step/name``, how it is pooled, and this rank's value."""
        return {f"{r.step}/{r.name}": (r.reduce, float(r.value)) for r in self._riding}

    def restore(self, entries: Sequence[LogEntry]) -> None:
        """Go on with rows that were not complete."""
        self.entries = {entry.step: entry for entry in entries}
        self._last_step = max(self.entries, default=-1)

    @property
    def riding_names(self) -> list[str]:
        """The names of what waits for an exchange, as ``step/name``."""
        return [f"{r.step}/{r.name}" for r in self._riding]

    @property
    def is_riding(self) -> bool:
        """True if values wait for an exchange."""
        return bool(self._riding)

    def take_complete(self, *, everything: bool = False) -> list[LogEntry]:
        """Entries that will not change any more: older than the latest step and than all that is riding."""
        open_from = min([r.step for r in self._riding] + [self._last_step])
        done = [step for step in sorted(self.entries) if everything or step < open_from]
        if done:
            self._written_step = done[-1]
        return [self.entries.pop(step) for step in done]


def _check(name: str, value: Any) -> None:
    if name in RESERVED or not NAME.fullmatch(name):
        raise ValueError(
            f"log({name}=...): the name must be made of letters, digits, '_', '-' and '.' (no '/'), begin with "
            f"a letter, a digit or one '_', and not be one of {list(RESERVED)}: it names an array in the group 'log'."
        )
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return
    if not isinstance(value, Real):
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise TypeError(f"log({name}={what}): must be a number or a tensor with one element.")
