"""Where a rank's time goes: a few clock readings per step."""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from contextlib import contextmanager

from distcockpit.quantities.batch import Times
from distcockpit.world import Traffic

UNKNOWN = float("nan")


class Clock:
    """Notified when `track` is entered, when its body ends, and when it is left; on every step, tracked or not."""

    def __init__(self) -> None:
        self._born = time.perf_counter()
        self._entered = self._began = self._ended = self._left = UNKNOWN
        self._outside = self._step = UNKNOWN
        self._wait = 0.0  # spent waiting for other ranks in this step
        self.n_steps = {True: 0, False: 0}  # by whether they were tracked
        self._inside = {True: 0.0, False: 0.0}  # seconds inside `track`, likewise
        self._own = 0.0  # of these, seconds before and after its body
        self._first = UNKNOWN  # when `track` was entered first

    def enter(self) -> None:
        """`track` is entered."""
        self._entered, self._began, self._wait = time.perf_counter(), UNKNOWN, 0.0
        self._first = self._entered if math.isnan(self._first) else self._first
        self._outside = self._entered - self._left

    def begin(self) -> None:
        """The body of `track` begins."""
        self._began = time.perf_counter()

    def end(self) -> None:
        """The body of `track` ended."""
        now = time.perf_counter()
        self._step, self._ended = now - self._ended, now

    def leave(self, *, is_tracked: bool) -> None:
        """`track` is left."""
        self._left = time.perf_counter()
        body = self._ended - self._began
        if body >= 0:  # it began and ended
            self.n_steps[is_tracked] += 1
            self._inside[is_tracked] += self._left - self._entered
            self._own += self._left - self._entered - body

    @property
    def duration(self) -> float:
        """Seconds from the first step to the end of the latest one; NaN if there was none."""
        return self._left - self._first

    @property
    def share(self) -> float:
        """What part of this time tracking took.

        How much longer tracked steps took than the others, or the work outside of the body of `track` if there are no
        others; NaN if there was no step.
        """
        took = self._own
        if self.n_steps[False]:
            took = self._inside[True] - self.n_steps[True] * self._inside[False] / self.n_steps[False]
        return max(0.0, took) / self.duration if self.duration > 0 else UNKNOWN

    @contextmanager
    def waiting(self) -> Generator[None, None, None]:
        """Inside, this rank waits for others."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self._wait += time.perf_counter() - before

    @property
    def elapsed(self) -> float:
        """Seconds since the cockpit was constructed, over all segments of the run."""
        return time.perf_counter() - self._born

    def go_on_from(self, elapsed: float) -> None:
        """Continue from the time that had already elapsed before."""
        self._born = time.perf_counter() - elapsed

    def times_elsewhere(self, traffic: Traffic) -> Times:
        """Return the times of a step that this rank had no part in."""
        unknown = (UNKNOWN,) * 6
        return Times(self.elapsed, *unknown, exchanges=traffic.exchanges, exchanged_bytes=traffic.bytes)

    def times(self, forward: float, traffic: Traffic) -> Times:
        """Return this step's times so far.

        Args:
            forward: Time in the model's forward pass.
            traffic: What was exchanged since the previous tracked step.
        """
        now = time.perf_counter()
        return Times(
            elapsed=now - self._born,
            step=self._step,
            outside=self._outside,
            track=self._ended - self._began,
            forward=forward,
            wait=self._wait,
            cockpit=(self._began - self._entered) + (now - self._ended) - self._wait,
            exchanges=traffic.exchanges,
            exchanged_bytes=traffic.bytes,
        )
