"""The step once more: for other layers than were hooked, or with batch statistics as constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from distcockpit.batch_axes import BatchAxes
from distcockpit.batchnorm import batch_statistics
from distcockpit.capture import Capture
from distcockpit.captured import Captured, Loss
from distcockpit.gradients.uses import Layer, Use
from distcockpit.replay import replayed
from distcockpit.trees import tensors


def differentiated_again(
    captured: Captured,
    model: nn.Module,
    layers: Sequence[Layer],
    axes: BatchAxes,
    parameters: Mapping[str, nn.Parameter],
    *,
    constant_statistics: bool,
) -> tuple[Captured, dict[str, Tensor]]:
    """A micro-batch with the uses of a second pass.

    The model is run again and its outputs are given the gradients that they received from the loss, whatever that was.

    Args:
        captured: The micro-batch as it was trained on.
        model: The bare module.
        layers: The layers whose calls are kept.
        axes: Where the batch is.
        parameters: The tracked parameters.
        constant_statistics: Whether batch norms in training mode hold the statistics of the batch as constants.

    Returns:
        What the second pass left, and the gradients that it gave the parameters.
    """
    uses: list[Use] = []
    seen: dict[str, Tensor] = {}
    for forward in captured.passes:
        if not forward.output_gradients or not captured.batch_size:
            continue
        again = Capture(model, layers, Loss(None), axes, batch_size=captured.batch_size)
        again.start()
        statistics = batch_statistics(forward, model) if constant_statistics else None
        try:
            with torch.enable_grad(), replayed(model, forward, statistics) as output:
                outputs = tensors(output)
                gradients = torch.autograd.grad(
                    [outputs[position] for position in forward.output_gradients],
                    list(parameters.values()),
                    [g.to(outputs[position].dtype) for position, g in forward.output_gradients.items()],
                    allow_unused=True,
                )
        finally:
            again.stop()
        uses += again.uses()
        for name, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                dense = gradient.to_dense().double()
                seen[name] = seen[name] + dense if name in seen else dense
    return replace(captured, uses=uses), seen
