"""A quantity that reads one attribute of its batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distcockpit import quantities as q

# -- quantities of one's own -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Reads(q.Quantity):
    """It reads an attribute of the batch, with or without asking, and returns a plain number."""

    attribute: str = "projections"
    asked: Any = ()

    @property
    def needs(self) -> q.Needs:
        return q.Needs(**dict.fromkeys(self.asked, True))

    def group(self, model: q.Model) -> q.Group:
        return q.Group({"value": q.Field()})

    def local(self, batch: q.LocalBatch, memory: dict) -> dict:
        return {"value": float(getattr(batch, self.attribute).sum())}

    def finalize(self, totals: Any, n: int) -> dict:
        return {"value": totals["value"] / n}
