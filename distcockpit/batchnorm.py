"""Batch norm in training mode: the step once more, with the statistics of the local batch as constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from distcockpit.capture import Capture
from distcockpit.captured import Captured, Loss
from distcockpit.gradients.uses import Layer
from distcockpit.layers import training_batchnorms
from distcockpit.replay import replayed


def with_constant_statistics(
    captured: Captured,
    model: nn.Module,
    loss_fn: nn.Module | None,
    layers: Sequence[Layer],
    parameters: Mapping[str, nn.Parameter],
) -> tuple[Captured, dict[str, Tensor]]:
    """A micro-batch, differentiated again with its batch statistics as constants.

    Args:
        captured: The micro-batch as it was trained on.
        model: The bare module.
        loss_fn: The loss module.
        layers: The tracked layers.
        parameters: The tracked parameters.

    Returns:
        What the second pass left, and the gradients that it gave the parameters.

    Raises:
        RuntimeError: If there is no loss module to run again.
    """
    if loss_fn is None:
        raise RuntimeError("track_batchnorm=True needs the loss module: DistCockpit(loss_fn=...).")
    again = Capture(model, layers, Loss(loss_fn), replay=True, batch_size=captured.batch_size)
    again.start()
    try:
        with replayed(model, loss_fn, captured, batch_statistics(captured, model)) as loss:
            gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    finally:
        again.stop()
    (result,) = again.finish()
    scale = replace(result.scale, weight=captured.scale.weight)
    seen = {name: g.double() for name, g in zip(parameters, gradients, strict=True) if g is not None}
    return replace(result, scale=scale, observed=captured.observed), seen


def batch_statistics(captured: Captured, model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Mean and biased variance over the local batch, by name of the batch norm.

    Raises:
        RuntimeError: If a batch norm was called more than once, or not at all.
    """
    found = {}
    for path, module in training_batchnorms(model):
        inputs = [use.input for use in captured.passes[0].uses if use.layer.module is module]
        if len(inputs) != 1:
            raise RuntimeError(
                f"Layer '{path}' ({type(module).__name__}) was called {len(inputs)} times in one forward pass; "
                "track_batchnorm=True needs exactly one call of a tracked layer."
            )
        axes = [axis for axis in range(inputs[0].dim()) if axis != 1]
        variance, mean = torch.var_mean(inputs[0], axes, correction=0)
        found[path] = (mean, variance)
    return found
