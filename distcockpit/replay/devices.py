"""Numbers of the host on the model's device, without a wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def sent(
    values: float | Sequence[Any] | np.ndarray | Tensor, device: torch.device, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Return numbers as a tensor on a device.

    ``torch.tensor(values, device=device)`` would make the host wait until the device has done everything before it: a
    copy from memory that is not pinned is not done in the background. A single number needs no copy at all.

    Args:
        values: A number, a sequence, an array, or a tensor on any device.
        device: Where to.
        dtype: The type of the result.
    """
    if isinstance(values, Tensor) and values.device.type != "cpu":
        return values.to(device, dtype)
    if device.type == "cpu" or isinstance(values, Tensor | np.ndarray | Sequence):
        host = torch.as_tensor(values, dtype=dtype, device="cpu")
        return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
    return torch.full((), values, dtype=dtype, device=device)
