"""Loops and losses beside the plain one: each case is one way to say which samples weigh what."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cases
import numpy as np
import oracle
import pytest
import torch
from ranks import Ranks
from steps import run_steps
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from distcockpit import DistCockpit, every, open_run
from distcockpit.quantities import Alpha, GradHist1d, MeanGSNR, OutputGradientGeometry

N = cases.N


def mean_terms(z: Tensor, y: Tensor) -> tuple[Tensor, float]:
    return cases._nll(z, y)[0], 1


def check(store: Path, model: nn.Module, states: list[dict], batches: list[tuple[Tensor, Tensor]], terms: Any) -> None:
    """GSNR, histogram, geometry and (if stored) alpha of every step against the oracle."""
    run = open_run(store)
    pooled = [oracle.batch(model, state, terms, x, y) for state, (x, y) in zip(states, batches, strict=True)]
    assert list(run["mean_gsnr"]["step"].values) == list(range(len(pooled)))
    for step, batch in enumerate(pooled):
        np.testing.assert_allclose(run["mean_gsnr"]["mean_gsnr"].sel(step=step), oracle.mean_gsnr(batch), rtol=1e-4)
        row = run["grad_hist_1d"].to_dataset().sel(step=step)
        moved = np.abs(np.cumsum(row["counts"]) - np.cumsum(oracle.grad_hist_1d(batch, row["edges"].values)))
        assert row["counts"].sum() == batch.flat.size and moved.max() <= 2
        geometry = run["output_gradient_geometry"].to_dataset().sel(step=step)
        for layer, (norm, _) in oracle.output_geometry(batch, None).items():
            if layer in geometry["layer"]:
                np.testing.assert_allclose(geometry["norm"].sel(layer=layer), norm, rtol=1e-4)
    if "alpha" in run.children:
        for step in range(len(pooled) - 1):
            row, expected = run["alpha"].to_dataset().sel(step=step), oracle.alpha(*pooled[step : step + 2])
            np.testing.assert_allclose(row["alpha"], expected["alpha"], rtol=1e-3, atol=1e-3)
            np.testing.assert_allclose(row["f_start"], expected["f_start"], rtol=1e-5)
            np.testing.assert_allclose(row["slope_end"], expected["slope_end"], rtol=1e-4)


def quantities(alpha: bool = True) -> list[Any]:
    first = [MeanGSNR(), GradHist1d(range=(-0.5, 0.5), bins=40), OutputGradientGeometry()]
    return [*first, Alpha()] if alpha else first


def train_sigmoid(
    store: Path,
    step_function: Callable[[DistCockpit, nn.Module, Tensor, Tensor], None],
    model: nn.Module | None = None,
    loss_fn: nn.Module | None = None,
    alpha: bool = True,
    target: str = "mean",
    **options: Any,
) -> tuple[nn.Module, list[dict], list[tuple[Tensor, Tensor]]]:
    """The model, its states before each step, and the batches."""
    net = cases.initialised("sigmoid") if model is None else model
    done = run_steps(
        store,
        net,
        partial(cases.data, "tokens" if target == "token_mean" else "sigmoid", target),
        loss_fn=loss_fn,
        body=lambda cockpit, x, y: step_function(cockpit, net, x, y),
        rate=0.3,
        **{"quantities": quantities(alpha), **options},
    )
    return net, done.states, done.batches


def test_functional_loss(tmp_path: Path) -> None:
    def step(cockpit: DistCockpit, net: nn.Module, x: Tensor, y: Tensor) -> None:
        F.cross_entropy(net(x), y).backward()

    check(tmp_path / "r", *train_sigmoid(tmp_path / "r", step, alpha=False), mean_terms)


@pytest.mark.parametrize("reduce", ["mean", "sum", "factor", "micro"])
def test_recorded_losses(tmp_path: Path, reduce: str) -> None:
    def step(cockpit: DistCockpit, net: nn.Module, x: Tensor, y: Tensor) -> None:
        sizes = [15, 9] if reduce == "micro" else [N]
        for part, target in zip(x.split(sizes), y.split(sizes), strict=True):
            losses = F.cross_entropy(net(part), target, reduction="none")
            cockpit.record_losses(losses)
            {"mean": losses.mean(), "sum": losses.sum() / 7, "factor": losses.mean() * 3, "micro": losses.mean() / 2}[
                reduce
            ].backward()

    factor = {"sum": N / 7, "factor": 3}.get(reduce, 1)

    def terms(z: Tensor, y: Tensor) -> tuple[Tensor, float]:
        return mean_terms(z, y)[0] * factor, 1

    check(tmp_path / "r", *train_sigmoid(tmp_path / "r", step), terms)


def test_importance_weights_are_part_of_the_individual_loss(tmp_path: Path) -> None:
    weights, scaler = torch.linspace(0.5, 2, N), torch.amp.GradScaler("cpu", init_scale=64)

    def step(cockpit: DistCockpit, net: nn.Module, x: Tensor, y: Tensor) -> None:
        losses = F.cross_entropy(net(x), y, reduction="none")
        cockpit.record_losses(losses)
        scaler.scale((losses * weights).sum() / weights.sum()).backward()
        for p in net.parameters():
            p.grad /= 64

    def terms(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        weight = weights[position.pop(0) % N].double()
        return cases._nll(z, y)[0] * weight, weight

    position = list(range(10 * N))
    check(tmp_path / "r", *train_sigmoid(tmp_path / "r", step), terms)


class OwnLoss(nn.Module):
    """A model that computes its loss, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = cases.initialised("sigmoid")

    def forward(self, *, inputs: dict[str, Tensor], labels: Tensor | None = None) -> Any:
        z = self.net(inputs["x"])
        return {"logits": z, "loss": None if labels is None else F.cross_entropy(z, labels)}


