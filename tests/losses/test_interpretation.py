"""What a loop means: passes, micro-batches, and which of them count."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import cases
import numpy as np
import oracle
import pytest
import torch
from compared_runs import check, mean_terms, train_sigmoid
from odd_loops import BATCH, check_norm_test, each, linear, six_samples, track_body
from own_quantities import Moments
from repeated_runs import SAMPLES
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from distcockpit import DistCockpit, every, open_run


def test_loss_called_twice_on_one_batch(tmp_path: Path) -> None:
    """Two calls of equal factor make one individual loss, in one backward call or in two."""
    loss_fn = nn.CrossEntropyLoss()

    def step(cockpit: DistCockpit, net: nn.Module, x: Tensor, y: Tensor) -> None:
        z = net(x)
        loss_fn(z, y).backward(retain_graph=True)
        loss_fn(z, (y + 1) % 5).backward()

    def terms(z: Tensor, y: Tensor) -> tuple[Tensor, float]:
        return cases._nll(z, y)[0] + cases._nll(z, (y + 1) % 5)[0], 1

    check(tmp_path / "r", *train_sigmoid(tmp_path / "r", step, loss_fn=loss_fn), terms)


def test_two_forward_passes_in_one_loss(tmp_path: Path) -> None:
    loss_fn = nn.CrossEntropyLoss()

    def step(cockpit: DistCockpit, net: nn.Module, x: Tensor, y: Tensor) -> None:
        loss_fn(net(x) + net(-x), y).backward()

    net, states, batches = train_sigmoid(tmp_path / "r", step, loss_fn=loss_fn)

    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = copy.deepcopy(net)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) + self.net(-x)

    twice = [{f"net.{k}": v for k, v in s.items()} for s in states]
    run = open_run(tmp_path / "r")
    pooled = [oracle.batch(Siamese(), s, mean_terms, *b) for s, b in zip(twice, batches, strict=True)]
    np.testing.assert_allclose(run["mean_gsnr"]["mean_gsnr"], [oracle.mean_gsnr(b) for b in pooled], rtol=1e-4)
    for step in range(2):
        expected = oracle.alpha(*pooled[step : step + 2])
        np.testing.assert_allclose(run["alpha"]["alpha"].sel(step=step), expected["alpha"], rtol=1e-3)


# -- passes and losses -------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_a_loss_of_two_passes_beside_their_own(tmp_path: Path) -> None:
    net, mse, (x, _) = linear(), nn.MSELoss(), six_samples()
    other, target = six_samples(1)[0], six_samples(2)[0]

    def body(c: Any) -> None:
        a, b = c(x), c(other)
        (mse(a, target) + mse(b, target) + mse(a, b)).backward()

    track_body(tmp_path, net, mse, body)


@pytest.mark.parametrize("order", ["losses last", "in between"])
def test_passes_that_feed_each_other(tmp_path: Path, order: str) -> None:
    """A sample is what went through both: its loss is the sum of both."""
    net, loss_fn, (x, y) = linear(), nn.CrossEntropyLoss(), six_samples()
    y2 = six_samples(1)[1]

    def body(c: Any) -> None:
        if order == "losses last":
            a = c(x)
            b = c(a)
            (loss_fn(a, y) + loss_fn(b, y2)).backward()
        else:
            a = c(x)
            loss = loss_fn(a, y)
            (loss + loss_fn(c(torch.tanh(a) + 0), y2)).backward()

    a = net(x)
    losses = each(a, y) + each(net(a if order == "losses last" else torch.tanh(a)), y2)
    check_norm_test(tmp_path, net, loss_fn, body, losses)


def test_a_recurrence_by_hand(tmp_path: Path) -> None:
    torch.manual_seed(0)
    loss_fn, (x, y) = nn.CrossEntropyLoss(), six_samples()

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both, self.head = nn.Linear(7, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(self.both(torch.cat([x, h], 1)))
            return self.head(h), h

    net = Cell()

    def run(model: Any, loss: Any) -> Tensor:
        h, total = torch.zeros(BATCH, 4), 0.0
        for t in range(3):
            z, h = model(x + t, h)
            total = total + loss(z, (y + t) % 3)
        return total

    check_norm_test(tmp_path, net, loss_fn, lambda c: (run(c, loss_fn) / 3).backward(), run(net, each))


def test_an_empty_batch_with_two_passes(tmp_path: Path) -> None:
    net, loss_fn = linear(), nn.CrossEntropyLoss(reduction="sum")
    x, y = torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)

    def body(c: Any) -> None:
        a, b = c(x), c(x)
        (loss_fn(a, y) + loss_fn(b, y)).backward()

    assert np.isnan(track_body(tmp_path, net, loss_fn, body)["norm_test"]["norm_test"].values).all()


# -- calls of the model in the model -----------------------------------------------------------------------------------


class Rerouted(nn.Module):
    """With labels it computes its loss by calling itself, after a prediction without gradients."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last, self.kind = nn.Linear(3, 4), nn.Linear(4, 3), kind
        self.scale = nn.Parameter(torch.ones(4)) if kind == "rerouted" else 1.0

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        if self.kind == "predicts inside" and y is not None:
            z = self.first(x)
            with torch.no_grad():
                self(x)
            return F.cross_entropy(self.last(z * self.scale), y)
        if y is None:
            z = torch.tanh(self.first(x)) * self.scale
            if self.kind == "checkpointed":
                return checkpoint(self.last, torch.tanh(z), use_reentrant=True)
            return self.last(z)
        if self.kind == "checkpointed":
            return F.cross_entropy(self(x), y)
        with torch.no_grad():
            pseudo = self(x)
        return F.cross_entropy(self(x) + pseudo, y)


