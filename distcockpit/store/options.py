"""How patient the writer of a store is, and how much it keeps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """Options of the store that few runs need: ``DistCockpit(..., store_options=StoreOptions(flush_seconds=5))``.

    Args:
        flush_seconds: Longest time until finished rows are in the store.
        flush_rows: Most finished rows that wait for that; a row is one step of one quantity.
        queue_steps: Tracked steps that may wait for the background thread.
        wait_seconds: Longest time that a tracked step waits for it when so many do. Rows are then dropped, and counted
            in the attribute ``dropped_rows`` of the store.
        unwritten_budget: Most memory for rows that the store does not take, in bytes or as a text ("64MiB"). Beyond it
            they are dropped and counted as well.
        store_seconds: Longest time that a request to a remote store may take, and that ``flush``, ``close`` and the end
            of the program wait for the store.
        lock_seconds: A store has one writer. One that gave no sign of life for so long is taken to be gone; on the same
            host that is known at once.
        fsync: Wait until the disk has each file, so that what is committed outlives a loss of power.
    """

    flush_seconds: float = 30.0
    flush_rows: int = 4096
    queue_steps: int = 1024
    wait_seconds: float = 1.0
    unwritten_budget: int | str = "256MiB"
    store_seconds: float = 30.0
    lock_seconds: float = 60.0
    fsync: bool = False
