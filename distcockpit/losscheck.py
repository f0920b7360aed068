"""Whether the loss module tells the whole loss, and of each sample what is its own: looked at in the graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distcockpit.captured import ForwardPass, Micro, paired
from distcockpit.losses import decompose
from distcockpit.trees import tensors

SEPARATE = 1e-5  # of the largest gradient: what rounding may leave at the outputs of other samples
EXPLAINED = 1e-2  # of the gradient at the outputs: what rounding may leave unexplained
LOW = 0.1  # the same for outputs of low precision


def _outputs(forward: ForwardPass) -> dict[int, Tensor]:
    """Those that a look at their gradients changes nothing of, by position."""
    return {k: t for k, t in enumerate(tensors(forward.output)) if t.requires_grad and not t.retains_grad}


def _gradients(loss: Tensor, outputs: Mapping[int, Tensor]) -> dict[int, Tensor]:
    found = torch.autograd.grad(loss, list(outputs.values()), retain_graph=True, allow_unused=True)
    return {k: g.detach() for k, g in zip(outputs, found, strict=True) if g is not None}


def check_samples(
    loss_fn: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], forward: ForwardPass, batch_dim: int
) -> None:
    """Whether the losses of half of the samples leave the outputs of the others alone.

    Args:
        loss_fn: The loss module.
        args: Its arguments.
        kwargs: Its arguments.
        forward: The pass whose outputs it was given.
        batch_dim: The batch axis of the model's inputs.

    Raises:
        RuntimeError: If not.
    """
    n, outputs = forward.batch_size, _outputs(forward)
    individual = decompose(loss_fn, args, kwargs, n, forward.output, batch_dim).individual
    if n < 2 or individual is None or not individual.requires_grad or not outputs:
        return
    for own, other in (((0, n // 2), (n // 2, n)), ((n // 2, n), (0, n // 2))):
        for gradient in _gradients(individual[slice(*own)].sum(), outputs).values():
            axes = [k for k, size in enumerate(gradient.shape) if size == n]
            others = [gradient.narrow(axis, other[0], other[1] - other[0]).abs().max() for axis in axes]
            if others and all(bool(each > SEPARATE * gradient.abs().max()) for each in others):
                raise RuntimeError(
                    f"{type(loss_fn).__name__} gave {n} terms, as many as samples, but the term of a sample depends on "
                    "the model's outputs for other samples, so that it is not the sample's loss: in-batch negatives, "
                    "or a selection of that many tokens. Where samples have losses of their own, pass loss_fn=None "
                    "and call cockpit.record_losses(losses) with these; others cannot be taken apart."
                )


def at_outputs(loss: Tensor, forward: ForwardPass) -> dict[int, Tensor]:
    """The gradient of a loss at the outputs of a pass, by position."""
    outputs = _outputs(forward)
    return _gradients(loss, outputs) if outputs else {}


def is_whole(micros: Sequence[Micro]) -> bool:
    """Whether the gradients at the outputs are those of the losses that are known."""
    for micro in (part for each in micros for part in paired(each)):
        if len(micro.passes) != 1 or not micro.losses or any(call.recorded for call in micro.losses):
            continue
        (forward,), calls = micro.passes, [(call.factor, call.at_outputs) for call in micro.losses]
        if not all(at for _, at in calls):
            continue  # a loss inside the model
        for position, arrived in forward.output_gradients.items():
            parts = [factor * at[position] for factor, at in calls if factor is not None and position in at]
            unknown = arrived - sum(parts) if parts else arrived
            tolerance = LOW if arrived.dtype in (torch.float16, torch.bfloat16) else EXPLAINED
            if position in _outputs(forward) and bool(unknown.norm() > tolerance * arrived.norm()):
                return False
    return True
