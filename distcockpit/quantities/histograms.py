"""Shared parts of the gradient histograms: validated axes, adapted edges, and turning slots into counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from distcockpit.gradients.kernels import bin_edges
from distcockpit.gradients.statistics import AbsMax, Statistic
from distcockpit.quantities.adaptation import GradAbsMax, ParamAbsMax
from distcockpit.quantities.base import Totals
from distcockpit.quantities.batch import LocalBatch
from distcockpit.schedules import Schedule

Range = tuple[float, float]
Adaptation = GradAbsMax | ParamAbsMax | None
A = TypeVar("A", GradAbsMax | None, ParamAbsMax | None)


@dataclass(frozen=True)
class Axis:
    """One axis of a histogram: its bins, its initial range, and how the range adapts to the data."""

    key: str  # names the axis in the sums and in the quantity's memory
    bins: int
    range: Range
    adapt: Adaptation

    @classmethod
    def checked(cls, owner: str, key: str, bins: object, range: object, adapt: object, allowed: type) -> Axis:
        """An axis from user arguments.

        Raises:
            ValueError: If the bins or the range are invalid.
            TypeError: If the adaptation has the wrong type.
        """
        if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
            raise ValueError(f"{owner}(bins={bins!r}): must be an integer of at least 1.")
        try:
            low, high = (float(end) for end in range)  # type: ignore[attr-defined]
        except (TypeError, ValueError):
            raise ValueError(f"{owner}(range={range!r}): must be a pair of numbers, (low, high).") from None
        if not (np.isfinite([low, high]).all() and low < high):
            raise ValueError(f"{owner}(range={range!r}): must be finite with low < high.")
        if adapt is not None and not isinstance(adapt, allowed):
            raise TypeError(f"{owner}(adapt={adapt!r}): must be None or {allowed.__name__}(...).")
        return cls(key, bins, (low, high), adapt)  # type: ignore[arg-type]

    def edges(self, memory: dict[str, Any]) -> np.ndarray:
        """The current edges."""
        low, high = memory.get(f"{self.key}_range", self.range)
        return bin_edges(low, high, self.bins)

    def measures(self, step: int) -> bool:
        """True if the adaptation measures at ``step``."""
        return self.adapt is not None and bool(self.adapt.schedule and self.adapt.schedule(step))

    def learn(self, totals: Totals, memory: dict[str, Any]) -> None:
        """Set the range from what the ranks measured, if anything."""
        if self.adapt is not None and f"{self.key}_largest" in totals:
            memory[f"{self.key}_range"] = self.adapt.range(float(totals[f"{self.key}_largest"].max()))

    def statistic(self, step: int) -> dict[str, Statistic]:
        """An accumulator for the largest gradient element, if this axis adapts to it at ``step``."""
        follows = self.measures(step) and isinstance(self.adapt, GradAbsMax)
        return {f"{self.key}_largest": AbsMax()} if follows else {}

    def measured(self, batch: LocalBatch) -> dict[str, Tensor]:
        """This rank's slot for the largest value, if this axis is measured."""
        if not self.measures(batch.step):
            return {}
        if isinstance(self.adapt, GradAbsMax):
            statistic = batch.statistics[f"{self.key}_largest"]
        else:
            statistic = AbsMax()
            for name, parameter in batch.own_parameters.items():
                statistic.block(name, parameter, slice(0))
        return {f"{self.key}_largest": batch.slot(batch.vector([statistic.value])[0])}  # type: ignore[attr-defined]


def with_schedule(adapt: A, schedule: Schedule) -> A:
    """The adaptation, with the histogram's schedule if it has none of its own."""
    return adapt if adapt is None or adapt.schedule is not None else dataclasses.replace(adapt, schedule=schedule)


def clipped(slots: np.ndarray, axis: int) -> np.ndarray:
    """Counts per bin from counts per slot: values outside go into the edge bins, NaN is dropped."""
    slots = np.moveaxis(slots, axis, 0)
    counts = slots[2:-3].copy()
    counts[0] += slots[0] + slots[1]
    counts[-1] += slots[-3] + slots[-2]
    return np.moveaxis(counts, 0, axis)


def outside(slots: np.ndarray) -> Mapping[str, int]:
    """How many of the elements counted in ``[b + 5]`` slots were not within the range."""
    return {
        "below": int(slots[0] + slots[1]),
        "above": int(slots[-3] + slots[-2]),
        "nan": int(slots[-1]),
        "pos_inf": int(slots[-2]),
        "neg_inf": int(slots[0]),
    }


OUTSIDE_FIELDS = {
    "below": "{} below the range, -inf included",
    "above": "{} above the range, +inf included",
    "nan": "{} that are NaN",
    "pos_inf": "{} that are +inf",
    "neg_inf": "{} that are -inf",
}


def as_sum(counts: Tensor | int, shape: tuple[int, ...], batch: LocalBatch) -> Tensor:
    """Counts as a float64 sum (exact up to 2^53); the 0 of a rank without samples as zeros of ``shape``."""
    if isinstance(counts, Tensor):
        return counts.double()
    return torch.zeros(shape, dtype=torch.float64, device=batch.vector([0.0]).device)
