"""The exchanges between header and sums. Other ranks wait for these, so a rank that fails must still answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from distcockpit.curvature.lanczos import LargestEigenvalue
from distcockpit.tracking.active import Active
from distcockpit.tracking.clock import Clock
from distcockpit.tracking.setup import Setup

MEAN, SQUARES, AVERAGED = "(1/N) sum_i g_i", "sum_i g_i^2", "what autograd gave, in its own scale"
ROUNDING = "what bounds the rounding of sums"


class Exchanges:
    """Those of one step: the element-wise vectors of each bucket in turn, then the word that eigenvalues begin.

    Args:
        setup: What all ranks agreed on.
        clock: Counts the time that this rank waits.
        active: The quantities of this step.
    """

    def __init__(self, setup: Setup, clock: Clock, active: Active) -> None:
        self._setup, self._clock = setup, clock
        kinds: list[object] = [MEAN] if active.wants("mean_gradient", "projections") else []
        kinds += [SQUARES] if active.wants("squared_gradients") else []
        kinds += [AVERAGED] if active.wants("averaged") else []
        kinds += dict.fromkeys(active.needs[q.name].curvature for q in active.with_need("pooled_curvature"))
        kinds += [ROUNDING] if active.takes_autograds_sums and active.subtracts_squares else []
        self.kinds = kinds  # in the order of the buffer
        self._buckets = list(setup.buckets) if kinds else []  # whose vectors the others wait for
        self._more = 0
        self.eigenvalues: list[LargestEigenvalue] = active.each("eigenvalue")
        self._to_confirm = len(self.eigenvalues)

    def pool(self, names: Sequence[str], vectors: Mapping[object, Sequence[Tensor]]) -> dict[object, Tensor]:
        """Add the element-wise vectors of the next bucket over ranks.

        Args:
            names: The parameters of the bucket.
            vectors: By kind: one vector, or its parts in the order of the parameters.

        Returns:
            Flat totals, float64, by kind; on a single rank without the mean, which needs no exchange and no copy.
        """
        if not self.kinds:
            return {}
        if self._setup.world.size == 1:
            parts = {kind: [part.double().reshape(-1) for part in vectors[kind]] for kind in self.kinds if kind != MEAN}
            return {kind: own[0] if len(own) == 1 else torch.cat(own) for kind, own in parts.items()}
        sizes = [self._size(kind, names) for kind in self.kinds]
        buffer = torch.empty(sum(sizes), dtype=torch.float64, device=self._setup.device)
        own = [part for kind in self.kinds for part in vectors[kind]]
        for place, part in zip(buffer.split([part.numel() for part in own]), own, strict=True):
            place.copy_(part.reshape(-1))
        return dict(zip(self.kinds, self._pool(buffer).split(sizes), strict=True))

    def _size(self, kind: object, names: Sequence[str]) -> int:
        return sum(3 if kind == ROUNDING else self._setup.tracked[name].numel() for name in names)

    def _pool(self, buffer: Tensor) -> Tensor:
        del self._buckets[0]
        return self._all_reduce(buffer)

    def expect_more(self, size: int) -> None:
        """Announce that all ranks are about to pool one more vector, of this length."""
        self._more = size

    def pool_more(self, vector: Tensor) -> Tensor:
        """All-reduce that vector."""
        self._more = 0
        return vector if self._setup.world.size == 1 else self._all_reduce(vector.clone())

    def confirm(self) -> None:
        """Make sure that all ranks are about to start an eigenvalue iteration; called once per eigenvalue.

        Raises:
            RuntimeError: If a rank failed before.
        """
        if failed := self._confirm(0.0):
            raise RuntimeError(f"{failed} rank(s) could not finish the tracked step; see the errors on those ranks.")

    def _confirm(self, failed: float) -> int:
        flag = torch.full((1,), failed, dtype=torch.float64, device=self._setup.device)
        total = int(self._all_reduce(flag).item())
        self._to_confirm = 0 if total else self._to_confirm - 1
        return total

    def _all_reduce(self, buffer: Tensor) -> Tensor:
        with self._clock.waiting():
            return self._setup.world.all_reduce(buffer)

    def give_up(self) -> None:
        """Answer what the other ranks still wait for: send NaN, and report that this rank failed."""
        unknown = torch.full((), float("nan"), dtype=torch.float64, device=self._setup.device)
        if self._more:
            self.pool_more(unknown.repeat(self._more))
        for names in list(self._buckets):
            self._pool(unknown.repeat(sum(self._size(kind, names) for kind in self.kinds)))
        if self._to_confirm:
            self._confirm(1.0)
