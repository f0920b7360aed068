"""SIGTERM, which launchers send to stop a job: write what has arrived, then let the usual thing happen."""

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

SECONDS = 10.0  # launchers wait about 30 s before they kill


class Terminated:
    """Writes when SIGTERM arrives, on its own thread, because the main thread may be stuck in a collective.

    The signal handler runs as soon as the main thread gets to it, and waits for the writing thread; then the previous
    handler runs, or the process ends as it would have. The byte that Python writes when a signal arrives
    (``signal.set_wakeup_fd``) wakes the thread even if the main thread never returns. Signal handlers can only be set
    from the main thread of a process; elsewhere this is a no-op.

    Args:
        write: Writes what has arrived.
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
        if self._previous is None:  # not set from Python, so it could not be called
            return
        self._read, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        signal.signal(signal.SIGTERM, self._handle)
        other = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        self._has_wakeup = other == -1
        if not self._has_wakeup:  # already taken by an event loop
            signal.set_wakeup_fd(other)
        self.is_installed = True
        os.register_at_fork(after_in_child=self._leave_parent_alone)
        threading.Thread(target=self._listen, name="distcockpit-sigterm", daemon=True).start()

    def remove(self) -> None:
        """Restore the previous handler, unless somebody else has replaced ours."""
        if not self.is_installed or os.getpid() != self._pid:
            return
        if threading.current_thread() is not threading.main_thread():
            return
        self.is_installed = False
        self._write = _nothing  # fork hooks are never removed, and must not keep the store alive
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._previous)
        if self._has_wakeup and (other := signal.set_wakeup_fd(-1)) not in (-1, self._wakeup):
            signal.set_wakeup_fd(other)
        os.close(self._wakeup)  # ends the thread

    def _leave_parent_alone(self) -> None:
        """Keep a forked process from writing to the pipe when it gets a signal."""
        if self.is_installed and self._has_wakeup:
            with contextlib.suppress(ValueError):  # forked from another thread
                signal.set_wakeup_fd(-1)

    def _listen(self) -> None:
        while data := os.read(self._read, 64):
            if signal.SIGTERM in data:
                logger.info("distcockpit: received SIGTERM; writing what has arrived.")
                self._write()
                self._done = True
        os.close(self._read)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal on the main thread; takes no lock, because that thread may already hold it."""
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