@pytest.mark.parametrize("factor", [1.0, 1 / 2, 1 / 6])
def test_loss_inside_the_model(tmp_path: Path, factor: float) -> None:
    """Two micro-batches, whose losses are added up, averaged, or averaged and multiplied by a third."""

    def step(cockpit: DistCockpit, net: nn.Module, x: Tensor, y: Tensor) -> None:
        for part, target in zip(x.split([15, 9]), y.split([15, 9]), strict=True):
            (cockpit(inputs={"x": part}, labels=target)["loss"] * factor).backward()

    net, states, batches = train_sigmoid(tmp_path / "r", step, OwnLoss(), alpha=False)
    states = [{k.removeprefix("net."): v for k, v in s.items()} for s in states]

    run = open_run(tmp_path / "r")

    def terms(z: Tensor, y: Tensor) -> tuple[Tensor, float]:
        return mean_terms(z, y)[0] * min(1, 2 * factor), 1

    pooled = [oracle.batch(net.net, s, terms, *b) for s, b in zip(states, batches, strict=True)]
    np.testing.assert_allclose(run["mean_gsnr"]["mean_gsnr"], [oracle.mean_gsnr(b) for b in pooled], rtol=1e-4)


def test_weight_of_a_functional_token_mean(tmp_path: Path) -> None:
    def step(cockpit: DistCockpit, net: nn.Module, x: Tensor, y: Tensor) -> None:
        F.cross_entropy(net(x), y).backward()

    x, y = cases.data("tokens", "token_mean", 0)
    net = cases.initialised("tokens")
    state = {k: v.clone() for k, v in net.state_dict().items()}
    with DistCockpit(net, None, store=tmp_path / "r", quantities=quantities(False), schedule=every(1)) as cockpit:
        with cockpit.track(0, weight=int((y != -100).sum())):
            step(cockpit, net, x, y)
    check(tmp_path / "r", net, [state], [(x, y)], cases._nll)


