"""A linear layer in loops that are not the usual one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from steps import run_steps
from torch import Tensor, nn
from torch.nn import functional as F

from distcockpit.quantities import NormTest

BATCH = 6


def six_samples(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, 3, generator=generator), torch.randint(3, (BATCH,), generator=generator)


def linear() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, 3)


def norm_test(rows: list[tuple[Tensor, ...]]) -> float:
    g = np.stack([np.concatenate([part.double().numpy().ravel() for part in row]) for row in rows])
    return float(np.sqrt(g.var(0, ddof=1).sum() / len(g)) / np.linalg.norm(g.mean(0)))


def expected(net: nn.Module, losses: Tensor) -> float:
    """The norm test of single losses, by autograd."""
    parameters = [p for p in net.parameters() if p.requires_grad]
    return norm_test([torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses])


def track_body(
    folder: Path, net: nn.Module, loss_fn: Any, body: Callable[[Any], None], steps: int = 1, **options: Any
) -> Any:
    options = {"quantities": [NormTest()], **options}
    done = run_steps(
        folder / "run", net, (None, None), steps, loss_fn=loss_fn, body=lambda cockpit, x, y: body(cockpit), **options
    )
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    return done.run


def check_norm_test(
    folder: Path, net: nn.Module, loss_fn: Any, body: Callable[[Any], None], losses: Tensor, **options: Any
) -> None:
    truth = expected(net, losses)
    found = track_body(folder, net, loss_fn, body, **options)["norm_test"]["norm_test"].values
    np.testing.assert_allclose(found, truth, rtol=1e-4)


def each(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="none")
