"""Histogram over pairs of an individual gradient element and the value of its parameter."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from distcockpit.gradients.kernels import OUTSIDE
from distcockpit.gradients.statistics import Histogram2d, Statistic
from distcockpit.quantities.adaptation import GradAbsMax, ParamAbsMax
from distcockpit.quantities.base import Quantity, Sums, Totals
from distcockpit.quantities.batch import LocalBatch, Model, Needs, ReplicatedValue
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
class GradHist2d(Quantity):
    r"""Histogram of the N P pairs $(g_{i,d}, \theta_d)$ of an individual gradient element and its parameter.

    Schneider et al. 2021, "Cockpit: A Practical Debugging Tool for the Training of Deep Neural Networks",
    arXiv:2102.06604, section 3.2. Bins are half-open, the last one closed, on both axes, and values outside are counted
    in the edge bins. ``counts`` and ``nan`` (pairs with a NaN in either place) add up to N P.

    Args:
        bins: Number of bins, (gradient, parameter).
        range: Lower and upper end of the bins, (gradient, parameter).
        adapt: ``(GradAbsMax(...) or None, ParamAbsMax(...) or None)`` adapt the ranges to the data.
        keep_individual: Store one histogram per parameter as well.
    """

    bins: tuple[int, int] = (40, 50)
    range: tuple[Range, Range] = ((-1.0, 1.0), (-2.0, 2.0))
    adapt: tuple[GradAbsMax | None, ParamAbsMax | None] = (None, None)
    keep_individual: bool = False

    source: ClassVar[str] = "Schneider et al. 2021, arXiv:2102.06604, section 3.2"

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ("bins", "range", "adapt"):
            value = getattr(self, option)
            if not isinstance(value, tuple | list) or len(value) != 2:
                raise ValueError(f"GradHist2d({option}={value!r}): must be a pair, (gradient, parameter).")
        self._axes  # noqa: B018 - checks the arguments

    @cached_property
    def _axes(self) -> tuple[Axis, Axis]:
        kinds = (("gradient", GradAbsMax), ("parameter", ParamAbsMax))
        first, second = (
            Axis.checked(type(self).__name__, key, bins, range, adapt, kind)
            for (key, kind), bins, range, adapt in zip(kinds, self.bins, self.range, self.adapt, strict=True)
        )
        return first, second

    @property
    def reads_totals(self) -> bool:
        """True with an adaptive range."""
        return any(axis.adapt is not None for axis in self._axes)

    @property
    def needs(self) -> Needs:
        """Parameters, next to their gradients."""
        return Needs(values=True)

    def with_schedule(self, schedule: Schedule) -> Quantity:
        """The adaptations get the schedule as well."""
        mine = self.schedule or schedule
        gradient, parameter = self.adapt
        adapt = (with_schedule(gradient, mine), with_schedule(parameter, mine))
        return dataclasses.replace(self, schedule=mine, adapt=adapt)

    def touches(self, step: int) -> bool:
        """Steps with a histogram, and steps at which a range is measured."""
        return self.starts(step) or any(axis.measures(step) for axis in self._axes)

    def group(self, model: Model) -> Group:
        """Counts, edges, and how many elements were outside of them, on both axes."""
        gradient, parameter = self._axes
        counts = Field(("grad_bin", "param_bin"), "pairs of gradient element and parameter", "pairs", dtype="int64")
        fields = {
            "counts": counts,
            "grad_edges": Field(("grad_edge",), "bin edges of gradient elements", "loss / parameter"),
            "param_edges": Field(("param_edge",), "bin edges of parameters"),
            "nan": Field((), "pairs with a NaN", "pairs", dtype="int64"),
        }
        for axis in ("grad", "param"):
            for name, text in OUTSIDE_FIELDS.items():
                what = f"pairs with {'gradient elements' if axis == 'grad' else 'parameters'}"
                fields[f"{axis}_{name}"] = Field((), text.format(what), "pairs", dtype="int64")
        sizes: dict[str, Any] = {
            "grad_bin": gradient.bins,
            "param_bin": parameter.bins,
            "grad_edge": gradient.bins + 1,
            "param_edge": parameter.bins + 1,
        }
        if self.keep_individual:
            fields["counts_per_parameter"] = dataclasses.replace(counts, dims=("parameter", *counts.dims))
            sizes["parameter"] = model.parameters
        return Group(fields, sizes)

    def statistics(self, step: int, parameters: Mapping[str, Tensor], memory: dict[str, Any]) -> dict[str, Statistic]:
        """The histogram, and the largest gradient element at steps that measure it."""
        gradient, parameter = self._axes
        wanted = gradient.statistic(step)
        if self.starts(step):
            wanted["histogram"] = Histogram2d((gradient.edges(memory), parameter.edges(memory)), parameters)
        return wanted

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """Counts per pair of slots; the largest values in this rank's slots."""
        gradient, parameter = self._axes
        sums: dict[str, Tensor | ReplicatedValue] = {**gradient.measured(batch), **parameter.measured(batch)}
        if not self.starts(batch.step):
            return sums
        histogram: Histogram2d = batch.statistics["histogram"]  # type: ignore[assignment]
        shape = (gradient.bins + OUTSIDE, parameter.bins + OUTSIDE)
        slots = torch.stack([as_sum(counts, shape, batch) for counts in histogram.counts.values()])
        sums["slots"] = slots if self.keep_individual else slots.sum(0, keepdim=True)
        for axis in self._axes:
            sums[f"{axis.key}_edges"] = batch.replicated(axis.edges(memory))
        return sums

    def learn(self, totals: Totals, memory: dict[str, Any]) -> None:
        """The next ranges."""
        for axis in self._axes:
            axis.learn(totals, memory)

    def finalize(self, totals: Totals, n: int) -> Row | None:
        """Clipped counts."""
        if "slots" not in totals:
            return None
        each = totals["slots"]
        total = each.sum(0)
        counts = clipped(clipped(each, 1), 2)
        row: dict[str, Any] = {
            "counts": counts.sum(0),
            "grad_edges": totals["gradient_edges"],
            "param_edges": totals["parameter_edges"],
            "nan": total[-1].sum() + total[:-1, -1].sum(),
        }
        for axis, slots in (("grad", total.sum(1)), ("param", total.sum(0))):
            row |= {f"{axis}_{name}": count for name, count in outside(slots).items()}
        return row | ({"counts_per_parameter": counts} if self.keep_individual else {})
