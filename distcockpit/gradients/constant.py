"""A gradient that is the same for every sample: that of a penalty on the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from distcockpit.gradients.uses import Blocks, Layer, Rule, Use


class ConstantRule(Rule):
    """The individual gradients are there."""

    def blocks(self, use: Use, names: Sequence[str], values: Mapping[str, Tensor]) -> Blocks:
        """See `Rule.blocks`."""
        return lambda samples: {name: use.delta[samples] for name in names}


def constant(name: str, gradient: Tensor, n: int) -> Use:
    """What gives n samples the same gradient.

    Args:
        name: Of the parameter.
        gradient: Of its shape.
        n: Number of samples.
    """
    layer = Layer("a penalty", nn.Identity(), {"p": name}, {"p": name}, is_leaf=True, function="a penalty")
    return Use(
        layer,
        ConstantRule(),
        (),
        {},
        versions=[],
        training={},
        buffers={},
        random_state=None,
        states=None,
        autocast=None,
        axes=(0,),
        shapes=[gradient.expand(n, *gradient.shape).shape],
        given=[],
        key="",
        call=0,
        output_gradients={0: gradient.expand(n, *gradient.shape)},
    )
