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
from distcockpit.quantities.batch import BucketSums
from distcockpit.replay.devices import sent
from distcockpit.store.schema import Field

PREVIOUS = Field((), "previous tracked step", description="-1: there was none", dtype="int64")


def compared(step: int, now: Mapping[str, Tensor], memory: dict[str, Any]) -> Tensor:
    """Compare vectors with their predecessors, which ``memory`` keeps: float64 ``[3 parameters + 1]``.

    Squared norms, previous squared norms, inner products of the two, and the previous step (-1: none).

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
        bucket: The sums of a bucket; the memory keeps a copy of its G.
        memory: The quantity's memory.
    """
    if memory.get("begun") != bucket.step:  # if this step is not finished, nothing compares with it
        memory.update(begun=bucket.step, last=memory.pop("step", -1))
    before, pairs = memory.setdefault("before", {}), []
    for name, vector in bucket.mean.items():
        if name not in before:
            before[name] = vector.new_zeros(bucket.model.shapes[name])
        place = rows_of(before[name], bucket.rows[name])
        pairs.append((kernels.squared_norm(vector), kernels.inner_products([vector], [place])[0]))
        place.copy_(vector)
    return torch.stack([torch.stack(each) for each in zip(*pairs, strict=True)])


def with_previous(step: int, pairs: Tensor, memory: dict[str, Any]) -> Tensor:
    """Add what is known of the previous step to squared norms and inner products, see `compared`."""
    (squares, inner), last = pairs, memory.pop("last", memory.get("step", -1))
    squares_before = memory.get("squares", squares)
    memory.update(squares=squares, step=step)
    return torch.cat([squares, squares_before, inner, sent([last], squares.device)])


def norm_and_correlation(totals: Totals) -> dict[str, Any]:
    """Norm, cosine with the previous vector (NaN without one, or where a norm is zero), and the step of the latter."""
    facts = totals["compared"]
    squares, before, inner = facts[:-1].reshape(3, -1)
    with np.errstate(all="ignore"):
        cosine = inner / np.sqrt(squares * before) if facts[-1] >= 0 else np.full_like(inner, np.nan)
    return {"norm": np.sqrt(squares), "correlation": cosine, "previous_step": int(facts[-1])}
