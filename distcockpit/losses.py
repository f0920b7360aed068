"""What a loss module computes: the losses of the individual samples, and what their sum was divided by."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distcockpit.reduce import Pending
from distcockpit.rng import unchanged
from distcockpit.trees import tensors

REDUCTIONS = ("mean", "sum", "batchmean")


@dataclass(frozen=True)
class Decomposition:
    """``loss = sum_i individual_i / divisor``."""

    total: Tensor  # sum_i individual_i
    individual: Tensor | None  # float64 [B]; None where it is not known which term is of which sample
    divides_by: Pending | float  # what a mean divides by (samples, terms, class weights); 1 for a sum
    is_sum: bool

    @property
    def divisor(self) -> float:
        """The same as a number; waits until it is known on the host, which it is soon after the forward pass."""
        return self.divides_by if isinstance(self.divides_by, float) else float(self.divides_by.result()[0])


def is_decomposable(loss_fn: nn.Module | None) -> bool:
    """Whether individual losses can be derived from the loss module."""
    return getattr(loss_fn, "reduction", None) in REDUCTIONS


def decompose(
    loss_fn: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batch_size: int,
    output: object,
    batch_dim: int = 0,
) -> Decomposition:
    """Individual losses and divisor of one call of a loss module.

    The terms of a sample are summed. Which they are is known if the batch is an axis of the terms, or if the loss was
    given an output of the model with its leading axes flattened. Where gradients are enabled they hold their graph.

    Args:
        loss_fn: A loss module with ``reduction`` "mean", "sum" or "batchmean".
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        batch_size: Number of samples B.
        output: What the model returned.
        batch_dim: The batch axis of the model's inputs, preferred to the first.
    """
    unreduced: Any = copy.copy(loss_fn)
    unreduced.reduction = "none"
    unreduced._buffers = {name: None if b is None else b.clone() for name, b in loss_fn._buffers.items()}
    given = tensors((args, kwargs))[0]
    torchs_own = type(loss_fn).__module__.startswith("torch.nn.")  # these draw no random numbers
    with nullcontext() if torchs_own else unchanged(given.device):
        terms = unreduced.forward(*args, **kwargs)
    total = terms.sum(dtype=torch.float64)
    individual = _by_sample(terms, given, batch_size, output, batch_dim)
    if loss_fn.reduction == "sum":
        return Decomposition(total, individual, 1.0, is_sum=True)
    divisor = _mean_divisor(loss_fn, terms, args, kwargs)
    on_its_way = Pending(divisor.double().reshape(1)) if isinstance(divisor, Tensor) else divisor
    return Decomposition(total, individual, on_its_way, is_sum=False)


def _by_sample(terms: Tensor, given: Tensor, batch_size: int, output: object, batch_dim: int) -> Tensor | None:
    """The terms added up by sample, float64 ``[B]``; ``None`` where it is not known which are of which sample."""
    if terms.dim() == 1 and len(terms) == batch_size:
        return terms.double()
    for shape in (terms.shape, *_flattened_from(terms, given, output)):
        axis = next((k for k in (batch_dim, 0) if len(shape) > k and shape[k] == batch_size), None)
        if axis is not None:
            rows = terms.reshape(shape).movedim(axis, 0)
            return rows.reshape(batch_size, math.prod(rows.shape[1:])).sum(1, dtype=torch.float64)
    return None


def _flattened_from(terms: Tensor, given: Tensor, output: object) -> list[torch.Size]:
    """The shape of the terms before axes were flattened: that of an output whose very memory the loss was given."""
    own = [
        z
        for z in tensors(output)
        if given.data_ptr() == z.data_ptr() and given.numel() == z.numel() and given.is_contiguous()
    ]
    shapes = [z.shape[:k] for z in own if z.is_contiguous() for k in (z.dim(), z.dim() - 1)]
    return [shape for shape in shapes if shape and math.prod(shape) == terms.numel()]


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
