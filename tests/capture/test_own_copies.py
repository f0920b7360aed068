"""Inputs and targets that a loop overwrites while it still needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import oracle
import torch
from odd_loops import six_samples, track_body
from small_batches import data, one_step, reference
from torch import Tensor, nn

from distcockpit.quantities import HessMaxEV, HessTrace

# -- tensors -----------------------------------------------------------------------------------------------------------


def test_targets_that_are_overwritten(tmp_path: Path) -> None:
    torch.manual_seed(5)
    net, mse, (x, _) = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 3)), nn.MSELoss(), six_samples()
    targets = six_samples(1)[0]
    quantities = [HessTrace(), HessTrace(curvature="hutchinson", name="hutchinson"), HessMaxEV()]

    def fresh(c: Any) -> None:
        for part, target in zip(x.split(3), targets.split(3), strict=True):
            (mse(c(part), target) / 2).backward()

    def reused(c: Any) -> None:
        bx, bt = torch.empty(3, 3), torch.empty(3, 3)
        for part, target in zip(x.split(3), targets.split(3), strict=True):
            bx.copy_(part)
            bt.copy_(target)
            (mse(c(bx), bt) / 2).backward()
            bt.fill_(100.0)

    a = track_body(tmp_path / "a", net, mse, fresh, quantities=quantities)
    b = track_body(tmp_path / "b", net, mse, reused, quantities=quantities)
    for name, field in (("hess_trace", "total"), ("hutchinson", "total"), ("hess_max_ev", "hess_max_ev")):
        np.testing.assert_allclose(b[name][field], a[name][field], rtol=1e-4)


class NormalisesInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x -= 0.5
        return self.inner(x)


def test_input_normalised_in_place(tmp_path: Path) -> None:
    """Replays begin with what the model was given, and leave the user's tensor alone."""
    _, x, y = data()
    net, loss_fn, once = NormalisesInPlace(), nn.CrossEntropyLoss(), x - 0.5
    batch = reference(net.inner, once, y)
    run = one_step(tmp_path / "a", lambda c: loss_fn(net(x), y).backward(), net, loss_fn)
    np.testing.assert_allclose(run["mean_gsnr"]["mean_gsnr"], [oracle.mean_gsnr(batch)], rtol=1e-4)
    assert torch.equal(x, once)
    curvature = [HessTrace(), HessTrace(curvature="diag_ggn_exact", name="ggn")]
    plain = nn.Sequential(net.inner)
    found = one_step(tmp_path / "b", lambda c: loss_fn(net(x), y).backward(), net, loss_fn, quantities=curvature)
    assert torch.equal(x, once - 0.5)
    inputs = once - 0.5
    expected = one_step(
        tmp_path / "c", lambda c: loss_fn(plain(inputs), y).backward(), plain, loss_fn, quantities=curvature
    )
    for name in ("hess_trace", "ggn"):
        np.testing.assert_allclose(found[name]["trace"], expected[name]["trace"], rtol=1e-4)
