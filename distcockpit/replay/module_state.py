"""What modules keep beside parameters and buffers: attributes that a forward pass may write, and their generators.

A pass that is run again must begin where the first one began, and leave no trace: counters, cached tensors, flags,
hidden states.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

STRUCTURE = frozenset(vars(nn.Module())) - {"training"}  # attributes of every module: its hooks, parameters, children
CONTAINERS = (list, dict, set, deque)
LARGE = 1 << 22  # elements from which a tensor is not copied
FEW = 100  # items of a container up to which what they hold is copied as well


@dataclass(frozen=True)
class ModuleStates:
    """The attributes of all modules of a model at one moment."""

    attributes: dict[nn.Module, dict[str, Any]]
    generators: list[tuple[torch.Generator, Tensor]]

    @classmethod
    def take(cls, model: nn.Module) -> ModuleStates:
        """Those of now."""
        attributes = {module: {k: _copied(v) for k, v in _own(module)} for module in model.modules()}
        found = [v for kept in attributes.values() for v in kept.values() if isinstance(v, torch.Generator)]
        return cls(attributes, [(generator, generator.get_state()) for generator in found])

    @contextmanager
    def installed(self) -> Generator[None, None, None]:
        """Let the modules begin from here; afterwards they are as before."""
        before = {module: dict(_own(module)) for module in self.attributes}
        at = [(generator, generator.get_state()) for generator, _ in self.generators]
        cache, enabled = parametrize._cache, parametrize._cache_enabled
        parametrize._cache, parametrize._cache_enabled = {}, 0
        try:
            for module, attributes in self.attributes.items():
                _install(module, {name: _copied(value) for name, value in attributes.items()})
            for generator, state in self.generators:
                generator.set_state(state)
            yield
        finally:
            for module, attributes in before.items():
                _install(module, attributes)
            for generator, state in at:
                generator.set_state(state)
            parametrize._cache, parametrize._cache_enabled = cache, enabled


def _own(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in vars(module).items() if name not in STRUCTURE)


def _install(module: nn.Module, attributes: dict[str, Any]) -> None:
    for name in [name for name, _ in _own(module) if name not in attributes]:
        del vars(module)[name]
    vars(module).update(attributes)


def _copied(value: Any, depth: int = 3) -> Any:
    """A copy of what a forward pass may write to in place."""
    if type(value) in CONTAINERS:
        if depth and len(value) < FEW:
            if type(value) is dict:
                return {key: _copied(each, depth - 1) for key, each in value.items()}
            if type(value) is list:
                return [_copied(each, depth - 1) for each in value]
        return copy.copy(value)
    if type(value) is np.ndarray and value.size < LARGE:
        return value.copy()
    if type(value) is Tensor and value.numel() < LARGE:
        return value.detach().clone() if value.grad_fn is None else value
    return value
