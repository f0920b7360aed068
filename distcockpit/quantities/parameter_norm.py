"""Norm of the parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from distcockpit.quantities.base import Quantity, Sums, Totals
from distcockpit.quantities.batch import LocalBatch, Model
from distcockpit.store.schema import Field, Group, Row


@dataclass(frozen=True, kw_only=True)
class ParameterNorm(Quantity):
    r"""Euclidean norm of the parameters before the optimizer step, per parameter and overall.

    In units of the parameters.

    Args:
        normalize_by_size: Store the root mean square over elements instead of the norm.
    """

    normalize_by_size: bool = False

    source: ClassVar[str] = "the parameter-norm lens of monitorch"

    def group(self, model: Model) -> Group:
        """A norm per parameter, and the overall norm."""
        what = "root mean square" if self.normalize_by_size else "norm"
        fields = {
            "parameter_norm": Field(("parameter",), f"{what} of the parameter", "parameter"),
            "total": Field((), f"{what} of all parameters", "parameter"),
        }
        return Group(fields, {"parameter": model.parameters})

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """Squares and sizes."""
        return {
            "squares": batch.of_parameters(lambda: batch.squared_norm(batch.own_parameters)),
            "sizes": batch.replicated(lambda: batch.vector([p.numel() for p in batch.parameters.values()])),
        }

    def finalize(self, totals: Totals, n: int) -> Row:
        """The norms."""
        squares, sizes = totals["squares"], totals["sizes"]
        if self.normalize_by_size:
            return {"parameter_norm": np.sqrt(squares / sizes), "total": np.sqrt(squares.sum() / sizes.sum())}
        return {"parameter_norm": np.sqrt(squares), "total": np.sqrt(squares.sum())}
