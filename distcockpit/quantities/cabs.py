"""The CABS criterion: a batch size that fits the learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from distcockpit.quantities.base import Quantity, Sums, Totals
from distcockpit.quantities.batch import LocalBatch, Model, Needs
from distcockpit.quantities.variance import scatter
from distcockpit.store.schema import Field, Group, Row


@dataclass(frozen=True, kw_only=True)
class CABS(Quantity):
    r"""Batch size suggested by the coupled adaptive batch size rule, from learning rate, gradient noise and loss.

    $$\frac{\eta}{N L}\Bigl(\sum_i \|g_i\|^2 - N\|G\|^2\Bigr)$$

    Balles, Romero and Hennig 2017, "Coupling Adaptive Batch Sizes with Learning Rates", arXiv:1612.05086, Eq. 22. In
    samples. Derived for SGD without momentum and for losses whose minimum is zero; computed for any optimizer. Each
    parameter group has its own learning rate and its own value; ``cabs`` is their sum, which equals the formula if all
    rates are equal. Parameters that are not in the optimizer do not count. NaN for N = 0.
    """

    source: ClassVar[str] = "Balles et al. 2017, arXiv:1612.05086, Eq. 22"

    @property
    def needs(self) -> Needs:
        """The loss, G, the norms of the individual gradients, and the learning rates."""
        return Needs(loss=True, mean_squared=True, squared_norms=True, optimizer=True)

    def group(self, model: Model) -> Group:
        """The total, and a value per parameter group."""
        remark = "derived for SGD without momentum; computed for any optimizer"
        fields = {
            "cabs": Field((), "batch size suggested by CABS", "samples", remark),
            "per_group": Field(("param_group",), "CABS per parameter group", "samples", remark),
        }
        return Group(fields, {"param_group": model.n_parameter_groups})

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """This rank's S2 per parameter group and sum of losses; G and the learning rates."""
        size = batch.model.n_parameter_groups
        index = [batch.model.parameter_groups.get(name, size) for name in batch.parameters]  # size: in no group
        return {
            "squares": batch.collected(batch.squared_norms, index, size + 1)[:size],
            "loss": batch.vector([float("nan") if batch.loss is None else batch.loss])[0],
            "mean_squared": batch.replicated(lambda: batch.collected(batch.mean_squared, index, size + 1)[:size]),
            "rates": batch.replicated(lambda: batch.vector(batch.learning_rates)),
        }

    def finalize(self, totals: Totals, n: int) -> Row:
        """The values."""
        with np.errstate(all="ignore"):
            each = totals["rates"] * scatter(totals["squares"], totals["mean_squared"], n) / totals["loss"]
        each = each if n else np.full_like(each, np.nan)
        return {"cabs": each.sum(), "per_group": each}
