"""What crosses ranks: the agreement at the start, the header of a step, the sums.

A world of one needs no process group.

The only file that uses torch.distributed. A tracked step makes two exchanges, or three when a quantity needs
element-wise pooled vectors, in this order:

1. the header: a fixed-size record per rank, gathered on a CPU (gloo) group, waited for;
2. element-wise vectors, such as the mean gradient: all-reduced, waited for by what needs them (on an accelerator by its
   stream, not by the host);
3. the sums: one packed float64 buffer, all-reduced, not waited for.

An eigenvalue of the Hessian adds two exchanges per product with a vector. The first tracked step of a quantity whose
sums depend on the sizes of outputs compares these, once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

HEADER = ("step", "batch_size", "weight", "layout", "failed")
"""The numbers of a header record, all exact in float64."""


class Pending:
    """A sum on its way. ``result`` waits for it, from any thread."""

    def __init__(self, buffer: Tensor, work: Any = None) -> None:
        self._buffer, self._work = buffer, work
        self._ready = None
        if buffer.device.type != "cpu":
            module = torch.get_device_module(buffer.device)
            side = module.Stream(buffer.device)
            side.wait_stream(module.current_stream(buffer.device))
            with module.stream(side):
                if work is not None:
                    work.wait()  # orders this stream behind the all-reduce; neither the host nor training waits
                self._host = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True)
                self._host.copy_(buffer, non_blocking=True)
                self._ready = module.Event()
                self._ready.record(side)
            buffer.record_stream(side)

    def result(self) -> np.ndarray:
        """The total, as a float64 array."""
        if self._ready is not None:
            self._ready.synchronize()
            return self._host.numpy()
        if self._work is not None:
            self._work.wait()
        return self._buffer.numpy()

    def done(self) -> bool:
        """Whether ``result`` would return at once."""
        if self._ready is not None:
            return bool(self._ready.query())
        return self._work is None or bool(self._work.is_completed())


@dataclass
class Traffic:
    """What a rank handed to collectives."""

    exchanges: int = 0
    bytes: int = 0

    def count(self, buffer: Tensor) -> Tensor:
        """The buffer is about to be exchanged."""
        self.exchanges += 1
        self.bytes += buffer.numel() * buffer.element_size()
        return buffer


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the parts of a packed buffer."""

    parts: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, sums: Mapping[str, Tensor]) -> Layout:
        """The layout of these sums, in their order."""
        return cls(tuple((name, tuple(value.shape)) for name, value in sums.items()))

    def unpack(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """Cut a buffer into its named parts."""
        parts, start = {}, 0
        for name, shape in self.parts:
            size = math.prod(shape)
            parts[name] = buffer[start : start + size].reshape(shape)
            start += size
        return parts


def pack(sums: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """One float64 buffer on ``device``."""
    if not sums:
        return torch.zeros(0, dtype=torch.float64, device=device)
    return torch.cat([value.reshape(-1).to(device, torch.float64) for value in sums.values()])


class World:
    """The ranks whose batches are pooled.

    Args:
        process_group: The data-parallel group; ``None`` is the default group, or a world of one where
            torch.distributed is not initialised.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.size = 0, 1
        self._traffic = Traffic()
        self._header: dist.ProcessGroup | None = None
        self._sums: dist.ProcessGroup | None = None
        if not (dist.is_available() and dist.is_initialized()):
            return
        group = process_group if process_group is not None else dist.group.WORLD
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.size == 1:
            return
        ranks = dist.get_process_group_ranks(group)
        among_themselves = len(ranks) < dist.get_world_size()
        # Groups made among themselves get a name from their ranks; torch reuses the name, and with it stale addresses,
        # once such a group is destroyed. They stay until torch.distributed ends.
        self._keep_groups = among_themselves
        self._header = dist.new_group(ranks, backend="gloo", use_local_synchronization=among_themselves)
        self._sums = dist.new_group(ranks, backend=dist.get_backend(group), use_local_synchronization=among_themselves)

    def share(self, fact: object) -> list[Any]:
        """One picklable object per rank, in the order of ranks. For construction and first steps only."""
        if self._header is None:
            return [fact]
        facts: list[Any] = [None] * self.size
        dist.all_gather_object(facts, fact, group=self._header)
        return facts

    def header(self, record: Mapping[str, float]) -> list[dict[str, float]]:
        """All ranks' records of this step, waited for.

        Raises:
            RuntimeError: If the ranks are at different steps, track different things, or one of them failed.
        """
        mine = torch.tensor([float(record[name]) for name in HEADER], dtype=torch.float64)
        if self._header is None:
            return [dict(record)]
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(gathered, self._traffic.count(mine), group=self._header)
        records = [dict(zip(HEADER, row.tolist(), strict=True)) for row in gathered]
        self._check(records)
        return records

    def _check(self, records: list[dict[str, float]]) -> None:
        first = records[0]
        for rank, record in enumerate(records):
            if record["step"] != first["step"]:
                raise RuntimeError(
                    f"The ranks are at different steps: rank 0 tracks step {int(first['step'])}, rank {rank} step "
                    f"{int(record['step'])}. Call track(step) with the same steps on all ranks."
                )
        for rank, record in enumerate(records):
            if record["failed"] and rank != self.rank:
                raise RuntimeError(
                    f"Rank {rank} could not finish tracked step {int(first['step'])}; its own error says why."
                )
        for rank, record in enumerate(records):
            if record["layout"] != first["layout"]:
                raise RuntimeError(
                    f"Rank {rank} tracks other values than rank 0 at step {int(first['step'])}. Schedules must say "
                    "the same on all ranks, and log(..., reduce=...) must be called with the same names."
                )

    def sum(self, buffer: Tensor) -> Pending:
        """Add the buffers of all ranks, in place, without waiting."""
        if self._sums is None:
            return Pending(buffer)
        return Pending(buffer, dist.all_reduce(self._traffic.count(buffer), group=self._sums, async_op=True))

    def pool(self, buffer: Tensor) -> Tensor:
        """Add the buffers of all ranks, in place, for use on the device right after."""
        if self._sums is not None:
            dist.all_reduce(self._traffic.count(buffer), group=self._sums, async_op=True).wait()
        return buffer

    def tell(self, buffer: Tensor) -> Tensor:
        """Overwrite the buffers of all ranks with that of rank 0."""
        if self._sums is not None:
            dist.broadcast(self._traffic.count(buffer), group=self._sums, group_src=0)
        return buffer

    def traffic(self) -> Traffic:
        """What this rank exchanged since it was last asked."""
        counted, self._traffic = self._traffic, Traffic()
        return counted

    def close(self) -> None:
        """Give the process groups back. Every rank must have waited for its sums."""
        if self._header is not None and dist.is_initialized() and not self._keep_groups:
            for group in (self._header, self._sums):
                dist.destroy_process_group(group)
        self._header = self._sums = None


def first_difference(descriptions: list[dict[str, str]]) -> str | None:
    """Who disagrees with rank 0 and on what, or ``None``.

    Args:
        descriptions: One description per rank: facts by name, in an order of importance.
    """
    for rank, description in enumerate(descriptions[1:], start=1):
        for name in dict.fromkeys([*descriptions[0], *description]):
            here, there = descriptions[0].get(name, "nothing"), description.get(name, "nothing")
            if here != there:
                return f"rank {rank} has {name} = {there}, rank 0 has {name} = {here}"
    return None
