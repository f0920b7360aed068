"""Quantities of gradient noise: tiny and vanishing variances."""

from __future__ import annotations

from pathlib import Path

import cases
import numpy as np
import oracle
import pytest
import torch
from panel_runs import track_batches
from torch import nn

from distcockpit import DistCockpit, every, open_run
from distcockpit import quantities as q
from distcockpit.quantities import MeanGSNR

# -- unusual numbers ---------------------------------------------------------------------------------------------------


def noise_quantities() -> list[q.Quantity]:
    return [q.NormTest(), q.InnerTest(), q.OrthoTest(), q.GradientNoiseScale(), q.CABS(), q.EarlyStopping(epsilon=0.0)]


@pytest.mark.parametrize("noise", [1e-2, 1e-4])
def test_small_noise_keeps_its_precision(tmp_path: Path, noise: float) -> None:
    """Sums of float32 squares, subtracted, would lose it entirely."""
    torch.manual_seed(0)
    net, loss_fn = nn.Linear(6, 1, bias=False), nn.L1Loss()
    with torch.no_grad():
        net.weight.abs_()
    x = 100 * (1 + noise * torch.randn(64, 6))
    state = {k: v.clone() for k, v in net.state_dict().items()}
    run = track_batches(tmp_path / "run", net, [(x, torch.zeros(64, 1))], noise_quantities(), loss_fn=loss_fn)
    batch = oracle.batch(net, state, lambda z, y: ((z - y).abs().sum(), 1), x, torch.zeros(64, 1))
    for name in ("norm_test", "inner_test", "ortho_test", "early_stopping"):
        expected = getattr(oracle, name)(batch, *([0.0] if name == "early_stopping" else []))
        np.testing.assert_allclose(run[name][name][0], expected, rtol=1e-3)
    np.testing.assert_allclose(run["gradient_noise_scale"]["noise"][0], oracle.noise_scale(batch)[0], rtol=1e-3)


def test_one_sample_and_no_gradient_are_undefined(tmp_path: Path) -> None:
    names = ["norm_test", "inner_test", "ortho_test"]
    x, y = cases.data("mlp", "mean", 0)
    run = track_batches(tmp_path / "one", cases.initialised("mlp"), [(x[:1], y[:1])], noise_quantities())
    for name in [*names, "early_stopping"]:
        assert np.isnan(run[name][name][0]), name
    assert np.isnan(run["gradient_noise_scale"].to_dataset()["noise"][0])
    assert run["cabs"]["cabs"][0] == 0  # its variance is that over the batch
    net = nn.Linear(3, 1)
    batches = [(x[:, :3], net(x[:, :3]).detach())]
    run = track_batches(tmp_path / "zero", net, batches, noise_quantities(), loss_fn=nn.MSELoss())
    for name in names:
        assert np.isnan(run[name][name][0]), name


def test_equal_samples_have_no_noise(tmp_path: Path) -> None:
    x, y = cases.data("mlp", "mean", 0)
    batch = (x[:1].expand(8, -1).clone(), y[:1].expand(8).clone())
    run = track_batches(tmp_path / "run", cases.initialised("mlp"), [batch], noise_quantities())
    for name in ("norm_test", "inner_test", "ortho_test", "cabs"):
        assert 0 <= run[name][name][0] < 1e-5, name


def test_gsnr_keeps_its_precision_when_noise_is_small(tmp_path: Path) -> None:
    """Noise of 1e-4 of the mean: raw float32 moments would lose it entirely."""
    torch.manual_seed(0)
    net, loss_fn = nn.Linear(6, 1, bias=False), nn.L1Loss()
    x = 100 * (1 + 1e-4 * torch.randn(64, 6))
    state = {k: v.clone() for k, v in net.state_dict().items()}
    chosen = [MeanGSNR(epsilon=0.0)]
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=chosen, schedule=every(1)) as cockpit:
        with cockpit.track(0):
            loss_fn(net(x), torch.full((64, 1), -1e6)).backward()
    batch = oracle.batch(net, state, lambda z, y: ((z - y).abs().sum(), 1), x, torch.full((64, 1), -1e6))
    expected = oracle.mean_gsnr(batch, epsilon=0.0)
    assert expected > 1e7
    np.testing.assert_allclose(open_run(tmp_path / "run")["mean_gsnr"]["mean_gsnr"], [expected], rtol=1e-4)
