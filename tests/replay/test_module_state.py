"""Second passes leave no trace: random numbers, buffers, attributes, caches."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from odd_loops import check_norm_test, each, linear, six_samples
from own_quantities import Moments
from repeated_runs import CLASSES, SAMPLES, WIDTH
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from distcockpit import DistCockpit, every, open_run
from distcockpit.quantities import HessMaxEV, Quantity


@pytest.mark.filterwarnings("ignore")  # MaskedTensor is a prototype
@pytest.mark.parametrize("kind", ["masked argument", "sparse output"])
def test_tensors_without_plain_memory(tmp_path: Path, kind: str) -> None:
    from torch.masked import masked_tensor

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear()

        def forward(self, x: Any) -> Any:
            if kind == "sparse output":
                z = self.inner(x)
                return z, z.to_sparse()
            return self.inner(x.get_data() * x.get_mask())

    net, loss_fn, (x, y) = Net(), nn.CrossEntropyLoss(), six_samples()

    def body(c: Any) -> None:
        z = c(x)[0] if kind == "sparse output" else c(masked_tensor(x, x > 0))
        loss_fn(z, y).backward()

    check_norm_test(tmp_path, net, loss_fn, body, each(net.inner(x if kind == "sparse output" else x * (x > 0)), y))


class Base(nn.Module):
    """Positions make the step run again for the parent, and all these keep something."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.positions, self.head = nn.Linear(6, 6), nn.Embedding(1, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x)) + self.positions.weight[0] * self.scale(x))

    def scale(self, x: Tensor) -> Tensor | float:
        return 1.0


class Counter(Base):
    calls = 0

    def scale(self, x: Tensor) -> float:
        self.calls += 1
        return 1.0 + self.calls


class Hidden(Base):
    """Remembers its latest output, and its mean as a plain tensor that it writes to in place."""

    state: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.seen = torch.zeros(6), []

    def scale(self, x: Tensor) -> Tensor:
        self.state = x.detach() if self.state is None else 0.5 * self.state + x.detach()
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        self.seen.append(float(self.mean.sum()))
        return self.state + self.mean + len(self.seen)


class Noise(Base):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def scale(self, x: Tensor) -> float:
        drawn = torch.rand((), generator=self.generator)
        return float(drawn) + random.random() + np.random.rand() + float(torch.rand(()))


class FirstBatch(nn.Module):
    """Takes its initial scale from the first batch, into a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 5)
        self.start, self.done = nn.Parameter(torch.ones(6)), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.done:
            self.start.data.copy_(1 / x.std(0))
            self.done = True
        return self.head(torch.tanh(self.first(x * self.start)))


class Momentum(nn.Module):
    """An average of weights, written in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.slow, self.head = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        for mine, other in zip(self.slow.parameters(), self.first.parameters(), strict=True):
            mine.data.mul_(0.9).add_(other.data, alpha=0.1)
        return self.head(torch.tanh(self.first(x)) + self.slow(x).detach())


class Twins(nn.Module):
    """One module at two places, called on what has a batch and on what has none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([nn.Linear(6, 6)] * 2), nn.Linear(6, 5)
        self.register_buffer("grid", torch.linspace(-1, 1, 24).reshape(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + layer(self.grid).sum(0)
        return self.head(x)


class Picture(Base):
    """Keeps a gradient by a hook, as saliency maps do."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = None

    def scale(self, x: Tensor) -> Tensor:
        z = self.first(x)
        if z.requires_grad:
            z.register_hook(lambda g: setattr(self, "kept", g))
        return z


MODELS: dict[str, Callable[[], nn.Module]] = {
    "counter": Counter,
    "hidden state": Hidden,
    "random numbers of all kinds": Noise,
    "data-dependent start": FirstBatch,
    "momentum encoder": Momentum,
    "one module at two places": Twins,
    "hook that keeps a gradient": Picture,
}


