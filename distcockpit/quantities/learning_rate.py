"""The learning rates of the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from distcockpit.quantities.base import Quantity, Sums, Totals
from distcockpit.quantities.batch import LocalBatch, Model, Needs
from distcockpit.store.schema import Field, Group, Row


@dataclass(frozen=True, kw_only=True)
class LearningRate(Quantity):
    """Learning rate of each parameter group, as set in the optimizer when the tracked step's backward pass ends.

    It is tracked automatically whenever the cockpit knows the optimizer. NaN for a group without a learning rate.
    """

    source: ClassVar[str] = "the optimizer's param_groups"

    @property
    def needs(self) -> Needs:
        """The optimizer."""
        return Needs(optimizer=True)

    def group(self, model: Model) -> Group:
        """One rate per parameter group."""
        field = Field(("param_group",), "learning rate")
        return Group({"learning_rate": field}, {"param_group": model.n_parameter_groups})

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """The rates, which all ranks know."""
        return {"rates": batch.replicated(lambda: batch.vector(batch.learning_rates))}

    def finalize(self, totals: Totals, n: int) -> Row:
        """The same."""
        return {"learning_rate": totals["rates"]}
