"""Run a forward pass again: same inputs, same random numbers, bare module, and no trace left behind."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from distcockpit.losses.captured import CapturedMicroBatch, ForwardPass, scalar_output
from distcockpit.replay.batch_norms import training_batchnorms
from distcockpit.replay.checkpointing import without_reentrance
from distcockpit.replay.trees import map_tensors, tensors
from distcockpit.shards import stood_in

Statistics = Mapping[str, tuple[Tensor, Tensor]]
"""Mean and biased variance, by name of a batch norm."""


@contextmanager
def replayed(
    model: nn.Module,
    forward: ForwardPass,
    batch_statistics: Statistics | None = None,
) -> Generator[Any, None, None]:
    """Call the model again in a fresh graph, and yield what it returns.

    Inside, buffers and attributes of modules are copies of what they were before the pass, hooks on parameters and
    in-place activations are off, and batch norms named in ``batch_statistics`` use these as constants. Random states
    are left unchanged. A sharded model has other values, see `stood_in`.

    Args:
        model: The bare module.
        forward: The pass to run again.
        batch_statistics: Mean and variance by name of the batch norm.

    Raises:
        RuntimeError: If the model's forward pass writes to its parameters.
    """
    frozen = {path: m for path, m in training_batchnorms(model) if batch_statistics and path in batch_statistics}
    if forward.writes_parameters:
        raise RuntimeError(
            "The model's forward pass writes to its parameters, so the step cannot be run again, as needed by "
            "curvature, track_batchnorm=True and layers on a slow route. Keep what it writes in buffers; if it only "
            "writes in its first call, call it once before the first tracked step."
        )
    with (
        stood_in(model),
        forward.before.restored(next(model.parameters()).device),
        forward.before.buffers_restored(model),
        without_hooks(list(model.parameters())),
        without_reentrance(),
    ):
        for path, module in frozen.items():
            module.running_mean, module.running_var = (batch_statistics or {})[path]
            module.training = False
        inplace = [module for module in model.modules() if getattr(module, "inplace", False) is True]
        for module in inplace:
            module.inplace = False  # type: ignore[assignment]
        args, kwargs = forward.args, forward.kwargs
        if forward.writes_inputs:
            args, kwargs = map_tensors(Tensor.clone, (args, kwargs))
        yield model(*args, **kwargs)


@contextmanager
def replayed_loss(
    model: nn.Module,
    loss_fn: nn.Module | None,
    captured: CapturedMicroBatch,
    batch_statistics: Statistics | None = None,
) -> Generator[tuple[Tensor, list[Tensor]], None, None]:
    """Yield the unscaled loss of a micro-batch, in a fresh graph, and the model outputs it was computed from.

    Args:
        model: The bare module.
        loss_fn: The loss module; ``None`` if the model returns its loss.
        captured: A micro-batch with one forward pass and one call of the loss.
        batch_statistics: See `replayed`.

    Raises:
        RuntimeError: If the loss was not computed directly from the model's output.
    """
    if len(captured.passes) != 1:
        raise RuntimeError(_needs_one(captured))
    (forward,) = captured.passes
    with torch.enable_grad(), replayed(model, forward, batch_statistics) as output:
        if loss_fn is None:
            loss = scalar_output(output)
            if loss is None:
                raise RuntimeError(_needs_one(captured))
            yield loss, []
            return
        if len(captured.losses) != 1 or not captured.losses[0].args:
            raise RuntimeError(_needs_one(captured))
        (call,) = captured.losses
        args, used = _with_new_output(call.args, forward.output, output)
        yield loss_fn(*args, **call.kwargs), used


def _needs_one(captured: CapturedMicroBatch) -> str:
    return (
        "Curvature reruns the step and needs exactly one call of the model and one call of the loss module per "
        f"micro-batch, but found {len(captured.passes)} and {len(captured.losses)}. Pass DistCockpit the loss module "
        "(loss_fn=...) and call it once as loss_fn(model(x), y), or let the model return its loss."
    )


@contextmanager
def without_hooks(leaves: Sequence[Tensor]) -> Generator[None, None, None]:
    """Remove the user's hooks from some tensors: they would see, and change, gradients that are not the run's."""
    hooks = [(t._backward_hooks, dict(t._backward_hooks)) for t in leaves if t._backward_hooks]
    kept = [(t, t.grad) for t in leaves if t.retains_grad and not t.is_leaf]
    try:
        for there, _ in hooks:
            there.clear()  # the very container that autograd looks into, even if a tensor is not a leaf
        yield
    finally:
        for there, before in hooks:
            there.update(before)
        for t, gradient in kept:
            t.grad = gradient


def _with_new_output(args: tuple[Any, ...], old: Any, new: Any) -> tuple[tuple[Any, ...], list[Tensor]]:
    """Return the loss arguments with the model's outputs replaced by new ones, and those outputs.

    The wrapper around the model may return an alias of its output, so an output is recognised by its memory; the loss
    may take it with its axes flattened.

    Raises:
        RuntimeError: If a differentiable argument is not an output.
    """
    before, after = tensors(old), tensors(new)
    used: list[Tensor] = []

    def exchange(leaf: Tensor) -> Tensor:
        if not leaf.requires_grad:
            return leaf
        for k, output in enumerate(before):
            same = leaf.shape == output.shape and leaf.stride() == output.stride()
            flat = leaf.numel() == output.numel() and leaf.is_contiguous() and output.is_contiguous()
            if leaf.data_ptr() == output.data_ptr() and (same or flat):
                used.append(after[k] if same else after[k].reshape(leaf.shape))
                return used[-1]
        raise RuntimeError(
            "Curvature reruns the step and needs the loss to be computed directly from the model's output, as in "
            "loss_fn(model(x), y). Move what is in between into the model, as a module."
        )

    return map_tensors(exchange, args), used
