"""The background thread of rank 0: waits for totals, finalizes quantities, appends rows, commits.

Store problems never reach the training: if the queue is full, one step waits, then rows are dropped and counted; if the
store fails, rows stay in memory and writes are retried.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from distcockpit.notices import Notices
from distcockpit.store.options import StoreOptions
from distcockpit.store.run_store import CLOSED, RUNNING, RunStore, State

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 0.1  # batch what arrived in the meantime: waking the thread takes longer than a row
POLL_SECONDS = 0.01  # between two polls for sums that have not arrived
GRACE_SECONDS = 2.0  # for sums in flight when the run does not end cleanly
AGAIN_SECONDS = 1.0  # between two attempts at something that must not fail


@dataclass(frozen=True)
class Job:
    """A job for the thread.

    Args:
        run: Takes the store, and returns True if a commit is due.
        rows: Rows that are lost if the job is not done.
        is_ready: Returns True if it would not wait for other ranks.
        insist: The job must succeed before anything else is done.
    """

    run: Callable[[RunStore], bool]
    rows: int = 0
    is_ready: Callable[[], bool] = field(default=lambda: True)
    insist: bool = False


class Writer:
    """Runs jobs in order on a daemon thread, so that training never waits for the disk.

    Args:
        store: The run's store.
        options: When to write and how long to wait.
        notices: Where to report faults of the store.
    """

    def __init__(self, store: RunStore, options: StoreOptions, notices: Notices) -> None:
        self._store, self._options, self._notices = store, options, notices
        self._jobs: queue.Queue[Job | None] = queue.Queue(options.queue_steps)
        self._pid = os.getpid()
        self._closed, self._end = False, CLOSED
        self._hurry = threading.Event()
        self._commit_now = threading.Event()  # also while waiting for sums
        self._last_commit = time.monotonic()
        self._dropped = 0  # by the training thread, since this thread last looked
        self._dropped_before = store.dropped_rows  # in earlier segments
        self._is_dropping = False
        self._in_hand = 0  # rows of the job in progress
        self._deadline = float("inf")  # after it, nothing waits for sums or the store
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="distcockpit-writer", daemon=True)
        self._thread.start()

    # -- on the training thread ----------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Run a job on the thread; if its queue stays full, drop the job."""
        if os.getpid() != self._pid or self._closed:
            return
        try:
            # Only one step waits. While the thread is still behind, later ones do not.
            self._jobs.put(job, not self._is_dropping, self._options.wait_seconds)
            self._is_dropping = False
            self._notices.when_new("queue", None)
        except queue.Full:
            self._dropped += job.rows
            self._is_dropping = True
            self._notices.when_new(
                "queue",
                f"{self._store.name} accepts rows too slowly; {self._options.queue_steps} tracked steps are queued, "
                "and new rows are dropped until it has caught up. The store attribute dropped_rows counts them.",
            )
        if self._jobs.qsize() >= self._options.queue_steps // 4:
            self._hurry.set()

    def flush(self, reason: str = "") -> bool:
        """Wait until everything submitted is committed or the store takes too long; True if it is committed.

        Args:
            reason: Why the run is about to end; if it goes on, the next commit says so.
        """
        if os.getpid() != self._pid or self._closed:
            return True
        done = threading.Event()
        good: list[bool] = []

        def job(store: RunStore) -> bool:
            good.append(self._commit(State("ended", reason) if reason else RUNNING))
            done.set()
            return False

        deadline = time.monotonic() + self._options.store_seconds
        self._commit_now.set()
        try:
            self._jobs.put(Job(job), timeout=self._options.store_seconds)
        except queue.Full:
            return False
        while not done.wait(0.1) and self._thread.is_alive() and time.monotonic() < deadline:
            self._hurry.set()
        return good == [True]

    def close(self, reason: str = "", *, wait_for_ranks: bool = True) -> None:
        """Write what is there, and stop the thread. Calling it again does nothing.

        Args:
            reason: Why the run ended early; empty if it was closed.
            wait_for_ranks: Wait for sums still in flight; otherwise, sums that have not arrived are lost.
        """
        if os.getpid() != self._pid or self._closed:
            return
        self._closed, self._end = True, State("ended", reason) if reason else CLOSED
        if not wait_for_ranks:
            self._deadline = time.monotonic() + GRACE_SECONDS
        ends = time.monotonic() + self._options.store_seconds
        try:
            self._hurry.set()
            self._jobs.put(None, timeout=self._options.store_seconds)
            while self._thread.is_alive() and time.monotonic() < ends:
                self._hurry.set()
                self._thread.join(0.05)
        except queue.Full:
            pass
        self._tell_losses()

    def _tell_losses(self) -> None:
        """Report what did not reach the store."""
        late = sum(job.rows for job in list(self._jobs.queue) if job is not None)
        lost = self._store.unwritten_rows + late + self._in_hand
        if self._thread.is_alive():
            self._deadline = 0.0
            self.error = self.error or TimeoutError(f"{self._store.name} did not answer")
        if lost:
            why = f" ({type(self.error).__name__}: {self.error})" if self.error else ""
            logger.warning("distcockpit: %d rows did not reach %s%s.", lost, self._store.name, why)
        if dropped := self._store.dropped_rows - self._dropped_before:
            logger.warning("distcockpit: %d rows were lost on the way to %s, see above.", dropped, self._store.name)

    # -- on the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        waiting, failed = False, False
        while True:
            due = self._last_commit + self._options.flush_seconds - time.monotonic() if waiting else float("inf")
            was_idle = self._jobs.empty()
            job: Job | None = None
            try:
                job = self._jobs.get(timeout=max(0.0, min(due, self._store.seconds_to_renewal)))
                if job is None:
                    break
                self._in_hand = job.rows
                if was_idle:
                    self._hurry.wait(PAUSE_SECONDS)
                    self._hurry.clear()
            except queue.Empty:
                if self._closed:  # the queue was full when the thread should have been told
                    break
            self._renew()
            commit_due = job is not None and self._do(job)
            self._in_hand = 0
            waiting = waiting or job is not None
            many = commit_due or self._store.unwritten_rows >= self._options.flush_rows
            if waiting and (self._is_late or (many and not failed)):  # a store that failed is given time
                waiting = failed = not self._commit()
        if not self._commit(self._end):
            time.sleep(AGAIN_SECONDS)
            self._commit(self._end)
        try:
            self._store.release()
        except Exception:  # other writers will find the lock stale
            logger.debug("distcockpit: the lock could not be removed.", exc_info=True)

    def _do(self, job: Job) -> bool:
        try:
            is_ready = self._wait_for_ranks(job)
        except Exception as error:  # of the accelerator, for example
            self._dropped += job.rows
            self.report(error, f"{job.rows} rows are lost")
            return False
        if not is_ready:
            self._dropped += job.rows
            self.report(TimeoutError("other ranks did not send their sums"), f"{job.rows} rows are lost")
            return False
        while True:
            try:
                return job.run(self._store)
            except Exception as error:  # an error here must not end the training
                what = f"{self._store.name} could not be resumed yet" if job.insist else "rows are lost"
                self.report(error, what)
                if not job.insist or self._gives_up:
                    self._dropped += job.rows
                    return False
                self._renew()
                self._hurry.wait(AGAIN_SECONDS)

    def _wait_for_ranks(self, job: Job) -> bool:
        """Wait for sums, and commit what is there in the meantime."""
        while not job.is_ready():
            if self._gives_up:
                return False
            self._renew()
            if self._store.unwritten_rows and (self._commit_now.is_set() or self._is_late):
                self._commit_now.clear()
                self._commit()
            time.sleep(POLL_SECONDS)
        return True

    @property
    def _is_late(self) -> bool:
        return time.monotonic() - self._last_commit >= self._options.flush_seconds

    def lose(self, rows: int) -> None:
        """Count lost rows."""
        self._dropped += rows

    @property
    def _gives_up(self) -> bool:
        return time.monotonic() >= self._deadline

    def _renew(self) -> None:
        try:
            self._store.renew()
        except Exception as error:
            self.report(error, f"{self._store.name} could not be written")

    def _commit(self, state: State = RUNNING) -> bool:
        dropped = self._dropped
        if dropped:
            self._dropped -= dropped
            self._store.drop(dropped)
        try:
            self._store.commit(state)
        except Exception as error:
            self.report(error, f"{self._store.name} could not be written; its rows are kept, and writing is retried")
            return False
        finally:
            self._last_commit = time.monotonic()
        self.error = None
        self._notices.when_new("store", None)
        return True

    def report(self, error: Exception, what: str) -> None:
        """Remember an error until the next successful commit, and log it if it is new."""
        self.error = error
        self._notices.when_new("store", f"{what} ({type(error).__name__}: {error}).", str(error))


def at_exit(function: Callable[[], None]) -> None:
    """Call a function when the interpreter exits, while threads can still be started.

    ``atexit`` runs too late for stores that use thread pools, and does not run in multiprocessing processes.
    """
    try:
        threading._register_atexit(function)  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        atexit.register(function)
