"""The statistics of the local batch that batch norms in training mode normalise with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distcockpit.losses.captured import ForwardPass
from distcockpit.replay.batch_norms import training_batchnorms


def batch_statistics(forward: ForwardPass, model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the mean and biased variance over the local batch, by name of the batch norm.

    Raises:
        RuntimeError: If a batch norm was not called exactly once.
    """
    found = {}
    norms: Sequence[tuple[str, Any]] = training_batchnorms(model)
    for path, module in norms:
        inputs = [use.input for use in forward.uses if use.layer.module is module]
        if len(inputs) != 1:
            raise RuntimeError(
                f"Layer '{path}' ({type(module).__name__}) was called {len(inputs)} times in one forward pass; "
                "track_batchnorm=True needs tracked batch norms to be called exactly once."
            )
        axes = [axis for axis in range(inputs[0].dim()) if axis != 1]
        kept: Tensor = next((t for t in (module.running_mean, module.weight) if t is not None), inputs[0])
        variance, mean = torch.var_mean(
            inputs[0].to(torch.promote_types(kept.dtype, inputs[0].dtype)), axes, correction=0
        )
        found[path] = (mean.to(kept.dtype), variance.to(kept.dtype))
    return found
