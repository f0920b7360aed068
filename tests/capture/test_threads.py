"""Forward and backward passes in several threads, inside and outside of tracked steps."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cases
import numpy as np
import oracle
import pytest
import torch
from failing_runs import data, norm, small_mlp
from torch import Tensor, nn
from torch.nn import functional as F
from waiting import HANG

from distcockpit import DistCockpit, every, open_run
from distcockpit.quantities import GradNorm, MeanGSNR


def elsewhere(function: Any, *args: Any) -> Any:
    """What it returns, called in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


IN_THREADS: dict[str, Any] = {
    "the forward pass": lambda model, x, y: F.cross_entropy(elsewhere(model, x), y).backward(),
    "the loss as well": lambda model, x, y: elsewhere(lambda: F.cross_entropy(model(x), y)).backward(),
    "the backward pass": lambda model, x, y: elsewhere(F.cross_entropy(model(x), y).backward),
    "all": lambda model, x, y: elsewhere(lambda: F.cross_entropy(model(x), y).backward()),
}


def l2(model: Any) -> Tensor:
    return 0.1 * torch.cat([p.flatten() for p in model.parameters()]).square().sum()


def train_in_threads(store: Path, one: Any, penalty: Any = lambda net: 0.0) -> list[tuple[float, float]]:
    net, expected = small_mlp(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with DistCockpit(net, optimizer=optimizer, store=store, schedule=every(1)) as cockpit:
        for step in range(4):
            x, y = data(step)
            optimizer.zero_grad()
            with cockpit.track(step):
                one(cockpit, x, y)
            expected.append((norm(net), (F.cross_entropy(net(x), y) + penalty(net)).item()))
            optimizer.step()
    return expected


@pytest.mark.parametrize("what", IN_THREADS)
def test_helper_threads(tmp_path: Path, what: str) -> None:
    """Gradients are right; a loss that is computed elsewhere is not seen, and a notice says so."""
    # The loop has a thread of its own, too: numbers that autograd gives in each thread would be the same ones.
    expected = elsewhere(train_in_threads, tmp_path / "run", IN_THREADS[what])
    run, (norms, losses) = open_run(tmp_path / "run"), zip(*expected, strict=True)
    np.testing.assert_allclose(run["grad_norm"]["total"], norms, rtol=1e-5)
    said = {each["topic"]: each["text"] for each in run.attrs.get("notices", ())}
    knows_loss = what in ("the forward pass", "the loss as well")
    np.testing.assert_allclose(run["loss"]["loss"], losses if knows_loss else [np.nan] * 4, rtol=1e-5)
    assert run["alpha"]["alpha"].isnull().all() == (what != "the forward pass")
    assert ("losses" in said) == (what != "the forward pass")
    assert knows_loss or "what is differentiated cannot be seen from this thread" in said["loss"]


def test_a_penalty_beside_a_forward_pass_elsewhere(tmp_path: Path) -> None:
    def one(model: Any, x: Tensor, y: Tensor) -> None:
        penalty = l2(model.model)
        (F.cross_entropy(elsewhere(model, x), y) + penalty).backward()

    norms, losses = zip(*elsewhere(train_in_threads, tmp_path / "run", one, l2), strict=True)
    run = open_run(tmp_path / "run")
    np.testing.assert_allclose(run["grad_norm"]["total"], norms, rtol=1e-5)
    np.testing.assert_allclose(run["loss"]["loss"], losses, rtol=1e-5)


@pytest.mark.parametrize("where", [0, 1], ids=["while the model runs", "between two layers"])
def test_an_evaluation_in_another_thread(tmp_path: Path, where: int) -> None:
    """It is none of the step's calls, even if it begins and ends while the model is called."""
    net = small_mlp()
    expected = elsewhere(
        train_in_threads, tmp_path / "plain", lambda model, x, y: F.cross_entropy(model(x), y).backward()
    )
    here = threading.get_ident()

    def evaluate(module: nn.Module, *_: Any) -> None:
        if threading.get_ident() == here:
            elsewhere(torch.no_grad()(lambda: net(torch.ones(3, 5))))

    (net[0].register_forward_pre_hook if where == 0 else net[0].register_forward_hook)(evaluate)
    with DistCockpit(net, store=tmp_path / "run", quantities=["economy"], schedule=every(1)) as cockpit:
        x, y = data(0)
        with cockpit.track(0):
            F.cross_entropy(cockpit(x), y).backward()
    run = open_run(tmp_path / "run")
    np.testing.assert_allclose(run["grad_norm"]["total"], [expected[0][0]], rtol=1e-5)
    np.testing.assert_allclose(run["loss"]["loss"], [expected[0][1]], rtol=1e-5)
    plain = open_run(tmp_path / "plain")["norm_test"]["norm_test"]
    np.testing.assert_allclose(run["norm_test"]["norm_test"], plain[:1], rtol=1e-5)


def test_a_call_in_another_thread_outlives_the_step(tmp_path: Path) -> None:
    """It meets hooks of a step that holds nothing any more, and returns and differentiates what it would have."""
    net, began, ended = small_mlp(), threading.Event(), threading.Event()

    def wait(module: nn.Module, *_: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            began.set()
            assert ended.wait(60)

    net[0].register_forward_pre_hook(wait)
    x, y = data(0)
    expected = net(x)
    with (
        DistCockpit(net, store=tmp_path / "run", quantities=["economy"], schedule=every(1)) as cockpit,
        ThreadPoolExecutor(1) as pool,
    ):
        with cockpit.track(0):
            F.cross_entropy(cockpit(x), y).backward()
            late = pool.submit(lambda: net(x))
            assert began.wait(60)
        ended.set()
        output = late.result(60)
        assert torch.equal(output, expected)
        output.sum().backward()
        with cockpit.track(1):
            F.cross_entropy(cockpit(x), y).backward()


def test_a_thread_that_evaluates_during_the_forward_pass(tmp_path: Path) -> None:
    """It calls the same modules; what it computes is none of the step's."""
    net, loss_fn = cases.initialised("sigmoid"), nn.CrossEntropyLoss()
    twin, due = cases.initialised("sigmoid"), list[str]()

    inside, go_on = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def run() -> None:
        with torch.no_grad():
            net(torch.randn(5, 12))

    def evaluate(*_: Any) -> None:
        if threading.current_thread() in threads:  # stays in the middle of the model until the step's pass is over
            inside.set()
            assert go_on.wait(HANG)
        elif due:
            due.clear()
            threads.append(threading.Thread(target=run))
            threads[-1].start()
            assert inside.wait(HANG)

    net[1].register_forward_hook(evaluate)
    quantities = [GradNorm(), MeanGSNR()]
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=quantities, schedule=every(1)) as cockpit:
        for step in range(3):
            x, y = cases.data("sigmoid", "mean", step)
            net.zero_grad()
            due.append("once")
            inside.clear()
            go_on.clear()
            with cockpit.track(step):
                z = cockpit(x)
                go_on.set()
                threads[-1].join()
                loss_fn(z, y).backward()
    tree = open_run(tmp_path / "run")
    for step in range(3):
        batch = oracle.batch(twin, twin.state_dict(), cases._nll, *cases.data("sigmoid", "mean", step))
        row = {name: tree[name].sel(step=step) for name in ("grad_norm", "mean_gsnr")}
        np.testing.assert_allclose(row["grad_norm"]["total"], np.linalg.norm(batch.flat.mean(0)), rtol=1e-4)
        np.testing.assert_allclose(row["mean_gsnr"]["mean_gsnr"], oracle.mean_gsnr(batch), rtol=1e-4)
