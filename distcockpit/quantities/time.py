"""How long the run has taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from distcockpit.quantities.base import Quantity, Sums, Totals
from distcockpit.quantities.batch import LocalBatch, Model, Needs
from distcockpit.store.schema import Field, Group, Row


@dataclass(frozen=True, kw_only=True)
class Time(Quantity):
    """When the tracked step's backward pass ended, and what the cockpit exchanged and held for it; on rank 0.

    ``exchanges`` counts collectives, and ``exchanged_bytes`` what rank 0 passed to them, since the same point of the
    previous tracked step: that step's sums, and this step's header and vectors.

    ``factor_bytes`` is the size of the inputs of calls with parameters and of the gradients at their outputs, which are
    kept until the step has ended: the loop frees them earlier, or never needs them. ``copy_bytes`` is that of copies of
    parameters and of their gradients. What is computed from them takes at most ``memory_budget`` beside both.
    """

    source: ClassVar[str] = "Schneider et al. 2021, arXiv:2102.06604"

    def group(self, model: Model) -> Group:
        """Five numbers per step."""
        fields = {
            "time": Field((), "time since the start", "s"),
            "exchanges": Field((), "collectives per tracked step", dtype="int64"),
            "exchanged_bytes": Field((), "data handed to collectives per tracked step", "B", dtype="int64"),
            "factor_bytes": Field((), "inputs and output gradients of layers held", "B", dtype="int64"),
            "copy_bytes": Field((), "copies of parameters and their gradients held", "B", dtype="int64"),
        }
        return Group(fields)

    @property
    def needs(self) -> Needs:
        """What the step holds."""
        return Needs(held=True)

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """Rank 0's clock and counters."""
        times, held = batch.times, batch.held
        sizes = (0, 0) if held is None else (held.factors, held.copies)
        numbers = [times.elapsed, times.exchanges, times.exchanged_bytes, *sizes]
        return {"time": batch.replicated(batch.vector(numbers))}

    def finalize(self, totals: Totals, n: int) -> Row:
        """The same."""
        time, *counts = totals["time"]
        names = ("exchanges", "exchanged_bytes", "factor_bytes", "copy_bytes")
        return {"time": time, **{name: int(count) for name, count in zip(names, counts, strict=True)}}
