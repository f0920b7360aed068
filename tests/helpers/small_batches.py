"""One step on a small batch, and the individual gradients that autograd gives it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distcockpit import DistCockpit, every, open_run
from distcockpit.quantities import MeanGSNR

B = 8


def reference(net: nn.Module, x: Tensor, y: Tensor) -> oracle.Batch:
    """Single losses of one batched forward pass, differentiated one by one, by autograd alone."""
    buffers = [(buffer, buffer.clone()) for buffer in net.buffers()]
    parameters = {name: p for name, p in net.named_parameters() if p.requires_grad}
    losses = F.cross_entropy(net(x).float(), y, reduction="none")
    rows = []
    for loss in losses:
        gradients = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, allow_unused=True)
        rows.append([
            torch.zeros_like(p) if g is None else g for p, g in zip(parameters.values(), gradients, strict=True)
        ])
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    stacked = {k: torch.stack([r[i] for r in rows]).double().numpy() for i, k in enumerate(parameters)}
    return oracle.Batch(
        losses.detach().double().numpy(), stacked, {}, {k: p.detach().double().numpy() for k, p in parameters.items()}
    )


def one_step(tmp_path: Path, body: Callable[[DistCockpit], None], net: nn.Module, loss_fn: Any, **options: Any) -> Any:
    options = {"quantities": [MeanGSNR()], "schedule": every(1), **options}
    with DistCockpit(net, loss_fn, store=tmp_path / "run", **options) as cockpit, cockpit.track(0):
        body(cockpit)
    return open_run(tmp_path / "run")


def data() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 6), nn.Sigmoid(), nn.Linear(6, 5)), torch.randn(B, 6), torch.arange(B) % 5
