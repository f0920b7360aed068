"""Individual gradients that are formed in the backward pass, in place of what they follow from."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from checks import check, run
from ranks import Ranks
from torch import nn
from torch.utils.checkpoint import checkpoint
from train import SHARDINGS, Spec

from distcockpit import DistCockpit, every, open_run
from distcockpit import quantities as q
from distcockpit.capture.coverage import AT_THE_END, CLOSED, EARLY
from distcockpit.tracking.buckets import rounded_convolutions

STEPS = 6  # the 1st, 2nd and 4th check themselves, and form nothing early


@pytest.mark.parametrize("buckets", [1, 3])
@pytest.mark.parametrize("sharding", ["one", "uneven 2", "empty rank"])
@pytest.mark.parametrize("model", ["transformer", "cnn", "eval_batchnorm", "partly_frozen", "tied"])
def test_every_row(ranks: Ranks, tmp_path: Path, model: str, sharding: str, buckets: int) -> None:
    """Every closed form, also of parameters that are not small."""
    loss = "mean" if model in ("cnn", "eval_batchnorm") else "token_mean"
    shards = tuple(SHARDINGS[sharding])
    spec = Spec(str(tmp_path / "run"), model, loss, shards=shards, steps=STEPS, forms=True, buckets=buckets)
    states, rows = run(ranks, spec, curvature=False)
    check(spec, states, rows, curvature=False)
    when = {row["when"] for row in rows.attrs["coverage"].values() if row["route"] == CLOSED}
    assert when == {EARLY}


@pytest.mark.parametrize("loop", [{"accumulate": 3}, {"factor": 1024.0}, {"accumulate": 2, "factor": 64.0}])
def test_micro_batches_and_scales(ranks: Ranks, tmp_path: Path, loop: dict[str, float]) -> None:
    """What is formed is scaled like the output gradients that it came from."""
    spec = Spec(str(tmp_path / "run"), "transformer", "token_mean", shards=(9, 5), steps=STEPS, forms=True, **loop)
    states, rows = run(ranks, spec, curvature=False)
    check(spec, states, rows, curvature=False)
    assert {row["when"] for row in rows.attrs["coverage"].values() if row["route"] == CLOSED} == {EARLY}


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mixed", [True, False])
def test_low_precision(tmp_path: Path, precision: torch.dtype, mixed: bool) -> None:
    """They are formed in float32, which is what output gradients are kept in until the end."""

    def train(forms: bool) -> np.ndarray:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Conv1d(16, 2, 3, padding=1), nn.LayerNorm(8)
        )
        net, store = net if mixed else net.to(precision), tmp_path / f"{forms}"
        with DistCockpit(net, None, store=store, quantities=[q.NormTest(), q.MeanGSNR()], schedule=every(1)) as cockpit:
            for step in range(4):
                x = torch.randn(4, 16, 8, generator=torch.Generator().manual_seed(step))
                with cockpit.track(step), torch.autocast("cpu", precision, enabled=mixed):
                    (256 * cockpit(x if mixed else x.to(precision)).float().square().mean()).backward()
            early = {row.parameter for row in cockpit.coverage() if row.when == EARLY}
        assert early == ({"1.weight", "1.bias"} if forms else set())
        run = open_run(store)
        return np.stack([run["norm_test"]["norm_test"].values, run["mean_gsnr"]["mean_gsnr"].values])

    early = train(True)
    with mock.patch("distcockpit.gradients.known.SMALLER", math.inf):
        at_the_end = train(False)
    assert np.isfinite(early).all()
    np.testing.assert_allclose(early, at_the_end, rtol=1e-5)


def test_only_small_ones(tmp_path: Path) -> None:
    """A layer norm on a sequence is, one on single vectors is not, nor is a matrix."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inside, self.outside = nn.Linear(8, 8), nn.LayerNorm(8), nn.LayerNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outside(self.inside(self.first(x)).mean(1))

    torch.manual_seed(0)
    net = Net()
    with DistCockpit(net, nn.MSELoss(), store=tmp_path / "run", quantities=[q.NormTest()], schedule=every(1)) as c:
        for step in range(3):
            assert {row.when for row in c.coverage()} == {AT_THE_END}  # steps 0 and 1 check themselves
            with c.track(step):
                nn.functional.mse_loss(c(torch.randn(4, 16, 8)), torch.randn(4, 8)).backward()
        early = {row.parameter for row in c.coverage() if row.when == EARLY}
    assert early == {"inside.weight", "inside.bias"}
    assert open_run(tmp_path / "run").attrs["coverage"]["inside.bias"]["when"] == EARLY


