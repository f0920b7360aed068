"""One writer at a time: a key in the store that says who writes it, renewed while the writer is alive."""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distcockpit.store.keys import Keys

STALE_SECONDS = 60.0

KEY = "writer/zarr.json"
"""An empty Zarr group, so that a reader who lists the store finds nothing unexpected."""


@dataclass(frozen=True)
class LockHolder:
    """The writer."""

    host: str  # with its PID namespace: two containers may share a host name
    process: int
    started: str  # when the process started, in the host's own format: PIDs are reused
    token: str

    @classmethod
    def this(cls) -> LockHolder:
        """This process."""
        return cls(_host(), os.getpid(), _start_of(os.getpid()), uuid.uuid4().hex)

    @property
    def is_dead(self) -> bool:
        """True if it is known to have ended, which only a process of this host can be."""
        return self.host == _host() and _start_of(self.process) != self.started


class Lock:
    """The right to write a store.

    Args:
        keys: The store.
        stale_seconds: A lock that was not renewed for this long is lost.
    """

    def __init__(self, keys: Keys, stale_seconds: float) -> None:
        self._keys, self._stale_seconds = keys, stale_seconds
        self.writer = LockHolder.this()
        self._renewed = 0.0

    def check(self, *, patient: bool) -> bool:
        """True if the lock is held by a writer that is gone.

        Args:
            patient: Wait for a lock to become stale, as long as nobody renews it.

        Raises:
            FileExistsError: If another process writes to the store.
        """
        first = found = self._held()
        while found is not None and not self._is_stale(*found):
            if not patient or found != first:
                who, when = found
                is_own = (who.host, who.process) == (self.writer.host, self.writer.process)
                own = (
                    "It belongs to an earlier cockpit in this same process: close that one with cockpit.close(). "
                    if is_own
                    else ""
                )
                raise FileExistsError(
                    f"store={self._keys.name!r} is being written by process {who.process} on {who.host}, which last "
                    f"renewed its lock {max(0.0, time.time() - when):.0f} s ago. Wait until it ends, or choose another "
                    f"path. {own}If the process is gone, its lock expires {self._stale_seconds:g} s after the last "
                    "renewal (lock_seconds=)."
                )
            time.sleep(min(1.0, self._stale_seconds / 20))
            found = self._held()
        return found is not None

    def take(self) -> None:
        """Take the lock, which `check` found free.

        Raises:
            FileExistsError: If another process was faster.
        """
        if not self._keys.create(KEY, self._document()):
            self._keys.put({KEY: self._document()})
        held = self._held()
        if held is None or held[0] != self.writer:
            raise FileExistsError(
                f"store={self._keys.name!r}: another process started writing it at the same time. Choose another path."
            )
        self._renewed = time.monotonic()

    def renew(self) -> None:
        """Renew the lock, if it is due.

        Raises:
            FileExistsError: If another process took the lock, because the last renewal was too long ago.
        """
        if self.seconds_to_renewal <= 0:
            self._renewed = time.monotonic()  # even if it fails: the next one will be in time
            held = self._held()
            if held is not None and held[0] != self.writer:
                raise FileExistsError(f"{self._keys.name} is now being written by another process, {held[0].process}")
            self._keys.put({KEY: self._document()})

    @property
    def seconds_to_renewal(self) -> float:
        """Seconds until the next renewal is due."""
        return self._renewed + self._stale_seconds / 4 - time.monotonic()

    def release(self) -> None:
        """Let others write."""
        held = self._held()
        if held is not None and held[0] == self.writer:
            self._keys.delete([KEY])

    def _is_stale(self, who: LockHolder, when: float) -> bool:
        return who.is_dead or time.time() - when > self._stale_seconds

    def _held(self) -> tuple[LockHolder, float] | None:
        found = _read(self._keys)
        return None if found is None else found[:2]

    def _document(self) -> bytes:
        attributes = {**asdict(self.writer), "time": time.time(), "stale_seconds": self._stale_seconds}
        return json.dumps({"zarr_format": 3, "node_type": "group", "attributes": attributes}).encode()


def is_abandoned(keys: Keys) -> bool:
    """True if nobody writes to a store any more, as far as can be known: its writer ended, or let its lock expire."""
    found = _read(keys)
    return found is None or found[0].is_dead or time.time() - found[1] > found[2]


def _read(keys: Keys) -> tuple[LockHolder, float, float] | None:
    """The holder of the lock, when it was renewed, and after how many seconds it expires; ``None`` if there is none."""
    data = keys.get_one(KEY)
    if data is None:
        return None
    try:
        known: dict[str, Any] = dict(json.loads(data)["attributes"])
        when, seconds = float(known.pop("time")), float(known.pop("stale_seconds", STALE_SECONDS))
        return LockHolder(**known), when, seconds
    except (ValueError, KeyError, TypeError):
        return None  # an unreadable lock blocks nobody


def _host() -> str:
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _start_of(process: int) -> str:
    """When a process of this host started; "none" if it has ended, empty if the system does not say."""
    try:
        state, *rest = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return "none" if state in "ZX" else rest[18]
    except (OSError, IndexError):
        pass
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return "none"
    except OSError:
        pass
    return ""
