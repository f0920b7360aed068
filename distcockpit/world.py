"""What ranks exchange: the agreement at the start, the header of a step, the sums.

A world of one needs no process group.

The only file that uses torch.distributed. A tracked step makes two exchanges, or three if a quantity needs pooled
element-wise vectors, in this order:

1. the header: a fixed-size record per rank, all-gathered on a CPU (gloo) group; blocking;
2. element-wise vectors, such as the mean gradient: all-reduced; whatever needs them waits (on an accelerator its
   stream, not the host);
3. the sums: one packed float64 buffer, all-reduced asynchronously.

An eigenvalue of the Hessian adds two exchanges per Hessian-vector product. The first tracked step of a quantity whose
sums depend on output sizes compares these sizes, once; the first step of each selection of quantities likewise compares
the names and lengths of its sums, because backends abort the process if lengths differ. While ranks have run out of
data (`torch.distributed.algorithms.Join`), the parameters follow the header.

Every rank records its position, so that a rank that waits in vain can say which one is missing.
"""

from __future__ import annotations

import functools
import hashlib
import socket
import time
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from distcockpit.replay.devices import is_host
from distcockpit.replay.memory import insist
from distcockpit.whereabouts import Whereabouts

T = TypeVar("T")

HEADER = (
    *("kind", "step", "batch_size", "weight", "of_sum", "is_sum", "own", "coefficient", "mix", "rounds"),
    *("model", "layout", "failed", "riding", "joined"),
)
"""The fields of a header record, in float64."""

KINDS = (
    "tracks step {}",
    "closes the cockpit after step {}",
    "calls state_dict() after step {}",
    "leaves Join",
    "compares the sums of step {}",
)
"""What a rank is doing when it sends a header, by the header's number `kind`."""
TRACK, CLOSE, STATE, LEAVE, COMPARE = map(float, range(len(KINDS)))

Record = Mapping[str, float]


def record_of(kind: float, step: int, **numbers: float) -> dict[str, float]:
    """Return a header record; numbers that are not given are zero."""
    return dict.fromkeys(HEADER, 0.0) | {"kind": kind, "step": float(step)} | numbers


class Pending:
    """A sum in flight. ``result`` waits for it, from any thread.

    Args:
        buffer: The sum, once it has arrived.
        work: The all-reduce; ``None`` if there is nothing to wait for.
        explain: What to tell the user if it fails.
        seconds: How long to wait; on the CPU, the process group itself has such a limit.
    """

    def __init__(
        self, buffer: Tensor, work: Any = None, explain: Callable[[str], str] = str, seconds: float = 0.0
    ) -> None:
        self._buffer, self._work, self._explain, self._seconds = buffer, work, explain, seconds
        self._ready = None
        self._result: np.ndarray | None = None
        if not is_host(buffer.device):
            module = torch.get_device_module(buffer.device)
            side = _side_stream(buffer.device) if work is None else module.Stream(buffer.device)
            side.wait_stream(module.current_stream(buffer.device))
            with module.stream(side):
                if work is not None:
                    work.wait()  # makes this stream wait for the all-reduce, but neither the host nor training
                self._host = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu", pin_memory=True)
                self._host.copy_(buffer, non_blocking=True)
                self._ready = module.Event()
                self._ready.record(side)
            buffer.record_stream(side)

    def result(self) -> np.ndarray:
        """Return the total, as a float64 array.

        Raises:
            RuntimeError: If a rank exited before it sent its part, or took too long.
        """
        if self._result is None:
            self._result = self._arrived()
        return self._result

    def _arrived(self) -> np.ndarray:
        try:
            if self._ready is not None:
                self._wait_for_the_device()
                if not self._ready.query():
                    self._ready.synchronize()
                return self._host.numpy()
            if self._work is not None:
                self._work.wait()
            return self._buffer.numpy()
        except RuntimeError as error:
            raise RuntimeError(self._explain("sums did not arrive")) from error

    def _wait_for_the_device(self) -> None:
        """Wait for the all-reduce, which the device alone would do forever if a rank does not come.

        Raises:
            RuntimeError: If it takes too long, or fails.
        """
        ends = time.monotonic() + self._seconds
        while self._work is not None and not self._work.is_completed():
            if time.monotonic() > ends:
                raise RuntimeError(f"The all-reduce was not done after {self._seconds:g} s.")
            time.sleep(1e-4)
        if self._work is not None and not self._work.is_success():
            raise RuntimeError("The all-reduce failed.")

    def done(self) -> bool:
        """True if ``result`` would return immediately."""
        if self._ready is not None:
            return bool(self._ready.query())
        return self._work is None or bool(self._work.is_completed())


