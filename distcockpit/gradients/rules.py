"""Which rule serves which module."""

from __future__ import annotations

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from distcockpit.gradients.backpack_layers import BackpackRule
from distcockpit.gradients.convolution import KINDS as CONVOLUTIONS
from distcockpit.gradients.convolution import ConvolutionRule
from distcockpit.gradients.embedding import EmbeddingRule
from distcockpit.gradients.generic import GenericRule
from distcockpit.gradients.linear import LinearRule
from distcockpit.gradients.norms import NormRule
from distcockpit.gradients.uses import Axes, Folded, Rule

LINEAR, TRANSPOSED, EMBEDDING = LinearRule(), LinearRule(transposed=True), EmbeddingRule()
CONVOLUTION, BACKPACK, GENERIC = ConvolutionRule(), BackpackRule(), GenericRule()
NORM, CHANNEL_NORM = NormRule(), NormRule(channels=True)


def rule_for(module: nn.Module) -> Rule:
    """The fastest rule that is exact for ``module``.

    Subclasses may compute anything, so only exact types count; other parameter names mean that the weight is computed
    from them (weight norm, pruning).
    """
    if not {name for name, _ in module.named_parameters(recurse=False)} <= {"weight", "bias"}:
        return GENERIC
    if type(module) is nn.Linear:
        return LINEAR
    if LinearRule.is_transposed(module):
        return TRANSPOSED
    if type(module) is nn.Embedding:
        return EMBEDDING
    if type(module) in CONVOLUTIONS:
        return CONVOLUTION
    if NormRule.serves(module):
        return CHANNEL_NORM if NormRule.has_channels(module) else NORM
    if BackpackRule.serves(module):
        return BACKPACK
    return GENERIC


def serving(rule: Rule, axes: Axes) -> Rule:
    """The rule, or the one that takes calls whose batch axis was merged with others."""
    return GENERIC if any(isinstance(axis, Folded) for axis in axes) and not rule.unfolds else rule


def is_unit(module: nn.Module) -> bool:
    """Whether a module uses the parameters below it without calling their modules, so that it is served whole."""
    return isinstance(module, nn.MultiheadAttention) or is_parametrized(module)
