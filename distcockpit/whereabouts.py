"""Where each rank was last, told through the key-value store of torch.distributed; only errors ask for it.

The host that keeps the store may be the one that vanished, so whoever asks waits a few seconds at most.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

GRACE_SECONDS = 1.5
"""How long other ranks that wait in vain have to say so; their errors come at nearly the same time."""

ANSWER_SECONDS = 1.5
"""How long the store may take to answer."""

WAITS = ", waiting"


class Whereabouts:
    """A line that each rank leaves for the others.

    Args:
        store: The key-value store that all ranks share; ``None`` if there is none.
        rank: This rank.
        hosts: Names of the hosts of all ranks.
        keeper: The host that keeps the store; empty if unknown.
    """

    def __init__(self, store: Any, rank: int, hosts: Sequence[str], keeper: str = "") -> None:
        self._store, self._rank, self._hosts, self._keeper = store, rank, hosts, keeper
        self._keys = [f"distcockpit/{k}" for k in range(len(hosts))]
        self._line = self._told = ""
        self.leave("not in any tracked step yet")

    def leave(self, line: str) -> None:
        """Tell the other ranks where this one is, without waiting for them."""
        self._line = line
        if self._store is not None:
            try:
                self._store.set(self._keys[self._rank], line)
            except RuntimeError:  # the store is gone; the next exchange will fail, too
                self._store, self._told = None, self._unreachable()

    def describe(self) -> str:
        """Say which ranks are missing, after a few seconds in which those that wait as this one does say so."""
        if not self._told:
            self._told = self._describe()
            self._store = None  # what this rank left is true from now on; if nobody answers, it is locked
        return self._told

    def _describe(self) -> str:
        if self._store is None:
            return "Where the other ranks are is unknown."
        store, lines = self._store, list[str]()

        def ask() -> None:
            try:
                store.set(self._keys[self._rank], self._line + WAITS)
                time.sleep(GRACE_SECONDS)
                lines.extend([line.decode() for line in store.multi_get(self._keys)])
            except RuntimeError:
                pass

        thread = threading.Thread(target=ask, name="distcockpit-whereabouts", daemon=True)
        thread.start()
        thread.join(GRACE_SECONDS + ANSWER_SECONDS)
        if not lines:
            return self._unreachable()
        waiting = [k for k, line in enumerate(lines) if line.endswith(WAITS) or k == self._rank]
        silent = [k for k in range(len(lines)) if k not in waiting]
        elsewhere = [k for k in silent if lines[k] != self._line]  # others may be about to say that they wait
        told = []
        if silent:
            told.append(f"Missing: {self._grouped(elsewhere or silent, lines, 'last seen ')}.")
        told.append(f"Waiting: {self._grouped(waiting, [line.removesuffix(WAITS) for line in lines])}.")
        return " ".join(told)

    def _unreachable(self) -> str:
        there = [k for k, host in enumerate(self._hosts) if host == self._keeper]
        on = f" Missing: {self._named(there)}, and whoever else cannot be reached." if there else ""
        return f"The key-value store of torch.distributed does not answer: its host is gone or cut off.{on}"

    def _grouped(self, ranks: Sequence[int], lines: Sequence[str], prefix: str = "") -> str:
        groups: dict[str, list[int]] = {}
        for rank in ranks:
            groups.setdefault(lines[rank], []).append(rank)
        return "; ".join(f"{self._named(who)} ({prefix}{line})" for line, who in groups.items())

    def _named(self, ranks: Sequence[int], shown: int = 8) -> str:
        hosts = list(dict.fromkeys(self._hosts[rank] for rank in ranks))
        more = f" and {len(ranks) - shown} more" if len(ranks) > shown else ""
        where = f" on {', '.join(hosts[:shown])}" if len(set(self._hosts)) > 1 else ""
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:shown]))}{more}{where}"
