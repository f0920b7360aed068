"""What a device is: the only place that asks. And numbers of the host on it, without a wait."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def is_host(device: torch.device) -> bool:
    """True if the host reads its memory, so that nothing has to be copied, pinned, or waited for."""
    return device.type == "cpu"


def products_round() -> bool:
    """True if products of float32 matrices are rounded to less than float32, on the CPU or elsewhere."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # set separately for each backend, which this does not report
        return True


def convolutions_round(device: torch.device) -> bool:
    """True if float32 convolutions are rounded to less than float32, as cuDNN does by default (TF32)."""
    if device.type != "cuda":
        return False
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # set separately for each operator
        return True


@contextmanager
def without_cudnn() -> Generator[None, None, None]:
    """Disable cuDNN, whose recurrent layers have no second derivative."""
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before


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
    if isinstance(values, Tensor) and (values.device == device or not is_host(values.device)):
        return values.to(device, dtype)
    if is_host(device) or isinstance(values, Tensor | np.ndarray | Sequence):
        host = torch.as_tensor(values, dtype=dtype, device="cpu")
        return host if is_host(device) else host.pin_memory().to(device, non_blocking=True)
    return torch.full((), values, dtype=dtype, device=device)
