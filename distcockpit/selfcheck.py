"""The first tracked step checks itself: what the hooks saw must explain the loss and every gradient.

A parameter that is used without calling its module, or a layer that does not compute what its type promises, would
otherwise leave a silent hole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from distcockpit.captured import Captured
from distcockpit.gradients.statistics import Moments
from distcockpit.gradients.uses import Layer, MicroBatch
from distcockpit.gradients.walk import walk

LOSS_TOLERANCE = 1e-3
GRADIENT_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}
LOW_PRECISION_TOLERANCE = 0.1


def check_losses(captured: Sequence[Captured]) -> None:
    """Whether the individual losses add up to the loss.

    Raises:
        RuntimeError: If not, with a way out.
    """
    for micro in captured:
        for call in micro.losses:
            if call.recorded or not micro.weight:
                continue
            expected = float(call.decomposition.individual.sum() / call.decomposition.divisor)
            if abs(expected - float(call.value)) > LOSS_TOLERANCE * max(1e-3, abs(float(call.value))):
                raise RuntimeError(
                    f"The loss is {float(call.value):g}, but the individual losses that its module gives with "
                    f"reduction='none' make {expected:g}. Its mean is not one over their terms: pass loss_fn=None and "
                    "call cockpit.record_losses(losses) with one loss per sample."
                )


def check_gradients(
    captured: Sequence[Captured],
    seen: Mapping[str, Tensor],
    model: nn.Module,
    layers: Sequence[Layer],
    tracked: Mapping[str, nn.Parameter],
) -> None:
    """Whether the individual gradients add up to the gradients that autograd gave the parameters.

    Args:
        captured: The micro-batches, not scaled yet.
        seen: What arrived at the parameters, summed over backward calls.
        model: The bare module.
        layers: Its tracked layers.
        tracked: The tracked parameters.

    Raises:
        RuntimeError: If not, naming the layer, with a way out.
    """
    moments = Moments(tracked)
    values = {name: p.detach() for name, p in model.named_parameters()}
    walk([MicroBatch(c.batch_size, c.uses) for c in captured], values, list(tracked), [moments])
    owner = {full: layer for layer in layers for full in layer.parameters.values()}
    for name, explained in moments.first.items():
        arrived = seen.get(name, torch.zeros_like(explained))
        if not (arrived.isfinite().all() and explained.isfinite().all()):
            continue
        tolerance = GRADIENT_TOLERANCE.get(tracked[name].dtype, LOW_PRECISION_TOLERANCE)
        error, size = float((explained - arrived).norm()), float(arrived.norm())
        if error > tolerance * size + 1e-6 * arrived.numel() ** 0.5 * max(1e-3, float(explained.norm())):
            layer = owner[name]
            raise RuntimeError(
                f"Parameter '{name}' of layer '{layer.path}' ({type(layer.module).__name__}) received a gradient of "
                f"norm {size:.3g}, of which the calls of its layer explain all but {error:.3g}. It is used outside of "
                "its module's forward, or the module mixes samples. Use it through its module, or leave the layer "
                f"out: exclude=['{layer.path}']."
            )
