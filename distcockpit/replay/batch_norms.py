"""The batch norms of a model, and which of them normalise with batch statistics."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

Modules = Sequence[tuple[str, nn.Module]]
"""Modules with their names."""


def batchnorms(model: nn.Module) -> Modules:
    """Return the batch norms of a model."""
    norm = nn.modules.batchnorm._BatchNorm
    return [(path, module) for path, module in model.named_modules() if isinstance(module, norm)]


def training(norms: Modules) -> Modules:
    """Return those batch norms that normalise with batch statistics."""
    return [(path, module) for path, module in norms if module.training or module.running_mean is None]


def training_batchnorms(model: nn.Module) -> Modules:
    """Return the batch norms of a model that normalise with batch statistics."""
    return training(batchnorms(model))
