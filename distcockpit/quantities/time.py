"""How long the run has taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from distcockpit.quantities.base import Quantity, Sums, Totals
from distcockpit.quantities.batch import LocalBatch, Model
from distcockpit.store.schema import Field, Group, Row


@dataclass(frozen=True, kw_only=True)
class Time(Quantity):
    """When the tracked step's backward pass ended, and what the cockpit exchanged for the step; on rank 0.

    ``exchanges`` counts collectives, and ``exchanged_bytes`` what rank 0 passed to them, since the same point of the
    previous tracked step: that step's sums, and this step's header and vectors.
    """

    source: ClassVar[str] = "Schneider et al. 2021, arXiv:2102.06604"

    def group(self, model: Model) -> Group:
        """Three numbers per step."""
        fields = {
            "time": Field((), "time since the start", "s"),
            "exchanges": Field((), "collectives per tracked step", dtype="int64"),
            "exchanged_bytes": Field((), "data handed to collectives per tracked step", "B", dtype="int64"),
        }
        return Group(fields)

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """Rank 0's clock and counters."""
        times = batch.times
        return {"time": batch.replicated(batch.vector([times.elapsed, times.exchanges, times.exchanged_bytes]))}

    def finalize(self, totals: Totals, n: int) -> Row:
        """The same."""
        time, exchanges, exchanged_bytes = totals["time"]
        return {"time": time, "exchanges": int(exchanges), "exchanged_bytes": int(exchanged_bytes)}
