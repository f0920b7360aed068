"""Mean gradient signal-to-noise ratio."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from distcockpit.gradients import kernels
from distcockpit.quantities.base import Quantity, Sums, Totals
from distcockpit.quantities.batch import BucketSums, LocalBatch, Model, Needs
from distcockpit.store.schema import Field, Group, Row


@dataclass(frozen=True, kw_only=True)
class MeanGSNR(Quantity):
    r"""Mean over parameters of the gradient signal-to-noise ratio.

    $$\frac1D \sum_d \frac{G_d^2}{s_d/N - G_d^2 + \epsilon}, \qquad s_d = \sum_i g_{i,d}^2$$

    Liu et al. 2020, "Understanding Why Neural Networks Generalize Well Through GSNR of Parameters",
    arXiv:2001.07384. Unitless; large early in the training of networks that generalize, near 0 when noise
    dominates. NaN for N < 2. The two terms of the variance are subtracted in float64.

    Args:
        epsilon: Added to the variance, at least 0.
    """

    epsilon: float = 1e-5

    source: ClassVar[str] = "Liu et al. 2020, arXiv:2001.07384"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.epsilon >= 0:
            raise ValueError(f"MeanGSNR(epsilon={self.epsilon!r}): must be at least 0.")

    @property
    def needs(self) -> Needs:
        """The pooled G and the sums of g_i^2."""
        return Needs(bucket_sums=True, squared_gradients=True)

    def group(self, model: Model) -> Group:
        """One number per step."""
        return Group({"mean_gsnr": Field((), "mean gradient signal-to-noise ratio")})

    def reduce(self, bucket: BucketSums, memory: dict[str, Any]) -> Mapping[str, Tensor]:
        """Sum of the ratio over this rank's range of elements."""
        shard = bucket.shard
        ratio = kernels.signal_to_noise(shard.mean, shard.squares, bucket.n, self.epsilon)
        return {"ratio": ratio, "elements": bucket.number(shard.mean.numel())}

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """The same, over all."""
        return batch.reduced

    def finalize(self, totals: Totals, n: int) -> Row:
        """The mean."""
        return {"mean_gsnr": totals["ratio"] / totals["elements"] if n > 1 else np.nan}
