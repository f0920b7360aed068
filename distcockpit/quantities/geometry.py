"""Norms and directions of vectors over time, shared by gradients and updates of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distcockpit.gradients import kernels
from distcockpit.gradients.factors import rows_of
from distcockpit.quantities.base import Totals
from distcockpit.quantities.batch import BucketSums, ReplicatedValue
from distcockpit.replay.devices import sent
from distcockpit.store.schema import Field

PREVIOUS = Field((), "previous tracked step", description="-1: there was none", dtype="int64")


def compared(step: int, now: Mapping[str, Tensor], memory: dict[str, Any]) -> dict[str, Tensor | ReplicatedValue]:
    """Compare vectors with their predecessors, which ``memory`` keeps; see `with_previous`.

    Args:
        step: This step.
        now: The vectors, by parameter; they are asked for one after the other.
        memory: The quantity's memory.
    """
    before, pairs = memory.setdefault("before", {}), []
    for name, vector in now.items():
        pairs.append((kernels.squared_norm(vector), kernels.inner_products([vector], [before.get(name, vector)])[0]))
        before[name] = vector
    return with_previous(step, torch.stack([torch.stack(each) for each in zip(*pairs, strict=True)]), memory)


def compared_in(bucket: BucketSums, memory: dict[str, Any]) -> Tensor:
    """Return squared norms of G and inner products with its predecessor, ``[2, parameters of the bucket]``.

    Args:
        bucket: The sums of a bucket; the memory keeps a copy of this rank's own part of its G.
        memory: The quantity's memory.
    """
    if memory.get("begun") != bucket.step:  # if this step is not finished, nothing compares with it
        memory.update(begun=bucket.step, last=memory.pop("step", -1))
    before, pairs = memory.setdefault("before", {}), []
    for name, vector in bucket.own.items():
        is_range = vector.shape != bucket.mean[name].shape
        key = f"{name}[{bucket.rows[name].start or 0}]" if is_range else name
        if key not in before:
            before[key] = vector.new_zeros(vector.shape if is_range else bucket.model.shapes[name])
        place = before[key] if is_range else rows_of(before[key], bucket.rows[name])
        pairs.append((kernels.squared_norm(vector), kernels.inner_products([vector], [place])[0]))
        place.copy_(vector)
    return torch.stack([torch.stack(each) for each in zip(*pairs, strict=True)])


def with_previous(step: int, pairs: Tensor, memory: dict[str, Any]) -> dict[str, Tensor | ReplicatedValue]:
    """Add what is known of the previous step to squared norms and inner products.

    Returns:
        ``compared``: squared norms, previous squared norms, inner products of the two, float64 ``[3, parameters]``;
        ``previous``: the previous step (-1: none); and ``gaps``: 1, the steps since then, and their square. If
        parameters are sharded, these are sums over ranks, and tell whether all of them compare with the same step: a
        rank that failed in between does not.
    """
    (squares, inner), last = pairs, memory.pop("last", memory.get("step", -1))
    squares_before, gap = memory.get("squares", squares), float(step - last)
    memory.update(squares=squares, step=step)
    return {
        "compared": torch.stack([squares, squares_before, inner]),
        "gaps": sent([1.0, gap, gap**2], squares.device),
        "previous": ReplicatedValue(sent(last, squares.device)),
    }


def norm_and_correlation(totals: Totals) -> dict[str, Any]:
    """Norm, cosine with the previous vector (NaN without one, or where a norm is zero), and the step of the latter."""
    (squares, before, inner), (ranks, gap, squared) = totals["compared"], totals["gaps"]
    with np.errstate(all="ignore"):
        alike = np.isclose(ranks * squared, gap**2, rtol=1e-14, atol=0) and totals["previous"] >= 0
        cosine = inner / np.sqrt(squares * before) if alike else np.full_like(inner, np.nan)
    return {"norm": np.sqrt(squares), "correlation": cosine, "previous_step": int(totals["previous"]) if alike else -1}
