"""What a call starts from besides its arguments and parameters: taken once, restored by every second pass.

Random numbers, buffers, the attributes of modules, which a forward pass may write (counters, cached tensors, flags,
hidden states), training modes, and the type of mixed precision.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from distcockpit.replay.rng import RandomState, unchanged

STRUCTURE = frozenset(vars(nn.Module())) - {"training"}  # attributes of every module: its hooks, parameters, children
CONTAINERS = (list, dict, set, deque)
LARGE = 1 << 22  # number of elements from which a tensor is not copied
FEW = 100  # number of items up to which the contents of a container are copied as well


@dataclass(frozen=True)
class Snapshot:
    """A module at the moment of a call. What was not taken is left alone by `restored`."""

    autocast: torch.dtype | None = None  # the type of mixed precision, if any
    random_state: RandomState | None = None
    buffers: Mapping[str, Tensor] = field(default_factory=dict)  # copies, by name
    attributes: Attributes | None = None
    training: Mapping[nn.Module, bool] = field(default_factory=dict)  # of the module and those below it

    @classmethod
    def take(cls, module: nn.Module, device: torch.device) -> Snapshot:
        """Take everything, of a module that is about to be called and may be run again."""
        modules = dict(module.named_modules())
        buffers = {
            f"{path}.{name}" if path else name: buffer.clone()
            for path, m in modules.items()
            if m._buffers
            for name, buffer in m._buffers.items()
            if buffer is not None
        }
        random_state, attributes = RandomState.take(device), Attributes.take(modules.values())
        return cls(autocast_type(device), random_state, buffers, attributes, _modes(modules.values()))

    @classmethod
    def of_modes(cls, module: nn.Module, device: torch.device) -> Snapshot:
        """Take the modes alone, of a module that a closed form serves."""
        return cls(autocast_type(device), training=_modes(module.modules() if module._modules else (module,)))

    @contextmanager
    def restored(self, device: torch.device) -> Generator[None, None, None]:
        """Restore everything but the buffers inside; whatever is written to modules there is discarded."""
        modes = {module: module.training for module in self.training}
        precision = torch.autocast(device.type, self.autocast, enabled=self.autocast is not None, cache_enabled=False)
        with self.attributes_restored(), unchanged(device, self.random_state), precision:
            _set(self.training)
            try:
                yield
            finally:
                _set(modes)

    @contextmanager
    def attributes_restored(self) -> Generator[None, None, None]:
        """Restore the attributes of modules inside; whatever is written to them there is discarded."""
        with nullcontext() if self.attributes is None else self.attributes.installed():
            yield

    @contextmanager
    def buffers_restored(self, module: nn.Module) -> Generator[None, None, None]:
        """Let modules work on copies of their buffers inside, with the values from before the call."""
        originals = [(path, m, dict(m._buffers)) for path, m in module.named_modules() if m._buffers]
        try:
            for path, m, buffers in originals:
                prefix = f"{path}." if path else ""
                m._buffers = {
                    name: None if b is None else self.buffers.get(f"{prefix}{name}", b).clone()
                    for name, b in buffers.items()
                }
            yield
        finally:
            for _, m, buffers in originals:
                m._buffers = buffers


def autocast_type(device: torch.device) -> torch.dtype | None:
    """The type of mixed precision on this device, if it is on."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _modes(modules: Iterable[nn.Module]) -> dict[nn.Module, bool]:
    return {module: module.training for module in modules}


def _set(modes: Mapping[nn.Module, bool]) -> None:
    for module, training in modes.items():
        module.training = training


@dataclass(frozen=True)
class Attributes:
    """The attributes of all modules of a model at one moment."""

    attributes: dict[nn.Module, dict[str, Any]]
    generators: list[tuple[torch.Generator, Tensor]]

    @classmethod
    def take(cls, modules: Iterable[nn.Module]) -> Attributes:
        """Take the current attributes."""
        attributes = {module: {k: _copied(v) for k, v in _own(module).items()} for module in modules}
        found = [v for kept in attributes.values() for v in kept.values() if isinstance(v, torch.Generator)]
        return cls(attributes, [(generator, generator.get_state()) for generator in found])

    @contextmanager
    def installed(self) -> Generator[None, None, None]:
        """Let the modules start from here, and restore them afterwards."""
        before = {module: _own(module) for module in self.attributes}
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


def _own(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in STRUCTURE}


def _install(module: nn.Module, attributes: dict[str, Any]) -> None:
    for name in _own(module).keys() - attributes.keys():
        del vars(module)[name]
    vars(module).update(attributes)


def _copied(value: Any, depth: int = 3) -> Any:
    """Return a copy of something that a forward pass may modify in place."""
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
