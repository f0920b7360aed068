"""The end of a run: once, on close or when the interpreter exits, and never in a forked process."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from distcockpit.store.writer import at_exit

logger = logging.getLogger("distcockpit")

_open: dict[int, Shutdown] = {}
"""Runs that are not closed yet, by id."""


class Shutdown:
    """Ends one run.

    Args:
        end: Writes everything; its argument is whether the end is orderly, so that it may wait for other ranks.
    """

    def __init__(self, end: Callable[[bool], None]) -> None:
        self._end, self._pid = end, os.getpid()
        self.is_closed = False
        if not _open:
            at_exit(_close_all)
        _open[id(self)] = self

    def close(self, *, orderly: bool) -> None:
        """End the run; calling it again does nothing."""
        if self.is_closed or os.getpid() != self._pid:
            return
        self.is_closed = True
        _open.pop(id(self), None)
        self._end(orderly)


def _close_all() -> None:
    for each in list(_open.values()):
        try:
            each.close(orderly=False)
        except Exception as error:  # the others must be closed as well
            logger.warning("distcockpit: %s", error)
