"""Tracked steps check themselves: what the hooks saw must explain the loss and the gradient of every parameter.

A parameter that is used without calling its module, or a layer that does not compute what its type promises, would
otherwise leave a silent hole. A parameter is done with once its gradient was explained at a step where it was not
zero; from then on nothing is checked, and nothing costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from distcockpit.captured import Captured
from distcockpit.gradients.statistics import GradientSum, SquaredNorms
from distcockpit.gradients.uses import Layer, MicroBatch
from distcockpit.gradients.walk import walk

# Relative errors that rounding may make, by type; types of lower precision may make LOW_PRECISION.
LOSS_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}
GRADIENT_TOLERANCE = {torch.float64: 1e-2, torch.float32: 1e-2}
LOW_PRECISION = 0.1
CANCELLATION = 1e-4  # of the norm of a parameter's individual gradients: what may be left where they cancel
NOISE = 1e-6  # of the norm of the whole gradient: what may be left where a gradient is zero but for rounding


def check_losses(captured: Sequence[Captured]) -> None:
    """Whether the terms that a loss module gives add up to the loss.

    Raises:
        RuntimeError: If not, with a way out.
    """
    for micro in captured:
        for call in micro.losses:
            if call.recorded or not micro.weight:
                continue
            expected, value = float(call.decomposition.total / call.decomposition.divisor), float(call.value)
            tolerance = LOSS_TOLERANCE.get(call.value.dtype, LOW_PRECISION)
            if abs(expected - value) > tolerance * max(1e-3, abs(value)):
                raise RuntimeError(
                    f"The loss is {value:g}, but the individual losses that its module gives with reduction='none' "
                    f"make {expected:g}. Its mean is not one over their terms: pass loss_fn=None and call "
                    "cockpit.record_losses(losses) with one loss per sample."
                )


def check_positions(captured: Sequence[Captured]) -> None:
    """Whether an embedding of positions passes for one of samples, because there are as many of both.

    Raises:
        ValueError: If the input of an embedding is 0, 1, ..., B-1; names the layer and a way out.
    """
    for micro in captured:
        for use in micro.uses:
            if isinstance(use.layer.module, nn.Embedding) and use.layer.parameters and micro.batch_size > 1:
                index = use.input
                if index.dim() == 1 and torch.equal(index, torch.arange(len(index), device=index.device)):
                    raise ValueError(
                        f"Layer '{use.layer.path}' (Embedding) was called with 0, 1, ..., {len(index) - 1} in a batch "
                        f"of {micro.batch_size}: positions, it seems, which the samples share, so that their gradients "
                        f"cannot be told apart. Leave the layer out: exclude=['{use.layer.path}']."
                    )


def check_gradients(
    captured: Sequence[Captured],
    seen: Mapping[str, Tensor],
    model: nn.Module,
    layers: Sequence[Layer],
    unchecked: Mapping[str, nn.Parameter],
) -> list[str]:
    """Whether the individual gradients add up to the gradients that autograd gave the parameters.

    Args:
        captured: The micro-batches, not scaled yet.
        seen: What arrived at the parameters, summed over backward calls.
        model: The bare module.
        layers: Its tracked layers.
        unchecked: The parameters to check.

    Returns:
        Names of the parameters whose gradient was finite, not zero, and explained.

    Raises:
        RuntimeError: If one is not explained; names the layer and a way out.
    """
    sums, norms = GradientSum(unchecked), SquaredNorms(unchecked)
    values = {name: p.detach() for name, p in model.named_parameters()}
    walk([MicroBatch(c.batch_size, c.uses) for c in captured], values, list(unchecked), [sums, norms])
    owner = {full: layer for layer in layers for full in layer.parameters.values()}
    n, explained_now = sum(c.batch_size for c in captured), []
    noise = NOISE * sum(float(g.square().sum()) for g in seen.values()) ** 0.5
    for name, explained in sums.sums.items():
        arrived = seen.get(name, torch.zeros_like(explained))
        error, size = float((explained - arrived).norm()), float(arrived.norm())
        everything = float((n * norms.values[name]).sqrt())
        if not all(map(torch.isfinite, map(torch.tensor, (error, size, everything)))):
            continue
        tolerance = GRADIENT_TOLERANCE.get(unchecked[name].dtype, LOW_PRECISION)
        if error > tolerance * size + CANCELLATION * everything + noise:
            layer = owner[name]
            raise RuntimeError(
                f"Parameter '{name}' of layer '{layer.path}' ({type(layer.module).__name__}) received a gradient of "
                f"norm {size:.3g}, of which the calls of its layer explain all but {error:.3g}. It is used outside of "
                "its module's forward, or the module's output is changed in a way that hides its gradient. Use it "
                f"through its module, or leave the layer out: exclude=['{layer.path}']."
            )
        if size > 0:
            explained_now.append(name)
    return explained_now
