"""Quantities as a user may write them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from distcockpit.quantities import Quantity
from distcockpit.quantities.batch import LocalBatch, Model, Needs
from distcockpit.store.schema import Field, Group


@dataclass(frozen=True, kw_only=True)
class Moments(Quantity):
    """Per parameter: the squared norm of the mean gradient, and the mean of the squared norms."""

    source: ClassVar[str] = "the test"

    @property
    def needs(self) -> Needs:
        return Needs(mean_gradient=True, squared_norms=True)

    def group(self, model: Model) -> Group:
        fields = {k: Field(("parameter",), k, "loss^2", "") for k in ("of_mean", "mean_of")}
        return Group(fields, {"parameter": model.parameters})

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> dict[str, Any]:
        return {"of_mean": batch.replicated(batch.squared_norm(batch.mean_gradient)), "mean_of": batch.squared_norms}

    def finalize(self, totals: Any, n: int) -> dict[str, Any]:
        return {"of_mean": totals["of_mean"], "mean_of": totals["mean_of"] / n}
