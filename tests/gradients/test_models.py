"""Architectures: every parameter's individual gradients against autograd, sample by sample."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import architectures
import numpy as np
import oracle
import pytest
import torch
from architectures import CASES
from own_quantities import Moments
from ranks import Ranks
from small_batches import B, reference
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, prune

from distcockpit import DistCockpit, every, open_run
from distcockpit.capture.coverage import CALLS
from distcockpit.gradients import parts
from distcockpit.quantities import (
    Alpha,
    GradHist1d,
    InnerTest,
    MeanGSNR,
    OutputActivation,
    OutputGradientGeometry,
    OutputNorm,
    Quantity,
)

SHARDINGS = {"one": [6], "uneven 2": [4, 2], "uneven 4": [3, 1, 1, 1]}


STEPS = 2  # the second one runs with what the first one learned


Report = tuple[list[tuple[np.ndarray, dict[str, np.ndarray]]], dict[str, tuple[str, ...]]]


def train_architecture(rank: int, size: int, group: Any, name: str, store: str, shards: list[int]) -> Report:
    """Two tracked steps; returns the individual gradients of this rank's samples, and the routes."""
    case, net = CASES[name], architectures.built(name)
    model: Any = net if group is None else DistributedDataParallel(net, process_group=group, **case.ddp)
    first, loss_fn, found = sum(shards[:rank]), case.loss_fn(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    chosen = [Moments(), MeanGSNR(), InnerTest(), GradHist1d(range=(-0.5, 0.5), bins=41)]
    options = {"quantities": chosen, "schedule": every(1), **case.options}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")  # DDP's own
        with DistCockpit(model, loss_fn, store=store, **options) as cockpit:
            for step in range(STEPS):
                batch = architectures.data(name, step, sum(shards))
                batch = architectures.part(name, batch, slice(first, first + shards[rank]))
                torch.manual_seed(10 * step + rank)
                buffers = {k: b.clone() for k, b in net.named_buffers()}
                losses, gradients = architectures.individual_gradients(name, net, batch, shards[rank])
                for k, b in net.named_buffers():
                    b.data.copy_(buffers[k])
                found.append((losses.numpy(), {k: g.numpy() for k, g in gradients.items()}))
                torch.manual_seed(10 * step + rank)
                optimizer.zero_grad()
                with cockpit.track(step):
                    case.train(cockpit, batch, loss_fn).backward()
                optimizer.step()
            routes = special(cockpit)
    return found, routes


def special(cockpit: DistCockpit) -> dict[str, tuple[str, ...]]:
    """The parameters that take a slow route, and those for which a module is run as a whole."""
    rows = list(cockpit.coverage())
    return {
        "slow": tuple(sorted(row.parameter for row in rows if row.route == "slow exact fallback")),
        "whole": tuple(sorted(row.parameter for row in rows if row.route == "module run again")),
        "again": tuple(sorted(row.parameter for row in rows if row.route == CALLS)),
    }


AGAIN = {
    "TransformerEncoder, dropout": (),
    "LoRA": (),
    "Llama": (),
    "nanoGPT": ("transformer.wpe.weight",),
    "GPT-2": ("transformer.wpe.weight",),
    "ViT": ("vit.embeddings.cls_token",),
}
"""Of models whose speed is that of closed forms: the parameters whose calls are run again on their own."""


def expected(name: str, routes: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    again = AGAIN.get(name, routes["again"])
    return {"slow": CASES[name].slow, "whole": CASES[name].whole, "again": again}


def close(actual: Any, expected: Any, case: architectures.Case) -> None:
    scale = float(np.abs(expected).max())
    assert scale > 0 and np.isfinite(expected).all()
    np.testing.assert_allclose(actual, expected, rtol=case.rtol, atol=case.rtol * 1e-3 * scale)


def check(name: str, ranks: Ranks | None, store: str, shards: list[int]) -> dict[str, tuple[str, ...]]:
    case = CASES[name]
    if len(shards) == 1 or ranks is None:
        reports = [train_architecture(0, 1, None, name, store, shards)]
    else:
        reports = ranks.run(len(shards), train_architecture, name, store, shards)
    run = open_run(store)
    for step in range(STEPS):
        parts = [found[step] for found, _ in reports]
        gradients = {k: np.concatenate([g[k] for _, g in parts]) for k in parts[0][1]}
        batch = oracle.Batch(np.concatenate([losses for losses, _ in parts]), gradients, {}, {})
        rows = {group: run[group].sel(step=step) for group in ("moments", "mean_gsnr", "inner_test", "grad_hist_1d")}
        assert list(rows["moments"]["parameter"].values) == list(gradients)
        close(rows["moments"]["mean_of"], [(g**2).sum() / batch.n for g in gradients.values()], case)
        close(rows["moments"]["of_mean"], [(g.mean(0) ** 2).sum() for g in gradients.values()], case)
        np.testing.assert_allclose(rows["mean_gsnr"]["mean_gsnr"], oracle.mean_gsnr(batch), rtol=10 * case.rtol)
        np.testing.assert_allclose(rows["inner_test"]["inner_test"], oracle.inner_test(batch), rtol=10 * case.rtol)
        counts = oracle.grad_hist_1d(batch, oracle.edges(-0.5, 0.5, 41))
        strays = np.abs(rows["grad_hist_1d"]["counts"].values - counts).sum() / counts.sum()
        assert strays < 20 * case.rtol, strays
    return reports[0][1]


def shardings(place: int, case: architectures.Case) -> list[str]:
    """One process and 4 ranks; two ranks, which add nothing but time, for every fourth model."""
    return ["one", *(["uneven 4"] if case.ranks else []), *(["uneven 2"] if case.ranks and place % 4 == 0 else [])]


@pytest.mark.parametrize(
    "name, sharding", [(name, k) for place, (name, case) in enumerate(CASES.items()) for k in shardings(place, case)]
)
def test_model(ranks: Ranks, tmp_path: Path, monkeypatch: Any, name: str, sharding: str) -> None:
    monkeypatch.setattr(parts, "FEW", 2)  # so that in one process, parts of the batch are run
    routes = check(name, ranks, str(tmp_path / "run"), SHARDINGS[sharding])
    assert routes == expected(name, routes)


@pytest.mark.parametrize("name", CASES)
def test_many_steps(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The same batch, no learning: all rows are equal, also those of the first step; no alarm, no other route."""
    case, net, loss_fn = CASES[name], architectures.built(name), CASES[name].loss_fn()
    batch = architectures.data(name, 0, architectures.LENGTH)  # as many samples as positions
    outputs = [OutputNorm(), OutputActivation(), OutputGradientGeometry()]
    options = {"quantities": [Moments(), *outputs], "schedule": every(1), **case.options}
    with caplog.at_level("WARNING"), DistCockpit(net, loss_fn, store=tmp_path / "run", **options) as cockpit:
        for step in range(18):
            buffers = {k: b.clone() for k, b in net.named_buffers()}
            torch.manual_seed(1)
            with cockpit.track(step):
                case.train(cockpit, batch, loss_fn).backward()
            for k, b in net.named_buffers():
                b.data.copy_(buffers[k])
        routes = special(cockpit)
    assert routes == expected(name, routes)
    assert not [r for r in caplog.records if "slow exact" not in r.getMessage()], caplog.text
    run = open_run(tmp_path / "run")
    for group in ("moments", "output_norm", "output_activation", "output_gradient_geometry"):
        for field, rows in run[group].data_vars.items():
            if field not in ("correlation", "previous_step"):
                first = np.broadcast_to(rows[:1], rows.shape)
                np.testing.assert_allclose(rows, first, rtol=case.rtol, atol=1e-7, err_msg=field)


@pytest.mark.parametrize("precision", ["autocast", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["ConvNeXt", "ResNet, track_batchnorm", "GPT-2", "BERT", "T5", "residual block in place"]
)
def test_rounding_is_no_hole(tmp_path: Path, name: str, precision: str) -> None:
    """Gradients that are zero but for rounding, as those of attention's key biases, raise no alarm."""
    case, net = CASES[name], architectures.built(name)
    net, loss_fn = net.bfloat16() if precision == "bfloat16" else net, case.loss_fn()
    options = {"quantities": [Moments()], "schedule": every(1), **case.options}
    with DistCockpit(net, loss_fn, store=tmp_path / "run", **options) as cockpit:
        for step in range(3):
            batch = architectures.data(name, step, 6)
            if precision == "bfloat16":
                batch = {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch.items()}
            with cockpit.track(step), torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
                case.train(cockpit, batch, loss_fn).backward()
        routes = special(cockpit)
    assert routes == expected(name, routes)
    assert np.isfinite(open_run(tmp_path / "run")["moments"]["mean_of"]).all()


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
