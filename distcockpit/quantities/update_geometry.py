"""Norm and direction of the optimizer step, per parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from distcockpit.quantities.base import Quantity, Sums, Totals
from distcockpit.quantities.batch import LocalBatch, Model, Needs
from distcockpit.quantities.geometry import PREVIOUS, compared, norm_and_correlation
from distcockpit.store.schema import Field, Group, Row


@dataclass(frozen=True, kw_only=True)
class UpdateGeometry(Quantity):
    r"""Norm of the optimizer step $\theta_{t+1} - \theta_t$ of each parameter, and its cosine with the previous one.

    The parameter-update lens of monitorch. Norms are in units of the parameters; the cosine with the update of the
    previous tracked step is NaN at the first one, and where a parameter did not move. Stored under the step t when the
    next step begins, or for the last step when the cockpit is closed. Rank 0 keeps copies of parameters and updates.
    """

    source: ClassVar[str] = "the parameter-update-geometry lens of monitorch"

    @property
    def needs(self) -> Needs:
        """The optimizer step."""
        return Needs(displacement=True)

    def group(self, model: Model) -> Group:
        """A norm and a cosine per parameter."""
        fields = {
            "norm": Field(("parameter",), "length of the update", "parameter"),
            "correlation": Field(("parameter",), "cosine with the previous update"),
            "previous_step": PREVIOUS,
        }
        return Group(fields, {"parameter": model.parameters})

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """Nothing before the optimizer has stepped."""
        return {}

    def displacement(self, step: int, d: Mapping[str, Tensor], memory: dict[str, Any]) -> Sums:
        """Norms and inner products."""
        return compared(step, d, memory)

    def finalize(self, totals: Totals, n: int) -> Row:
        """Norms and cosines."""
        return norm_and_correlation(totals)
