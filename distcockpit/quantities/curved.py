"""What curvature quantities have in common: which curvature, and its traces."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from distcockpit.curvature.diagonals import KINDS, Curvature
from distcockpit.curvature.hutchinson import MATRICES, TraceEstimate
from distcockpit.quantities.base import Quantity
from distcockpit.quantities.batch import LocalBatch, Needs


@dataclass(frozen=True, kw_only=True)
class OfCurvature(Quantity, ABC):
    """A quantity based on the diagonal of the curvature of the pooled loss.

    Args:
        curvature: ``"diag_h"``: the Hessian; ``"diag_ggn_exact"``: the generalised Gauss-Newton matrix;
            ``"diag_ggn_mc"``: its Monte-Carlo estimate, with draws that differ between ranks.
        mc_samples: Draws per sample for ``"diag_ggn_mc"``, at least 1.
        seed: Base seed of these draws. The global random state is not changed.
    """

    curvature: str = "diag_h"
    mc_samples: int = 1
    seed: int = 0

    kinds: ClassVar[tuple[str, ...]] = KINDS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.curvature not in self.kinds:
            raise ValueError(f"{type(self).__name__}(curvature={self.curvature!r}): must be one of {list(self.kinds)}.")
        self._check_positive("mc_samples")

    def _check_positive(self, option: str) -> None:
        value = getattr(self, option)
        if value < 1:
            raise ValueError(f"{type(self).__name__}({option}={value!r}): must be at least 1.")

    @property
    def diagonal(self) -> Curvature:
        """Which diagonal."""
        return Curvature(self.curvature, self.mc_samples, self.seed)

    @property
    def needs(self) -> Needs:
        """The diagonal."""
        return Needs(curvature=self.diagonal)


@dataclass(frozen=True, kw_only=True)
class OfTraces(OfCurvature, ABC):
    """A quantity based on traces of the curvature, which may also be estimated.

    Args:
        samples: Random vectors for the estimates, at least 1; each costs a product with the matrix.
    """

    samples: int = 10

    kinds: ClassVar[tuple[str, ...]] = (*KINDS, *MATRICES)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("samples")

    @property
    def diagonal(self) -> Curvature:
        """Which diagonal, of which the sums are enough."""
        return replace(super().diagonal, summed=True)

    @property
    def estimate(self) -> TraceEstimate | None:
        """Which estimate; ``None`` if the traces are those of a diagonal."""
        return TraceEstimate(self.curvature, self.samples, self.seed) if self.curvature in MATRICES else None

    @property
    def needs(self) -> Needs:
        """The diagonal, or the estimate."""
        return Needs(curvature=self.diagonal) if self.estimate is None else Needs(trace=self.estimate)

    def traces(self, batch: LocalBatch) -> Tensor:
        """This rank's part of the traces, float64 ``[draws, parameters]``; one draw if they are exact."""
        if self.estimate is not None:
            return batch.traces[self.estimate]
        sums = batch.curvature[self.diagonal]
        return torch.stack([sums[name] for name in batch.parameters])[None]
