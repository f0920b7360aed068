"""Ordinary programs in which a careless tool is silently wrong, breaks, or disturbs: exact here, or a clear error."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from waiting import run_program

from distcockpit import DistCockpit, StoreOptions, every, open_run
from distcockpit.capture.coverage import SLOW
from distcockpit.quantities import Alpha, GradHist1d, HessTrace, Loss, MeanGSNR, OutputGradientGeometry, Quantity
from distcockpit.store.keys import FolderKeys
from distcockpit.store.run_store import RunStore
from distcockpit.store.schema import Field, Group

B = 8


def reference(net: nn.Module, x: Tensor, y: Tensor) -> oracle.Batch:
    """Single losses of one batched forward pass, differentiated one by one, by autograd alone."""
    buffers = [(buffer, buffer.clone()) for buffer in net.buffers()]
    parameters = {name: p for name, p in net.named_parameters() if p.requires_grad}
    losses = F.cross_entropy(net(x).float(), y, reduction="none")
    rows = []
    for loss in losses:
        gradients = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, allow_unused=True)
        rows.append([
            torch.zeros_like(p) if g is None else g for p, g in zip(parameters.values(), gradients, strict=True)
        ])
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    stacked = {k: torch.stack([r[i] for r in rows]).double().numpy() for i, k in enumerate(parameters)}
    return oracle.Batch(
        losses.detach().double().numpy(), stacked, {}, {k: p.detach().double().numpy() for k, p in parameters.items()}
    )


def compare(tmp_path: Path, net: nn.Module, x: Tensor, y: Tensor, rtol: float = 1e-3, autocast: bool = False) -> None:
    """Three steps of SGD: GSNR at each, alpha between them."""
    loss_fn, pooled = nn.CrossEntropyLoss(), []
    precision = torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False)
    chosen: list[Quantity] = [MeanGSNR(), Alpha(), GradHist1d(), OutputGradientGeometry()]
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=chosen, schedule=every(1)) as cockpit:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            torch.manual_seed(step)
            with precision:
                pooled.append(reference(net, x, y))
            torch.manual_seed(step)
            optimizer.zero_grad()
            with cockpit.track(step):
                with precision:
                    z = net(x)
                loss_fn(z.float(), y).backward()
            optimizer.step()
    run = open_run(tmp_path / "run")
    expected = [oracle.mean_gsnr(batch) for batch in pooled]
    assert min(expected) > 1e-5
    np.testing.assert_allclose(run["mean_gsnr"]["mean_gsnr"], expected, rtol=rtol)
    for step in range(2):
        alpha = oracle.alpha(*pooled[step : step + 2])
        np.testing.assert_allclose(run["alpha"]["slope_start"][step], alpha["slope_start"], rtol=10 * rtol)
        np.testing.assert_allclose(run["alpha"]["slope_end"][step], alpha["slope_end"], rtol=10 * rtol)


class Net(nn.Module):
    """Input -> layer -> pooled over all but batch and features -> 5 classes."""

    def __init__(self, body: nn.Module, features: int, first: Callable[[Any], Tensor] = lambda z: z) -> None:
        super().__init__()
        self.body, self.head, self._first = body, nn.Linear(features, 5), first

    def forward(self, x: Tensor) -> Tensor:
        z = self._first(self.body(x)).float().flatten(1)
        return self.head(F.adaptive_avg_pool1d(z.unsqueeze(1), self.head.in_features).squeeze(1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.n, self.m = nn.Embedding(9, 6), nn.Embedding(9, 6), nn.LayerNorm(6), nn.LayerNorm(6)
        self.b.weight, self.m.weight = self.a.weight, self.n.weight

    def forward(self, x: Tensor) -> Tensor:
        x = (x.abs() * 4).long() % 9
        return self.m(torch.sigmoid(self.n(self.a(x) + self.b(x.flip(1)).sin())))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.token = nn.Linear(6, 6), nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


class OutputSize(nn.ConvTranspose1d):
    def forward(self, x: Tensor) -> Tensor:  # a subclass: served by the generic rule
        return super().forward(x, output_size=[12])


class CallsWithSize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose1d(4, 3, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x, output_size=[12]))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        out += x
        return out.relu_()


class FlatActivation(nn.Module):
    """An activation module on [B T, F], between layers that keep the batch first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.act = nn.Linear(6, 6), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        z = self.inner(x)
        return self.act(z.reshape(-1, 6)).reshape(z.shape)


