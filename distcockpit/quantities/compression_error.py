"""How far the gradient that DDP delivers is from the pooled one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from distcockpit.gradients import kernels
from distcockpit.quantities.base import Quantity, Sums, Totals
from distcockpit.quantities.batch import BucketSums, LocalBatch, Model, Needs
from distcockpit.store.schema import Field, Group, Row


@dataclass(frozen=True, kw_only=True)
class CompressionError(Quantity):
    r"""Relative distance between the gradient that DDP passes to the optimizer and the pooled mean gradient.

    $$\frac{\|\hat g - G\|}{\|G\|}, \qquad \frac{\|\hat g - \bar g\|}{\|\bar g\|}$$

    $\hat g$ is what the step left in ``.grad`` when `track` ends, after communication hooks (fp16, PowerSGD), without
    the factors on the loss; so clip gradients after `track`. $G$ is the pooled mean gradient, $\bar g$ the mean over
    ranks of their own mean gradients, which is what DDP computes without a hook: with unequal batches these two differ.
    So ``error`` is the total error of the optimizer's gradient, and ``hook_error`` the hook's share of it. Unitless;
    about 1e-7 without a hook and with equal batches, NaN where the gradient is zero.

    Vogels et al. 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
    arXiv:1905.13727.
    """

    source: ClassVar[str] = "Vogels et al. 2019, arXiv:1905.13727"

    @property
    def needs(self) -> Needs:
        """G, and what DDP delivered; one more element-wise sum over ranks."""
        return Needs(bucket_sums=True, averaged=True)

    def group(self, model: Model) -> Group:
        """Both distances, per parameter and overall, and the angle."""
        fields = {
            "error": Field(("parameter",), "relative distance of DDP's gradient from the pooled one"),
            "total": Field((), "relative distance of DDP's whole gradient from the pooled one"),
            "cosine": Field((), "cosine of DDP's whole gradient with the pooled one"),
            "hook_error": Field(("parameter",), "relative distance from the plain mean over ranks"),
            "hook_total": Field((), "relative distance of the whole from the plain mean over ranks"),
        }
        return Group(fields, {"parameter": model.parameters})

    def reduce(self, bucket: BucketSums, memory: dict[str, Any]) -> Mapping[str, Tensor]:
        """Inner products: the same on all ranks with samples; of a sharded model, those of this rank's pieces."""
        averaged = bucket.averaged
        assert averaged is not None
        mean, held, plain = averaged.mean, averaged.held, averaged.plain
        products = [
            [kernels.squared_norm(each) for each in (held[n], mean[n], plain[n], held[n] - plain[n])]
            + [kernels.inner_products([held[n]], [mean[n].double()])[0]]
            for n in bucket.rows
        ]
        found = torch.stack([torch.stack(each) for each in zip(*products, strict=True)])
        return {"products": bucket.by_parameter(found)}

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """The same, and this rank's part of the scale."""
        products = batch.reduced["products"]
        if batch.pieces is None:
            knows, counts = float(batch.local_n > 0), batch.local_n > 0
        else:
            knows, counts = float(batch.rank == 0), True
        return {
            "products": products if counts else torch.zeros_like(products),
            "ranks": batch.vector([knows])[0],
            "factor": batch.scale_of_grad / batch.world_size,
        }

    def finalize(self, totals: Totals, n: int) -> Row:
        """The distances."""
        with np.errstate(all="ignore"):
            held, pooled, plain, from_plain, inner = totals["products"] / totals["ranks"]
            factor = totals["factor"]
            apart = np.maximum(held / factor**2 - 2 * inner / factor + pooled, 0)
            return {
                "error": np.sqrt(apart / pooled),
                "total": np.sqrt(apart.sum() / pooled.sum()),
                "cosine": inner.sum() / np.sqrt(held.sum() * pooled.sum()) * np.sign(factor),
                "hook_error": np.sqrt(from_plain / plain),
                "hook_total": np.sqrt(from_plain.sum() / plain.sum()),
            }