def test_a_loop_that_differentiates_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """From the beginning: nothing is formed early. Suddenly: one row is missing, and later ones are right."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Flatten(1), nn.Linear(128, 1))

    def train(store: Path, twice: set[int]) -> dict[int, float]:
        with DistCockpit(net, None, store=store, quantities=[q.NormTest()], schedule=every(1)) as cockpit:
            for step in range(6):
                net.zero_grad()
                x = torch.randn(4, 16, 8, generator=torch.Generator().manual_seed(step))
                with cockpit.track(step):
                    loss = cockpit(x).square().mean()
                    if step in twice:
                        (0.5 * loss).backward(retain_graph=True)
                        loss = 0.5 * loss
                    loss.backward()
            assert any(row.when == EARLY for row in cockpit.coverage()) == (not twice)
        rows = open_run(store)["norm_test"]
        return dict(zip(rows["step"].values.tolist(), rows["norm_test"].values.tolist(), strict=True))

    once = train(tmp_path / "once", set())
    assert train(tmp_path / "always", set(range(6))) == pytest.approx(once, rel=1e-5)
    suddenly = train(tmp_path / "suddenly", {4, 5})
    assert suddenly == pytest.approx({step: value for step, value in once.items() if step != 4}, rel=1e-5)
    assert "differentiated again" in caplog.text


def doubles(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    """Let the gradient at the output of a module be doubled in place."""

    def double(gradient: torch.Tensor) -> None:
        gradient.mul_(2)

    output.register_hook(double)


def test_a_gradient_that_is_overwritten_afterwards(tmp_path: Path) -> None:
    """By a hook of the user's that runs after ours, from step 4 on: no row rather than a wrong one."""
    torch.manual_seed(0)
    norm, head = nn.LayerNorm(8), nn.Linear(8, 1)
    net = nn.Sequential(norm, head)
    with DistCockpit(net, None, store=tmp_path / "run", quantities=[q.NormTest()], schedule=every(1)) as cockpit:
        for step in range(6):
            if step == 4:
                norm.register_forward_hook(doubles)
            with cockpit.track(step):
                cockpit(torch.randn(4, 16, 8)).square().mean().backward()
    assert list(open_run(tmp_path / "run")["norm_test"]["step"].values) == [0, 1, 2, 3]


def test_gradients_that_are_nobody_elses(tmp_path: Path) -> None:
    """Where nothing is summed, the individual gradients are the output gradient, which the loop may see as y.grad."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.p = nn.LayerNorm(8), nn.Parameter(torch.zeros(8))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            normed = self.norm(x)  # which the backward pass reaches last
            return (normed * (y + self.p)).square().sum(1)

    found = []
    for writes in (False, True):
        net, store = Net(), tmp_path / f"{writes}"
        with mock.patch("distcockpit.gradients.known.SMALLER", 0):
            with DistCockpit(net, None, store=store, quantities=[q.NormTest()], schedule=every(1)) as cockpit:
                for step in range(6):
                    x, y = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(step))
                    y.requires_grad_()
                    with cockpit.track(step):
                        cockpit(x, y).mean().backward()
                        if writes and step > 3:
                            y.grad.zero_()
        found.append(open_run(store)["norm_test"]["norm_test"].values)
    np.testing.assert_array_equal(*found)


def test_where_nothing_counts(tmp_path: Path) -> None:
    """A micro-batch whose mask is empty divides by zero; it has no weight, and no layer is blamed for its NaN."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 1))
    with DistCockpit(net, None, store=tmp_path / "run", quantities=[q.RankHealth()], schedule=every(1)) as cockpit:
        for step in range(6):
            with cockpit.track(step):
                for mask in (torch.ones(4), torch.full((4,), float(step < 4))):
                    losses = cockpit(torch.randn(4, 16, 8)).square().mean((1, 2))
                    ((losses * mask).sum() / mask.sum()).backward()
    assert not open_run(tmp_path / "run")["rank_health"]["first_nonfinite_gradient"].values.any()


