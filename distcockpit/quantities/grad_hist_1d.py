"""Histogram of all individual gradient elements."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from distcockpit.gradients.kernels import OUTSIDE
from distcockpit.gradients.statistics import Histogram1d, Statistic
from distcockpit.quantities.adaptation import GradAbsMax
from distcockpit.quantities.base import Quantity, Sums, Totals
from distcockpit.quantities.batch import LocalBatch, Model, ReplicatedValue
from distcockpit.quantities.histograms import (
    OUTSIDE_FIELDS,
    Axis,
    Range,
    as_sum,
    clipped,
    outside,
    with_schedule,
)
from distcockpit.schedules import Schedule
from distcockpit.store.schema import Field, Group, Row


@dataclass(frozen=True, kw_only=True)
class GradHist1d(Quantity):
    r"""Histogram of the N P elements $g_{i,d}$ of all individual gradients of the pooled batch.

    Schneider et al. 2021, "Cockpit: A Practical Debugging Tool for the Training of Deep Neural Networks",
    arXiv:2102.06604, section 3.2. Bins are half-open, the last one closed. Values outside the range, infinities
    included, are counted in the edge bins; ``counts`` and ``nan`` add up to N P. Every row stores its edges.

    Args:
        bins: Number of bins, at least 1.
        range: Lower and upper end of the bins.
        adapt: A :class:`GradAbsMax` adapts the range to the gradients; every rank then waits, before its next
            histogram, for the totals of the measured step.
    """

    bins: int = 100
    range: Range = (-2.0, 2.0)
    adapt: GradAbsMax | None = None

    source: ClassVar[str] = "Schneider et al. 2021, arXiv:2102.06604, section 3.2"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._axis  # noqa: B018 - checks the arguments

    @cached_property
    def _axis(self) -> Axis:
        return Axis.checked(type(self).__name__, "gradient", self.bins, self.range, self.adapt, GradAbsMax)

    @property
    def reads_totals(self) -> bool:
        """True with an adaptive range."""
        return self.adapt is not None

    def with_schedule(self, schedule: Schedule) -> Quantity:
        """The adaptation gets the schedule as well."""
        mine = self.schedule or schedule
        return dataclasses.replace(self, schedule=mine, adapt=with_schedule(self.adapt, mine))

    def touches(self, step: int) -> bool:
        """Steps with a histogram, and steps at which its range is measured."""
        return self.starts(step) or self._axis.measures(step)

    def group(self, model: Model) -> Group:
        """Counts, edges, and how many elements were outside of them."""
        fields = {
            "counts": Field(("bin",), "individual gradient elements", "elements", dtype="int64"),
            "edges": Field(("edge",), "bin edges of gradient elements", "loss / parameter"),
            **{
                name: Field((), text.format("gradient elements"), "elements", dtype="int64")
                for name, text in OUTSIDE_FIELDS.items()
            },
        }
        return Group(fields, {"bin": self.bins, "edge": self.bins + 1})

    def statistics(self, step: int, parameters: Mapping[str, Tensor], memory: dict[str, Any]) -> dict[str, Statistic]:
        """The histogram, and the largest element at steps that measure it."""
        wanted = self._axis.statistic(step)
        if self.starts(step):
            wanted["histogram"] = Histogram1d(self._axis.edges(memory))
        return wanted

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """Counts per slot; the largest element in this rank's slot."""
        sums: dict[str, Tensor | ReplicatedValue] = {**self._axis.measured(batch)}
        if self.starts(batch.step):
            histogram: Histogram1d = batch.statistics["histogram"]  # type: ignore[assignment]
            sums["slots"] = as_sum(histogram.counts, (self.bins + OUTSIDE,), batch)
            sums["edges"] = batch.replicated(histogram.edges)
        return sums

    def learn(self, totals: Totals, memory: dict[str, Any]) -> None:
        """The next range."""
        self._axis.learn(totals, memory)

    def finalize(self, totals: Totals, n: int) -> Row | None:
        """Clipped counts."""
        if "slots" not in totals:
            return None
        return {"counts": clipped(totals["slots"], 0), "edges": totals["edges"], **outside(totals["slots"])}
