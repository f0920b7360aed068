"""How long the run has taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from distcockpit.quantities.base import Quantity, Sums, Totals
from distcockpit.quantities.batch import LocalBatch, Model
from distcockpit.schema import Field, Group, Row


@dataclass(frozen=True, kw_only=True)
class Time(Quantity):
    """Seconds since the cockpit was constructed, at the end of the tracked step's backward pass; clock of rank 0."""

    source: ClassVar[str] = "Schneider et al. 2021, arXiv:2102.06604"

    def group(self, model: Model) -> Group:
        """One number per step."""
        return Group({"time": Field((), "time since the start", "s")})

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """Rank 0's clock."""
        return {"time": batch.once(batch.times.elapsed)}

    def finalize(self, totals: Totals, n: int) -> Row:
        """The same."""
        return {"time": totals["time"]}
