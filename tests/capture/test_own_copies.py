"""Inputs and targets that a loop overwrites while it still needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import numpy as np
import oracle
import torch
from compared_runs import N, check, mean_terms, quantities
from odd_loops import six_samples, track_body
from small_batches import data, one_step, reference
from torch import Tensor, nn

from distcockpit import DistCockpit, every
from distcockpit.quantities import HessMaxEV, HessTrace, MeanGSNR


def test_input_buffers_that_are_reused(tmp_path: Path) -> None:
    net, loss_fn, buffer = cases.initialised("sigmoid"), nn.CrossEntropyLoss(), torch.empty(N, 12)
    states: list[dict[str, Tensor]] = []
    batches: list[tuple[Tensor, Tensor]] = []
    with DistCockpit(net, loss_fn, store=tmp_path / "r", quantities=quantities(), schedule=every(1)) as cockpit:
        for step in range(2):
            x, y = cases.data("sigmoid", "mean", step)
            with torch.no_grad():
                for p in net.parameters():
                    p += 0.01
            states.append({k: v.clone() for k, v in net.state_dict().items()})
            batches.append((x, y))
            buffer.copy_(x)
            with cockpit.track(step):
                loss_fn(net(buffer), y).backward()
                buffer.numpy()[:] = 7.0  # as a loader with shared memory does, and nobody can see
    check(tmp_path / "r", net, states, batches, mean_terms)


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


def test_buffers_reused_by_micro_batches(tmp_path: Path) -> None:
    net, x, y = data()
    loss_fn, buffer = nn.CrossEntropyLoss(), torch.empty(4, 6)

    def body(cockpit: DistCockpit) -> None:
        for part, target in zip(x.split(4), y.split(4), strict=True):
            buffer.copy_(part)
            (loss_fn(net(buffer), target) / 2).backward()

    run = one_step(tmp_path, body, net, loss_fn, quantities=[MeanGSNR(), HessTrace()])
    batch = reference(net, x, y)
    np.testing.assert_allclose(run["mean_gsnr"]["mean_gsnr"], [oracle.mean_gsnr(batch)], rtol=1e-4)
    again = one_step(tmp_path / "b", lambda c: loss_fn(net(x), y).backward(), net, loss_fn, quantities=[HessTrace()])
    np.testing.assert_allclose(run["hess_trace"]["trace"], again["hess_trace"]["trace"], rtol=1e-4)


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