def spectral_old() -> nn.Module:
    return torch.nn.utils.spectral_norm(nn.Linear(6, 6))


def weight_norm_old() -> nn.Module:
    return torch.nn.utils.weight_norm(nn.Linear(6, 6))


def pruned() -> nn.Module:
    return prune.random_unstructured(nn.Linear(6, 6), "weight", 0.5)


def eval_norm() -> nn.Module:
    norm = nn.BatchNorm1d(4).eval()
    norm.train = lambda mode=True: norm  # type: ignore[method-assign]
    return norm


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "linear on [N, T, in], activation in place": lambda: (
        Net(nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True)), 12),
        torch.randn(B, 4, 6),
    ),
    "residual in place": lambda: (Net(Residual(), 12), torch.randn(B, 4, 6)),
    "attention output in place": lambda: (
        Net(AttentionInPlace(), 12),
        torch.randn(B, 4, 6),
    ),
    "instance norm behind a convolution": lambda: (
        Net(nn.Sequential(nn.Conv1d(4, 6, 3), nn.InstanceNorm1d(6), nn.Sigmoid()), 12),
        torch.randn(B, 4, 8),
    ),
    "tied embeddings and norms": lambda: (Net(Tied(), 12), torch.randn(B, 5)),
    "weight norm, old": lambda: (Net(weight_norm_old(), 6), torch.randn(B, 6)),
    "weight norm": lambda: (Net(parametrizations.weight_norm(nn.Linear(6, 6)), 6), torch.randn(B, 6)),
    "spectral norm, old": lambda: (Net(spectral_old(), 6), torch.randn(B, 6)),
    "spectral norm": lambda: (Net(parametrizations.spectral_norm(nn.Linear(6, 6)), 6), torch.randn(B, 6)),
    "pruned": lambda: (Net(pruned(), 6), torch.randn(B, 6)),
    "own parameter that takes no part": lambda: (Net(Unused(), 6), torch.randn(B, 6)),
    "output padding": lambda: (
        Net(nn.ConvTranspose1d(4, 3, 3, stride=2, padding=1, output_padding=1), 12),
        torch.randn(B, 4, 6),
    ),
    "output size": lambda: (Net(CallsWithSize(), 12), torch.randn(B, 4, 6)),
    "output size in a subclass": lambda: (Net(OutputSize(4, 3, 3, stride=2, padding=1), 12), torch.randn(B, 4, 6)),
    "activation on a flattened batch": lambda: (Net(FlatActivation(), 12), torch.randn(B, 4, 6)),
    "same padding": lambda: (Net(nn.Conv1d(4, 6, 3, padding="same"), 12), torch.randn(B, 4, 8)),
    "circular padding": lambda: (
        Net(nn.Conv1d(4, 6, 3, padding=1, padding_mode="circular"), 12),
        torch.randn(B, 4, 8),
    ),
    "bidirectional LSTM with dropout": lambda: (
        Net(nn.LSTM(4, 5, 2, batch_first=True, dropout=0.5, bidirectional=True), 12, lambda z: z[0]),
        torch.randn(B, 6, 4),
    ),
    "PReLU": lambda: (Net(nn.Sequential(nn.Linear(6, 6), nn.PReLU(6)), 6), torch.randn(B, 6)),
    "batch norm in eval mode": lambda: (Net(nn.Sequential(nn.Conv1d(4, 4, 3), eval_norm()), 12), torch.randn(B, 4, 8)),
}


class AttentionInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        z = self.attend(x, x, x)[0]
        z += x
        return z


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning", "ignore:.*weight_norm.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:RNN module weights:UserWarning")
@pytest.mark.parametrize("model", MODELS)
def test_models(tmp_path: Path, model: str) -> None:
    torch.manual_seed(2)
    net, x = MODELS[model]()
    compare(tmp_path, net, x, torch.arange(B) % 5)


@pytest.mark.parametrize("model", ["PReLU", "batch norm in eval mode", "residual in place", "circular padding"])
def test_autocast(tmp_path: Path, model: str) -> None:
    torch.manual_seed(2)
    net, x = MODELS[model]()
    compare(tmp_path, net, x, torch.arange(B) % 5, rtol=0.03, autocast=True)


def test_bfloat16_model(tmp_path: Path) -> None:
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5)).bfloat16()
    compare(tmp_path, net, torch.randn(B, 6).bfloat16(), torch.arange(B) % 5, rtol=0.05)


def one_step(tmp_path: Path, body: Callable[[DistCockpit], None], net: nn.Module, loss_fn: Any, **options: Any) -> Any:
    options = {"quantities": [MeanGSNR()], "schedule": every(1), **options}
    with DistCockpit(net, loss_fn, store=tmp_path / "run", **options) as cockpit, cockpit.track(0):
        body(cockpit)
    return open_run(tmp_path / "run")


def data() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 6), nn.Sigmoid(), nn.Linear(6, 5)), torch.randn(B, 6), torch.arange(B) % 5


def test_loss_with_keywords(tmp_path: Path) -> None:
    net, x, y = data()
    loss_fn, batch = nn.CrossEntropyLoss(), reference(net, x, y)
    run = one_step(tmp_path, lambda c: loss_fn(input=net(x), target=y).backward(), net, loss_fn)
    np.testing.assert_allclose(run["mean_gsnr"]["mean_gsnr"], [oracle.mean_gsnr(batch)], rtol=1e-4)


def test_buffers_reused_by_micro_batches(tmp_path: Path) -> None:
    net, x, y = data()
    loss_fn, buffer = nn.CrossEntropyLoss(), torch.empty(4, 6)

    def body(cockpit: DistCockpit) -> None:
        for part, target in zip(x.split(4), y.split(4), strict=True):
            buffer.copy_(part)
            (loss_fn(net(buffer), target) / 2).backward()

    run = one_step(tmp_path, body, net, loss_fn, quantities=[MeanGSNR(), HessTrace()])
    batch = reference(net, x, y)
    np.testing.assert_allclose(run["mean_gsnr"]["mean_gsnr"], [oracle.mean_gsnr(batch)], rtol=1e-4)
    again = one_step(tmp_path / "b", lambda c: loss_fn(net(x), y).backward(), net, loss_fn, quantities=[HessTrace()])
    np.testing.assert_allclose(run["hess_trace"]["trace"], again["hess_trace"]["trace"], rtol=1e-4)


class NormalisesInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x -= 0.5
        return self.inner(x)


def test_input_normalised_in_place(tmp_path: Path) -> None:
    """Replays begin with what the model was given, and leave the user's tensor alone."""
    _, x, y = data()
    net, loss_fn, once = NormalisesInPlace(), nn.CrossEntropyLoss(), x - 0.5
    batch = reference(net.inner, once, y)
    run = one_step(tmp_path / "a", lambda c: loss_fn(net(x), y).backward(), net, loss_fn)
    np.testing.assert_allclose(run["mean_gsnr"]["mean_gsnr"], [oracle.mean_gsnr(batch)], rtol=1e-4)
    assert torch.equal(x, once)
    curvature = [HessTrace(), HessTrace(curvature="diag_ggn_exact", name="ggn")]
    plain = nn.Sequential(net.inner)
    found = one_step(tmp_path / "b", lambda c: loss_fn(net(x), y).backward(), net, loss_fn, quantities=curvature)
    assert torch.equal(x, once - 0.5)
    inputs = once - 0.5
    expected = one_step(
        tmp_path / "c", lambda c: loss_fn(plain(inputs), y).backward(), plain, loss_fn, quantities=curvature
    )
    for name in ("hess_trace", "ggn"):
        np.testing.assert_allclose(found[name]["trace"], expected[name]["trace"], rtol=1e-4)


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