def train_repeated(model: nn.Module, tmp_path: Path | None, quantities: list[Quantity]) -> list[Any]:
    """Three steps; the individual gradients that one batched pass has, before each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for kind in (torch.manual_seed, random.seed, np.random.seed):
        kind(1)
    loss_fn = nn.CrossEntropyLoss()
    options = {"quantities": quantities, "schedule": every(1), "enabled": tmp_path is not None}
    found = []
    with DistCockpit(model, loss_fn, optimizer, store=(tmp_path or Path()) / "run", **options) as cockpit:
        for step in range(3):
            data = torch.Generator().manual_seed(step)
            x, y = torch.randn(SAMPLES, WIDTH, generator=data), torch.arange(SAMPLES) % CLASSES
            optimizer.zero_grad()
            with cockpit.track(step):
                z = cockpit(x)
                losses = F.cross_entropy(z, y, reduction="none")
                loss = loss_fn(z, y)
                if tmp_path is None:
                    named = {k: p for k, p in model.named_parameters() if p.requires_grad}
                    rows = [
                        torch.autograd.grad(each, list(named.values()), retain_graph=True, materialize_grads=True)
                        for each in losses
                    ]
                    stacked = {k: torch.stack([r[i] for r in rows]).double().numpy() for i, k in enumerate(named)}
                    found.append(oracle.Batch(losses.detach().double().numpy(), stacked, {}, {}))
                    if isinstance(model, Picture):
                        model.kept = None
                loss.backward()
            optimizer.step()
    left = [t.clone() for t in model.state_dict().values()]
    plain = (int, float, list, bool, Tensor)
    kept = [str({k: v for k, v in vars(m).items() if type(v) in plain}) for m in model.modules()]
    return [found, [*left, torch.get_rng_state()], [random.random(), np.random.rand(), kept]]


@pytest.mark.parametrize("name", MODELS)
def test_what_a_model_keeps(tmp_path: Path, name: str) -> None:
    results = []
    for path in (None, tmp_path):
        torch.manual_seed(7)
        results.append(train_repeated(MODELS[name](), path, [Moments()]))
    (expected, plain, others), (_, tracked, same) = results
    assert all(torch.equal(a, b) for a, b in zip(plain, tracked, strict=True)) and others == same
    rows = open_run(tmp_path / "run")["moments"]
    for step, batch in enumerate(expected):
        squares = [(g**2).sum() / SAMPLES for g in batch.gradients.values()]
        np.testing.assert_allclose(rows["mean_of"].sel(step=step), squares, rtol=1e-4, atol=1e-9)


@pytest.mark.smoke
def test_parametrizations_that_are_cached(tmp_path: Path) -> None:
    net, loss_fn = parametrizations.weight_norm(nn.Linear(6, 5)), nn.CrossEntropyLoss()
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=[Moments()], schedule=every(1)) as cockpit:
        with cockpit.track(0), parametrize.cached():
            loss_fn(cockpit(torch.randn(SAMPLES, 6)), torch.arange(SAMPLES) % 5).backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in net.parameters())


@pytest.mark.smoke
def test_a_forward_that_empties_its_input(tmp_path: Path) -> None:
    class Pops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 5)

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.inner(batch.pop("x"))

    net, loss_fn = Pops(), nn.CrossEntropyLoss()
    chosen = [Moments(), HessMaxEV(tolerance=1e-2)]
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=chosen, schedule=every(1)) as cockpit:
        with cockpit.track(0):
            loss_fn(cockpit({"x": torch.randn(SAMPLES, 6)}), torch.arange(SAMPLES) % 5).backward()
    assert np.isfinite(open_run(tmp_path / "run")["hess_max_ev"]["hess_max_ev"]).all()


class Pair:
    """An output that torch does not know as a tree."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.first, self.second = first, second


@pytest.mark.smoke
def test_odd_inputs_and_outputs(tmp_path: Path) -> None:
    """Inference tensors have no version, nested tensors no shape; neither stops the training."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.act = nn.Linear(6, 5), nn.ReLU()

        def forward(self, x: Tensor) -> Pair:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                nested = self.act(torch.nested.nested_tensor(list(x.detach()), layout=torch.strided))
            z = self.inner(x)
            return Pair(z, nested)

    with torch.inference_mode():
        x = torch.randn(SAMPLES, 6)
    net, loss_fn = Odd(), nn.CrossEntropyLoss()
    net.inner.register_forward_pre_hook(lambda module, args: (args[0].clone(),))
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=[Moments()], schedule=every(1)) as cockpit:
        for step in range(2):
            with cockpit.track(step):
                loss_fn(cockpit(x).first, torch.arange(SAMPLES) % 5).backward()
    assert (open_run(tmp_path / "run")["moments"]["mean_of"] > 0).all()


class Counting(nn.Module):
    """Counts its calls in a tensor inside a dict, in a list of one, and in an array of NumPy's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))  # the scale takes a slow route
        self.kept = {"deep": {"seen": torch.zeros(1)}, "listed": [torch.zeros(1)]}
        self.array = np.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept["deep"]["seen"] += 1
        self.kept["listed"][0] += 1
        self.array += 1
        return self.inner(x) * self.scale * (1 + self.array[0])


def test_what_containers_hold_is_as_before(tmp_path: Path) -> None:
    net, loss_fn = nn.Sequential(Counting(), nn.Linear(4, 3)), nn.CrossEntropyLoss()
    x, y = torch.randn(20, 4), torch.arange(20) % 3
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=[Moments()], schedule=every(1)) as cockpit:
        for step in range(3):
            with cockpit.track(step):
                loss_fn(cockpit(x), y).backward()
            counts = net[0].kept["deep"]["seen"], net[0].kept["listed"][0], net[0].array
            assert [float(count[0]) for count in counts] == [step + 1] * 3
