"""Losses in pieces, weighted, accumulated and tried again: right, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import numpy as np
import oracle
import pytest
import torch
import xarray as xr
from loops import shows
from steps import run_steps
from told_losses import CE, SUM, N
from torch import Tensor, nn
from torch.nn import functional as F

from distcockpit import DistCockpit, every, open_run
from distcockpit.quantities import GradNorm, Loss, NormTest

Body = Callable[[DistCockpit, nn.Sequential, Tensor, Tensor], Any]


def tracked(tmp_path: Path, loss_fn: nn.Module | None, body: Body, steps: int = 3) -> tuple[list[Any], xr.DataTree]:
    """The individual gradients of the mean loss at each step, and the run; the training is that without a cockpit."""
    nets = [cases.initialised("sigmoid"), cases.initialised("sigmoid")]
    runs = [
        run_steps(
            tmp_path / "run",
            net,
            lambda step: cases.data("sigmoid", "mean", step, N),
            steps,
            loss_fn=loss_fn,
            body=lambda cockpit, x, y, net=net: body(cockpit, net, x, y),
            rate=0.1,
            quantities=[Loss(), GradNorm(), NormTest()],
            enabled=enabled,
        )
        for net, enabled in zip(nets, (False, True), strict=True)
    ]
    seen = zip(runs[1].states, runs[1].batches, strict=True)
    batches = [oracle.batch(nets[1], state, cases._nll, x, y) for state, (x, y) in seen]
    assert all(torch.equal(a, b) for a, b in zip(*(net.parameters() for net in nets), strict=True))
    return batches, open_run(tmp_path / "run")


def pieces(loss: nn.Module, factor: float) -> Body:
    def body(cockpit: DistCockpit, net: nn.Module, x: Tensor, y: Tensor) -> None:
        z = cockpit(x)
        (sum(loss(a, b) for a, b in zip(z.chunk(3), y.chunk(3), strict=True)) * factor).backward()

    return body


def in_place(cockpit: DistCockpit, net: nn.Module, x: Tensor, y: Tensor) -> None:
    loss = CE(cockpit(x), y)
    loss /= 3
    (loss * 3).backward()


def kept_gradient(cockpit: DistCockpit, net: nn.Module, x: Tensor, y: Tensor) -> None:
    z = cockpit(x)
    z.retain_grad()
    CE(z, y).backward()
    torch.testing.assert_close(z.grad, (z.softmax(1) - F.one_hot(y, z.shape[1])).detach() / len(x))


def one_loss_of_parts(cockpit: DistCockpit, net: nn.Module, x: Tensor, y: Tensor) -> None:
    CE(torch.cat([cockpit(part) for part in x.chunk(2)]), y).backward()


@shows("Losses", "in chunks over one output of the model; scaled in place")
@pytest.mark.parametrize(
    "loss_fn, body",
    [
        (None, one_loss_of_parts),
        (CE, pieces(CE, 1 / 3)),
        (SUM, pieces(SUM, 1 / N)),
        (CE, in_place),
        (CE, kept_gradient),
    ],
    ids=["one loss of two passes", "means of pieces", "sums of pieces", "scaled in place", "retain_grad"],
)
def test_right(tmp_path: Path, loss_fn: nn.Module, body: Body) -> None:
    batches, run = tracked(tmp_path, loss_fn, body)
    for step, batch in enumerate(batches):
        np.testing.assert_allclose(run["loss"]["loss"].sel(step=step), batch.losses.mean(), rtol=1e-5)
        np.testing.assert_allclose(
            run["grad_norm"]["total"].sel(step=step), np.linalg.norm(batch.flat.mean(0)), rtol=1e-4
        )
        np.testing.assert_allclose(run["norm_test"]["norm_test"].sel(step=step), oracle.norm_test(batch), rtol=1e-4)


def weighted_passes(cockpit: DistCockpit, net: nn.Module, x: Tensor, y: Tensor) -> None:
    for weight, part, target in zip((1.0, 0.3), x.chunk(2), y.chunk(2), strict=True):
        (weight * CE(cockpit(part), target)).backward()


def gradient_of_a_part(cockpit: DistCockpit, net: nn.Sequential, x: Tensor, y: Tensor) -> None:
    loss = CE(cockpit(x), y)
    torch.autograd.grad(loss, list(net[-1].parameters()), retain_graph=True)
    loss.backward()


def thrown_away(cockpit: DistCockpit, net: nn.Module, x: Tensor, y: Tensor) -> None:
    CE(cockpit(x[:8]), y[:8]).backward()
    net.zero_grad()
    CE(cockpit(x[8:]), y[8:]).backward()


def negatives(cockpit: DistCockpit, net: nn.Module, x: Tensor, y: Tensor) -> None:
    z = cockpit(x)
    CE(z @ z.T, torch.arange(len(x))).backward()


def told_late(cockpit: DistCockpit, net: nn.Module, x: Tensor, y: Tensor) -> None:
    losses = F.cross_entropy(cockpit(x), y, reduction="none")
    (64 * losses.mean()).backward()
    cockpit.record_losses(losses)


@shows("Refused with an error", "losses of samples that depend on other samples, for quantities listed by hand")
@pytest.mark.parametrize(
    "loss_fn, body, words",
    [
        (CE, gradient_of_a_part, "differentiated twice"),
        (CE, thrown_away, r"thrown away \(zero_grad\)"),
        (CE, negatives, r"the loss couples the samples of a batch \(cross_entropy\)"),
        (None, told_late, "record_losses was called after the backward pass"),
    ],
)
def test_refused(tmp_path: Path, loss_fn: nn.Module | None, body: Body, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        tracked(tmp_path, loss_fn, body)


@pytest.mark.parametrize("later", [gradient_of_a_part, thrown_away])
def test_a_loop_that_changes_goes_on(tmp_path: Path, later: Body, caplog: pytest.LogCaptureFixture) -> None:
    """What is an error at first costs the step alone, with a notice, where steps were right before."""
    steps: list[int] = []

    def body(cockpit: DistCockpit, net: nn.Sequential, x: Tensor, y: Tensor) -> None:
        steps.append(len(steps) % 5)
        if steps[-1] == 3:  # everything is looked at
            later(cockpit, net, x, y)
        else:
            CE(cockpit(x), y).backward()

    tracked(tmp_path, CE, body, steps=5)
    assert "step 3 is not tracked" in caplog.text


class WithLoss(nn.Module):
    """Computes its loss by the loss module that the cockpit is given."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.loss_fn = cases.initialised("sigmoid"), CE

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss_fn(self.net(x), y)