def test_losses_recorded_beside_the_graph(tmp_path: Path) -> None:
    """The factors are those of what is differentiated."""
    net, x, y = data()

    def body(cockpit: DistCockpit) -> None:
        for part, target in zip(x.split(4), y.split(4), strict=True):
            z = net(part)
            cockpit.record_losses(F.cross_entropy(z.detach(), target, reduction="none"))
            (F.cross_entropy(z, target) / 2).backward()

    run = one_step(tmp_path, body, net, None, quantities=[Loss()])
    np.testing.assert_allclose(run["loss"]["loss"], [F.cross_entropy(net(x), y).item()], rtol=1e-6)


def test_layers_frozen_on_the_way(tmp_path: Path) -> None:
    net, x, y = data()
    loss_fn = nn.CrossEntropyLoss()
    with DistCockpit(net, loss_fn, store=tmp_path / "run", schedule=every(1)) as cockpit:
        net[0].weight.requires_grad_(False)
        with cockpit.track(0):
            loss_fn(net(x), y).backward()
    norms = open_run(tmp_path / "run")["grad_norm"]["grad_norm"][0]
    expected = [np.nan if p.grad is None else p.grad.norm() for p in net.parameters()]
    np.testing.assert_allclose(norms, expected, rtol=1e-5)
    assert np.isnan(norms).sum() == 1


@pytest.mark.parametrize("kind", ["affine", "no affine", "frozen"])
def test_batch_norm_without_parameters(tmp_path: Path, kind: str) -> None:
    _, x, y = data()
    norm = nn.BatchNorm1d(6, affine=kind != "no affine")
    norm.requires_grad_(kind == "affine")
    net, loss_fn = nn.Sequential(nn.Linear(6, 6), norm, nn.Linear(6, 5)), nn.CrossEntropyLoss()
    run = one_step(tmp_path, lambda c: loss_fn(net(x), y).backward(), net, loss_fn, track_batchnorm=True)
    assert float(run["mean_gsnr"]["mean_gsnr"][0]) > 1e-3


def test_batch_norm_flags_are_restored(tmp_path: Path) -> None:
    _, x, y = data()
    net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 5)).eval()
    loss_fn = nn.CrossEntropyLoss()
    one_step(tmp_path, lambda c: loss_fn(net(x), y).backward(), net, loss_fn, track_batchnorm=True)
    assert not net[1].training and net[1].running_mean is None


