"""SIGTERM, with which launchers stop a job: what is there is written, then happens what would have happened."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

logger = logging.getLogger(__name__)

SECONDS = 10.0  # launchers wait some 30 s before they kill


class Terminated:
    """Writes when SIGTERM comes, from a thread of its own: the main one may be stuck in a collective.

    The signal's handler runs when the main thread comes to it, and waits for the thread; then the handler that was
    there before runs, or the process ends as it would have. The byte that Python writes when a signal arrives
    (``signal.set_wakeup_fd``) wakes the thread even if the main one never returns. Only the main thread of a process
    can be asked for signals; elsewhere nothing happens.

    Args:
        write: Writes what is there.
    """

    def __init__(self, write: Callable[[], object]) -> None:
        self._write: Callable[[], object] = write
        self._pid = os.getpid()
        self._wakeup = -1
        self.is_installed = False
        self._done = False
        if threading.current_thread() is not threading.main_thread():
            return
        self._previous = signal.getsignal(signal.SIGTERM)
        if self._previous is None:  # not set from Python, so that it could not be called
            return
        self._read, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        signal.signal(signal.SIGTERM, self._handle)
        other = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        self._has_wakeup = other == -1
        if not self._has_wakeup:  # an event loop has it
            signal.set_wakeup_fd(other)
        self.is_installed = True
        os.register_at_fork(after_in_child=self._leave_parent_alone)
        threading.Thread(target=self._listen, name="distcockpit-sigterm", daemon=True).start()

    def remove(self) -> None:
        """Put back what was there, if nobody else came in between."""
        if not self.is_installed or os.getpid() != self._pid:
            return
        if threading.current_thread() is not threading.main_thread():
            return
        self.is_installed = False
        self._write = _nothing  # what is called at a fork stays for ever; the store must not
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._previous)
        if self._has_wakeup and (other := signal.set_wakeup_fd(-1)) not in (-1, self._wakeup):
            signal.set_wakeup_fd(other)
        os.close(self._wakeup)  # ends the thread

    def _leave_parent_alone(self) -> None:
        """A forked process must not write to the pipe when it gets a signal."""
        if self.is_installed and self._has_wakeup:
            with contextlib.suppress(ValueError):  # forked from another thread
                signal.set_wakeup_fd(-1)

    def _listen(self) -> None:
        while data := os.read(self._read, 64):
            if signal.SIGTERM in data:
                logger.info("distcockpit: SIGTERM; writing what is there.")
                self._write()
                self._done = True
        os.close(self._read)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """On the main thread; takes no lock, because that thread may hold it."""
        if self.is_installed and os.getpid() == self._pid:
            self._done = False
            os.write(self._wakeup, bytes([signal.SIGTERM]))
            ends = time.monotonic() + SECONDS
            while not self._done and time.monotonic() < ends:
                time.sleep(0.01)
        if callable(self._previous):
            self._previous(number, frame)
        elif self._previous == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)


def _nothing() -> None:
    pass