def test_a_loss_inside_the_model_is_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, (x, y) = WithLoss(), cases.data("sigmoid", "mean", 0, N)
    batch = oracle.batch(model.net, model.net.state_dict(), cases._nll, x, y)
    with DistCockpit(model, CE, store=tmp_path / "run", quantities=[NormTest()], schedule=every(1)) as cockpit:
        with cockpit.track(0):
            cockpit(x, y).backward()
    assert not caplog.text
    np.testing.assert_allclose(
        open_run(tmp_path / "run")["norm_test"]["norm_test"], [oracle.norm_test(batch)], rtol=1e-4
    )


@pytest.mark.parametrize("kind", ["penalty", "divergence"])
def test_what_is_differentiated_beside_the_loss(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """What is stored is what is differentiated; where the loss module says less, a notice tells both numbers."""

    def body(cockpit: DistCockpit, net: nn.Module, x: Tensor, y: Tensor) -> None:
        z = cockpit(x)
        loss = CE(z, y)
        if kind == "penalty":
            loss = loss + 0.5 * z.square().sum(1).mean()
        else:  # two passes, as R-Drop has them
            again = cockpit(x)
            loss = loss + CE(again, y) + (again - 0.5 * z).square().mean()
        loss.backward()

    tracked(tmp_path, CE, body)
    if kind == "penalty":
        assert "loss_fn (CrossEntropyLoss) gave 1." in caplog.text and "but what is differentiated is " in caplog.text
    caplog.clear()
    tracked(tmp_path / "plain", CE, lambda cockpit, net, x, y: CE(cockpit(x), y).backward())
    assert not caplog.text


@shows("Losses", "skipped inside `track` where they are not finite")
def test_a_loop_that_skips_and_tries_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It skips losses that are not finite, and a step without data; and repeats one that failed."""
    net = cases.initialised("sigmoid")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    quantities = [Loss(), GradNorm(), NormTest()]
    with DistCockpit(net, CE, optimizer, store=tmp_path / "run", quantities=quantities, schedule=every(1)) as cockpit:
        for step in range(6):
            x, y = cases.data("sigmoid", "mean", step, N)
            for attempt in range(2):
                optimizer.zero_grad()
                try:
                    with cockpit.track(step):
                        if step == 3:
                            break
                        loss = CE(cockpit(x * (torch.nan if step == 2 else 1)), y)
                        if step == 4 and not attempt:
                            raise MemoryError
                        if torch.isfinite(loss):
                            loss.backward()
                except MemoryError:
                    continue
                if step != 2:
                    optimizer.step()
                break
    run = open_run(tmp_path / "run")
    assert list(run["loss"]["step"].values) == [0, 1, 2, 3, 4, 5]
    assert list(run["loss"]["batch_size"].values) == [N, N, 0, 0, N, N]
    for name, field in (("loss", "loss"), ("grad_norm", "total"), ("norm_test", "norm_test")):
        assert list(np.isnan(run[name][field].values)) == [False, False, True, True, False, False]
    assert "its samples are not counted" in caplog.text


def test_a_returned_loss_that_is_not_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is recorded beside the graph is not what is differentiated: the latter is stored."""
    net, (x, y) = cases.initialised("sigmoid"), cases.data("sigmoid", "mean", 0, N)
    model = WithLoss()
    model.forward = lambda x, y: (z := net(x), CE(z, y))
    model.net = net
    with DistCockpit(model, None, store=tmp_path / "run", quantities=[Loss()], schedule=every(1)) as cockpit:
        with cockpit.track(0):
            z, loss = cockpit(x, y)
            cockpit.record_losses(F.cross_entropy(z, y, reduction="none").detach())
            objective = 0.1 * loss + z.square().mean()
            objective.backward()
    assert "record_losses says 1." in caplog.text
    np.testing.assert_allclose(open_run(tmp_path / "run")["loss"]["loss"], [objective.item()], rtol=1e-5)
