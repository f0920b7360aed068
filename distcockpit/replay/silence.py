"""Whether gradients that are zero for some samples stay zero for them: whoever mixes samples is seen."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distcockpit.replay.devices import sent


def parts_of(n: int, device: torch.device) -> list[Tensor]:
    """Split the batch into a few random parts that do not overlap: single samples, if there are no more than four.

    Args:
        n: How many samples there are.
        device: Where to.

    Returns:
        For each part, bool ``[n]``: which samples belong to it.
    """
    count = min(n, 4)
    place = torch.randperm(n, generator=torch.Generator().manual_seed(n), device="cpu") % count
    return list(sent(torch.stack([place == k for k in range(count)]), device, torch.bool)) if n else []


def reaches(silent: Tensor, gradient: Tensor) -> Tensor:
    """Whether rows that should be zero are not, beyond rounding; a bool that is still on the device.

    Args:
        silent: Which rows should be zero, bool ``[n]``.
        gradient: ``[n, *]``.
    """
    if not gradient.numel():
        return torch.zeros((), dtype=torch.bool, device=gradient.device)
    sizes, rows = gradient.abs().nan_to_num(nan=0.0), silent.view(-1, *[1] * (gradient.dim() - 1))
    return sizes.where(rows, 0).max() > 1e-6 * sizes.where(~rows, 0).max()


def on_host(flags: Sequence[Tensor]) -> list[bool]:
    """Several bools, for which the host waits once."""
    return torch.stack([flag.to(flags[0].device) for flag in flags]).tolist() if flags else []
