"""Trace of the diagonal curvature, per parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from distcockpit.curvature import KINDS, Curvature
from distcockpit.quantities.base import Quantity, Sums, Totals
from distcockpit.quantities.batch import LocalBatch, Model, Needs
from distcockpit.schema import Field, Group, Row


def checked_curvature(owner: str, curvature: str, mc_samples: int, seed: int) -> Curvature:
    """The diagonal that a quantity's options describe.

    Raises:
        ValueError: If one breaks its rule.
    """
    if curvature not in KINDS:
        raise ValueError(f"{owner}(curvature={curvature!r}): must be one of {list(KINDS)}.")
    if mc_samples < 1:
        raise ValueError(f"{owner}(mc_samples={mc_samples!r}): must be at least 1.")
    return Curvature(curvature, mc_samples, seed)


@dataclass(frozen=True, kw_only=True)
class HessTrace(Quantity):
    r"""Trace of the curvature of the pooled loss, per parameter: $\sum_r (w_r/W)\,\mathrm{tr}\,h_r$.

    Dangel et al. 2020, "BackPACK: Packing more into Backprop", arXiv:1912.10985; as in Schneider et al. 2021,
    arXiv:2102.06604. In units of loss per squared parameter. NaN for N = 0.

    Args:
        curvature: ``"diag_h"``: the Hessian; ``"diag_ggn_exact"``: the generalised Gauss-Newton matrix;
            ``"diag_ggn_mc"``: its Monte-Carlo estimate, with draws that differ between ranks.
        mc_samples: Draws per sample for ``"diag_ggn_mc"``, at least 1.
        seed: Base of the seeds of these draws. The global random state stays as it was.
    """

    curvature: str = "diag_h"
    mc_samples: int = 1
    seed: int = 0

    source: ClassVar[str] = "Dangel et al. 2020, arXiv:1912.10985; Schneider et al. 2021, arXiv:2102.06604"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._kind  # noqa: B018 - checks the arguments

    @property
    def _kind(self) -> Curvature:
        return checked_curvature(type(self).__name__, self.curvature, self.mc_samples, self.seed)

    @property
    def needs(self) -> Needs:
        """The diagonal."""
        return Needs(curvature=self._kind)

    def group(self, model: Model) -> Group:
        """A trace per parameter."""
        field = Field(("parameter",), "curvature trace", "loss / parameter^2", f"trace of {self.curvature}")
        return Group({"trace": field}, {"parameter": model.parameters})

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """This rank's part of the traces."""
        diagonal = batch.curvature[self._kind]
        return {"trace": torch.stack([diagonal[name].sum() for name in batch.parameters])}

    def finalize(self, totals: Totals, n: int) -> Row:
        """The traces."""
        return {"trace": totals["trace"] if n else float("nan")}