def test_sum_divided_by_tokens(tmp_path: Path) -> None:
    """loss_fn sums, the loop divides by the tokens and says so."""
    net = cases.initialised("tokens")
    loss_fn = nn.CrossEntropyLoss(reduction="sum")
    x, y = cases.data("tokens", "token_mean", 0)
    state, count = {k: v.clone() for k, v in net.state_dict().items()}, int((y != -100).sum())
    with DistCockpit(net, loss_fn, store=tmp_path / "r", quantities=quantities(False), schedule=every(1)) as cockpit:
        with cockpit.track(0, weight=count):
            (loss_fn(net(x), y) / count).backward()
    check(tmp_path / "r", net, [state], [(x, y)], cases._nll)


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


def test_evaluation_inside_a_tracked_step_does_not_count(tmp_path: Path) -> None:
    loss_fn = nn.CrossEntropyLoss()

    def step(cockpit: DistCockpit, net: nn.Module, x: Tensor, y: Tensor) -> None:
        loss = loss_fn(net(x), y)
        net.eval()
        with torch.no_grad():
            loss_fn(net(x[:3]), y[:3])
        net.train()
        loss.backward()

    check(tmp_path / "r", *train_sigmoid(tmp_path / "r", step, loss_fn=loss_fn), mean_terms)


def test_gradients_left_from_before_do_not_count(tmp_path: Path) -> None:
    loss_fn = nn.CrossEntropyLoss()

    def step(cockpit: DistCockpit, net: nn.Module, x: Tensor, y: Tensor) -> None:
        for p in net.parameters():
            p.grad = torch.full_like(p, 100.0)
        loss_fn(net(x), y).backward()
        for p in net.parameters():
            p.grad -= 100.0

    check(tmp_path / "r", *train_sigmoid(tmp_path / "r", step, loss_fn=loss_fn), mean_terms)


def test_ignored_samples_count_as_zero_gradients(tmp_path: Path) -> None:
    """All tokens of one micro-batch are ignored: it holds samples, but no weight."""
    loss_fn = nn.CrossEntropyLoss(reduction="mean")
    net = cases.initialised("sigmoid")
    x, y = cases.data("sigmoid", "mean", 0)
    y[16:] = -100
    state = {k: v.clone() for k, v in net.state_dict().items()}
    with DistCockpit(net, loss_fn, store=tmp_path / "r", quantities=quantities(False), schedule=every(1)) as cockpit:
        with cockpit.track(0):
            for part in (slice(0, 16), slice(16, 24)):
                loss_fn(net(x[part]), y[part]).backward()
    check(tmp_path / "r", net, [state], [(x, y)], cases._nll)


def test_include_and_exclude(tmp_path: Path) -> None:
    loss_fn = nn.CrossEntropyLoss()

    def step(cockpit: DistCockpit, net: nn.Module, x: Tensor, y: Tensor) -> None:
        loss_fn(net(x), y).backward()

    net, states, batches = train_sigmoid(tmp_path / "r", step, loss_fn=loss_fn, exclude=["2"], alpha=False)
    run = open_run(tmp_path / "r")
    assert list(run.attrs["parameters"]) == ["0.weight", "0.bias", "4.weight", "4.bias"]
    batch = oracle.batch(net, states[0], mean_terms, *batches[0])
    batch.gradients = {k: g for k, g in batch.gradients.items() if not k.startswith("2.")}
    np.testing.assert_allclose(run["mean_gsnr"]["mean_gsnr"][0], oracle.mean_gsnr(batch), rtol=1e-4)


def test_frozen_parameters(tmp_path: Path) -> None:
    loss_fn, net = nn.CrossEntropyLoss(), cases.initialised("cnn")
    net[0].requires_grad_(False)
    net[6].bias.requires_grad_(False)
    x, y = cases.data("cnn", "mean", 0)
    state = {k: v.clone() for k, v in net.state_dict().items()}
    with DistCockpit(net, loss_fn, store=tmp_path / "r", quantities=quantities(False), schedule=every(1)) as cockpit:
        with cockpit.track(0):
            loss_fn(net(x), y).backward()
    assert list(open_run(tmp_path / "r").attrs["parameters"]) == ["3.weight", "6.weight"]
    check(tmp_path / "r", net, [state], [(x, y)], mean_terms)


