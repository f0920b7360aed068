"""The end of a run: once, on close or when the interpreter exits, and never in a forked process."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

from distcockpit.store.names import plain
from distcockpit.store.writer import at_exit

logger = logging.getLogger("distcockpit")

NOT_CLOSED = "the program ended without close()"

_open: dict[int, Shutdown] = {}
"""Runs that are not closed yet, by id."""


class Shutdown:
    """Ends one run.

    Args:
        end: Writes everything. Its argument is why the run ended early; empty for an orderly end, which may wait for
            other ranks.
        alone: Whether there are no other ranks, so that the end of a program without errors is an orderly one.
    """

    def __init__(self, end: Callable[[str], None], *, alone: bool) -> None:
        self._end, self._pid = end, os.getpid()
        self._reason = "" if alone else NOT_CLOSED  # of a program that ends without errors
        self.is_closed = False
        if not _open:
            at_exit(_close_all)
        _open[id(self)] = self

    def close(self, reason: str = "") -> None:
        """End the run; calling it again does nothing.

        Args:
            reason: As for ``end``.
        """
        if self.is_closed or os.getpid() != self._pid:
            return
        self.is_closed = True
        _open.pop(id(self), None)
        self._end(reason)

    def leave(self) -> None:
        """End the run as the interpreter exits."""
        error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)  # which ended the program
        self.close(self._reason if error is None else in_words(error))


def in_words(error: BaseException) -> str:
    """Return why a run ended early."""
    return plain(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__, 300)


def _close_all() -> None:
    for each in list(_open.values()):
        try:
            each.leave()
        except Exception as error:  # the others must be closed as well
            logger.warning("distcockpit: %s", error)
