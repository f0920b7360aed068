"""The check of individual gradients against autograd's sums: what it catches, when, and what follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from changing_runs import assert_norms, go
from compared_runs import check, mean_terms, train_sigmoid
from odd_loops import linear, six_samples
from small_batches import data, reference
from torch import Tensor, nn

from distcockpit import DistCockpit, every, open_run
from distcockpit import quantities as q
from distcockpit.capture.coverage import SLOW
from distcockpit.quantities import CompressionError, MeanGSNR


def test_gradients_left_from_before_do_not_count(tmp_path: Path) -> None:
    loss_fn = nn.CrossEntropyLoss()

    def step(cockpit: DistCockpit, net: nn.Module, x: Tensor, y: Tensor) -> None:
        for p in net.parameters():
            p.grad = torch.full_like(p, 100.0)
        loss_fn(net(x), y).backward()
        for p in net.parameters():
            p.grad -= 100.0

    check(tmp_path / "r", *train_sigmoid(tmp_path / "r", step, loss_fn=loss_fn), mean_terms)


class Gate(nn.Module):
    """Loses its batch axis, behind a dropout, at a step that does not check everything."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.last, self.dropout, self.on = nn.Linear(6, 6), nn.Linear(6, 3), nn.Dropout(0.5), False
        self.register_buffer("grid", torch.ones(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(x + self.p(self.grid if self.on else x)))


class Late(nn.Module):
    """Positions join at such a step."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.last, self.dropout, self.on = nn.Embedding(4, 6), nn.Linear(6, 3), nn.Dropout(0.5), False

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(x + torch.tanh(self.e(torch.arange(4))) if self.on else x))


@pytest.mark.parametrize("model", [Gate, Late])
def test_what_changes_between_checks_is_run_again_with_its_own_random_numbers(tmp_path: Path, model: type) -> None:
    def change(step: int, net: Any) -> None:
        net.on = step >= 2

    chosen = [q.NormTest(), q.GradNorm()]
    assert_norms(*go(tmp_path / "r", model(), ((6, 4, 6), (6, 4, 3)), chosen, 4, change))


@pytest.mark.parametrize("sizes", [(6,), (2, 4), (1, 2, 3)])
def test_gradients_from_autograd_with_factors_and_micro_batches(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    """Without variances G comes from autograd; each micro-batch has a scale of its own."""
    torch.manual_seed(0)
    net, loss_fn = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), nn.CrossEntropyLoss()
    x, y = torch.randn(6, 5), torch.arange(6) % 3
    state = {k: v.clone() for k, v in net.state_dict().items()}
    options = {"quantities": [q.GradNorm(), q.InnerTest()], "schedule": every(1)}
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)
    with DistCockpit(net, loss_fn, store=tmp_path / "r", **options) as cockpit:
        for step in range(3):
            net.zero_grad()
            with cockpit.track(step):
                for part, target in zip(x.split(list(sizes)), y.split(list(sizes)), strict=True):
                    scaler.scale(loss_fn(cockpit(part), target)).backward()
    terms = nn.CrossEntropyLoss(reduction="sum")
    batch = oracle.batch(net, state, lambda z, t: (terms(z, t), 1.0), x, y)
    run = open_run(tmp_path / "r")
    norms = [np.linalg.norm(g.mean(0)) for g in batch.gradients.values()]
    np.testing.assert_allclose(run["grad_norm"]["grad_norm"][2], norms, rtol=1e-5)
    np.testing.assert_allclose(run["inner_test"]["inner_test"][2], oracle.inner_test(batch), rtol=1e-5)


# -- what is left in .grad, and optimizers -----------------------------------------------------------------------------


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_zeroed_inside_without_new_ones(tmp_path: Path, to_none: bool) -> None:
    """A parameter that is used at every second step; NaN where zeroing and adding cannot be told apart."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = linear(), linear()

        def forward(self, x: Tensor, step: int) -> Tensor:
            return self.first(x) + (self.second(x) if step % 2 == 0 else 0)

    net, loss_fn, (x, y) = Net(), nn.CrossEntropyLoss(), six_samples()
    with DistCockpit(
        net, loss_fn, store=tmp_path / "run", quantities=[CompressionError()], schedule=every(1)
    ) as cockpit:
        for step in range(4):
            with cockpit.track(step):
                net.zero_grad(set_to_none=to_none)
                loss_fn(cockpit(x, step), y).backward()
    total = open_run(tmp_path / "run")["compression_error"]["total"].values
    assert (total[::2] < 1e-6).all()
    assert (total[1::2] < 1e-6).all() if to_none else np.isnan(total[1::2]).all()


class Unseen(torch.autograd.Function):
    """A linear layer whose code no mode sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return delta @ weight, delta.T @ x


class HiddenUse(nn.Module):
    """Uses a weight behind its module's back, ahead of a head that begins at zero."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.a, self.h = nn.Linear(6, 6), nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()
        nn.init.zeros_(self.h.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.h(self.norm(torch.sigmoid(Unseen.apply(self.a(x), self.a.weight))))


@pytest.mark.parametrize("norm", [False, True])
def test_a_hole_that_opens_at_the_second_step(tmp_path: Path, norm: bool) -> None:
    _, x, y = data()
    net, loss_fn = HiddenUse(norm), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    options = {"quantities": [MeanGSNR()], "schedule": every(1), "track_batchnorm": norm}
    with DistCockpit(net, loss_fn, optimizer, store=tmp_path / "run", **options) as cockpit:
        with cockpit.track(0):
            loss_fn(net(x), y).backward()
        optimizer.step()
        assert not cockpit.coverage()["a.weight"].checked and cockpit.coverage()["a.weight"].route == "closed form"
        with cockpit.track(1):
            loss_fn(net(x), y).backward()
        assert cockpit.coverage()["a.weight"].checked and cockpit.coverage()["a.weight"].route == SLOW
        if not norm:
            expected = [oracle.mean_gsnr(reference(net, x, y))]
            cockpit.flush()
            np.testing.assert_allclose(
                open_run(tmp_path / "run")["mean_gsnr"]["mean_gsnr"][1:], expected, rtol=1e-4, atol=1e-9
            )