class DroppingAttention(nn.Module):
    """Attention with dropout: a layer of the generic rule that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(12, 2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack([x, -x, x.roll(1, 1)], 1)
        return self.head(torch.dropout(self.attend(x, x, x)[0].mean(1), 0.3, self.training))


def test_dropout_in_a_generic_layer(tmp_path: Path) -> None:
    """The reference differentiates single losses of the very same batched forward pass."""
    torch.manual_seed(0)
    net, loss_fn = DroppingAttention(), nn.CrossEntropyLoss()
    x, y = cases.data("sigmoid", "mean", 0)
    with DistCockpit(net, loss_fn, store=tmp_path / "r", quantities=[MeanGSNR()], schedule=every(1)) as cockpit:
        torch.manual_seed(1)
        with cockpit.track(0):
            loss_fn(net(x), y).backward()
    torch.manual_seed(1)
    losses = F.cross_entropy(net(x), y, reduction="none")
    each = [torch.autograd.grad(loss, list(net.parameters()), retain_graph=True) for loss in losses]
    flat = np.stack([np.concatenate([g.double().numpy().ravel() for g in gradients]) for gradients in each])
    batch = oracle.Batch(losses.detach().numpy(), {"all": flat}, {}, {})
    np.testing.assert_allclose(open_run(tmp_path / "r")["mean_gsnr"]["mean_gsnr"], [oracle.mean_gsnr(batch)], rtol=1e-4)


# -- batch norm with its statistics as constants -----------------------------------------------------------------------


class ConstantStatistics(nn.Module):
    """Batch norm as the oracle sees it: given statistics."""

    def __init__(self, inner: nn.BatchNorm2d, mean: Tensor, var: Tensor) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = inner.weight, inner.bias, inner.eps
        self.mean, self.var = mean, var

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean.to(x.dtype), self.var.to(x.dtype), self.weight, self.bias, False, 0, self.eps)


def batchnorm_net() -> nn.Sequential:
    torch.manual_seed(11)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Sigmoid(), nn.Flatten(), nn.Linear(108, 5))


def train_batchnorm(rank: int, size: int, group: Any, store: str, shards: list[int]) -> None:
    net, loss_fn = batchnorm_net(), nn.CrossEntropyLoss()
    model = DistributedDataParallel(net, process_group=group) if group is not None else net
    options = {"quantities": quantities(), "schedule": every(1), "track_batchnorm": True}
    with DistCockpit(model, loss_fn, store=store, **options) as cockpit:
        for step in range(2):
            x, y = cases.data("cnn", "mean", step)
            first = sum(shards[:rank])
            with cockpit.track(step):
                loss_fn(model(x[first : first + shards[rank]]), y[first : first + shards[rank]]).backward()
            if step == 0:
                with torch.no_grad():
                    for p in net.parameters():
                        p += 0.05 * torch.sin(torch.arange(p.numel()).view_as(p))


@pytest.mark.parametrize("shards", [[24], [17, 7]])
def test_batchnorm_statistics_as_constants(ranks: Ranks, tmp_path: Path, shards: list[int]) -> None:
    store = str(tmp_path / "r")
    train_batchnorm(0, 1, None, store, shards) if len(shards) == 1 else ranks.run(2, train_batchnorm, store, shards)
    run, pooled = open_run(store), []
    for step in range(2):
        net = batchnorm_net()
        if step:
            with torch.no_grad():
                for p in net.parameters():
                    p += 0.05 * torch.sin(torch.arange(p.numel()).view_as(p))
        x, y = cases.data("cnn", "mean", step)
        parts = []
        for rank, b in enumerate(shards):
            part = slice(sum(shards[:rank]), sum(shards[:rank]) + b)
            var, mean = torch.var_mean(net[0](x[part]).detach().double(), (0, 2, 3), correction=0)
            constant = copy.deepcopy(net)
            constant[1] = ConstantStatistics(net[1], mean, var)
            parts.append(oracle.batch(constant, constant.state_dict(), mean_terms, x[part], y[part]))
        pooled.append(
            oracle.Batch(
                losses=np.concatenate([p.losses for p in parts]),
                gradients={k: np.concatenate([p.gradients[k] for p in parts]) for k in parts[0].gradients},
                outputs={},
                parameters=parts[0].parameters,
            )
        )
    assert [k for k in pooled[0].gradients] == list(run.attrs["parameters"])
    np.testing.assert_allclose(run["mean_gsnr"]["mean_gsnr"], [oracle.mean_gsnr(b) for b in pooled], rtol=1e-4)
    np.testing.assert_allclose(run["alpha"]["alpha"][0], oracle.alpha(*pooled)["alpha"], rtol=1e-3)


# -- the update that alpha sees ----------------------------------------------------------------------------------------


def status_of(run: Any, step: int) -> tuple[str, float]:
    row = run["alpha"].to_dataset().sel(step=step)
    return row["status"].attrs["flag_meanings"].split()[int(row["status"])], float(row["alpha"])


def test_steps_that_a_gradient_scaler_skips(tmp_path: Path) -> None:
    """A real scaler: an infinite gradient makes it skip the optimizer's step and lower its scale."""
    net, loss_fn = cases.initialised("sigmoid"), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    options = {"quantities": quantities(), "schedule": every(1), "grad_scaler": scaler}
    with DistCockpit(net, loss_fn, optimizer, store=tmp_path / "r", **options) as cockpit:
        for step in range(4):
            x, y = cases.data("sigmoid", "mean", step)
            optimizer.zero_grad()
            with cockpit.track(step):
                scaler.scale(loss_fn(net(x), y)).backward()
            if step == 1:
                net[0].weight.grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
    run = open_run(tmp_path / "r")
    assert [status_of(run, s)[0] for s in range(3)] == ["minimum", "step_skipped", "minimum"]
    assert np.isnan(status_of(run, 1)[1])
    assert np.isfinite([status_of(run, 0)[1], status_of(run, 2)[1]]).all()


