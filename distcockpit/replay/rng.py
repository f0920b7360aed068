"""Random state of torch, NumPy and Python: take it, replay it later, leave the global state alone."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distcockpit.replay.devices import is_host


@dataclass(frozen=True)
class RandomState:
    """State of the global generators: torch's on the CPU and on one accelerator, if any, NumPy's, and Python's."""

    cpu: Tensor
    device: torch.device | None = None
    accelerator: Tensor | None = None
    numpy: Any = field(default_factory=np.random.get_state)
    python: Any = field(default_factory=random.getstate)

    @classmethod
    def take(cls, device: torch.device) -> RandomState:
        """Take the current state, for a model on ``device``."""
        if is_host(device):
            return cls(torch.get_rng_state())
        return cls(torch.get_rng_state(), device, torch.get_device_module(device).get_rng_state(device))

    def torch_drew(self) -> bool:
        """True if torch drew numbers since this state was taken."""
        now = [torch.get_rng_state()]
        if self.device is not None:
            now.append(torch.get_device_module(self.device).get_rng_state(self.device))
        before = (self.cpu, self.accelerator)
        return any(
            a is not None and a.numpy().tobytes() != b.numpy().tobytes() for a, b in zip(before, now, strict=False)
        )

    def restore(self) -> None:
        """Make this the current state."""
        torch.set_rng_state(self.cpu)
        np.random.set_state(self.numpy)
        random.setstate(self.python)
        if self.device is not None:
            torch.get_device_module(self.device).set_rng_state(self.accelerator, self.device)


@contextmanager
def unchanged(device: torch.device, start: RandomState | None = None) -> Generator[None, None, None]:
    """Leave the global random state as it was, whatever happens inside; start from ``start`` if given."""
    before = RandomState.take(device)
    try:
        if start is not None:
            start.restore()
        yield
    finally:
        before.restore()


def set_seed(device: torch.device, seed: int) -> None:
    """Seed the CPU generator and that of ``device``, and no other."""
    torch.default_generator.manual_seed(seed)
    if not is_host(device):
        with torch.get_device_module(device).device(device):
            torch.get_device_module(device).manual_seed(seed)
