"""Closed forms of functions against autograd, sample by sample, and what happens where they do not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from changing_runs import assert_norms, go
from torch import Tensor, nn
from torch.nn import functional as F

from distcockpit import DistCockpit, every, open_run
from distcockpit import quantities as q
from distcockpit.capture.coverage import CALLS, CLOSED
from distcockpit.gradients.embedding import EmbeddingRule
from distcockpit.gradients.rounding import RoundedNorms
from distcockpit.gradients.statistics import GradientSum, SquaredNorms
from distcockpit.quantities import Alpha, MeanGSNR, NormTest


def test_convolutions_that_are_adapted_keep_the_closed_form(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 3, stride=2), nn.Tanh(), nn.Conv2d(3, 2, 3, padding=1))
    net[0].stride, net[0].dilation, net[0].padding = (1, 1), (2, 2), (2, 2)
    chosen = [q.NormTest(), q.GradNorm(), q.InnerTest()]
    assert_norms(*go(tmp_path / "r", net, ((4, 2, 6, 6), (4, 2, 6, 6)), chosen, 1, fallback="error"))


@pytest.mark.parametrize("n_micros", [1, 2])
def test_short_sequences_of_wide_layers_are_not_formed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_micros: int
) -> None:
    """Where two T x T matrices are cheaper than one of the parameter's shape, norms come from them; sums of several
    micro-batches from their factors, that of one from autograd."""
    used = set()
    for kind in (GradientSum, SquaredNorms, RoundedNorms):

        def sequence(self: Any, *args: Any, kind: Any = kind, original: Any = kind.sequence) -> None:
            used.add(kind)
            original(self, *args)

        monkeypatch.setattr(kind, "sequence", sequence)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Flatten(), nn.Linear(80, 3))
    loss_fn, x, y = nn.CrossEntropyLoss(), torch.randn(6, 2, 40), torch.arange(6) % 3
    state = {k: v.clone() for k, v in net.state_dict().items()}
    chosen = [q.NormTest(), q.OrthoTest(), q.GradNorm()]
    with DistCockpit(net, loss_fn, store=tmp_path / "r", quantities=chosen, schedule=every(1)) as cockpit:
        for step in range(3):  # the last one checks nothing
            used.clear()
            with cockpit.track(step):
                for part in range(n_micros):
                    loss_fn(cockpit(x[part::n_micros]), y[part::n_micros]).div(n_micros).backward()
    assert used == ({RoundedNorms} if n_micros == 1 else {GradientSum, SquaredNorms})
    terms = nn.CrossEntropyLoss(reduction="sum")
    batch = oracle.batch(net, state, lambda z, t: (terms(z, t), 1.0), x, y)
    run = open_run(tmp_path / "r")
    for name in ("norm_test", "ortho_test"):
        np.testing.assert_allclose(run[name][name][2], getattr(oracle, name)(batch), rtol=1e-5)
    norms = [np.linalg.norm(g.mean(0)) for g in batch.gradients.values()]
    np.testing.assert_allclose(run["grad_norm"]["grad_norm"][2], norms, rtol=1e-5)


class Words(nn.Module):
    """An embedding, with a padding index or without."""

    def __init__(self, rows: int, padding: int | None) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(rows, 4, padding_idx=padding), nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.embed(x)).flatten(1))


@pytest.mark.parametrize("rows", [3, 50])  # fewer than a sample has words, and more
@pytest.mark.parametrize("padding", [None, 1])
@pytest.mark.parametrize("range", [(-0.5, 0.5), (0.01, 1.0)])
def test_embeddings_are_not_formed(tmp_path: Path, rows: int, padding: int | None, range: tuple) -> None:
    torch.manual_seed(0)
    net, loss_fn = Words(rows, padding), nn.CrossEntropyLoss()
    x, y = torch.randint(rows, (6, 5)), torch.arange(6) % 3
    x[:, 1] = x[:, 0]  # a word that comes twice
    state = {k: v.clone() for k, v in net.state_dict().items()}
    adapted = q.GradHist1d(name="adapted", adapt=q.GradAbsMax(), bins=10)
    chosen = [q.NormTest(), q.MeanGSNR(), q.GradHist1d(range=range, bins=20), adapted]
    options = {"quantities": chosen, "schedule": every(1), "fallback": "error"}
    with DistCockpit(net, loss_fn, store=tmp_path / "r", **options) as cockpit:
        for step in (0, 1, 2):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(EmbeddingRule, "blocks", None)  # no block of it may be asked for
                with cockpit.track(step):
                    loss_fn(cockpit(x), y).backward()
    terms = nn.CrossEntropyLoss(reduction="sum")
    batch = oracle.batch(net, state, lambda z, t: (terms(z, t), 1.0), x, y)
    run = open_run(tmp_path / "r")
    for name in ("norm_test", "mean_gsnr"):
        np.testing.assert_allclose(run[name][name][-1], getattr(oracle, name)(batch), rtol=1e-4)
    counts = oracle.grad_hist_1d(batch, oracle.edges(*range, 20))
    np.testing.assert_array_equal(run["grad_hist_1d"]["counts"][-1], counts)
    largest = max(np.abs(g).max() for g in batch.gradients.values())
    np.testing.assert_allclose(run["adapted"]["edges"][-1, -1], largest, rtol=1e-5)
    assert run["adapted"]["counts"][-1].sum() == counts.sum()


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_the_longer_end_of_a_padding(tmp_path: Path) -> None:
    net, chosen = nn.Sequential(nn.Conv1d(2, 3, 4, dilation=3, padding="same")), [q.NormTest(), q.GradNorm()]
    assert_norms(*go(tmp_path / "r", net, ((4, 2, 9), (4, 3, 9)), chosen, 2, fallback="error"))


N = 5


Forward = Callable[[Any, Tensor], Tensor]


class Model(nn.Module):
    """Mixes the channels of images ``[N, 4, 6, 6]``, and does with them and two parameters what a test says."""

    def __init__(self, forward: Forward, weight: tuple[int, ...], bias: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix = nn.Conv2d(4, 4, 1)
        self.w = nn.Parameter(0.3 * torch.randn(weight))
        self.b = nn.Parameter(0.3 * torch.randn(bias))
        self.register_buffer("fixed", torch.randn(weight))
        self.register_buffer("mean", torch.linspace(-0.1, 0.2, 4))
        self.register_buffer("variance", torch.linspace(0.5, 2, 4))
        self.used = forward

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.used(self, self.mix(x))).flatten(1)
        return z @ torch.cos(torch.arange(z.shape[1] * 3.0).view(-1, 3))


def convolved(**options: Any) -> Forward:
    return lambda m, z: F.conv2d(z, m.w, m.b, **options)


def back(**options: Any) -> Forward:
    return lambda m, z: F.conv_transpose2d(z, m.w, m.b, **options)


def words(z: Tensor) -> Tensor:
    """A word for each place, ``[N, 6, 6]``."""
    return (7 * z[:, 0].detach().sigmoid()).long()


Row = tuple[Forward, tuple[int, ...], tuple[int, ...]]


FORMS: dict[str, Row] = {
    "linear": (lambda m, z: F.linear(z, m.w, m.b), (3, 6), (3,)),
    "linear, keywords": (lambda m, z: F.linear(input=z, weight=m.w, bias=m.b), (3, 6), (3,)),
    "linear, transposed weight": (lambda m, z: F.linear(z, m.w.t(), m.b), (6, 3), (3,)),
    "linear, one row for each sample": (lambda m, z: F.linear(z.flatten(1), m.w, m.b), (3, 144), (3,)),
    "linear, frozen weight": (lambda m, z: F.linear(z, m.fixed, m.b) * m.w[:1, 0].exp(), (3, 6), (3,)),
    "matmul": (lambda m, z: z @ m.w + m.b, (6, 3), (3,)),
    "matmul, transposed": (lambda m, z: torch.matmul(z, m.w.mT) + m.b, (3, 6), (3,)),
    "matmul, axes exchanged": (lambda m, z: z.matmul(m.w.transpose(-1, 0)) + m.b, (3, 6), (3,)),
    "addmm": (lambda m, z: torch.addmm(m.b, z.flatten(1), m.w), (144, 3), (3,)),
    "addmm, frozen bias": (lambda m, z: torch.addmm(m.fixed[0], z.flatten(1), m.w) + m.b, (144, 3), (3,)),
    "mm of folded rows": (lambda m, z: (z.view(-1, 6).mm(m.w) + m.b).view(len(z), -1), (6, 3), (3,)),
    "addmm of folded rows": (lambda m, z: torch.addmm(m.b, z.view(-1, 6), m.w).view(len(z), -1), (6, 3), (3,)),
    "embedding": (lambda m, z: z.mean(1)[..., None] * F.embedding(words(z), m.w) + m.b, (7, 3), (3,)),
    "embedding, padding": (
        lambda m, z: z.mean(1)[..., None] * F.embedding(words(z), m.w, padding_idx=3) + m.b,
        (7, 3),
        (3,),
    ),
    "embedding, padding from behind": (
        lambda m, z: z.mean(1)[..., None] * F.embedding(words(z), m.w, -4) + m.b,
        (7, 3),
        (3,),
    ),
    "convolution": (convolved(), (3, 4, 3, 2), (3,)),
    "convolution, stride, padding, dilation": (
        convolved(stride=(2, 1), padding=(1, 2), dilation=2),
        (3, 4, 3, 2),
        (3,),
    ),
    "convolution, groups": (convolved(groups=2, padding=1), (6, 2, 3, 3), (6,)),
    "convolution, same": (convolved(padding="same", dilation=(3, 1)), (3, 4, 2, 4), (3,)),
    "convolution, valid": (convolved(padding="valid"), (3, 4, 2, 3), (3,)),
    "convolution along one axis": (lambda m, z: F.conv1d(z.flatten(2), m.w, m.b, 2, 1), (3, 4, 3), (3,)),
    "convolution along three axes": (
        lambda m, z: F.conv3d(z.view(-1, 2, 2, 6, 6), m.w, m.b, padding=1),
        (3, 2, 2, 3, 3),
        (3,),
    ),
    "transposed convolution": (back(), (4, 3, 3, 2), (3,)),
    "transposed convolution, stride, padding": (back(stride=(2, 3), padding=(1, 0)), (4, 3, 3, 2), (3,)),
    "transposed convolution, output padding": (
        back(stride=2, padding=1, output_padding=(1, 0), dilation=(1, 2)),
        (4, 3, 3, 3),
        (3,),
    ),
    "transposed convolution, wide output padding": (back(stride=1, output_padding=2, dilation=3), (4, 3, 2, 2), (3,)),
    "transposed convolution, groups": (back(stride=2, groups=2), (4, 3, 3, 3), (6,)),
    "transposed convolution along one axis": (
        lambda m, z: F.conv_transpose1d(z.flatten(2), m.w, m.b, 2, 1, 1, 1, 2),
        (4, 3, 5),
        (3,),
    ),
    "layer norm": (lambda m, z: F.layer_norm(z, (6, 6), m.w, m.b, 0.1), (6, 6), (6, 6)),
    "rms norm": (lambda m, z: F.rms_norm(z, (6,), m.w, eps=0.1) + m.b, (6,), (6,)),
    "group norm": (lambda m, z: F.group_norm(z, 2, m.w, m.b, eps=0.1), (4,), (4,)),
    "batch norm": (lambda m, z: F.batch_norm(z, m.mean, m.variance, m.w, m.b, eps=0.1), (4,), (4,)),
    "instance norm": (lambda m, z: F.instance_norm(z, weight=m.w, bias=m.b, eps=0.1), (4,), (4,)),
    "elements": (lambda m, z: m.w * z + m.b, (4, 1, 6), (1, 1, 6, 1)),
    "elements, of other kinds": (lambda m, z: torch.sub(z, m.b).mul(m.w), (1,), (6,)),
    "elements, from a parameter": (lambda m, z: torch.sub(m.b, z) * m.w, (6, 6), (4, 1, 1)),
    "elements of folded rows": (lambda m, z: (z.flatten(0, 2) * m.w + m.b).view_as(z), (6,), (1, 6)),
}


AGAIN: dict[str, Row] = {  # what has no closed form is run again by itself
    "addmm with factors": (lambda m, z: torch.addmm(m.b, z.flatten(1), m.w, beta=2, alpha=3), (144, 3), (3,)),
    "add with a factor": (lambda m, z: torch.add(z, m.b, alpha=3) * m.w.exp(), (6,), (6,)),
    "weight of all samples": (lambda m, z: z * m.w[:1].expand(len(z), 4, 1, 6) - m.b[None].sin(), (1, 4, 1, 6), (6,)),
    "a weight in front of the batch": (
        lambda m, z: (z.flatten(2).transpose(0, 1) * m.w).transpose(0, 1) * m.b.exp(),
        (4, 1, 1),
        (36,),
    ),
    "broadcast input": (lambda m, z: z.mean((1, 2, 3), keepdim=True) * m.w + m.b.exp(), (4, 6), (6,)),
    "norm of one's own weight": (lambda m, z: F.layer_norm(z, (6,), m.w.exp(), m.b), (6,), (6,)),
    "norm of weights that are made of one": (
        lambda m, z: F.layer_norm(z, (6,), m.w, 2 * m.w) * m.b.exp(),
        (6,),
        (6,),
    ),
    "one weight twice": (lambda m, z: F.layer_norm(z, (6,), m.w, m.w) * m.b.exp(), (6,), (6,)),
    "division": (lambda m, z: z / (2 + m.w) + m.b / (3 + z), (6,), (6,)),
    "statistics of the batch, mapped": (lambda m, z: torch.einsum("nchw,wo->ncho", z, m.w) * m.b.exp(), (6, 3), (3,)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("name", [*FORMS, *AGAIN])
def test_individual_gradients(tmp_path: Path, name: str) -> None:
    net, loss_fn = Model(*(FORMS | AGAIN)[name]), nn.CrossEntropyLoss()
    optimizer, expected = torch.optim.SGD(net.parameters(), lr=0.1), []
    quantities = [MeanGSNR(), NormTest(), Alpha()]
    with DistCockpit(net, loss_fn, optimizer, store=tmp_path / "run", quantities=quantities, schedule=every(1)) as c:
        for step in range(3):
            x, y = images(step), torch.arange(N) % 3
            batch = individual(net, x, y)
            expected.append((oracle.mean_gsnr(batch), oracle.norm_test(batch)))
            optimizer.zero_grad()
            with c.track(step):
                loss_fn(c(x), y).backward()
            optimizer.step()
        routes = {row.parameter: row.route for row in c.coverage()}
    run = open_run(tmp_path / "run")
    alone = along(Model(*(FORMS | AGAIN)[name]), tmp_path / "alone")
    # One of the slopes may be nearly zero, and then is what rounding leaves of terms of the other's size.
    np.testing.assert_allclose(run["alpha"]["slope_end"], alone, rtol=1e-4, atol=1e-6 * np.abs(alone).max())
    found = np.stack([run["mean_gsnr"]["mean_gsnr"], run["norm_test"]["norm_test"]], 1)
    np.testing.assert_allclose(found, expected, rtol=2e-4)
    assert (run["alpha"]["status"] <= 1).all()
    assert routes["w"] == (CLOSED if name in FORMS and name != "linear, frozen weight" else CALLS)
    assert routes["b"] == CLOSED or (name in AGAIN and routes["b"] == CALLS)


def along(net: nn.Module, store: Path) -> np.ndarray:
    """The same slopes where nothing else wants individual gradients, so that none are formed."""
    loss_fn, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1)
    with DistCockpit(net, loss_fn, optimizer, store=store, quantities=[Alpha()], schedule=every(1)) as cockpit:
        for step in range(3):
            optimizer.zero_grad()
            with cockpit.track(step):
                loss_fn(cockpit(images(step)), torch.arange(N) % 3).backward()
            optimizer.step()
    return open_run(store)["alpha"]["slope_end"].values


def images(step: int) -> Tensor:
    return torch.randn(N, 4, 6, 6, generator=torch.Generator().manual_seed(step))


def individual(net: nn.Module, x: Tensor, y: Tensor) -> oracle.Batch:
    """What single samples give."""
    parameters = dict(net.named_parameters())
    rows = [
        torch.autograd.grad(F.cross_entropy(net(x[k : k + 1]), y[k : k + 1]), [*parameters.values()]) for k in range(N)
    ]
    gradients = {name: np.stack([row[k].double().numpy() for row in rows]) for k, name in enumerate(parameters)}
    losses = F.cross_entropy(net(x), y, reduction="none")
    return oracle.Batch(losses.detach().double().numpy(), gradients, {}, {})