def test_input_buffers_that_are_reused(tmp_path: Path) -> None:
    net, loss_fn, buffer = cases.initialised("sigmoid"), nn.CrossEntropyLoss(), torch.empty(N, 12)
    states: list[dict[str, Tensor]] = []
    batches: list[tuple[Tensor, Tensor]] = []
    with DistCockpit(net, loss_fn, store=tmp_path / "r", quantities=quantities(), schedule=every(1)) as cockpit:
        for step in range(2):
            x, y = cases.data("sigmoid", "mean", step)
            with torch.no_grad():
                for p in net.parameters():
                    p += 0.01
            states.append({k: v.clone() for k, v in net.state_dict().items()})
            batches.append((x, y))
            buffer.copy_(x)
            with cockpit.track(step):
                loss_fn(net(buffer), y).backward()
                buffer.numpy()[:] = 7.0  # as a loader with shared memory does, and nobody can see
    check(tmp_path / "r", net, states, batches, mean_terms)


class Memory(nn.Module):
    """Reads a state that it writes to in its next call."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.head = torch.randn(N, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        self.state.copy_(x)
        return self.head(self.state)


def test_inputs_of_layers_that_the_model_overwrites(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, loss_fn = Memory(), nn.CrossEntropyLoss()
    with DistCockpit(net, loss_fn, store=tmp_path / "r", quantities=quantities(), schedule=every(1)) as cockpit:
        for step in range(2):
            x, y = cases.data("sigmoid", "mean", step)
            with torch.no_grad():
                net.head.weight += 0.01
                net.state.zero_()
            with cockpit.track(step):
                loss_fn(net(x), y).backward()
    status, alpha = status_of(open_run(tmp_path / "r"), 0)
    assert status == "inputs_changed" and np.isnan(alpha)


def test_no_step_and_too_few_samples(tmp_path: Path) -> None:
    net, loss_fn = cases.initialised("sigmoid"), nn.CrossEntropyLoss()
    with DistCockpit(net, loss_fn, store=tmp_path / "r", quantities=quantities(), schedule=every(1)) as cockpit:
        for step, n in enumerate([N, N, 1]):
            x, y = cases.data("sigmoid", "mean", step)
            with cockpit.track(step):
                loss_fn(net(x[:n]), y[:n]).backward()
    run = open_run(tmp_path / "r")
    assert status_of(run, 0) == ("no_step", -1.0)
    assert status_of(run, 1)[0] == "fewer_than_two_samples"


def test_pairs_of_steps(tmp_path: Path) -> None:
    """every(5) touches 0, 1, 5, 6; a pair that is torn by a gap in the steps leaves no row."""
    net, loss_fn = cases.initialised("sigmoid"), nn.CrossEntropyLoss()
    with DistCockpit(
        net, loss_fn, store=tmp_path / "r", quantities=[Alpha(), MeanGSNR()], schedule=every(5)
    ) as cockpit:
        for step in [0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11]:
            x, y = cases.data("sigmoid", "mean", step)
            with cockpit.track(step):
                loss_fn(net(x), y).backward()
    run = open_run(tmp_path / "r")
    assert list(run["alpha"]["step"].values) == [0, 10]
    assert list(run["mean_gsnr"]["step"].values) == [0, 5, 10]


# -- exchanges ---------------------------------------------------------------------------------------------------------


def count_exchanges(rank: int, size: int, group: Any, store: str, model: str) -> dict[str, int]:
    """Collectives per step: of DDP alone, and with everything tracked."""
    import torch.distributed as dist
    from train import everything

    names = [n for n in dir(dist) if n.startswith(("all_", "reduce", "broadcast", "gather", "scatter", "barrier"))]
    names += ["send", "recv", "isend", "irecv", "batch_isend_irecv"]
    calls: list[str] = []

    def counted(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        return call

    net, loss_fn = cases.initialised(model), nn.CrossEntropyLoss()
    ddp = DistributedDataParallel(net, process_group=group)
    originals = {n: getattr(dist, n) for n in names if callable(getattr(dist, n))}
    per_step = {}
    chosen = [q for q in everything() if q.needs.eigenvalue is None]  # which makes two exchanges per product
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with DistCockpit(ddp, loss_fn, optimizer, store=store, quantities=chosen, schedule=every(2)) as cockpit:
        for step in range(6):
            x, y = cases.data(model, "mean", step)
            cockpit.log(step, reduce="mean", value=float(rank))
            for n, original in originals.items():
                setattr(dist, n, counted(n, original))
            with cockpit.track(step):
                loss_fn(cockpit(x), y).backward()
            for n, original in originals.items():
                setattr(dist, n, original)
            per_step[step] = len(calls)
            calls.clear()
    return per_step


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_exchanges_per_step(ranks: Ranks, tmp_path: Path, model: str) -> None:
    for per_step in ranks.run(4, count_exchanges, str(tmp_path / "r"), model):
        assert per_step[0] == 6  # once: the numbers of neurons; names and lengths of the sums, with a header
        assert per_step[2] == per_step[4] == 3  # header, element-wise sums, sums
        assert per_step[1] == 4 and per_step[3] == per_step[5] == 2  # the end of alpha's update: header, sums
    assert (open_run(tmp_path / "r")["log"]["value"] == 1.5).all()
