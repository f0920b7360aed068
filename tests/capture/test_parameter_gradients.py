"""What autograd leaves in ``.grad`` is G without a copy, unless something writes to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import cases
import numpy as np
import pytest
import torch
from steps import run_steps
from torch import Tensor, nn

from distcockpit import DistCockpit
from distcockpit.quantities import Alpha, GradNorm, NormTest

Body = Callable[[nn.Module, DistCockpit, Tensor, Tensor], None]


def clips(net: nn.Module, cockpit: DistCockpit, x: Tensor, y: Tensor) -> None:
    nn.CrossEntropyLoss()(cockpit(x), y).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1e-3)


def clears(net: nn.Module, cockpit: DistCockpit, x: Tensor, y: Tensor) -> None:
    nn.CrossEntropyLoss()(cockpit(x), y).backward()
    for p in net.parameters():
        p.grad = torch.ones_like(p)


def scales_between(net: nn.Module, cockpit: DistCockpit, x: Tensor, y: Tensor) -> None:
    loss = nn.CrossEntropyLoss()(cockpit(x), y) / 2
    loss.backward(retain_graph=True)
    for p in net.parameters():
        p.grad.mul_(3)
    loss.backward()


def hooked(net: nn.Module, cockpit: DistCockpit, x: Tensor, y: Tensor) -> None:
    """A hook of the user's that is there before the step: autograd's sum is copied before it."""

    def scale(p: Tensor) -> None:
        p.grad.mul_(5)

    if not net[0].weight._post_accumulate_grad_hooks:
        for p in net.parameters():
            p.register_post_accumulate_grad_hook(scale)
    nn.CrossEntropyLoss()(cockpit(x), y).backward()


@pytest.mark.parametrize("begins", [0, 4])
@pytest.mark.parametrize("body", [clips, clears, scales_between, hooked])
def test_gradients_that_are_written_to(tmp_path: Path, body: Body, begins: int) -> None:
    """A loop that does so from the start loses nothing; if it begins later, one step where nothing else is kept."""
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    x, y = cases.data("mlp", "mean", 0)
    grads = torch.autograd.grad(loss_fn(net(x), y), list(net.parameters()))
    right = float(torch.cat([g.flatten() for g in grads]).norm())
    for name, quantities in {"alone": [GradNorm()], "beside": [GradNorm(), NormTest()]}.items():
        steps: list[int] = []

        def go(cockpit: DistCockpit, x: Tensor, y: Tensor, steps: list[int] = steps) -> None:
            steps.append(0)
            if len(steps) > begins:
                body(net, cockpit, x, y)
            else:
                loss_fn(cockpit(x), y).backward()

        done = run_steps(tmp_path / name, net, (x, y), 7, loss_fn=loss_fn, quantities=quantities, body=go)
        for p in net.parameters():
            (p._post_accumulate_grad_hooks or {}).clear()
        rows = done.run["grad_norm"]["total"].values
        lost = [begins] if begins and name == "alone" and body is not hooked else []
        assert np.flatnonzero(np.isnan(rows)).tolist() == lost and len(rows) == 7
        np.testing.assert_allclose(np.delete(rows, lost), right, rtol=1e-5)
        notices = [notice["text"] for notice in done.run.attrs.get("notices", [])]
        assert sum("was overwritten before `track` ended" in text for text in notices) == len(lost)


def test_hooks_that_are_there_before(tmp_path: Path) -> None:
    """A hook of the user's that changes ``.grad`` runs before ours, so that what arrives is copied."""
    net, (x, y), loss_fn = cases.initialised("mlp"), cases.data("mlp", "mean", 0), nn.CrossEntropyLoss()
    grads = torch.autograd.grad(loss_fn(net(x), y), list(net.parameters()))

    def scale(p: Tensor) -> None:
        p.grad.mul_(5)

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(scale)
    done = run_steps(tmp_path / "run", net, (x, y), 4, loss_fn=loss_fn, quantities=[GradNorm()])
    norms = [float(g.norm()) for g in grads]
    np.testing.assert_allclose(done.run["grad_norm"]["grad_norm"], [norms] * 4, rtol=1e-5)


class Shifted(nn.Module):
    """The gradient of what is added is the gradient at its output."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.head = nn.Parameter(torch.zeros(1, 12)), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.shift)


def test_a_gradient_of_an_input_that_is_overwritten_is_noticed(tmp_path: Path) -> None:
    """It is the same memory as what is kept of the output of ``x + p``."""
    net, (x, y) = Shifted(), cases.data("mlp", "mean", 0)
    given = x.clone().requires_grad_()

    def body(cockpit: DistCockpit, x: Tensor, y: Tensor) -> None:
        nn.CrossEntropyLoss()(cockpit(given), y).backward()
        if 2 < len(norms) < 5:
            given.grad.zero_()
        norms.append(0)
        given.grad = None

    norms: list[int] = []
    done = run_steps(tmp_path / "run", net, (x, y), 6, loss_fn=nn.CrossEntropyLoss(), quantities=["economy"], body=body)
    assert list(done.run["norm_test"]["step"].values) == [0, 1, 2, 5]
    (notice,) = [n["text"] for n in done.run.attrs["notices"] if "overwritten" in n["text"]]
    assert "step 3 is not tracked" in notice


def test_a_parameters_gradient_is_not_what_is_kept(tmp_path: Path) -> None:
    """With one sample both are one tensor in autograd; the loop scales it before alpha's next step has ended."""
    rows = {}
    for scales in (False, True):
        torch.manual_seed(0)
        net, (x, y) = Shifted(), cases.data("mlp", "mean", 0, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def body(cockpit: DistCockpit, x: Tensor, y: Tensor, scales: bool = scales, net: nn.Module = net) -> None:
            nn.CrossEntropyLoss()(cockpit(x), y).backward()
            if scales:
                kept = [p.grad.clone() for p in net.parameters()]
                for p in net.parameters():
                    p.grad.mul_(1000)
                for p, g in zip(net.parameters(), kept, strict=True):
                    p.grad.copy_(g)

        done = run_steps(
            tmp_path / str(scales),
            net,
            (x, y),
            5,
            loss_fn=nn.CrossEntropyLoss(),
            optimizer=optimizer,
            quantities=[Alpha(), GradNorm(), NormTest()],
            body=body,
        )
        rows[scales] = done.run["alpha"]["slope_start"].values, done.run["grad_norm"]["total"].values
    for a, b in zip(rows[False], rows[True], strict=True):
        np.testing.assert_array_equal(a, b)
