"""Norm of the pooled mean gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from distcockpit.quantities.base import Quantity, Sums, Totals
from distcockpit.quantities.batch import LocalBatch, Model, Needs
from distcockpit.store.schema import Field, Group, Row


@dataclass(frozen=True, kw_only=True)
class GradNorm(Quantity):
    r"""Euclidean norm of the mean gradient G of the pooled batch, per parameter and overall.

    In units of loss per parameter. G is the mean over all samples, which DDP's ``p.grad`` is not if batches are
    unequal; it is not clipped. NaN for N = 0.
    """

    source: ClassVar[str] = "Schneider et al. 2021, arXiv:2102.06604"

    @property
    def needs(self) -> Needs:
        """G."""
        return Needs(mean_squared=True)

    def group(self, model: Model) -> Group:
        """A norm per parameter, and the overall norm."""
        fields = {
            "grad_norm": Field(("parameter",), "norm of the mean gradient", "loss / parameter"),
            "total": Field((), "norm of the whole mean gradient", "loss / parameter"),
        }
        return Group(fields, {"parameter": model.parameters})

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """The squared norms, which all ranks know."""
        return {"squares": batch.replicated(batch.mean_squared)}

    def finalize(self, totals: Totals, n: int) -> Row:
        """The norms."""
        return {"grad_norm": np.sqrt(totals["squares"]), "total": np.sqrt(totals["squares"].sum())}
