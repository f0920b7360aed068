"""How far each rank's batch is from the pooled batch."""

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
class RankDisagreement(Quantity):
    r"""Per rank: norm of its mean gradient $G_r$, cosine of $G_r$ with the pooled G, its mean loss, its batch size.

    $G_r$ and the loss are means over the rank's own samples. A rank whose numbers keep differing has different data:
    a different distribution, different preprocessing, broken labels. In units of loss per parameter, 1, and loss. NaN
    for a rank without samples; the loss is NaN if it is unknown.
    """

    source: ClassVar[str] = "distcockpit"

    @property
    def needs(self) -> Needs:
        """G, and this rank's part of it."""
        return Needs(mean_squared=True, bucket_sums=True)

    def group(self, model: Model) -> Group:
        """Four numbers per rank."""
        fields = {
            "grad_norm": Field(("rank",), "norm of the rank's mean gradient", "loss / parameter"),
            "cosine": Field(("rank",), "cosine of the rank's mean gradient with the pooled one"),
            "loss": Field(("rank",), "mean loss of the rank's samples", "loss"),
            "local_batch_size": Field(("rank",), "batch size of the rank", "samples", dtype="int64"),
        }
        return Group(fields, {"rank": model.world_size})

    def reduce(self, bucket: BucketSums, memory: dict[str, Any]) -> Mapping[str, Tensor]:
        """Inner product of this rank's gradient with G, and its squared norm."""
        mine, mean = list(bucket.part_of_mean.values()), list(bucket.mean.values())
        if bucket.world_size == 1:  # they are the same
            return dict.fromkeys(("inner", "squares"), bucket.mean_squared.sum())
        return {"inner": kernels.inner_products(mine, mean).sum(), "squares": kernels.squared_norms(mine).sum()}

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """This rank's values in its slots; the norm of G."""
        inner, squares = batch.reduced["inner"], batch.reduced["squares"]
        loss = float("nan") if batch.loss is None else batch.loss
        facts = batch.vector([batch.local_n, squares, inner, loss])
        mean_squared = batch.replicated(lambda: batch.mean_squared.sum())
        return {"ranks": batch.slot(facts), "mean_squared": mean_squared}

    def finalize(self, totals: Totals, n: int) -> Row:
        """Means per rank."""
        samples, squares, inner, loss = totals["ranks"].T
        with np.errstate(all="ignore"):
            return {
                "grad_norm": np.sqrt(squares) * n / samples,
                "cosine": inner / np.sqrt(squares * totals["mean_squared"]),
                "loss": np.where(samples > 0, loss / samples, np.nan),
                "local_batch_size": samples.astype(np.int64),
            }
