"""Condition number of the weight matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from distcockpit.quantities.base import Quantity, Sums, Totals
from distcockpit.quantities.batch import LocalBatch, Model
from distcockpit.store.schema import Field, Group, Row


@dataclass(frozen=True, kw_only=True)
class ParameterCondition(Quantity):
    r"""Condition number $\sigma_{\max} / \sigma_{\min}$ of each parameter with two axes or more, and $\sigma_{\max}$.

    The parameter is reshaped to the matrix ``[first axis, all others]``, as a convolution uses it. Large numbers mean
    that a layer collapses some directions; the spectral norm bounds how much a layer amplifies. Unitless, and in units
    of the parameter. Infinite for a rank-deficient matrix, NaN if an element is not finite.

    The eigenvalues of $W W^\top$ (on the shorter side) are the squares of the singular values, and far cheaper. They
    lose $\kappa^2$ times the rounding error of float64, so a matrix with a condition number above 1e4 gets a singular
    value decomposition instead. Both run on rank 0's background thread, and slow down training if there are few cores,
    so the preset ``layers`` tracks it only every 100th step.
    """

    source: ClassVar[str] = "Golub and Van Loan, Matrix Computations, section 2.6"

    def _matrices(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        return [name for name, shape in shapes.items() if len(shape) > 1]

    def group(self, model: Model) -> Group:
        """Two numbers per matrix."""
        fields = {
            "parameter_condition": Field(("parameter",), "condition number"),
            "spectral_norm": Field(("parameter",), "largest singular value", "parameter"),
        }
        return Group(fields, {"parameter": self._matrices(model.shapes)})

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """The matrices, which all ranks hold."""
        matrices = self._matrices(batch.model.shapes)
        return {name: batch.replicated(batch.parameters[name].flatten(1)) for name in matrices}

    def finalize(self, totals: Totals, n: int) -> Row:
        """Their extreme singular values."""
        ends = np.array([_extreme_singular_values(matrix) for matrix in totals.values()]).reshape(-1, 2)
        with np.errstate(all="ignore"):
            condition = np.where(ends[:, 1] == 0, np.inf, ends[:, 0] / ends[:, 1])
            return {"parameter_condition": condition, "spectral_norm": ends[:, 0]}


LARGE = 1e4
"""Condition number up to which squares are precise enough: the square of the smallest singular value, relative to that
of the largest, is off by about 1e-16."""


def _extreme_singular_values(matrix: np.ndarray) -> tuple[float, float]:
    """The largest and the smallest; one within rounding of zero is zero, as for the rank of a matrix."""
    if not matrix.size or not np.isfinite(matrix).all():
        return np.nan, np.nan
    largest = np.abs(matrix).max()  # its square might overflow or underflow
    if largest > 0:
        rows = (matrix if len(matrix) <= matrix.shape[1] else matrix.T) / largest
        squares = np.linalg.eigvalsh(rows @ rows.T)
        if squares[0] * LARGE**2 > squares[-1]:
            return largest * np.sqrt(squares[-1]), largest * np.sqrt(squares[0])
    values = np.linalg.svd(matrix, compute_uv=False)
    rounding = values[0] * max(matrix.shape) * np.finfo(float).eps
    return values[0], values[-1] if values[-1] > rounding else 0.0
