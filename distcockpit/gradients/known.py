"""Individual gradients that are already known: of penalties on parameters, and of parameters in the loss itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from distcockpit.gradients.uses import Blocks, Layer, Use, UseRule
from distcockpit.replay.snapshot import Snapshot


class GivenRule(UseRule):
    """The individual gradients are already known."""

    def blocks(self, use: Use, names: Sequence[str], values: Mapping[str, Tensor]) -> Blocks:
        """See `UseRule.blocks`."""
        return lambda samples: {name: use.delta[samples] for name in names}


def of_samples(name: str, gradients: Tensor) -> Use:
    """Return a use that gives samples these gradients.

    Args:
        name: Name of the parameter.
        gradients: ``[B, *parameter.shape]``.
    """
    layer = Layer("the loss", nn.Identity(), {"p": name}, {"p": name}, is_leaf=True, function="the loss")
    return Use(
        layer,
        GivenRule(),
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
