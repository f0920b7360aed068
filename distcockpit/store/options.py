"""How long the writer of a store waits, and how much it keeps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """Store options that few runs need: ``DistCockpit(..., store_options=StoreOptions(flush_seconds=5))``.

    Args:
        flush_seconds: Maximum time until finished rows are in the store.
        flush_rows: Maximum number of finished rows that wait for that; a row is one step of one quantity.
        queue_steps: Number of tracked steps that may wait for the background thread.
        wait_seconds: How long a tracked step waits for the thread if the queue is full. After that, rows are dropped,
            and counted in the attribute ``dropped_rows`` of the store.
        unwritten_budget: Maximum memory for rows that the store does not accept, in bytes or as a string ("64MiB").
            Rows beyond it are dropped and counted as well.
        store_seconds: How long a request to a remote store may take, and how long ``flush``, ``close`` and the end of
            the program wait for the store.
        lock_seconds: A store has one writer. A writer that has not renewed its lock for this long is considered dead;
            on the same host, this is known at once.
        fsync: Wait until each file is on disk, so that committed rows survive a power failure.
    """

    flush_seconds: float = 30.0
    flush_rows: int = 4096
    queue_steps: int = 1024
    wait_seconds: float = 1.0
    unwritten_budget: int | str = "256MiB"
    store_seconds: float = 30.0
    lock_seconds: float = 60.0
    fsync: bool = False
