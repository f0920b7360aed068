"""The quantities of a tracked step, and their combined needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

from distcockpit.quantities.base import Quantity
from distcockpit.quantities.batch import Needs

OF_GRADIENTS = (
    "mean_squared",
    "bucket_sums",
    "mean_gradient",
    "squared_norms",
    "projections",
    "squared_gradients",
    "update",
)
"""The needs that are met by individual gradients."""


def of_individual_gradients(quantity: Quantity) -> bool:
    """True if it is derived from individual gradients, or from curvature, which is that of individual losses."""
    needs = quantity.needs
    own = type(quantity).statistics is not Quantity.statistics
    return own or needs.second_order or any(getattr(needs, name) for name in OF_GRADIENTS)


class Active:
    """Some of the quantities, with their needs, each of which is evaluated once.

    Args:
        quantities: The quantities, in the order of the run.
    """

    def __init__(self, quantities: Sequence[Quantity]) -> None:
        self.quantities = list(quantities)
        self.needs: dict[str, Needs] = {q.name: q.needs for q in self.quantities}
        self._with_need: dict[str, list[Quantity]] = {}

    def __iter__(self) -> Iterator[Quantity]:
        return iter(self.quantities)

    def __len__(self) -> int:
        return len(self.quantities)

    @cached_property
    def _wanted(self) -> frozenset[str]:
        names = [field.name for field in dataclasses.fields(Needs)]
        return frozenset(name for name in names if any(getattr(needs, name) for needs in self.needs.values()))

    def wants(self, *needs: str) -> bool:
        """True if any quantity has any of these needs."""
        return not self._wanted.isdisjoint(needs)

    def each(self, need: str) -> list[Any]:
        """Return the distinct values of a need, in the order of the quantities, skipping quantities without it."""
        values = dict.fromkeys(getattr(needs, need) for needs in self.needs.values())
        return [value for value in values if value is not None and value is not False]

    def with_need(self, need: str) -> list[Quantity]:
        """Return the quantities that have this need."""
        if need not in self._with_need:
            self._with_need[need] = [q for q in self.quantities if getattr(self.needs[q.name], need)]
        return self._with_need[need]

    @cached_property
    def with_individual_gradients(self) -> list[Quantity]:
        """The quantities derived from individual gradients or from per-sample losses."""
        return [q for q in self.quantities if of_individual_gradients(q) or q.needs.loss or q.needs.losses]

    @cached_property
    def of_gradients(self) -> list[Quantity]:
        """The quantities derived from individual gradients."""
        return [q for q in self.quantities if of_individual_gradients(q)]

    @cached_property
    def wants_mean(self) -> bool:
        """True if any of them needs G, or something that follows from it."""
        return self.wants("mean_squared", "bucket_sums", "mean_gradient", "projections")

    @cached_property
    def reducing(self) -> list[Quantity]:
        """The quantities that see the sums of buckets."""
        needs = ("bucket_sums", "squared_gradients", "pooled_curvature", "averaged")
        return [q for q in self.quantities if any(getattr(self.needs[q.name], need) for need in needs)]

    @cached_property
    def wants_calls(self) -> bool:
        """True if any of them needs individual gradients, and not just their sum."""
        own = any(type(q).statistics is not Quantity.statistics for q in self.quantities)
        needs = ("squared_norms", "projections", "squared_gradients", "update", "backward")
        return own or self.wants(*needs)

    @cached_property
    def subtracts_squares(self) -> bool:
        """True if any of them computes a variance as a difference of a sum of squares and a squared sum."""
        return self.wants("squared_norms", "squared_gradients")

    @cached_property
    def takes_autograds_sums(self) -> bool:
        """True if sums over individual gradients may come from autograd.

        An element-wise variance needs sums of exactly the gradients that were squared: autograd's sums are rounded
        differently, which would swamp a small variance.
        """
        return self.wants_mean and not self.wants("squared_gradients")


class Actives:
    """The selections of quantities that occur in a run; there are few, so each is cached.

    Args:
        quantities: All quantities of the run.
    """

    def __init__(self, quantities: Sequence[Quantity]) -> None:
        self._all = list(quantities)
        self._met: dict[tuple[int, ...], Active] = {}
        self._none = Active([])
        # Most quantities share one schedule; evaluate it once, not once per quantity, on untracked steps.
        self._rules: dict[object, Callable[[int], bool]] = {}
        self._rule_of: list[object] = []
        for k, q in enumerate(self._all):
            usual = type(q).touches is Quantity.touches and type(q).starts is Quantity.starts
            rule = (id(q.schedule), q.ends_updates) if usual else k
            self._rules.setdefault(rule, q.touches)
            self._rule_of.append(rule)

    def touched(self, step: int) -> Active:
        """Return the quantities that this step must be tracked for."""
        hit = {rule: touches(step) for rule, touches in self._rules.items()}
        return self.of(hit[rule] for rule in self._rule_of) if any(hit.values()) else self._none

    def of(self, chosen: Iterable[bool]) -> Active:
        """Return the quantities for which ``chosen``, in the order of the run, is true."""
        key = tuple(k for k, is_chosen in enumerate(chosen) if is_chosen)
        if key not in self._met:
            self._met[key] = Active([self._all[k] for k in key])
        return self._met[key]
