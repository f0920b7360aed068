"""Means and sums that end a loss: what they divide by and which samples their terms belong to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import numpy as np
import objectives
import oracle
import pytest
import torch
from objective_runs import data
from small_batches import one_step
from told_losses import CE, N
from torch import Tensor, nn
from torch.nn import functional as F

from distcockpit import DistCockpit, every, open_run
from distcockpit.losses.reductions import LOSSES
from distcockpit.quantities import GradNorm, Loss, NormTest
from distcockpit.quantities.batch import Needs


def test_a_selection_of_as_many_tokens_as_samples(tmp_path: Path) -> None:
    """Half of the terms may happen to be those of half of the samples; it is found whose each of them is."""
    net, (x, y) = cases.initialised("tokens"), cases.data("tokens", "token_mean", 0)
    chosen = torch.zeros(N, y.shape[1], dtype=torch.bool)
    chosen[: N // 2, :2] = True
    chosen[N // 2 - 1, :2], chosen[N // 2, 0], chosen[0, 2] = False, True, True
    assert chosen.sum() == N
    seen: list[Tensor] = []

    class Kept(Loss):
        def local(self, batch: Any, memory: dict[str, Any]) -> Any:
            seen.append(batch.losses)
            return super().local(batch, memory)

        @property
        def needs(self) -> Needs:
            return Needs(loss=True, losses=True)

    with DistCockpit(net, CE, store=tmp_path / "run", quantities=[Kept(name="loss")], schedule=every(1)) as cockpit:
        with cockpit.track(0):
            z = cockpit(x)
            z = z if z.shape[-1] > 2 and z.shape[:2] == y.shape else z.transpose(1, 2)
            CE(z[chosen], y.clamp(min=0)[chosen]).backward()
    terms = F.cross_entropy(z.detach().transpose(1, 2), y.clamp(min=0), reduction="none") * chosen
    torch.testing.assert_close(seen[0], terms.sum(1).double(), rtol=1e-5, atol=1e-6)


S = torch.sin(torch.arange(24.0 * 5)).view(24, 5)  # something for each sample


SIGNS = S.sign()


FUNCTIONS: dict[Any, Any] = {
    F.l1_loss: lambda z, i: (z, S[i]),
    F.smooth_l1_loss: lambda z, i: (z, S[i]),
    F.huber_loss: lambda z, i: (z, S[i]),
    F.mse_loss: lambda z, i: (z, S[i]),
    F.kl_div: lambda z, i: (z.log_softmax(-1), S[i].softmax(-1)),
    F.binary_cross_entropy: lambda z, i: (z.sigmoid(), S[i].abs()),
    F.binary_cross_entropy_with_logits: lambda z, i: (z, S[i].abs()),
    F.nll_loss: lambda z, i: (z.log_softmax(-1), i % 5),
    F.cross_entropy: lambda z, i: (z, S[i].softmax(-1)),
    F.gaussian_nll_loss: lambda z, i: (z, S[i], S[i].abs() + 0.1),
    F.poisson_nll_loss: lambda z, i: (z, S[i].abs()),
    F.hinge_embedding_loss: lambda z, i: (z, SIGNS[i]),
    F.soft_margin_loss: lambda z, i: (z, SIGNS[i]),
    F.multilabel_soft_margin_loss: lambda z, i: (z, SIGNS[i].clamp(min=0)),
    F.multilabel_margin_loss: lambda z, i: (z, torch.tensor([[1, 3, -1, 0, 0]]).expand(len(z), -1)),
    F.multi_margin_loss: lambda z, i: (z, i % 5),
    F.cosine_embedding_loss: lambda z, i: (z, S[i], SIGNS[i, 0]),
    F.margin_ranking_loss: lambda z, i: (z[:, 0], z[:, 1], SIGNS[i, 0]),
    F.triplet_margin_loss: lambda z, i: (z, S[i], S[i].flip(1)),
    F.triplet_margin_with_distance_loss: lambda z, i: (z, S[i], S[i].flip(1)),
}


def test_every_function_that_reduces_is_in_the_list() -> None:
    fused = {F.linear_cross_entropy} if hasattr(F, "linear_cross_entropy") else set()  # not in torch 2.8
    assert set(LOSSES) == {*FUNCTIONS, F.ctc_loss, *fused}


class Fused(nn.Module):
    """Its head and its loss are one call."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 7), nn.Linear(7, 4, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.linear_cross_entropy(torch.tanh(self.body(x)).flatten(0, 1), self.head.weight, y.flatten())


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch does not have the function")
def test_a_head_and_its_loss_in_one_call(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x, y = Fused(), torch.randn(6, 3, 5), torch.arange(18).view(6, 3) % 4
    with DistCockpit(net, store=tmp_path / "run", quantities=[Loss(), NormTest()]) as cockpit:
        with cockpit.track(0):
            cockpit(x, y).backward()
        assert {row.route for row in cockpit.coverage()} == {"closed form"}
    losses, gradients = [], []
    for i in range(6):
        net.zero_grad()
        losses.append(net(x[i : i + 1], y[i : i + 1]))
        losses[-1].backward()
        gradients.append(torch.cat([p.grad.flatten() for p in net.parameters()]).double())
    run, each = open_run(tmp_path / "run"), torch.stack(gradients)
    np.testing.assert_allclose(run["loss"]["loss"], [np.mean([loss.item() for loss in losses])], rtol=1e-5)
    expected = ((each - each.mean(0)).square().sum() / 5 / 6 / each.mean(0).square().sum()).sqrt()
    np.testing.assert_allclose(run["norm_test"]["norm_test"], [expected], rtol=1e-4)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_losses_of_torch(tmp_path: Path, function: Any, reduction: str) -> None:
    """Beside the loss and the gradient of each sample by itself."""

    def loss(z: Tensor, i: Tensor) -> Tensor:
        value = function(*FUNCTIONS[function](z, i), reduction=reduction)
        return value.mean() if reduction == "none" else value

    torch.manual_seed(0)
    net, places = objectives.Net(), torch.arange(24)
    with DistCockpit(net, store=tmp_path / "run", quantities=[Loss(), NormTest(), GradNorm()], schedule=1) as cockpit:
        for step in range(3):
            with cockpit.track(step):
                loss(cockpit(data(0).x), places).backward()
    losses, gradients = [], []
    for i in range(24):
        net.zero_grad()
        alone = loss(net(data(0).x[i : i + 1]), places[i : i + 1])
        alone.backward()
        losses.append(alone.item())
        gradients.append(torch.cat([p.grad.flatten() for p in net.parameters()]).double())
    each = torch.stack(gradients)
    mean = each.mean(0)
    run = open_run(tmp_path / "run")
    np.testing.assert_allclose(run["loss"]["loss"], [np.mean(losses)] * 3, rtol=1e-5)
    np.testing.assert_allclose(run["grad_norm"]["total"], [mean.norm()] * 3, rtol=1e-4)
    expected = ((each - mean).square().sum() / 23 / 24 / mean.square().sum()).sqrt()
    np.testing.assert_allclose(run["norm_test"]["norm_test"], [expected] * 3, rtol=1e-3)
    assert [each["topic"] for each in run.attrs.get("notices", ())] == (["sum"] if reduction == "sum" else [])


def test_a_selection_of_tokens(tmp_path: Path) -> None:
    """A masked selection of tokens: it is found whose each of them is."""
    net, loss_fn = nn.Linear(6, 5), nn.CrossEntropyLoss()
    x, y = torch.randn(4, 3, 6), torch.arange(12).reshape(4, 3) % 5
    mask = torch.tensor([[1, 0, 1], [1, 1, 1], [0, 1, 1], [1, 0, 0]], dtype=torch.bool)  # 8 of 12, two samples differ
    run = one_step(tmp_path / "a", lambda c: loss_fn(net(x)[mask], y[mask]).backward(), net, loss_fn)
    losses = F.cross_entropy(net(x).transpose(1, 2), y, reduction="none") * mask
    rows = [torch.autograd.grad(loss * 4 / 8, list(net.parameters()), retain_graph=True) for loss in losses.sum(1)]
    gradients = np.stack([np.concatenate([g.double().numpy().ravel() for g in row]) for row in rows])
    expected = oracle.mean_gsnr(oracle.Batch(np.ones(4), {"all": gradients}, {}, {}))
    np.testing.assert_allclose(run["mean_gsnr"]["mean_gsnr"], [expected], rtol=1e-4)
