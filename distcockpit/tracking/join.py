"""Ranks that have run out of data, under `torch.distributed.algorithms.Join`: they contribute w_r = 0."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from distcockpit.quantities.base import Quantity
from distcockpit.world import Record


class JoinedRanks:
    """The ranks that have joined: they take no optimizer steps any more and need the parameters of those that do."""

    def __init__(self) -> None:
        self.is_possible = False  # whether the loop is inside `Join`
        self._ranks: frozenset[int] = frozenset()
        self._step = -1

    def expect(self) -> None:
        """Expect ranks to run out of data from here on."""
        self.is_possible = True

    def note(self, records: Sequence[Record]) -> frozenset[int]:
        """Return the ranks that have joined, according to their headers."""
        self._ranks = frozenset(rank for rank, record in enumerate(records) if record["joined"])
        self._step = int(max(record["step"] for record in records))
        return self._ranks

    def wait_for_parameters(self, step: int, quantities: Iterable[Quantity]) -> bool:
        """True if rank 0 has joined and waits for the parameters of this step, at which an update ended."""
        if 0 not in self._ranks or self._step != step - 1:
            return False
        return any(q.needs.displacement and q.starts(step - 1) for q in quantities)
