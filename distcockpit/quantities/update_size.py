"""Length of the optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from distcockpit.gradients.differences import squared_norms
from distcockpit.quantities.base import Quantity, Sums, Totals
from distcockpit.quantities.batch import LocalBatch, Model, Needs
from distcockpit.store.schema import Field, Group, Row


@dataclass(frozen=True, kw_only=True)
class UpdateSize(Quantity):
    r"""Euclidean length of the optimizer step, $\|\theta_{t+1} - \theta_t\|$, per parameter and overall.

    In units of the parameters; works with any optimizer. Stored under the step t when the next step begins, or for the
    last step when the cockpit is closed. 0 where nothing moved. Rank 0 keeps a copy of the parameters for one step.
    """

    source: ClassVar[str] = "Schneider et al. 2021, arXiv:2102.06604"

    @property
    def needs(self) -> Needs:
        """The optimizer step."""
        return Needs(displacement=True)

    def group(self, model: Model) -> Group:
        """A length per parameter, and the overall length."""
        fields = {
            "update_size": Field(("parameter",), "length of the update", "parameter"),
            "total": Field((), "length of the whole update", "parameter"),
        }
        return Group(fields, {"parameter": model.parameters})

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """Nothing before the optimizer has stepped."""
        return {}

    def displacement(self, step: int, d: Mapping[str, Tensor], memory: dict[str, Any]) -> Mapping[str, Tensor]:
        """The squared lengths."""
        return {"squares": squared_norms(d, d)}

    def finalize(self, totals: Totals, n: int) -> Row:
        """The lengths."""
        return {"update_size": np.sqrt(totals["squares"]), "total": np.sqrt(totals["squares"].sum())}
