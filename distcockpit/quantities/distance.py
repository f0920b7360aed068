"""Distance of the parameters from their initial values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from distcockpit.gradients.differences import Differences
from distcockpit.quantities.base import Quantity, Sums, Totals
from distcockpit.quantities.batch import LocalBatch, Model, Needs
from distcockpit.store.schema import Field, Group, Row

STATUS = ("measured", "start_unknown", "failed", "out_of_memory")


@dataclass(frozen=True, kw_only=True)
class Distance(Quantity):
    r"""Euclidean distance of the parameters from their values at the first call of ``track``.

    $\|\theta_t - \theta_0\|$, per parameter and overall. In units of the parameters. Rank 0 keeps a copy of the tracked
    parameters; of a sharded model each rank keeps one of its pieces. NaN, with a ``status``, in a run that was resumed
    without the cockpit's state: the initial values are then unknown; and at a step at which a rank that keeps a copy
    failed, or ran out of memory.
    """

    source: ClassVar[str] = "Schneider et al. 2021, arXiv:2102.06604"

    @property
    def needs(self) -> Needs:
        """The initial parameters."""
        return Needs(initial=True)

    def group(self, model: Model) -> Group:
        """A distance per parameter, and the overall distance."""
        fields = {
            "distance": Field(("parameter",), "distance from initialisation", "parameter"),
            "total": Field((), "distance of all parameters from initialisation", "parameter"),
            "status": Field((), "status of the distance", dtype="int8", codes=STATUS),
        }
        return Group(fields, {"parameter": model.parameters})

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """The squared distances."""
        return {
            "squares": batch.of_parameters(lambda: self._squares(batch)),
            "known": batch.replicated(bool(batch.initial)),
        }

    def _squares(self, batch: LocalBatch) -> Tensor:
        if not batch.initial:
            return batch.vector([float("nan")] * len(batch.parameters))
        return batch.squared_norm(Differences(batch.own_parameters, batch.initial))

    def finalize(self, totals: Totals, n: int) -> Row:
        """The distances."""
        return {
            "distance": np.sqrt(totals["squares"]),
            "total": np.sqrt(totals["squares"].sum()),
            "status": 2 if np.isnan(totals["known"]) else int(not totals["known"]),
        }
