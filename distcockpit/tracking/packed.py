"""Named sums as one buffer, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from distcockpit.replay.devices import sent


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the parts of a packed buffer."""

    parts: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, sums: Mapping[str, Tensor]) -> Layout:
        """The layout of these sums, in their order."""
        return cls(tuple((name, tuple(value.shape)) for name, value in sums.items()))

    @cached_property
    def by_owner(self) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
        """The parts grouped by the prefix of their names, ``owner/...``."""
        found: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
        for name, shape in self.parts:
            found.setdefault(name.partition("/")[0], []).append((name, shape))
        return found

    def unpack(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """Cut a buffer into its named parts."""
        parts, start = {}, 0
        for name, shape in self.parts:
            size = math.prod(shape)
            parts[name] = buffer[start : start + size].reshape(shape)
            start += size
        return parts


def pack(sums: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """Pack the sums into one float64 buffer on ``device``."""
    if not sums:
        return torch.zeros(0, dtype=torch.float64, device=device)
    return torch.cat([sent(value, device).reshape(-1) for value in sums.values()])
