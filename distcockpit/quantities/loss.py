"""The pooled loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from distcockpit.quantities.base import Quantity, Sums, Totals
from distcockpit.quantities.batch import LocalBatch, Model, Needs
from distcockpit.store.schema import Field, Group, Row


@dataclass(frozen=True, kw_only=True)
class Loss(Quantity):
    r"""Loss of the pooled batch: $L = \frac1N \sum_i \ell_i$.

    In units of the loss. NaN for N = 0.
    """

    source: ClassVar[str] = "Schneider et al. 2021, arXiv:2102.06604"

    @property
    def needs(self) -> Needs:
        """The loss."""
        return Needs(loss=True)

    def group(self, model: Model) -> Group:
        """One number per step."""
        return Group({"loss": Field((), "pooled loss", "loss")})

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """The sum over this rank's samples."""
        return {"sum": batch.vector([float("nan") if batch.loss is None else batch.loss])[0]}

    def finalize(self, totals: Totals, n: int) -> Row:
        """The mean."""
        return {"loss": totals["sum"] / n if n else float("nan")}
