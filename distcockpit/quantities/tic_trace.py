"""The Takeuchi information criterion, approximated by traces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from distcockpit.curvature import Curvature
from distcockpit.quantities.base import Quantity, Sums, Totals
from distcockpit.quantities.batch import LocalBatch, Model, Needs
from distcockpit.quantities.hess_trace import checked_curvature
from distcockpit.schema import Field, Group, Row


@dataclass(frozen=True, kw_only=True)
class TICTrace(Quantity):
    r"""Takeuchi information criterion from the traces of gradient second moment and curvature.

    $$\frac{\frac1N\sum_i \|g_i\|^2}{\sum_d h_d + \epsilon}$$

    with the pooled curvature diagonal h. Thomas et al. 2019, "On the interplay between noise and curvature and its
    effect on optimization and generalization", arXiv:1906.07774. In units of loss. NaN for N = 0.

    Args:
        curvature: ``"diag_h"``: the Hessian; ``"diag_ggn_exact"``: the generalised Gauss-Newton matrix;
            ``"diag_ggn_mc"``: its Monte-Carlo estimate, with draws that differ between ranks.
        mc_samples: Draws per sample for ``"diag_ggn_mc"``, at least 1.
        seed: Base of the seeds of these draws. The global random state stays as it was.
        epsilon: Added to the trace of the curvature.
    """

    curvature: str = "diag_h"
    mc_samples: int = 1
    seed: int = 0
    epsilon: float = 1e-7

    source: ClassVar[str] = "Thomas et al. 2019, arXiv:1906.07774"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._kind  # noqa: B018 - checks the arguments

    @property
    def _kind(self) -> Curvature:
        return checked_curvature(type(self).__name__, self.curvature, self.mc_samples, self.seed)

    @property
    def needs(self) -> Needs:
        """The norms of the individual gradients, and the diagonal."""
        return Needs(squared_norms=True, curvature=self._kind)

    def group(self, model: Model) -> Group:
        """One number per step."""
        field = Field((), "TIC from traces", "loss", f"with {self.curvature}")
        return Group({"tic_trace": field})

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """S2 and this rank's part of the trace."""
        diagonal = batch.curvature[self._kind]
        trace = torch.stack([diagonal[name].sum() for name in batch.parameters]).sum()
        return {"squares": batch.squared_norms.sum(), "trace": trace}

    def finalize(self, totals: Totals, n: int) -> Row:
        """The ratio."""
        with np.errstate(all="ignore"):
            return {"tic_trace": totals["squares"] / n / (totals["trace"] + self.epsilon) if n else np.nan}
