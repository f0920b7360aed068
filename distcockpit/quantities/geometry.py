"""Norms and directions of vectors over time, shared by gradients and updates of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distcockpit.gradients import kernels
from distcockpit.quantities.base import Totals
from distcockpit.store.schema import Field

PREVIOUS = Field((), "previous tracked step", description="-1: there was none", dtype="int64")


def compared(step: int, now: Mapping[str, Tensor], squares: Tensor, memory: dict[str, Any]) -> Tensor:
    """Compare vectors with their predecessors, which ``memory`` keeps: float64 ``[3 parameters + 1]``.

    Squared norms, previous squared norms, inner products of the two, and the previous step (-1: none).

    Args:
        step: This step.
        now: The vectors, by parameter.
        squares: Their squared norms, float64 ``[parameters]``.
        memory: The quantity's memory.
    """
    last = squares.new_tensor([memory.get("step", -1)])
    before, squares_before = memory.get("before", now), memory.get("squares", squares)
    inner = kernels.inner_products(list(now.values()), [before[name] for name in now])
    memory.update(before=now, squares=squares, step=step)
    return torch.cat([squares, squares_before, inner, last])


def norm_and_correlation(totals: Totals) -> dict[str, Any]:
    """Norm, cosine with the previous vector (NaN without one, or where a norm is zero), and the step of the latter."""
    facts = totals["compared"]
    squares, before, inner = facts[:-1].reshape(3, -1)
    with np.errstate(all="ignore"):
        cosine = inner / np.sqrt(squares * before) if facts[-1] >= 0 else np.full_like(inner, np.nan)
    return {"norm": np.sqrt(squares), "correlation": cosine, "previous_step": int(facts[-1])}
