"""Which rank produces non-finite numbers, and which one is slow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from distcockpit.gradients import kernels
from distcockpit.gradients.uses import label
from distcockpit.quantities.base import Quantity, Sums, Totals
from distcockpit.quantities.batch import BucketSums, LocalBatch, Model, Needs
from distcockpit.store.schema import Field, Group, Row

SECONDS = {
    "step": "from the end of the previous step's backward pass to the end of this one's",
    "outside": "between the `track` of the previous step and this one's: data loading, the optimizer's step",
    "track": "inside `track`: forward and backward pass",
    "forward": "in the forward pass of the model",
    "wait": "waiting for other ranks in the exchanges before the sums",
    "cockpit": "in the cockpit's own work of this step up to the sums, without the wait",
}

SHOWN = 3  # ranks that a notice names


@dataclass(frozen=True, kw_only=True)
class RankHealth(Quantity):
    """Per rank: non-finite losses and gradients and the layer they came from, and where its time went.

    The counts are of samples with a non-finite loss (1 if individual losses are unknown), and of non-finite elements in
    the sum of the rank's individual gradients. The layers are the first, in forward order, with a non-finite output,
    and the first with parameters, in backward order, with a non-finite output gradient; 0 is none. Times are host times
    in seconds, so an accelerator may still be working. NaN where a time is unknown.

    All ranks of a synchronous job take the same time per step: a slow rank shows up in ``outside_seconds`` (its data)
    or ``forward_seconds`` (its compute), the other ranks in the rest of ``track_seconds``, where they wait for it.
    """

    source: ClassVar[str] = "distcockpit"

    @property
    def needs(self) -> Needs:
        """Outputs, and this rank's gradients."""
        return Needs(outputs=True, bucket_sums=True, backward=True)

    def group(self, model: Model) -> Group:
        """Counts, layers and times per rank."""
        leaves, layers = ([label(path).replace(" ", "_") for path in paths] for paths in (model.leaves, model.layers))
        fields = {
            "nonfinite_losses": Field(("rank",), "non-finite losses", "samples", dtype="int64"),
            "nonfinite_gradients": Field(("rank",), "non-finite gradient elements", dtype="int64"),
            "first_nonfinite_output": Field(
                ("rank",), "first layer with a non-finite output", dtype="int32", codes=("none", *leaves)
            ),
            "first_nonfinite_gradient": Field(
                ("rank",), "first layer with a non-finite output gradient", dtype="int32", codes=("none", *layers)
            ),
            **{f"{name}_seconds": Field(("rank",), f"time {text}", "s") for name, text in SECONDS.items()},
        }
        return Group(fields, {"rank": model.world_size})

    def observe(self, output: Tensor, has_batch_axis: bool) -> Tensor:
        """A reduction in which any non-finite element shows up."""
        return kernels.extremes(output)

    def reduce(self, bucket: BucketSums, memory: dict[str, Any]) -> Mapping[str, Tensor]:
        """How many elements of this rank's gradient are not finite."""
        count = sum(map(kernels.count_nonfinite, bucket.part_of_mean.values())) if bucket.has_gradients else 0
        return {"nonfinite": bucket.number(count)}

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """This rank's values in its slots."""
        outputs = ((path, extremes) for micro in batch.observed for path, extremes in micro)
        losses = kernels.count_nonfinite(batch.losses)
        counts = [
            losses if batch.loss is None else torch.maximum(losses, kernels.count_nonfinite(batch.loss)),
            batch.reduced["nonfinite"],
            _first(outputs, list(batch.model.leaves), batch),
            _first(batch.backward, list(batch.model.layers), batch) if batch.has_gradients else 0,
        ]
        return {
            "counts": batch.slot(batch.vector(counts)),
            "seconds": batch.slot(batch.vector([getattr(batch.times, name) for name in SECONDS])),
        }

    def finalize(self, totals: Totals, n: int) -> Row:
        """The same, by name."""
        losses, gradients, output, gradient = totals["counts"].T.astype(np.int64)
        row: dict[str, Any] = {
            "nonfinite_losses": losses,
            "nonfinite_gradients": gradients,
            "first_nonfinite_output": output,
            "first_nonfinite_gradient": gradient,
        }
        return row | {f"{name}_seconds": each for name, each in zip(SECONDS, totals["seconds"].T, strict=True)}

    def notice(self, row: Row, model: Model) -> str | None:
        """The first ranks with non-finite numbers, and their layers."""
        bad = np.flatnonzero(row["nonfinite_losses"] + row["nonfinite_gradients"] + row["first_nonfinite_output"])
        if not len(bad):
            return None
        shown = []
        for rank in bad[:SHOWN]:
            places = [
                f"{what} '{label(list(paths)[row[field][rank] - 1])}'"
                for field, what, paths in (
                    ("first_nonfinite_output", "output of", model.leaves),
                    ("first_nonfinite_gradient", "gradient at the output of", model.layers),
                )
                if row[field][rank]
            ]
            shown.append(f"rank {rank}" + (f" (first {', first '.join(places)})" if places else ""))
        more = f" and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        return f"non-finite numbers on {', '.join(shown)}{more}."


def _first(extremes: Iterable[tuple[str, Tensor]], paths: list[str], batch: LocalBatch) -> Tensor:
    """1 + the position in ``paths`` of the first one that is not finite; 0 if all are. Does not sync the device."""
    codes = {path: k for k, path in enumerate(paths, start=1)}
    known = [(codes[path], pair) for path, pair in extremes if path in codes]
    if not known:
        return batch.vector([0.0])[0]
    values = batch.vector([code for code, _ in known])
    raised = (~torch.stack([pair.double() for _, pair in known]).isfinite().all(1)).double()
    return values.gather(0, raised.argmax().reshape(1))[0] * raised.max()