@functools.cache
def _side_stream(device: torch.device) -> Any:
    """The stream for copies to the host, done in order: who has waited for one has waited for all before it."""
    return torch.get_device_module(device).Stream(device)


@dataclass
class Traffic:
    """What a rank passed to collectives."""

    exchanges: int = 0
    bytes: int = 0

    def count(self, buffer: Tensor) -> Tensor:
        """Count a buffer that is about to be exchanged."""
        self.exchanges += 1
        self.bytes += buffer.numel() * buffer.element_size()
        return buffer


class RankFailed(RuntimeError):
    """This tracked step cannot be finished together, and all ranks know in time."""


class ModelsDiffer(RankFailed):
    """The models of the ranks did not change in the same way."""


class World:
    """The ranks whose batches are pooled.

    Args:
        process_group: The data-parallel group; ``None`` is the default group, or a world of one where
            torch.distributed is not initialised.
        timeout_seconds: How long a rank waits for another one.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, timeout_seconds: float = 1800.0) -> None:
        self.rank, self.size, self.ranks = 0, 1, [0]
        self.timeout_seconds = timeout_seconds
        self._broken = ""
        self._traffic = Traffic()
        self._header: dist.ProcessGroup | None = None
        self._sums: dist.ProcessGroup | None = None
        self._whereabouts = Whereabouts(None, 0, [""])
        if not (dist.is_available() and dist.is_initialized()):
            return
        self.group = process_group if process_group is not None else dist.group.WORLD
        if dist.get_rank(self.group) < 0:
            raise ValueError(
                f"process_group= does not contain this rank, {dist.get_rank()} of {dist.get_world_size()}. Pass a "
                "group that it belongs to, or construct DistCockpit only on the ranks of the group."
            )
        ranks = self.ranks = sorted(dist.get_process_group_ranks(self.group))  # the order that new groups have
        self.rank, self.size = ranks.index(dist.get_rank()), len(ranks)
        if self.size == 1:
            return
        options: dict[str, Any] = {
            "timeout": timedelta(seconds=timeout_seconds),
            "use_local_synchronization": len(ranks) < dist.get_world_size(),
        }
        new_group: Callable[..., Any] = dist.new_group
        with self._explained("construct DistCockpit"), _names_of_our_own(ranks):
            self._header = new_group(ranks, backend="gloo", **options)
            backend: str = dist.get_backend(self.group)
            if backend == "undefined":  # of a group with one for each device, as `init_process_group()` makes
                backend = str(dist.get_backend_config(self.group))
            self._sums = new_group(ranks, backend=backend, **options)
            hosts: list[Any] = [None] * self.size
            dist.all_gather_object(hosts, socket.gethostname(), group=self._header)
        # The store is kept by the host of the first rank of all, as far as torchrun and the usual set-ups go.
        keeper = hosts[ranks.index(0)] if 0 in ranks else ""
        store = getattr(self._header, "get_group_store", lambda: None)()
        with suppress(RuntimeError):  # stores of another kind cannot be cloned
            store = store and store.clone()
        self._whereabouts = Whereabouts(store, self.rank, hosts, keeper)

    @property
    def is_broken(self) -> bool:
        """True if an exchange failed; those that follow would fail, too."""
        return bool(self._broken)

    # -- who is where --------------------------------------------------------------------------------------------------

    def leave_word(self, text: str) -> None:
        """Tell the other ranks where this one is, without waiting for them."""
        self._whereabouts.leave(text)

    def explain(self, what: str) -> str:
        """Explain a failed exchange to the user; the ones that follow fail for the same reason, and at once."""
        self._broken = self._broken or (
            f"Rank {self.rank}: {what}, because another rank has exited, is stuck, or took a different path "
            f"(timeout_seconds={self.timeout_seconds:g}). {self._whereabouts.describe()} All ranks must track the "
            "same steps; ranks that run out of data early need `with Join([ddp, cockpit]):`."
        )
        return self._broken

    def note(self, error: BaseException) -> None:
        """Add a note on where the ranks are, if this error came from an exchange between them."""
        if self._header is not None and (isinstance(error, dist.DistError) or "gloo" in str(error).lower()):
            error.add_note(self._whereabouts.describe())

    @contextmanager
    def _explained(self, what: str) -> Generator[None, None, None]:
        if self._broken:
            raise RuntimeError(self._broken)
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(self.explain(f"could not {what} together with all ranks")) from error

    # -- exchanges -----------------------------------------------------------------------------------------------------

    def insist(self, make: Callable[[], T]) -> T:
        """Return what ``make`` returns, which the other ranks wait for, see `replay.memory.insist`.

        If there is no memory for it, this rank exchanges nothing more: sums would mix what does not belong together.
        """
        try:
            return insist(make)
        except Exception as error:
            self._broken = self._broken or (
                f"Rank {self.rank} had no memory left for what the other ranks waited for ({error}), so it cannot "
                "track any more steps. Pass a smaller memory_budget=, or track fewer quantities."
            )
            raise

    def all_gather_object(self, fact: object) -> list[Any]:
        """Gather one picklable object per rank, in rank order, on all ranks. For construction and first steps only."""
        if self._header is None:
            return [fact]
        facts: list[Any] = [None] * self.size
        with self._explained("exchange objects"):
            dist.all_gather_object(facts, fact, group=self._header)
        return facts

    def gather_object(self, fact: object) -> list[Any] | None:
        """Gather one picklable object per rank, in rank order, on rank 0; returns ``None`` on the others."""
        if self._header is None:
            return [fact]
        facts: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with self._explained("gather objects"):
            dist.gather_object(fact, facts, group=self._header, group_dst=0)
        return facts

    def header(self, record: Record) -> list[dict[str, float]]:
        """Gather all ranks' records of this step; blocking.

        Raises:
            RuntimeError: If the ranks are at different steps, track different things, or one of them failed or does not
                respond.
        """
        if self._header is None:
            return [dict(record)]
        fields = [float(record[name]) for name in HEADER]
        mine = self.insist(lambda: torch.tensor(fields, dtype=torch.float64, device="cpu"))
        gathered = self.insist(lambda: [torch.empty_like(mine) for _ in range(self.size)])
        with self._explained("finish a tracked step" if record["kind"] == TRACK else "synchronize"):
            dist.all_gather(gathered, self._traffic.count(mine), group=self._header)
        records = [dict(zip(HEADER, row.tolist(), strict=True)) for row in gathered]
        self._check(records)
        return records

    def refuse(self, record: Record) -> None:
        """Answer a header on behalf of a rank that failed, so that the others fail too instead of waiting."""
        try:
            self.header({**record, "failed": 1.0})
        except RuntimeError:
            pass  # this rank's own error is the one to show

    def _check(self, records: list[dict[str, float]]) -> None:
        present = [(rank, record) for rank, record in enumerate(records) if not record["joined"]]
        if not present:
            return
        one, first = present[0]
        for rank, record in present:
            if (record["kind"], record["step"]) != (first["kind"], first["step"]):
                here, there = (KINDS[int(r["kind"])].format(int(r["step"])) for r in (first, record))
                raise RuntimeError(
                    f"The ranks are at different steps: rank {one} {here}, rank {rank} {there}. Call track(step), "
                    "state_dict() and close() at the same steps on all ranks."
                )
        for rank, record in enumerate(records):
            if record["failed"] and rank != self.rank:
                raise RankFailed(
                    f"Rank {rank} could not finish tracked step {int(first['step'])}; see the error on that rank."
                )
        for rank, record in enumerate(records):
            if first["kind"] == TRACK and record["model"] != first["model"]:
                raise ModelsDiffer(
                    f"Rank {rank} tracks different parameters or modules than rank {one} at step {int(first['step'])}. "
                    "A model must change on all ranks between the same steps."
                )
        for rank, record in present:
            if record["layout"] != first["layout"]:
                raise RankFailed(
                    f"Rank {rank} tracks different values than rank {one} at step {int(first['step'])}. Schedules must "
                    "return the same on all ranks."
                )

    def all_reduce_async(self, buffer: Tensor) -> Pending:
        """All-reduce a buffer (sum), in place, without waiting."""
        if self._sums is None:
            return Pending(buffer)
        with self._explained("all-reduce sums"):
            work = dist.all_reduce(self._traffic.count(buffer), group=self._sums, async_op=True)
        return Pending(buffer, work, self.explain, self.timeout_seconds)

    def all_reduce(self, buffer: Tensor) -> Tensor:
        """All-reduce a buffer (sum), in place, for immediate use on the device."""
        return self.start_all_reduce(buffer)()

    def start_all_reduce(self, buffer: Tensor) -> Callable[[], Tensor]:
        """Begin to all-reduce a buffer (sum), in place; what is returned waits for it, and returns it for use."""
        if self._sums is None:
            return lambda: buffer
        with self._explained("all-reduce vectors"):
            work = dist.all_reduce(self._traffic.count(buffer), group=self._sums, async_op=True)

        def wait() -> Tensor:
            with self._explained("all-reduce vectors"):
                work.wait()
            return buffer

        return wait

    def broadcast(self, buffer: Tensor, rank: int = 0) -> Tensor:
        """Broadcast a buffer from one rank to all, in place."""
        if self._sums is not None:
            with self._explained("broadcast a vector"):
                dist.broadcast(self._traffic.count(buffer), group=self._sums, group_src=rank)
        return buffer

    def traffic(self) -> Traffic:
        """Return what this rank has exchanged since the last call."""
        counted, self._traffic = self._traffic, Traffic()
        return counted

    def close(self) -> None:
        """Destroy the process groups. Every rank must have waited for its sums."""
        if self._header is not None and dist.is_initialized():
            for group in (self._header, self._sums):
                dist.destroy_process_group(group)
        self._header = self._sums = None


_groups: WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = WeakKeyDictionary()
"""How many of our groups were made so far, by the default group, which may end and begin anew, and by their ranks."""


@contextmanager
def _names_of_our_own(ranks: list[int]) -> Generator[None, None, None]:
    """Give groups of these ranks that are made inside names of our own.

    torch makes names from the number of groups that each rank has made. Ranks whose numbers differ would wait for each
    other forever; and from torch 2.14 on a group of some ranks puts these ahead of the others, so that the user's next
    group of all ranks would hang.
    """
    module, members = dist.distributed_c10d, tuple(ranks)
    original, digest_of_ranks = module._process_group_name, hashlib.sha1(repr(members).encode()).hexdigest()
    made = _groups.setdefault(dist.group.WORLD, Counter())

    def name(*_: Any, **__: Any) -> Any:
        made[members] += 1
        return f"distcockpit_{digest_of_ranks}_{made[members]}"

    module._process_group_name = name
    try:
        yield
    finally:
        module._process_group_name = original


def first_difference(descriptions: list[dict[str, str]]) -> str | None:
    """Return which rank disagrees with rank 0 and on what, or ``None``.

    Args:
        descriptions: One description per rank: facts by name, in order of importance.
    """
    for rank, description in enumerate(descriptions[1:], start=1):
        for name in dict.fromkeys([*descriptions[0], *description]):
            here, there = descriptions[0].get(name, "nothing"), description.get(name, "nothing")
            if here != there:
                return f"rank {rank} has {name} = {there}, rank 0 has {name} = {here}"
    return None


def digest(*facts: Any) -> int:
    """Return a number below 2^32 (exact in float64) that differs if the facts differ."""
    return zlib.crc32(repr(facts).encode())