def test_convolutions_that_round(tmp_path: Path) -> None:
    """Autograd's gradients of convolutions are not taken where cuDNN rounds them, however their own are formed."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.Flatten(1))
    seen: list[set[str]] = []

    def rounded(inputs: Any, device: torch.device) -> set[str]:
        seen.append(rounded_convolutions(inputs, device))
        return seen[-1]

    with (
        mock.patch("distcockpit.tracking.buckets.convolutions_round", lambda _: True),
        mock.patch("distcockpit.tracking.finish.rounded_convolutions", rounded),
        DistCockpit(net, None, store=tmp_path / "run", quantities=[q.InnerTest()], schedule=every(1)) as cockpit,
    ):
        for step in range(6):
            with cockpit.track(step):
                cockpit(torch.randn(4, 3, 16, 16)).square().mean().backward()
        assert {row.when for row in cockpit.coverage()} == {EARLY}
    assert seen == [set(dict(net.named_parameters()))] * 6


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_checkpointing(tmp_path: Path, reentrant: bool | None) -> None:
    """What the backward pass calls again, as reentrant checkpointing does, waits for the end."""
    torch.manual_seed(0)
    first, inside = nn.Linear(8, 8), nn.Sequential(nn.LayerNorm(8), nn.GELU())
    net = nn.Sequential(first, inside, nn.Linear(8, 1))
    if reentrant is not None:
        net.forward = lambda x: net[2](checkpoint(inside, first(x), use_reentrant=reentrant))
    with DistCockpit(net, None, store=tmp_path / "run", quantities=[q.NormTest()], schedule=every(1)) as cockpit:
        for step in range(6):
            x = torch.randn(4, 16, 8, generator=torch.Generator().manual_seed(step))
            net.zero_grad()
            with cockpit.track(step):
                cockpit(x).square().mean().backward()
            parts = [
                torch.autograd.grad(net[2](inside(first(each))).square().mean(), list(net.parameters())) for each in x
            ]
            squares = sum(float(sum(g.square().sum() for g in part)) for part in parts)
            mean = float(sum(torch.stack(each).mean(0).square().sum() for each in zip(*parts, strict=True)))
        early = {row.parameter for row in cockpit.coverage() if row.when == EARLY}
    row = open_run(tmp_path / "run")["norm_test"]["norm_test"].sel(step=5)
    assert float(row) == pytest.approx(((squares - 4 * mean) / (4 * 3) / mean) ** 0.5, rel=1e-4)
    assert early == {"2.weight", "2.bias"} | (set() if reentrant else {"1.0.weight", "1.0.bias"})


def test_a_call_that_is_new(tmp_path: Path) -> None:
    """At step 4, so that its batch axis, and with it those of all calls, are looked at again: what is formed stays.

    The batch is on the second axis and as long as the parameters, so that a guess would be wrong.
    """

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head, self.other = nn.LayerNorm(8), nn.Linear(8, 1), nn.Linear(8, 8)
            self.is_new = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(x)
            return self.head(self.other(x) + self.other(x.tanh()) if self.is_new else self.other(x))

    def train(store: Path) -> np.ndarray:
        torch.manual_seed(0)
        net = Net()
        options = {"quantities": [q.NormTest()], "schedule": every(1), "batch_dim": 1}
        with DistCockpit(net, None, store=store, **options) as cockpit:
            for step in range(6):
                net.is_new = step > 3
                x = torch.randn(16, 8, 8, generator=torch.Generator().manual_seed(step))
                with cockpit.track(step):
                    cockpit(x).square().mean().backward()
        return open_run(store)["norm_test"]["norm_test"].values

    early = train(tmp_path / "early")
    with mock.patch("distcockpit.gradients.known.SMALLER", math.inf):
        np.testing.assert_allclose(early, train(tmp_path / "end"), rtol=1e-5)
    assert len(early) == 6 and (early > 0).all()