@pytest.mark.parametrize("kind", ["rerouted", "predicts inside", "checkpointed"])
def test_a_model_that_calls_itself(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    net, (x, y) = Rerouted(kind), six_samples()
    if kind == "checkpointed":
        losses = each(net.last(torch.tanh(torch.tanh(net.first(x)))), y)
    elif kind == "rerouted":
        losses = each(net(x) + net(x).detach(), y)
    else:
        losses = each(net.last(net.first(x) * net.scale), y)
    check_norm_test(tmp_path, net, None, lambda c: c(x, y).backward(), losses, steps=3)
    assert kind != "checkpointed" or "slow" not in caplog.text


def test_a_forward_that_fails_and_is_tried_again(tmp_path: Path) -> None:
    class Hungry(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear()

        def forward(self, x: Tensor) -> Tensor:
            z = self.inner(x)
            if len(x) > 4:
                raise torch.OutOfMemoryError("too many")
            return z

    net, loss_fn, (x, y) = Hungry(), nn.CrossEntropyLoss(), six_samples()

    def body(c: Any) -> None:
        try:
            loss_fn(c(x), y).backward()
        except torch.OutOfMemoryError:
            loss_fn(c(x[:4]), y[:4]).backward()

    check_norm_test(tmp_path, net, loss_fn, body, each(net(x[:4]), y[:4]))


def test_an_output_without_axes_is_no_loss(tmp_path: Path) -> None:
    """A variational autoencoder returns a penalty beside its prediction."""

    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.code, self.decode = nn.Linear(6, 3), nn.Linear(3, 6)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            z = self.code(x)
            return self.decode(z), z.square().sum(1).mean()

    torch.manual_seed(2)
    net, x = Autoencoder(), torch.randn(SAMPLES, 6)
    with DistCockpit(net, None, store=tmp_path / "run", quantities=[Moments()], schedule=every(1)) as cockpit:
        with cockpit.track(0):
            prediction, penalty = cockpit(x)
            (F.mse_loss(prediction, x) + 0.1 * penalty).backward()
    squares = []
    for sample in x.split(1):
        prediction, penalty = net(sample)
        loss = F.mse_loss(prediction, sample) + 0.1 * penalty
        squares.append([float(g.square().sum()) for g in torch.autograd.grad(loss, list(net.parameters()))])
    values = open_run(tmp_path / "run")["moments"]["mean_of"][0]
    np.testing.assert_allclose(values, np.mean(squares, 0), rtol=1e-4)


def test_a_prediction_without_axes_is_no_loss(tmp_path: Path) -> None:
    """`squeeze` takes the axis of a single sample away, too."""
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(6, 1), nn.Flatten(0))
    net.forward = lambda x: net[0](x).squeeze()
    for order in ((1, 6), (6, 1)):
        store = tmp_path / str(order)
        with DistCockpit(net, None, store=store, quantities=[Moments()], schedule=every(1)) as cockpit:
            for step, n in enumerate(order):
                x = torch.randn(n, 6, generator=torch.Generator().manual_seed(n))
                with cockpit.track(step):
                    F.mse_loss(cockpit(x), torch.ones(n).squeeze()).backward()
                gradients = 2 * (net[0](x) - 1).detach() * x
                value = float(gradients.square().sum(1).mean())
                cockpit.flush()
                np.testing.assert_allclose(open_run(store)["moments"]["mean_of"].sel(step=step)[0], value, rtol=1e-4)
