"""When to track: plain callables from step to bool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Schedule = Callable[[int], bool]
"""Any callable that takes a step and returns whether it is tracked; the answer must be the same on all ranks."""


def in_words(schedule: Schedule | None) -> str:
    """A human-readable name for a schedule: a function by its name."""
    return str(getattr(schedule, "__qualname__", schedule))


@dataclass(frozen=True)
class Every:
    """The schedule of :func:`every`."""

    n: int
    offset: int = 0

    def __str__(self) -> str:
        return f"every({self.n})" if self.offset == 0 else f"every({self.n}, offset={self.offset})"

    def __post_init__(self) -> None:
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1:
            raise ValueError(f"every(n={self.n!r}): n must be an integer of at least 1.")
        if isinstance(self.offset, bool) or not isinstance(self.offset, int) or self.offset < 0:
            raise ValueError(f"every(offset={self.offset!r}): offset must be an integer of at least 0.")

    def __call__(self, step: int) -> bool:
        """True if ``step`` is tracked."""
        return step >= self.offset and (step - self.offset) % self.n == 0


@dataclass(frozen=True)
class AtSteps:
    """The schedule of :func:`logspaced`: a fixed set of steps."""

    steps: frozenset[int]

    def __call__(self, step: int) -> bool:
        """True if ``step`` is tracked."""
        return step in self.steps

    def __repr__(self) -> str:
        return f"AtSteps({sorted(self.steps)})"

    def __str__(self) -> str:
        return f"{len(self.steps)} steps up to {max(self.steps, default=0)}"


@dataclass(frozen=True)
class AnyOf:
    """The steps of any of several schedules."""

    schedules: tuple[Schedule, ...]

    def __str__(self) -> str:
        return " or ".join(map(in_words, self.schedules))

    def __call__(self, step: int) -> bool:
        """True if ``step`` is tracked."""
        return any(schedule(step) for schedule in self.schedules)


def every(n: int, offset: int = 0) -> Every:
    """Track the steps ``offset``, ``offset + n``, ``offset + 2n``, ...

    Args:
        n: Distance between two tracked steps, at least 1.
        offset: First tracked step, at least 0.
    """
    return Every(n, offset)


def logspaced(start: int, stop: int, num: int = 100) -> AtSteps:
    """Track up to ``num`` log-spaced steps between ``start`` and ``stop``, both included, and step 0.

    Steps are rounded to integers and duplicates are removed, so the early part is dense.

    Args:
        start: First step of the sequence, at least 1.
        stop: Last step, greater than ``start``.
        num: Number of steps before rounding, at least 2.

    Raises:
        ValueError: If an argument is invalid.
    """
    if start < 1:
        raise ValueError(f"logspaced(start={start}): start must be at least 1; step 0 is always tracked.")
    if stop <= start:
        raise ValueError(f"logspaced(stop={stop}): stop must be greater than start={start}.")
    if num < 2:
        raise ValueError(f"logspaced(num={num}): num must be at least 2.")
    return AtSteps(frozenset({0, *np.geomspace(start, stop, num).round().astype(int).tolist()}))
