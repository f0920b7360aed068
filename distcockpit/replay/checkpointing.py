"""Activation checkpointing (`torch.utils.checkpoint`) in models that are run again."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.utils.checkpoint as checkpoints


@contextmanager
def kept_activations() -> Generator[None, None, None]:
    """Inside, checkpointed functions are called directly, and keep what their backward pass needs.

    For parts of a model that are run with other parameters: recomputation in the backward pass would see those of the
    model.
    """

    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args)

    def nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    # The generator is called by the second name from torch 2.15 on.
    names = ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl")
    with _exchanged(CheckpointFunction=_Function(apply), **dict.fromkeys(names, nothing)):
        yield


@contextmanager
def without_reentrance() -> Generator[None, None, None]:
    """Inside, ``use_reentrant=True``, which does not support `torch.autograd.grad`, is treated as ``False``."""

    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return checkpoints.checkpoint(function, *args, preserve_rng_state=preserve, use_reentrant=False)

    with _exchanged(CheckpointFunction=_Function(apply)):
        yield


@dataclass(frozen=True)
class _Function:
    """Stands in for an autograd function."""

    apply: Callable[..., Any]


@contextmanager
def _exchanged(**substitutes: Any) -> Generator[None, None, None]:
    """Replace what torch's function looks up in its module, because it has no switch for this."""
    originals = {name: getattr(checkpoints, name) for name in substitutes if hasattr(checkpoints, name)}
    try:
        for name in originals:
            setattr(checkpoints, name, substitutes[name])
        yield
    finally:
        for name, original in originals.items():
            setattr(checkpoints, name, original)
