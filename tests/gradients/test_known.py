"""Individual gradients that are formed in the backward pass, in place of what they follow from."""

from __future__ import annotations

import math
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from checks import check, run
from ranks import Ranks
from torch import nn
from train import SHARDINGS, Spec

from distcockpit import DistCockpit, every, open_run
from distcockpit import quantities as q
from distcockpit.capture.coverage import AT_THE_END, CLOSED, EARLY

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
            assert any(row.when == EARLY for row in cockpit.coverage()) == (0 not in twice)
        rows = open_run(store)["norm_test"]
        return dict(zip(rows["step"].values.tolist(), rows["norm_test"].values.tolist(), strict=True))

    once = train(tmp_path / "once", set())
    assert train(tmp_path / "always", set(range(6))) == pytest.approx(once, rel=1e-5)
    suddenly = train(tmp_path / "suddenly", {4, 5})
    assert suddenly == pytest.approx({step: value for step, value in once.items() if step != 4}, rel=1e-5)
    assert "differentiated again" in caplog.text
