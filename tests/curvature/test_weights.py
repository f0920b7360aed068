"""Diagonals and traces at weights, a few samples and columns at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backpack import backpack, extend, extensions
from live_memory import LiveMemory
from torch import nn

from distcockpit.curvature import weights
from distcockpit.curvature.diagonals import KINDS, Curvature

KIND = torch.float64
OTHERS = {
    "diag_h": extensions.DiagHessian,
    "diag_ggn_exact": extensions.DiagGGNExact,
    "diag_ggn_mc": extensions.DiagGGNMC,
}
CONVOLUTIONS = {
    "groups": (nn.Conv2d(4, 6, 3, groups=2, padding=1, stride=2), nn.Conv2d(6, 4, 2, dilation=2), (4, 9, 8)),
    "depthwise": (nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 3, 1, bias=False), (4, 6, 6)),
    "1d": (nn.Conv1d(2, 3, 3), nn.Conv1d(3, 4, 2), (2, 9)),
    "3d": (nn.Conv3d(2, 3, 2), nn.Conv3d(3, 2, 2), (2, 4, 4, 4)),
}


@pytest.mark.parametrize("most", [1, 200, 2**19])
@pytest.mark.parametrize("curvature", KINDS)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_it_is_backpacks(monkeypatch: Any, name: str, curvature: str, most: int) -> None:
    """Whatever is formed at once: one product, some, or all."""
    monkeypatch.setattr(weights, "ELEMENTS", (most, most))
    first, second, shape = CONVOLUTIONS[name]
    net, x, y = (
        nn.Sequential(first, nn.Sigmoid(), second, nn.Flatten()),
        torch.randn(5, *shape).to(KIND).requires_grad_(),
        torch.arange(5),
    )
    net, loss_fn = extend(net.to(KIND)), extend(nn.CrossEntropyLoss())
    found = []
    for extension in (OTHERS[curvature](), Curvature(curvature).extension()):
        torch.manual_seed(0)
        with backpack(extension):
            loss_fn(net(x), y).backward()
        found.append([p.__dict__.pop(extension.savefield) for p in (first.weight, second.weight)])
    for theirs, ours in zip(*found, strict=True):
        assert float(theirs.abs().max()) > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)


LINEAR = {
    "linear": (nn.Linear(6, 5), nn.Linear(5, 4, bias=False), (6,)),
    "linear on sequences": (nn.Linear(6, 5), nn.Linear(5, 4), (3, 6)),
}


@pytest.mark.parametrize("double", [0, 1000])
@pytest.mark.parametrize("most", [1, 200, 2**19])
@pytest.mark.parametrize("curvature", KINDS)
@pytest.mark.parametrize("name", [*CONVOLUTIONS, *LINEAR])
def test_traces_are_sums_of_backpacks(monkeypatch: Any, name: str, curvature: str, most: int, double: int) -> None:
    """From matrices of places, or from the diagonal."""
    monkeypatch.setattr(weights, "ELEMENTS", (most, most))
    monkeypatch.setattr(weights, "DOUBLE", (double, double))
    first, second, shape = (CONVOLUTIONS | LINEAR)[name]
    x, y = torch.randn(5, *shape).to(KIND).requires_grad_(), torch.arange(5) % 4
    net = extend(nn.Sequential(first, nn.Sigmoid(), second, nn.Flatten()).to(KIND))
    loss_fn, found = extend(nn.CrossEntropyLoss()), []
    for extension in (OTHERS[curvature](), Curvature(curvature, summed=True).extension()):
        torch.manual_seed(0)
        with backpack(extension):
            loss_fn(net(x), y).backward()
        found.append([p.__dict__.pop(extension.savefield) for p in (first.weight, second.weight)])
    for theirs, ours in zip(*found, strict=True):
        assert ours.shape == () and float(theirs.abs().max()) > 0
        torch.testing.assert_close(ours, theirs.sum(), rtol=1e-10, atol=1e-14)


def test_a_trace_that_cancels_is_exact(monkeypatch: Any) -> None:
    """What a sample gives is the square of a sum over places that is nearly zero, in float32."""
    layer = nn.Conv1d(1, 64, 1, bias=False)
    layer.input0 = torch.ones(2, 1, 64)
    s = torch.randn(3, 2, 64, 32)
    s = torch.cat([s, -s], 3) + 1e-5
    expected = (s.double().sum(3) ** 2).sum()
    assert float(expected) < 1e-9 * float(s.double().square().sum()) * 64
    monkeypatch.setattr(weights, "DOUBLE", (0, 0))
    found = weights.weight_trace(None, layer, None, None, s)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_what_it_holds() -> None:
    """Not the products of all samples and columns, four times as much as all that there is now."""
    net = nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(64, 10))
    net, loss_fn, x = extend(net), extend(nn.CrossEntropyLoss()), torch.randn(32, 32, 4, 4).requires_grad_()
    peaks = []
    for extension in (OTHERS["diag_ggn_exact"](), Curvature("diag_ggn_exact").extension()):
        with LiveMemory() as memory, backpack(extension):
            loss_fn(net(x), torch.arange(32) % 10).backward()
        peaks.append(memory.peak)
    products = 4 * 10 * 32 * net[0].weight.numel()
    assert peaks[0] > products > 4 * peaks[1]