class NoisyLoss(nn.CrossEntropyLoss):
    """Draws random numbers and counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(z + torch.rand(()), y)


def test_a_loss_with_state(tmp_path: Path) -> None:
    net, x, y = data()
    loss_fn = NoisyLoss()
    torch.manual_seed(0)
    one_step(tmp_path, lambda c: loss_fn(net(x), y).backward(), net, loss_fn)
    drawn = torch.rand(2)
    torch.manual_seed(0)
    torch.rand(())
    assert torch.equal(drawn, torch.rand(2)) and loss_fn.calls == 1


class TupleLoss(nn.Module):
    reduction = "mean"

    def forward(self, z: Tensor, y: Tensor) -> tuple[Tensor, int]:
        return F.cross_entropy(z, y), 1


def test_loss_that_is_no_tensor(tmp_path: Path) -> None:
    """What is differentiated is seen, whatever the loss module returns."""
    net, x, y = data()
    loss_fn = TupleLoss()
    run = one_step(tmp_path, lambda c: loss_fn(net(x), y)[0].backward(), net, loss_fn, quantities=[Loss()])
    np.testing.assert_allclose(run["loss"]["loss"], [loss_fn(net(x), y)[0].item()], rtol=1e-6)


@pytest.mark.parametrize(
    "net, y, words",
    [
        (nn.Sequential(nn.Linear(6, 5)), torch.tensor([0, 1, -100, 2, 3, 4, 0, 1]), "ignore_index=-100"),
        (nn.Sequential(nn.Linear(6, 5)), torch.full((B, 5), 0.5), "do not add up to 1"),
    ],
)
def test_targets_that_curvature_cannot_serve(tmp_path: Path, net: nn.Module, y: Tensor, words: str) -> None:
    loss_fn, x = nn.CrossEntropyLoss(), torch.randn(B, 6)
    with pytest.raises(RuntimeError, match=words):
        one_step(tmp_path, lambda c: loss_fn(net(x), y).backward(), net, loss_fn, quantities=[HessTrace()])
    assert not any("diag_h" in vars(p) for p in net.parameters())


def test_padding_and_reuse_that_curvature_cannot_serve(tmp_path: Path) -> None:
    circular = nn.Sequential(nn.Conv1d(4, 3, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(24, 5))
    with pytest.raises(ValueError, match="padding_mode='circular'"):
        DistCockpit(circular, nn.CrossEntropyLoss(), store=tmp_path / "a", quantities=[HessTrace()])
    act, loss_fn = nn.Sigmoid(), nn.CrossEntropyLoss()
    net = nn.Sequential(nn.Linear(6, 6), act, nn.Linear(6, 5), act)
    x, y = torch.randn(B, 6), torch.arange(B) % 5
    with pytest.raises(RuntimeError, match="second call of '1'"):
        one_step(tmp_path / "b", lambda c: loss_fn(net(x), y).backward(), net, loss_fn, quantities=[HessTrace()])


# -- the store ---------------------------------------------------------------------------------------------------------


def test_steps_that_are_numpy_integers(tmp_path: Path) -> None:
    net, x, y = data()
    loss_fn = nn.CrossEntropyLoss()
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=[MeanGSNR()], schedule=every(1)) as cockpit:
        for step in np.arange(3):
            with cockpit.track(step, epoch=np.float32(0.5)):
                loss_fn(net(x), y).backward()
            cockpit.log(step, a=np.float32(1.5))
    run = open_run(tmp_path / "run")
    assert run["mean_gsnr"].sizes["step"] == run["log"].sizes["step"] == 3 and run.attrs["state"] == "closed"


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda c: c.log(1.5, a=1.0), r"log\(step=1.5\)"),
        (lambda c: c.log(True, a=1.0), r"log\(step=True\)"),
        (lambda c: c.log(2**63, a=1.0), "below 2"),
        (lambda c: c.log(0, epoch="x", a=1.0), r"log\(epoch='x'\)"),
        (lambda c: c.track(0, epoch="two"), r"track\(epoch='two'\)"),
        (lambda c: c.track(-1), r"track\(step=-1\)"),
        (lambda c: c.track(0, weight=float("nan")), r"track\(weight=nan\)"),
        (lambda c: c.track(0, batch_size=-2), r"track\(batch_size=-2\)"),
        (lambda c: c.log(0, **{"zarr.json": 1.0}), "zarr.json"),
        (lambda c: c.log(0, **{"..": 1.0}), r"\.\."),
        (lambda c: c.log(0, **{"a\\b": 1.0}), "letters"),
        (lambda c: c.close() or c.log(0, a=1.0), "closed"),
    ],
)
def test_what_log_and_track_refuse(tmp_path: Path, call: Any, words: str) -> None:
    net, _, _ = data()
    with DistCockpit(net, None, store=tmp_path / "run", quantities=[MeanGSNR()]) as cockpit:
        with pytest.raises((TypeError, ValueError, RuntimeError), match=words):
            call(cockpit)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"store_options": StoreOptions(flush_seconds="a")}, "flush_seconds='a'"),
        ({"store_options": StoreOptions(flush_seconds=-1)}, "flush_seconds=-1"),
        ({"store_options": 3}, "store_options=3: must be a StoreOptions"),
        ({"flush_second": 3}, r"no argument 'flush_second'. Did you mean 'flush_seconds'"),
        ({"quantity": 3}, r"no argument 'quantity'. Did you mean 'quantities'"),
        ({"grad_scaler": 3}, "grad_scaler=3"),
        ({"track_batchnorm": "no"}, "track_batchnorm='no'"),
        ({"include": "0"}, "include='0'"),
        ({"exclude": ["nonexistent"]}, "'nonexistent' matches no layer"),
        ({"optimizer": "sgd"}, "optimizer='sgd'"),
    ],
)
def test_what_the_constructor_refuses(tmp_path: Path, options: dict, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        DistCockpit(data()[0], None, store=tmp_path / "run", **options)


def test_relative_path_and_changed_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x, y = data()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    loss_fn = nn.CrossEntropyLoss()
    with DistCockpit(net, loss_fn, store="run", quantities=[MeanGSNR()], schedule=every(1)) as cockpit:
        os.chdir("elsewhere")
        with cockpit.track(0):
            loss_fn(net(x), y).backward()
    assert open_run(tmp_path / "run")["mean_gsnr"].sizes["step"] == 1
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_row_that_does_not_fit_leaves_no_trace(tmp_path: Path) -> None:
    groups = {"a": Group({"x": Field(), "v": Field(("bin",))}, {"bin": 3})}
    store, at = (
        RunStore(FolderKeys(tmp_path / "run"), "w-", groups, {"parameters": {}, "config": {}}),
        {"wall_time": 0.0, "epoch": 0.0, "batch_size": 1},
    )
    store.append("a", 0, {"x": 1.0, "v": np.ones(3)}, at)
    with pytest.raises(ValueError):
        store.append("a", 1, {"x": 1.0, "v": np.ones(4)}, at)
    store.append("a", 2, {"x": 2.0, "v": np.ones(3)}, at)
    store.commit()
    assert list(open_run(tmp_path / "run")["a"].load()["step"].values) == [0, 2]


def test_the_last_row_of_the_log_survives_a_forgotten_close(tmp_path: Path) -> None:
    script = f"""
