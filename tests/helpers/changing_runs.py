"""Runs of a model that changes between steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from steps import run_steps
from torch import Tensor, nn

Change = Callable[[int, nn.Module], None]


def go(
    store: Path, net: nn.Module, shapes: tuple, chosen: list, steps: int, change: Change | None = None, **options: Any
) -> tuple[Any, list[list[Tensor]]]:
    """The run, and the gradients that the parameters had after each step."""
    torch.manual_seed(0)
    done = run_steps(
        store,
        net,
        lambda step: tuple(torch.randn(shape) for shape in shapes),
        steps,
        loss_fn=nn.MSELoss(),
        optimizer=torch.optim.SGD(net.parameters(), lr=0.0),
        before=None if change is None else lambda step: change(step, net),
        quantities=chosen,
        **options,
    )
    return done.run, done.gradients


def assert_norms(run: Any, gradients: list[list[Tensor]]) -> None:
    for step, each in enumerate(gradients):
        norms = [float(g.norm()) for g in each]
        np.testing.assert_allclose(run["grad_norm"]["grad_norm"][step], norms, rtol=1e-5, atol=1e-7)
