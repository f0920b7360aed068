"""What a loss module computes: the losses of the individual samples, and what their sum was divided by."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

REDUCTIONS = ("mean", "sum", "batchmean")


@dataclass(frozen=True)
class Decomposition:
    """``loss = sum_i individual_i / divisor``."""

    individual: Tensor  # float64 [B]
    divisor: Tensor | float  # what a mean divides by (samples, terms, class weights); 1 for a sum
    is_sum: bool


def is_decomposable(loss_fn: nn.Module | None) -> bool:
    """Whether individual losses can be derived from the loss module."""
    return getattr(loss_fn, "reduction", None) in REDUCTIONS


@torch.no_grad()
def decompose(loss_fn: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], batch_size: int) -> Decomposition:
    """Individual losses and divisor of one call of a loss module.

    The terms of a sample are summed. They are found by sample-major order: the first axis of the terms is the
    batch, or a flattening of axes that begin with the batch.

    Args:
        loss_fn: A loss module with ``reduction`` "mean", "sum" or "batchmean".
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        batch_size: Number of samples B.

    Raises:
        ValueError: If the terms cannot be told apart by sample.
    """
    unreduced: Any = copy.copy(loss_fn)
    unreduced.reduction = "none"
    terms = unreduced.forward(*args, **kwargs)
    if batch_size == 0:
        individual = terms.new_zeros(0, dtype=torch.float64)
    elif terms.dim() == 0 or terms.numel() % batch_size:
        raise ValueError(
            f"{type(loss_fn).__name__} with reduction='none' gives {tuple(terms.shape)} terms for a batch of "
            f"{batch_size} samples, which cannot be told apart by sample. Pass loss_fn=None to DistCockpit and "
            "call cockpit.record_losses(losses) with one loss per sample."
        )
    else:
        individual = terms.reshape(batch_size, -1).sum(1, dtype=torch.float64)
    if loss_fn.reduction == "sum":
        return Decomposition(individual, 1.0, is_sum=True)
    return Decomposition(individual, _mean_divisor(loss_fn, terms, args, kwargs), is_sum=False)


def _mean_divisor(loss_fn: nn.Module, terms: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | float:
    if loss_fn.reduction == "batchmean":
        return float((args[0] if args else kwargs["input"]).shape[0])
    if isinstance(loss_fn, nn.CrossEntropyLoss | nn.NLLLoss):
        target = args[1] if len(args) > 1 else kwargs["target"]
        if not target.is_floating_point():
            counted = target != loss_fn.ignore_index
            if loss_fn.weight is None:
                return counted.sum(dtype=torch.float64)
            return (loss_fn.weight.double()[target.where(counted, 0)] * counted).sum()
    return float(terms.numel())
