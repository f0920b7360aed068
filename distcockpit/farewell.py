"""The line at the end of a run: how much was tracked, what it cost, what looks wrong, and where to look."""

from __future__ import annotations

import contextlib
import logging
import shlex
import threading
from collections.abc import Sequence

from distcockpit.tracking.clock import Clock

logger = logging.getLogger("distcockpit")

FEWEST_STEPS = 20
"""Tracked steps of a run that is worth a look at its end; rules need several rows, and reading takes a second."""

SECONDS = 10.0
"""After which nobody waits for the rules."""


class Farewell:
    """Logs the line, on rank 0.

    Args:
        store: Name of the store.
    """

    def __init__(self, store: str) -> None:
        self._store = store

    def __call__(self, clock: Clock, rows: int, reason: str) -> None:
        """Log the line, unless there was no step.

        Args:
            clock: Of the run.
            rows: How many rows were recorded.
            reason: Why the run ended early; empty if it was closed.
        """
        tracked, n = clock.n_steps[True], sum(clock.n_steps.values())
        if not n:
            if not reason:
                logger.info(
                    "distcockpit: no step was tracked: put the forward and backward passes inside "
                    "`with cockpit.track(step):`."
                )
            return
        words = [
            f"{n:,} step{'s' if n > 1 else ''} in {_duration(clock.duration)}, {tracked:,} of them tracked, which took "
            f"{clock.share:.0%} of the time; {rows:,} rows in {self._store}."
        ]
        if reason:
            words.insert(0, f"The run ended early: {reason}.")
        elif tracked >= FEWEST_STEPS and "://" not in self._store:
            words += self._findings()
        if not self._store.startswith("memory://"):
            words.append(f"See: distcockpit report {shlex.quote(self._store)} -o report.html")
        logger.info("distcockpit: %s", " ".join(words))

    def _findings(self) -> Sequence[str]:
        """What looks wrong, in a sentence; nothing if that cannot be known soon."""
        found: list[str] = []

        def look() -> None:
            with contextlib.suppress(Exception):  # as the interpreter exits, not all that is imported here can be
                found.append(_checked(self._store))

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        thread.join(SECONDS)
        return found


def _checked(store: str) -> str:
    from distcockpit.findings import check  # noqa: PLC0415 - reading takes modules that training does not need
    from distcockpit.run import look_at  # noqa: PLC0415

    titles = [finding.title for finding in check(look_at(store)).findings]
    return (
        f"What looks wrong: {'; '.join(titles)}."
        if titles
        else "Nothing looks wrong by the rules that could be applied."
    )


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
