"""Individual gradients that are already known: of penalties, of parameters in the loss itself, and of small parameters.

The individual gradients of a small parameter, such as the scale of a layer norm on sequences, take less memory than the
input and the output gradient of the call that they follow from. They are formed as soon as the output gradient has
arrived, in the backward pass, which frees both. They are linear in the output gradient, so that neither the scale of
the loss nor what other ranks do matters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from distcockpit.gradients import kernels
from distcockpit.gradients.uses import Blocks, Layer, Use, UseRule
from distcockpit.replay.snapshot import Snapshot
from distcockpit.replay.trees import memory_of

SMALLER = 4
"""How many times smaller they must be."""


class GivenRule(UseRule):
    """The individual gradients are in place of output gradients, in the order of the names of the layer."""

    def blocks(self, use: Use, names: Sequence[str], values: Mapping[str, Tensor]) -> Blocks:
        """See `UseRule.blocks`."""
        gradients = {name: use.output_gradients[list(use.layer.names).index(name)] for name in names}
        return lambda samples: {name: gradient[samples] for name, gradient in gradients.items()}


GIVEN = GivenRule()


def of_samples(name: str, gradients: Tensor) -> Use:
    """Return a use that gives samples these gradients.

    Args:
        name: Name of the parameter.
        gradients: ``[B, *parameter.shape]``.
    """
    layer = Layer("the loss", nn.Identity(), {"p": name}, {"p": name}, is_leaf=True, function="the loss")
    return Use(
        layer,
        GIVEN,
        (),
        {},
        versions=[],
        before=Snapshot(),
        axes=(0,),
        shapes=[gradients.shape],
        given=[],
        key="",
        call=0,
        output_gradients={0: gradients},
    )


def is_small(use: Use, output: Tensor, n: int, parameters: Mapping[str, Tensor]) -> bool:
    """True if individual gradients take much less memory than the input and the output gradient of a call.

    Args:
        use: A call with one output.
        output: The output, of n samples.
        n: Number of samples.
        parameters: Of the model, by name.
    """
    if use.closed is None or not output.is_floating_point():
        return False
    size = n * sum(parameters[full].numel() for full in use.layer.names.values())
    return SMALLER * size <= output.numel() + use.input.numel()


@torch.no_grad()
def form(use: Use, parameters: Mapping[str, Tensor]) -> None:
    """Let individual gradients take the place of the input and the output gradient of a call.

    Args:
        use: A call whose output gradient has arrived, and for which `is_small` was true.
        parameters: Of the model, by name.
    """
    rule, delta, names = use.closed, use.delta, use.layer.names
    if rule is None or use.inputs_changed:
        return
    with torch.autocast(delta.device.type, enabled=False):
        formed = rule.blocks(use, list(names), {})(slice(None))
    gradients = [formed[name].reshape(-1, *parameters[full].shape) for name, full in names.items()]
    # Where nothing is summed, they are the output gradient itself, which belongs to autograd.
    gradients = [each.clone() if memory_of(each) == memory_of(delta) else each for each in gradients]
    use.extremes = kernels.extremes(delta)
    use.form, use.formed_by, use.args, use.versions = GIVEN, rule, (), []
    use.axes, use.shapes = (0,) * len(gradients), [each.shape for each in gradients]
    use.have(dict(enumerate(gradients)))
