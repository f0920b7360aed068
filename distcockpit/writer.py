"""The background thread of rank 0: waits for totals, finalizes quantities, appends rows, commits."""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
from collections.abc import Callable

from distcockpit.store import RunStore

logger = logging.getLogger(__name__)

QUEUE_STEPS = 256  # tracked steps that may wait; the training thread waits when the disk is that far behind
PAUSE_SECONDS = 0.1  # the thread takes what came in the meantime together: waking it takes longer than a row does
EXIT_SECONDS = 30.0


class Writer:
    """Runs jobs in order on a daemon thread, so that training never waits for the disk.

    A job is a callable that takes the store and says whether a commit is due.

    Args:
        store: The run's store.
        flush_seconds: Longest time between two commits while rows wait.
    """

    def __init__(self, store: RunStore, flush_seconds: float = 30.0) -> None:
        self._store, self._flush_seconds = store, flush_seconds
        self._jobs: queue.Queue[Callable[[RunStore], bool] | None] = queue.Queue(QUEUE_STEPS)
        self._pid = os.getpid()
        self._closed, self._last_state = False, "closed"
        self._hurry = threading.Event()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="distcockpit-writer", daemon=True)
        self._thread.start()
        atexit.register(self._at_exit)

    def submit(self, job: Callable[[RunStore], bool]) -> None:
        """Run ``job`` on the thread."""
        if os.getpid() == self._pid and not self._closed:
            self._jobs.put(job)
            if self._jobs.qsize() >= QUEUE_STEPS // 4:
                self._hurry.set()

    def flush(self) -> None:
        """Wait until all that was submitted is committed."""
        if os.getpid() != self._pid or self._closed:
            return
        done = threading.Event()

        def job(store: RunStore) -> bool:
            self._commit()
            done.set()
            return False

        self._jobs.put(job)
        self._hurry.set()
        while not done.wait(1.0) and self._thread.is_alive():
            pass

    def close(self, state: str = "closed", timeout: float | None = None) -> None:
        """Write what is there, with this state of the run, and end the thread. Calling it again does nothing."""
        if os.getpid() != self._pid or self._closed:
            return
        self._closed, self._last_state = True, state
        atexit.unregister(self._at_exit)
        self._hurry.set()
        try:
            self._jobs.put(None, timeout=timeout)
        except queue.Full:
            logger.warning("distcockpit: the store is too slow; rows were not written.")
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            logger.warning("distcockpit: the store did not finish in %s s; rows may be missing.", timeout)

    def _at_exit(self) -> None:
        self.close("running", EXIT_SECONDS)

    def _run(self) -> None:
        last_commit, waiting = time.monotonic(), False
        while True:
            due = max(0.0, last_commit + self._flush_seconds - time.monotonic())
            was_idle = self._jobs.empty()
            try:
                job = self._jobs.get(timeout=due if waiting else None)
                if was_idle:
                    self._hurry.wait(PAUSE_SECONDS)
                    self._hurry.clear()
            except queue.Empty:
                job = _commit_now
            if job is None:
                break
            try:
                commit_due = job(self._store)
                waiting = True
            except Exception as error:  # a fault here must not end the training
                self.report(error, "a row of the store could not be computed")
                commit_due = False
            if commit_due or time.monotonic() - last_commit >= self._flush_seconds:
                waiting = not self._commit()
                last_commit = time.monotonic()
        self._commit(self._last_state)

    def _commit(self, state: str = "running") -> bool:
        try:
            self._store.commit(state)
        except Exception as error:
            self.report(error, f"{self._store.path} could not be written; its rows are kept and tried again")
            return False
        self.error = None
        return True

    def report(self, error: Exception, what: str) -> None:
        """Remember a fault until the next successful commit, and log it when it is a new one."""
        if str(error) != str(self.error):
            logger.warning("distcockpit: %s (%s: %s).", what, type(error).__name__, error)
        self.error = error


def _commit_now(store: RunStore) -> bool:
    return True