from torch import nn
from distcockpit import DistCockpit
cockpit = DistCockpit(nn.Linear(2, 2), None, store={str(tmp_path / "run")!r}, quantities="economy")
for step in range(5):
    cockpit.log(step, value=step)
"""
    run_program(sys.executable, "-c", script)
    assert list(open_run(tmp_path / "run")["log"]["value"].values) == [0, 1, 2, 3, 4]


# -- ranks -------------------------------------------------------------------------------------------------------------


def options_differ(rank: int, size: int, group: Any, store: str, what: str) -> str:
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 5))
    smoothing = 0.1 * rank if what == "loss" else 0.0
    options: dict[str, Any] = {"quantities": [MeanGSNR(), GradHist1d()]}
    if what == "order" and rank:
        options["quantities"].reverse()
    if what == "modules":
        options["quantities"] = [OutputGradientGeometry(skip_activation=False)]
        options["exclude"] = ["1"] if rank else None
    if what == "batch norm":
        options["track_batchnorm"] = bool(rank)
    try:
        DistCockpit(net, nn.CrossEntropyLoss(label_smoothing=smoothing), store=store, process_group=group, **options)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "what, word",
    [("loss", "label_smoothing"), ("order", "order"), ("modules", "modules"), ("batch norm", "track_batchnorm")],
)
def test_options_that_differ_between_ranks(ranks: Ranks, tmp_path: Path, what: str, word: str) -> None:
    for said in ranks.run(2, options_differ, str(tmp_path / "run"), what):
        assert "The ranks disagree: rank 1 has" in said and word in said
