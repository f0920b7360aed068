"""Trace of the diagonal curvature, per parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from distcockpit.quantities.base import Sums, Totals
from distcockpit.quantities.batch import LocalBatch, Model
from distcockpit.quantities.curved import OfTraces
from distcockpit.store.schema import Field, Group, Row


@dataclass(frozen=True, kw_only=True)
class HessTrace(OfTraces):
    r"""Trace of the curvature of the pooled loss, per parameter: $\sum_r (w_r/W)\,\mathrm{tr}\,h_r$.

    Dangel et al. 2020, "BackPACK: Packing more into Backprop", arXiv:1912.10985; as in Schneider et al. 2021,
    arXiv:2102.06604. In units of loss per squared parameter. NaN for N = 0.

    The estimates are Hutchinson's (1990, doi:10.1080/03610919008812866): the mean over random vectors v of
    $v_p^\top (C v)_p$ for each parameter p, with its standard error, which is NaN for a single vector. All ranks draw
    the same vectors, so the row does not depend on how samples are split across ranks.

    Args:
        curvature: BackPACK's diagonals, for chains of modules that it supports: ``"diag_h"``, the Hessian;
            ``"diag_ggn_exact"``, the generalised Gauss-Newton matrix (GGN); ``"diag_ggn_mc"``, its Monte-Carlo
            estimate, with draws that differ between ranks. Estimates, for any twice-differentiable model:
            ``"hutchinson"`` of the Hessian, ``"hutchinson_ggn"`` of the GGN.
        mc_samples: Draws per sample for ``"diag_ggn_mc"``, at least 1.
        samples: Random vectors for the estimates, at least 1; each costs a product with the matrix.
        seed: Base seed of draws and vectors. The global random state is not changed.
    """

    source: ClassVar[str] = "Dangel et al. 2020, arXiv:1912.10985; Schneider et al. 2021, arXiv:2102.06604"

    def group(self, model: Model) -> Group:
        """A trace per parameter, and their sum; of an estimate also the standard errors."""
        units, matrix = "loss / parameter^2", f"trace of {self.curvature}"
        fields = {
            "trace": Field(("parameter",), "curvature trace", units, matrix),
            "total": Field((), "curvature trace of all parameters", units, matrix),
        }
        if self.estimate is not None:
            text = f"of the mean over {self.samples} random vectors"
            fields["standard_error"] = Field(("parameter",), "standard error of the trace", units, text)
            fields["total_standard_error"] = Field((), "standard error of the total", units, text)
        return Group(fields, {"parameter": model.parameters})

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """This rank's part of the traces, by draw."""
        return {"traces": self.traces(batch)}

    def finalize(self, totals: Totals, n: int) -> Row:
        """The means over draws, and their standard errors."""
        draws = totals["traces"] if n else np.full_like(totals["traces"], np.nan)
        row = {"trace": draws.mean(0), "total": draws.sum(1).mean()}
        if self.estimate is not None:
            row["standard_error"] = _standard_error(draws)
            row["total_standard_error"] = _standard_error(draws.sum(1))
        return row


def _standard_error(draws: np.ndarray) -> np.ndarray:
    """Standard error of the mean over the first axis; NaN for a single draw."""
    if len(draws) < 2:
        return np.full(draws.shape[1:], np.nan)
    return draws.std(0, ddof=1) / np.sqrt(len(draws))
