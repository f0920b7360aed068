"""What quantities keep from step to step, after they have seen the totals that they asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distcockpit.quantities.base import Quantity
from distcockpit.tracking.packed import Layout
from distcockpit.world import Pending


class Memories:
    """The memory of each quantity on this rank."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, Any]] = {}
        self._unread: dict[str, tuple[Layout, Pending]] = {}

    def of(self, quantity: Quantity) -> dict[str, Any]:
        """Return what a quantity keeps, after showing it the latest totals it asked for; waits for these."""
        memory = self._kept.setdefault(quantity.name, {})
        if quantity.name in self._unread:
            layout, sums = self._unread.pop(quantity.name)
            prefix = f"{quantity.name}/"
            totals = layout.unpack(sums.result())
            quantity.learn({k[len(prefix) :]: v for k, v in totals.items() if k.startswith(prefix)}, memory)
        return memory

    def restore(self, quantity: Quantity, kept: Mapping[str, Any]) -> None:
        """Continue with what a quantity kept in an earlier part of the run."""
        self._kept.setdefault(quantity.name, {}).update(kept)

    def expect(self, quantity: Quantity, layout: Layout, sums: Pending) -> None:
        """Remember totals in flight that a quantity learns from."""
        if quantity.reads_totals:
            self._unread[quantity.name] = (layout, sums)
