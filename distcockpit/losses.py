"""What a loss module computes: the losses of the individual samples, and what their sum was divided by."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from distcockpit.rng import unchanged

REDUCTIONS = ("mean", "sum", "batchmean")


@dataclass(frozen=True)
class Decomposition:
    """``loss = sum_i individual_i / divisor``."""

    total: Tensor  # sum_i individual_i
    individual: Tensor | None  # float64 [B]; None where it is not known which term is of which sample
    divisor: Tensor | float  # what a mean divides by (samples, terms, class weights); 1 for a sum
    is_sum: bool


def is_decomposable(loss_fn: nn.Module | None) -> bool:
    """Whether individual losses can be derived from the loss module."""
    return getattr(loss_fn, "reduction", None) in REDUCTIONS


@torch.no_grad()
def decompose(
    loss_fn: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], batch_size: int, output: object
) -> Decomposition:
    """Individual losses and divisor of one call of a loss module.

    The terms of a sample are summed. Which they are is known if the first axis of the terms is the batch, or if the
    loss was given the model's own output with its leading axes flattened.

    Args:
        loss_fn: A loss module with ``reduction`` "mean", "sum" or "batchmean".
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        batch_size: Number of samples B.
        output: What the model returned.
    """
    unreduced: Any = copy.copy(loss_fn)
    unreduced.reduction = "none"
    unreduced._buffers = {name: None if b is None else b.clone() for name, b in loss_fn._buffers.items()}
    given = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    with unchanged(given.device):
        terms = unreduced.forward(*args, **kwargs)
    total = terms.sum(dtype=torch.float64)
    individual = None
    if (terms.dim() and terms.shape[0] == batch_size) or _is_flattened(given, output, batch_size):
        individual = terms.reshape(batch_size, -1).sum(1, dtype=torch.float64) if batch_size else terms.double()[:0]
    if loss_fn.reduction == "sum":
        return Decomposition(total, individual, 1.0, is_sum=True)
    return Decomposition(total, individual, _mean_divisor(loss_fn, terms, args, kwargs), is_sum=False)


def _is_flattened(given: Tensor, output: object, batch_size: int) -> bool:
    """Whether the loss got the very memory of the model's output, whose first axis is the batch."""
    return (
        isinstance(output, Tensor)
        and output.dim() > 0
        and output.shape[0] == batch_size
        and given.data_ptr() == output.data_ptr()
        and given.numel() == output.numel()
        and given.is_contiguous()
        and output.is_contiguous()
    )


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
