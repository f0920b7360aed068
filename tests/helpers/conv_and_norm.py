"""A small network of convolutions and norms."""

from __future__ import annotations

import torch
from torch import nn
from train import everything

from distcockpit import quantities as q


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 6), nn.LayerNorm(6), nn.Linear(6, 3)
    )


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(5, 2, 4, 4, generator=generator), torch.randint(3, (5,), generator=generator)


def without_waiting() -> list[q.Quantity]:
    """All but the curvature, whose programs are BackPACK's and ARPACK's."""
    needs = ("curvature", "trace", "eigenvalue")
    chosen = [quantity for quantity in everything() if not any(getattr(quantity.needs, need) for need in needs)]
    return [*chosen, q.GradHist1d(name="adapted", adapt=q.GradAbsMax())]
