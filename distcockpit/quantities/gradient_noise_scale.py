"""The parts of the gradient noise scale."""

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
from distcockpit.quantities.variance import sample_variance
from distcockpit.store.schema import Field, Group, Row


@dataclass(frozen=True, kw_only=True)
class GradientNoiseScale(Quantity):
    r"""Unbiased estimates of the two parts of the simple noise scale: gradient noise and squared gradient.

    $$B_{\text{simple}} = \frac{\operatorname{tr}\Sigma}{|\mathcal G|^2}, \qquad
      \operatorname{tr}\Sigma \approx V = \frac{\sum_i \|g_i\|^2 - N\|G\|^2}{N-1}, \qquad
      |\mathcal G|^2 \approx \|G\|^2 - V/N$$

    from individual gradients, overall and per layer; and from the batch gradients $G_r$ of the R ranks that hold
    samples, by analysis of variance, exact for unequal batches:

    $$\operatorname{tr}\Sigma \approx V_R = \frac{\sum_r B_r \|G_r - G\|^2}{R-1}, \qquad
      |\mathcal G|^2 \approx \|G\|^2 - V_R/N$$

    The ratio of the parts of one step is itself very noisy: average both over steps, then divide. Its unit is samples:
    a much smaller batch is dominated by noise, a much larger one is wasteful. Each estimate may be negative. NaN for
    fewer than two samples, or fewer than two ranks with samples. McCandlish, Kaplan, Amodei et al. 2018, "An Empirical
    Model of Large-Batch Training", arXiv:1812.06162, Eq. 2.9 and appendix A.
    """

    source: ClassVar[str] = "McCandlish et al. 2018, arXiv:1812.06162, Eq. 2.9 and appendix A"

    @property
    def needs(self) -> Needs:
        """G, and the norms of the individual gradients."""
        return Needs(mean_squared=True, bucket_sums=True, squared_norms=True)

    def group(self, model: Model) -> Group:
        """Both parts, for each of the three sources."""
        units = "(loss / parameter)^2"
        fields = {
            "noise": Field((), "gradient noise", units, "trace of the covariance of individual gradients"),
            "signal": Field((), "squared norm of the true gradient", units),
            "layer_noise": Field(("layer",), "gradient noise per layer", units),
            "layer_signal": Field(("layer",), "squared norm of the true gradient per layer", units),
            "rank_noise": Field((), "gradient noise, from ranks", units, "from the batch gradients of the ranks"),
            "rank_signal": Field((), "squared norm of the true gradient, from ranks", units),
        }
        return Group(fields, {"layer": model.layer_labels})

    def reduce(self, bucket: BucketSums, memory: dict[str, Any]) -> Mapping[str, Tensor]:
        """The distance of this rank's gradient from G."""
        if not (bucket.local_n and bucket.world_size > 1):
            return {"between": bucket.number(0.0)}
        factor, between = bucket.n / bucket.local_n, bucket.number(0.0)
        for name, mean in bucket.mean.items():
            between += kernels.squared_norm(bucket.part_of_mean[name].double().mul(factor).sub_(mean))
        return {"between": bucket.local_n * between}

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """S2 by layer, and the distance of this rank's gradient from G; the squared norm of G by layer."""
        layer_of = {name: k for k, names in enumerate(batch.model.layers.values()) for name in names}
        index, size = [layer_of[name] for name in batch.parameters], len(batch.model.layers)
        between = batch.reduced["between"]
        return {
            "squares": batch.collected(batch.squared_norms, index, size),
            "mean_squared": batch.replicated(lambda: batch.collected(batch.mean_squared, index, size)),
            "between": between,
            "ranks": torch.ones_like(between) if batch.local_n else torch.zeros_like(between),
        }

    def finalize(self, totals: Totals, n: int) -> Row:
        """The estimates."""
        squares, mean_squared, ranks = totals["squares"], totals["mean_squared"], totals["ranks"]
        with np.errstate(all="ignore"):
            layer_noise = sample_variance(squares, mean_squared, n)
            noise = layer_noise.sum()
            rank_noise = totals["between"] / (ranks - 1 if ranks > 1 else np.nan)
            return {
                "noise": noise,
                "signal": mean_squared.sum() - noise / n,
                "layer_noise": layer_noise,
                "layer_signal": mean_squared - layer_noise / n,
                "rank_noise": rank_noise,
                "rank_signal": mean_squared.sum() - rank_noise / n,
            }
