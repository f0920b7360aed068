"""Activation checkpointing in models that are run again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from odd_loops import each, expected, six_samples, track_body
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from distcockpit.replay.checkpointing import kept_activations

# -- checkpointing -----------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, own: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.middle, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4)) if own else None
        self.reentrant: bool | None = reentrant

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.first(x))
        z = z if self.scale is None else z * self.scale

        def inside(z: Tensor) -> Tensor:
            return torch.tanh(self.middle(z if self.scale is None else z + self.scale))

        return self.last(inside(z) if self.reentrant is None else checkpoint(inside, z, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [True, False])
def test_with_other_parameters(reentrant: bool) -> None:
    """Nothing is computed again once the model has its own parameters back, and nothing is called twice."""
    net, (x, y), calls = Checkpointed(reentrant, own=True), six_samples(), []
    net.middle.register_forward_hook(lambda *_: calls.append(1))

    def gradients() -> list[Tensor]:
        made = {name: (2 * p).detach().requires_grad_() for name, p in net.named_parameters()}
        with kept_activations():
            loss = nn.functional.cross_entropy(functional_call(net, made, (x,)), y)
        return list(torch.autograd.grad(loss, list(made.values())))

    found = gradients()
    assert len(calls) == 1
    net.reentrant = None
    for one, other in zip(found, gradients(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_beside_a_parameter_on_a_slow_route(
    tmp_path: Path, reentrant: bool, caplog: pytest.LogCaptureFixture
) -> None:
    net, loss_fn, (x, y) = Checkpointed(reentrant, own=True), nn.CrossEntropyLoss(), six_samples()
    net.reentrant = None
    losses = each(net(x), y)
    truth = expected(net, losses)
    net.reentrant = reentrant
    run = track_body(tmp_path, net, loss_fn, lambda c: loss_fn(c(x), y).backward(), steps=2)
    np.testing.assert_allclose(run["norm_test"]["norm_test"], truth, rtol=1e-4)
    assert "could not check" not in caplog.text


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch, of the call without gradients
def test_reentrant_checkpointing_and_several_passes(tmp_path: Path) -> None:
    net, loss_fn, (x, y) = Checkpointed(True), nn.CrossEntropyLoss(), six_samples()

    def at_once(c: Any) -> None:
        first = loss_fn(c(x), y)
        (first + loss_fn(c(x + 1), y)).backward()

    def one_by_one(c: Any) -> None:
        for part in (x, x + 1):
            loss = loss_fn(c(part), y) / 2
            with torch.no_grad():
                c(part)  # does not make the pass forgotten
            loss.backward()

    with pytest.raises(
        RuntimeError, match="use_reentrant=True does, while several forward passes.*use_reentrant=False"
    ):
        track_body(tmp_path / "a", net, loss_fn, at_once)
    net.zero_grad()
    net.reentrant = None
    losses = torch.cat([each(net(x), y), each(net(x + 1), y)])
    truth = expected(net, losses)
    net.reentrant = True
    found = track_body(tmp_path / "b", net, loss_fn, one_by_one)["norm_test"]["norm_test"].values
    np.testing.assert_allclose(found, truth, rtol=1e-4)
