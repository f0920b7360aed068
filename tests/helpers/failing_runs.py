"""Runs in which something fails at one step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

FAILS_AT, STEPS = 3, 8


def small_mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def data(step: int) -> tuple[Tensor, Tensor]:
    return torch.sin(torch.arange(60.0) * (1 + 0.1 * step)).view(12, 5), torch.arange(12) % 3


def norm(net: nn.Module) -> float:
    return float(sum(p.grad.square().sum() for p in net.parameters() if p.grad is not None)) ** 0.5
