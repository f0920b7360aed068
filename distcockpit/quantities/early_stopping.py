"""The evidence-based criterion for early stopping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from distcockpit.quantities.base import Quantity, Sums, Totals
from distcockpit.quantities.batch import BucketSums, LocalBatch, Model, Needs
from distcockpit.store.schema import Field, Group, Row


@dataclass(frozen=True, kw_only=True)
class EarlyStopping(Quantity):
    r"""Evidence-based early-stopping criterion: above zero, the gradient is indistinguishable from noise.

    $$1 - \frac{N}{D}\sum_d \frac{G_d^2}{v_d + \epsilon}, \qquad v_d = \frac{\sum_i g_{i,d}^2 - N G_d^2}{N - 1}$$

    Mahsereci, Balles, Lassner and Hennig 2017, "Early Stopping without a Validation Set", arXiv:1703.09580, Eq. 7.
    Unitless. Derived for SGD; computed for any optimizer. NaN for fewer than two samples. The two terms of the
    variance are subtracted in float64.

    Args:
        epsilon: Added to the variance, at least 0.
    """

    epsilon: float = 1e-5

    source: ClassVar[str] = "Mahsereci et al. 2017, arXiv:1703.09580, Eq. 7"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.epsilon >= 0:
            raise ValueError(f"EarlyStopping(epsilon={self.epsilon!r}): must be at least 0.")

    @property
    def needs(self) -> Needs:
        """The pooled G and the sums of g_i^2."""
        return Needs(bucket_sums=True, squared_gradients=True)

    def group(self, model: Model) -> Group:
        """One number per step."""
        remark = "stop above 0; derived for SGD, computed for any optimizer"
        return Group({"early_stopping": Field((), "early stopping criterion", "1", remark)})

    def reduce(self, bucket: BucketSums, memory: dict[str, Any]) -> Mapping[str, Tensor]:
        """Sum of the ratio over this rank's range of elements."""
        squared = bucket.shard.mean.square()
        variance = (bucket.shard.squares - bucket.n * squared) / max(bucket.n - 1, 1)
        ratio = squared / (variance + self.epsilon)
        return {"ratio": ratio.sum(), "elements": bucket.number(ratio.numel())}

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """The same, over all."""
        return batch.reduced

    def finalize(self, totals: Totals, n: int) -> Row:
        """The criterion."""
        return {"early_stopping": 1 - n * totals["ratio"] / totals["elements"] if n > 1 else np.nan}
