"""Training with and without a cockpit."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from distcockpit.presets import full, layers
from distcockpit.quantities import HessTrace, MeanGSNR


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(48, 12),
        nn.Sigmoid(),
        nn.Dropout(0.5),
        nn.Linear(12, 5),
    )


def everything() -> list[Any]:
    monte_carlo = HessTrace(curvature="diag_ggn_mc", name="monte_carlo", mc_samples=2)
    return [*full(), *layers(), MeanGSNR(), monte_carlo, HessTrace(curvature="diag_ggn_exact", name="exact")]


def hooks(module: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(m, kind)) for m in module.modules() for kind in kinds)
