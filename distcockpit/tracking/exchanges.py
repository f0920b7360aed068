"""The exchanges between header and sums. Other ranks wait for these, so a rank that fails must still answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from distcockpit.curvature.lanczos import LargestEigenvalue
from distcockpit.gradients.factors import rows_of
from distcockpit.tracking.active import Active
from distcockpit.tracking.clock import Clock
from distcockpit.tracking.gathering import gather
from distcockpit.tracking.setup import Bucket, Setup

MEAN, SQUARES, AVERAGED = "(1/N) sum_i g_i", "sum_i g_i^2", "what autograd gave, in its own scale"

Pooled = Callable[[], Mapping[object, Tensor]]
"""Waits for the totals of a bucket: flat, float64, by kind; on a single rank without the mean, which is its own."""


class Exchanges:
    """Those of one step: the element-wise vectors of each bucket in turn, what bounds their rounding, and eigenvalues.

    Args:
        setup: What all ranks agreed on.
        clock: Counts the time that this rank waits.
        active: The quantities of this step.
        rounds: Whether any rank takes rounded sums where squares are subtracted.
        gathers: How many vectors of each bucket are gathered before it is walked, where parameters are sharded.
    """

    def __init__(self, setup: Setup, clock: Clock, active: Active, *, rounds: bool, gathers: int = 0) -> None:
        self._setup, self._clock = setup, clock
        self._to_gather = [bucket for bucket in setup.buckets for _ in range(gathers)]  # for which the others wait
        kinds: list[object] = [MEAN] if active.wants_mean else []
        kinds += [SQUARES] if active.wants("squared_gradients") else []
        kinds += [AVERAGED] if active.wants("averaged") else []
        kinds += dict.fromkeys(active.needs[q.name].curvature for q in active.with_need("pooled_curvature"))
        self.kinds = kinds  # in the order of the buffer
        self._buckets: list[Bucket] = list(setup.buckets) if kinds else []  # whose vectors the others wait for
        self._in_flight: list[Callable[[], Tensor]] = []
        self.rounds = rounds and active.takes_autograds_sums and active.subtracts_squares
        self._bounds = [len(setup.tracked) * 4] if self.rounds else []  # sizes of what is still to be pooled
        self._more: list[int] = []  # likewise
        self.eigenvalues: list[LargestEigenvalue] = active.each("eigenvalue")
        self._to_confirm = len(self.eigenvalues)

    def start(self, sizes: Mapping[str, int], vectors: Mapping[object, Sequence[Tensor]]) -> Pooled:
        """Begin to add the element-wise vectors of the next bucket over ranks.

        Args:
            sizes: The parameters of the bucket, with their numbers of elements in it.
            vectors: By kind: one vector, or its parts in the order of the parameters.
        """
        if not self.kinds:
            return dict
        if self._setup.world.size == 1:
            whole = len(vectors[MEAN]) == 1 and vectors[MEAN][0].dtype == torch.float64  # else the parts do as they are
            kinds = [kind for kind in self.kinds if kind != MEAN or whole]
            parts = {kind: [part.double().reshape(-1) for part in vectors[kind]] for kind in kinds}
            alone = {kind: own[0] if len(own) == 1 else torch.cat(own) for kind, own in parts.items()}
            return lambda: alone
        size = sum(sizes.values())
        buffer = torch.empty(size * len(self.kinds), dtype=torch.float64, device=self._setup.device)
        own = [part for kind in self.kinds for part in vectors[kind]]
        for place, part in zip(buffer.split([part.numel() for part in own]), own, strict=True):
            place.copy_(part.reshape(-1))
        arrived = self._start(buffer)

        def wait() -> Mapping[object, Tensor]:
            with self._clock.waiting():
                total = arrived()
            self._in_flight.remove(arrived)
            return dict(zip(self.kinds, total.split(size), strict=True))

        return wait

    def gather(self, bucket: Bucket, pieces: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """Return the rows of a bucket, of what is sharded; see `tracking.gathering.gather`."""
        try:
            with self._clock.waiting():
                return gather(self._setup, bucket, pieces)
        finally:
            del self._to_gather[0]

    def _start(self, buffer: Tensor) -> Callable[[], Tensor]:
        del self._buckets[0]
        arrived = self._setup.world.start_all_reduce(buffer)
        self._in_flight.append(arrived)
        return arrived

    def pool_bounds(self, bounds: Tensor) -> Tensor:
        """Add what bounds the rounding of sums over ranks: float64 ``[parameters, 4]``."""
        self._bounds = []
        return bounds if self._setup.world.size == 1 else self._all_reduce(bounds.flatten()).view(-1, 4)

    def expect_more(self, sizes: Sequence[int]) -> None:
        """Announce that all ranks are about to pool more vectors, of these lengths."""
        self._more = list(sizes)

    def pool_more(self, vector: Tensor) -> Tensor:
        """All-reduce the next of these vectors."""
        own = vector if self._setup.world.size == 1 else vector.clone()
        del self._more[0]
        return own if self._setup.world.size == 1 else self._all_reduce(own)

    def confirm(self) -> None:
        """Make sure that all ranks are about to start an eigenvalue iteration; called once per eigenvalue.

        Raises:
            RuntimeError: If a rank failed before.
        """
        if failed := self._confirm(0.0):
            raise RuntimeError(f"{failed} rank(s) could not finish the tracked step; see the errors on those ranks.")

    def _confirm(self, failed: float) -> int:
        device = self._setup.device
        flag = self._setup.world.insist(lambda: torch.full((1,), failed, dtype=torch.float64, device=device))
        total = int(self._all_reduce(flag).item())
        self._to_confirm = 0 if total else self._to_confirm - 1
        return total

    def _all_reduce(self, buffer: Tensor) -> Tensor:
        with self._clock.waiting():
            return self._setup.world.all_reduce(buffer)

    def _unknown(self, size: int) -> Tensor:
        unknown, device = float("nan"), self._setup.device
        return self._setup.world.insist(lambda: torch.full((size,), unknown, dtype=torch.float64, device=device))

    def give_up(self) -> None:
        """Answer what the other ranks still wait for: send NaN, and report that this rank failed."""
        for arrived in list(self._in_flight):
            arrived()
        self._in_flight.clear()
        if self._setup.world.size > 1:
            for bucket in self._setup.buckets:
                while self._to_gather and self._to_gather[0] is bucket:
                    self.gather(bucket, None)
                if self._buckets and self._buckets[0] is bucket:
                    size = sum(elements(self._setup.tracked, bucket).values())
                    self._start(self._unknown(size * len(self.kinds)))()
            for size in (*self._bounds, *self._more):
                self._all_reduce(self._unknown(size))
        if self._to_confirm:
            self._confirm(1.0)


def elements(parameters: Mapping[str, Tensor], bucket: Bucket) -> dict[str, int]:
    """Return how many elements of each parameter belong to a bucket."""
    return {name: rows_of(parameters[name], rows).numel() for name, rows in bucket.items()}
