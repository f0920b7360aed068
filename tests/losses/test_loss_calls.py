"""Losses that are given by a module, recorded by the user, or returned by the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import numpy as np
import oracle
import pytest
import torch
from checks import close
from compared_runs import N, check, mean_terms, quantities, train_sigmoid
from default_loops import C, V, mlp, train_default
from loops import shows
from odd_loops import each, linear, six_samples, track_body
from small_batches import data, one_step, reference
from torch import Tensor, nn
from torch.nn import functional as F

from distcockpit import DistCockpit, every, open_run
from distcockpit import quantities as q
from distcockpit.quantities import GradNorm, Loss, MeanGSNR


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


def test_the_loss_as_a_function(tmp_path: Path) -> None:
    """Curvature is that of the module that stands for it."""
    found = []
    for name, loss_fn in {"function": F.cross_entropy, "module": nn.CrossEntropyLoss()}.items():
        torch.manual_seed(0)
        store, options = tmp_path / name, {"quantities": "full", "loss_fn": loss_fn}
        train_default(mlp(), lambda model, f=loss_fn: f(model(V), C), store, **options)
        run = open_run(tmp_path / name)
        found.append((run["hess_trace"]["trace"].values, run["hess_max_ev"]["hess_max_ev"].values))
    for of_function, of_module in zip(*found, strict=True):
        assert np.isfinite(of_module).all()
        np.testing.assert_allclose(of_function, of_module, rtol=1e-6)


def test_losses_told_twice(tmp_path: Path) -> None:
    net, loss_fn, (x, y) = linear(), nn.CrossEntropyLoss(), six_samples()

    def twice(c: Any) -> None:
        z = c(x)
        c.record_losses(each(z, y))
        c.record_losses(each(z, (y + 1) % 3))

    with pytest.raises(RuntimeError, match="record_losses was called twice"):
        track_body(tmp_path / "a", net, None, twice)
    with pytest.raises(ValueError, match=r"divisor=0\): must be positive"):
        track_body(tmp_path / "c", net, None, lambda c: c.record_losses(loss_fn(c(x), y), divisor=0))


# -- the loss of a micro-batch, told by the loop -----------------------------------------------------------------------


@shows(
    "Losses",
    "the loss of each micro-batch from a function: `record_losses(loss)`, `record_losses(loss, weight=tokens)`",
)
@pytest.mark.parametrize("how", ["mean of each", "sum over all tokens"])
def test_losses_of_micro_batches(tmp_path: Path, how: str) -> None:
    """Factors on the loss follow from the gradient that reaches it."""
    net, (x, y) = cases.initialised("tokens"), cases.data("tokens", "token_mean", 0)
    batch = oracle.batch(net, net.state_dict(), cases._nll, x, y)
    total, scaler = int((y != -100).sum()), torch.amp.GradScaler("cpu", init_scale=1024)
    quantities = [MeanGSNR(), Loss(), GradNorm()]
    with DistCockpit(net, None, store=tmp_path / "run", quantities=quantities, schedule=every(1)) as cockpit:
        with cockpit.track(0):
            for part, target in zip(x.split([15, 9]), y.split([15, 9]), strict=True):
                z, tokens = cockpit(part), (target != -100).sum()
                if how == "mean of each":
                    loss = F.cross_entropy(z, target)
                    cockpit.record_losses(loss, weight=tokens)
                    scaler.scale(loss / 2).backward()
                else:
                    loss = F.cross_entropy(z, target, reduction="sum") / total
                    cockpit.record_losses(loss, weight=tokens, divisor=total)
                    scaler.scale(loss).backward()
    run = open_run(tmp_path / "run")
    close(run["mean_gsnr"]["mean_gsnr"], [oracle.mean_gsnr(batch)], 1e-4)
    close(run["loss"]["loss"], [batch.losses.mean()])
    close(run["grad_norm"]["total"], [np.linalg.norm(batch.flat.mean(0))], 1e-4)


# -- losses that no module tells ---------------------------------------------------------------------------------------


class ReturnsItsLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = cases.initialised("mlp")

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(x), y)


def test_the_loss_of_a_model_that_returns_it(tmp_path: Path) -> None:
    """No individual losses are needed for the loss itself, nor for what rests on it."""
    model = ReturnsItsLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = cases.data("mlp", "mean", 0)
    chosen = [q.Loss(), q.CABS(), q.RankDisagreement(), q.RankHealth()]
    with DistCockpit(model, None, optimizer, store=tmp_path / "run", quantities=chosen, schedule=every(1)) as cockpit:
        with cockpit.track(0):
            loss = cockpit(x, y)
            torch.amp.GradScaler("cpu", init_scale=512).scale(loss).backward()
    run = open_run(tmp_path / "run")
    state = {name.removeprefix("net."): v for name, v in model.state_dict().items()}
    batch = oracle.batch(model.net, state, mean_terms, x, y)
    np.testing.assert_allclose(run["loss"]["loss"][0], loss.item(), rtol=1e-6)
    np.testing.assert_allclose(run["rank_disagreement"]["loss"][0], [loss.item()], rtol=1e-6)
    np.testing.assert_allclose(run["cabs"]["cabs"][0], oracle.cabs(batch, 0.1), rtol=1e-4)


@pytest.mark.parametrize(
    "arguments, kind, words",
    [
        ({"weight": -1}, ValueError, r"record_losses\(weight=-1\): must be at least 0"),
        ({"weight": "ten"}, TypeError, r"record_losses\(weight='ten'\): must be a number"),
        (
            {"divisor": 3.0},
            ValueError,
            r"record_losses\(divisor=3.0\): the divisor of per-sample losses is measured",
        ),
    ],
)
def test_what_record_losses_refuses(tmp_path: Path, arguments: dict, kind: type[Exception], words: str) -> None:
    net, (x, y) = cases.initialised("sigmoid"), cases.data("sigmoid", "mean", 0)
    with DistCockpit(net, None, store=tmp_path / "run", quantities=[Loss()], schedule=every(1)) as cockpit:
        with pytest.raises(kind, match=words), cockpit.track(0):
            cockpit.record_losses(F.cross_entropy(net(x), y, reduction="none"), **arguments)


def test_loss_with_keywords(tmp_path: Path) -> None:
    net, x, y = data()
    loss_fn, batch = nn.CrossEntropyLoss(), reference(net, x, y)
    run = one_step(tmp_path, lambda c: loss_fn(input=net(x), target=y).backward(), net, loss_fn)
    np.testing.assert_allclose(run["mean_gsnr"]["mean_gsnr"], [oracle.mean_gsnr(batch)], rtol=1e-4)


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
