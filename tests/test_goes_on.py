"""After a right step nothing that goes wrong on a rank ends the run: rows are NaN or missing, and a notice says why."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn
from torch.nn import functional as F

from distcockpit import DistCockpit, every, open_run
from distcockpit.gradients.statistics import Statistic
from distcockpit.quantities import GradNorm, HessTrace, NormTest, Quantity
from distcockpit.quantities.batch import LocalBatch, Model, Needs
from distcockpit.store.schema import Field, Group, Row

FAILS_AT, STEPS = 3, 8


@dataclass(frozen=True, kw_only=True)
class OfTheUser(Quantity):
    """The norm of this step's gradient, with a fault in a method on one rank."""

    where: str = ""

    @property
    def needs(self) -> Needs:
        return Needs(mean_gradient=True)

    def group(self, model: Model) -> Group:
        return Group({self.name: Field()})

    def fail(self, where: str, step: int, rank: int) -> None:
        if where == self.where and step == FAILS_AT and rank == broken_rank:
            raise KeyError("no such key")

    def statistics(self, step: int, parameters: Mapping[str, Tensor], memory: dict[str, Any]) -> dict[str, Statistic]:
        self.fail("statistics", step, torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
        return {}

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> dict[str, Any]:
        self.fail("local", batch.step, batch.rank)
        return {"n": batch.vector([batch.local_n])}

    def finalize(self, totals: Mapping[str, np.ndarray], n: int) -> Row:
        return {self.name: totals["n"][0]}


broken_rank = -1


def small_mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def data(step: int) -> tuple[Tensor, Tensor]:
    return torch.sin(torch.arange(60.0) * (1 + 0.1 * step)).view(12, 5), torch.arange(12) % 3


def norm(net: nn.Module) -> float:
    return float(sum(p.grad.square().sum() for p in net.parameters() if p.grad is not None)) ** 0.5


def with_a_fault(rank: int, size: int, group: Any, store: str, where: str, broken: int) -> list[float]:
    global broken_rank
    broken_rank = broken
    net, norms = small_mlp(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    chosen = ["economy", OfTheUser(where=where)]
    options: dict[str, Any] = {"quantities": chosen, "schedule": every(1), "process_group": group}
    with DistCockpit(net, optimizer=optimizer, store=store, **options) as cockpit:
        for step in range(STEPS):
            x, y = data(step)
            mine = slice(12 * rank // size, 12 * (rank + 1) // size)
            optimizer.zero_grad()
            with cockpit.track(step):
                F.cross_entropy(cockpit(x[mine]), y[mine]).backward()
            norms.append(norm(net))
    return norms


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("where", ["local", "statistics"])
def test_a_quantity_of_the_user_fails(ranks: Ranks, tmp_path: Path, size: int, where: str) -> None:
    where_to = str(tmp_path / "run"), where, size - 1
    said = [with_a_fault(0, 1, None, *where_to)] if size == 1 else ranks.run(size, with_a_fault, *where_to)
    assert [len(norms) for norms in said] == [STEPS] * size
    run, expected = open_run(tmp_path / "run"), []
    net = small_mlp()
    for step in range(STEPS):
        x, y = data(step)
        net.zero_grad()
        F.cross_entropy(net(x), y).backward()
        expected.append(norm(net))
    own, stored = run["of_the_user"]["of_the_user"], run["grad_norm"]["total"]
    assert own.reindex(step=[FAILS_AT]).isnull().all() and (own.dropna("step") == 12).all()
    there = stored.dropna("step")["step"].values.tolist()
    if where == "local":
        assert there == list(range(STEPS))
    else:  # all of the step; at the next one an update would have ended, which ranks see that they do not share
        assert there == [step for step in range(STEPS) if step != FAILS_AT and (size == 1 or step != FAILS_AT + 1)]
    np.testing.assert_allclose(stored.reindex(step=there), [expected[step] for step in there], rtol=1e-5)
    assert run.attrs["state"] == "closed"
    if size == 1:  # else it is rank 0's store, and another rank's notice
        (notice,) = run.attrs["notices"]
        assert notice["step"] == FAILS_AT and "KeyError: 'no such key'" in notice["text"]


class Noisy(torch.autograd.Function):
    """Its backward pass is another one each time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] * weight, (gradients[0] * x).sum(0) * random.uniform(1, 2)


class Gate(nn.Module):
    """Scales what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.is_noisy = nn.Parameter(torch.ones(7)), False

    def forward(self, x: Tensor) -> Tensor:
        return Noisy.apply(x, self.weight) if self.is_noisy else x * self.weight


def test_gradients_that_cannot_be_explained_for_a_while(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Steps 0, 1, 3, 7 check themselves; what is found there is looked at again after 1, 2, 4, ... further ones."""
    torch.manual_seed(0)
    net, norms = nn.Sequential(nn.Linear(5, 7), Gate(), nn.Tanh(), nn.Linear(7, 3)), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with DistCockpit(net, optimizer=optimizer, store=tmp_path / "run", schedule=every(1)) as cockpit:
        for step in range(STEPS):
            net[1].is_noisy = step in (3, 4, 5)
            x, y = data(step)
            optimizer.zero_grad()
            with cockpit.track(step):
                F.cross_entropy(cockpit(x), y).backward()
            norms.append(norm(net))
            optimizer.step()
    run = open_run(tmp_path / "run")
    unknown = [3, 4, 5]
    known = [step for step in range(STEPS) if step not in unknown]
    stored = run["grad_norm"]["total"]
    np.testing.assert_allclose(stored.sel(step=known), [norms[step] for step in known], rtol=1e-5)
    assert stored.sel(step=unknown).isnull().all() and not run["loss"]["loss"].isnull().any()
    assert run["norm_test"]["norm_test"].sel(step=unknown).isnull().all()
    (notice,) = [each for each in run.attrs["notices"] if each["topic"] == "wrong"]
    assert notice["step"] == 3 and "were correct at step 1, but are unknown now" in notice["text"]


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


class Unknown(nn.Module):
    """No module that diagonals of the curvature could be taken of."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * torch.ones(7).sum() / 7


def test_curvature_that_cannot_be_had_any_more(tmp_path: Path) -> None:
    net, loss_fn = small_mlp(), nn.CrossEntropyLoss()
    chosen = [HessTrace(curvature="diag_ggn_exact"), NormTest()]
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=chosen, schedule=every(1)) as cockpit:
        for step in range(5):
            if step == FAILS_AT:
                net[1] = Unknown()
            x, y = data(step)
            with cockpit.track(step):
                loss_fn(cockpit(x), y).backward()
    run = open_run(tmp_path / "run")
    assert run["hess_trace"]["trace"].isnull().all("parameter").values.tolist() == [False] * 3 + [True] * 2
    assert not run["norm_test"]["norm_test"].isnull().any()
    (notice,) = [each for each in run.attrs["notices"] if each["topic"] == "curvature"]
    assert notice["step"] == FAILS_AT and "hess_trace: NaN" in notice["text"]


class OfNothing(nn.Module):
    """Draws its samples itself, as a generator of an adversarial pair may."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, n: int) -> Tensor:
        return self.layer(torch.randn(n, 5))


def without_a_batch(cockpit: Any, optimizer: torch.optim.Optimizer, net: nn.Module) -> list[float]:
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        with cockpit.track(step):
            cockpit(12).square().mean().backward()
        norms.append(norm(net))
        optimizer.step()
    return norms


@pytest.mark.parametrize("chosen", ["economy", "GradNorm"])
def test_a_model_that_is_given_no_tensor(tmp_path: Path, caplog: pytest.LogCaptureFixture, chosen: str) -> None:
    """Of a preset nothing is tracked, and the run goes on; who listed quantities by hand is told at the first step."""
    torch.manual_seed(0)
    net = OfNothing()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    quantities: Any = chosen if chosen == "economy" else [GradNorm()]
    options: dict[str, Any] = {"optimizer": optimizer, "store": tmp_path / "run", "quantities": quantities}
    if chosen == "economy":
        with DistCockpit(net, schedule=every(1), **options) as cockpit:
            norms = without_a_batch(cockpit, optimizer, net)
        torch.manual_seed(0)
        alone = OfNothing()
        assert norms == without_a_batch(Untouched(alone), torch.optim.SGD(alone.parameters(), lr=0.1), alone)
        (line,) = [each for each in caplog.messages if "batch size is unknown" in each]
        assert "track(step, batch_size=...)" in line
    else:
        with (
            pytest.raises(ValueError, match="batch size is unknown"),
            DistCockpit(net, schedule=every(1), **options) as cockpit,
        ):
            without_a_batch(cockpit, optimizer, net)


class Untouched:
    """The model itself, in the place of a cockpit."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def track(self, step: int) -> Any:
        return nullcontext()

    def __call__(self, *args: Any) -> Any:
        return self.model(*args)
