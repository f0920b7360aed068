"""Faults in a tracked step: the run goes on, on all ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import torch
from default_loops import C, Changing, V, mlp
from failing_runs import FAILS_AT, STEPS, data, norm, small_mlp
from ranks import Ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from distcockpit import DistCockpit, every, open_run, presets
from distcockpit import quantities as q
from distcockpit.gradients.statistics import Statistic
from distcockpit.quantities import GradNorm, NormTest, Quantity
from distcockpit.quantities.batch import LocalBatch, Model, Needs
from distcockpit.store.schema import Field, Group, Row


class Change:
    """What a loop does differently from step 2 on; and what is tracked from there."""

    def __init__(self, net: Changing, optimizer: torch.optim.Optimizer, loss_fn: nn.Module) -> None:
        self.net, self.optimizer, self.loss_fn, self.accumulates = net, optimizer, loss_fn, False
        self.loss: Callable[[Any], Tensor] = lambda model: loss_fn(model(V), C)

    def batch_norm(self) -> None:
        self.net.norm.train()

    def exchanged_head(self) -> None:
        torch.manual_seed(1)
        self.net.head = nn.Linear(7, 3)

    def frozen(self) -> None:
        self.net.body.requires_grad_(False)

    def unfrozen(self) -> None:
        self.net.extra.requires_grad_(True)

    def parameter_group(self) -> None:
        self.net.extra.requires_grad_(True)
        self.optimizer.add_param_group({"params": list(self.net.extra.parameters()), "lr": 0.3})

    def another_loss(self) -> None:
        self.loss = lambda model: F.mse_loss(model(V), V[:, :3])

    def mixup(self) -> None:
        self.loss = lambda model: 0.3 * self.loss_fn(z := model(V), C) + 0.7 * self.loss_fn(z, C.flip(0))

    def micro_batches(self) -> None:
        self.accumulates = True

    def told_twice(self) -> None:
        def loss(model: Any) -> Tensor:
            z = model(V)
            for _ in range(2):
                model.record_losses(F.cross_entropy(z, C, reduction="none"))
            return self.loss_fn(z, C)

        self.loss = loss

    def half_of_the_outputs(self) -> None:
        self.loss = lambda model: self.loss_fn(model(V)[:4], C[:4])

    def no_batch(self) -> None:
        """A call without samples that could be told apart."""
        self.loss = lambda model: model(V.mean(0, keepdim=True)).square().sum() + self.loss_fn(model(V), C)

    def gradient_in_the_loss(self) -> None:
        def loss(model: Any) -> Tensor:
            x = V.clone().requires_grad_()
            value = self.loss_fn(model(x), C)
            return value + torch.autograd.grad(value, x, create_graph=True)[0].square().sum()

        self.loss = loss


CHANGES = [name for name, kind in vars(Change).items() if callable(kind) and not name.startswith("_")]


def run_with_a_change(name: str, **options: Any) -> tuple[list[Tensor], list[float]]:
    """The parameters at the end, and norms of the gradients that the optimizer got."""
    net, loss_fn, norms = Changing(), nn.CrossEntropyLoss(), []
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    change = Change(net, optimizer, loss_fn)
    with DistCockpit(net, loss_fn, optimizer, schedule=every(1), **options) as cockpit:
        for step in range(6):
            if step == 2:
                getattr(change, name)()
            net.zero_grad()
            n_micros = 2 if change.accumulates else 1
            with cockpit.track(step):
                for _ in range(n_micros):
                    (change.loss(cockpit) / n_micros).backward()
            norms.append(float(sum(p.grad.square().sum() for p in net.parameters() if p.grad is not None)) ** 0.5)
            optimizer.step()
    return [p.detach().clone() for p in net.parameters()], norms


@pytest.mark.parametrize("name", CHANGES)
def test_a_run_that_changes_goes_on(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Training is the same to the last bit; what is stored after the change is right, or not there."""
    quantities = [*presets.economy(), NormTest(name="by_hand"), *presets.layers()]
    with caplog.at_level("WARNING"):
        after, norms = run_with_a_change(name, store=tmp_path / "run", quantities=quantities)
    plain, _ = run_with_a_change(name, store="", enabled=False)
    assert all(torch.equal(a, b) for a, b in zip(after, plain, strict=True))
    run = open_run(tmp_path / "run")
    steps = run["grad_norm"]["step"].values.tolist()
    assert steps[:2] == [0, 1]
    stored, expected = run["grad_norm"]["total"].values, [norms[step] for step in steps]
    if name in ("gradient_in_the_loss", "batch_norm"):
        assert np.isnan(stored[2:]).all()
        assert ("create_graph" if name == "gradient_in_the_loss" else "is in training mode") in caplog.text
        assert not run["loss"]["loss"].isnull().any() or name == "gradient_in_the_loss"
        stored[2:] = expected[2:]
    np.testing.assert_allclose(stored, expected, rtol=1e-3)
    parts = {"exchanged_head", "frozen", "unfrozen", "parameter_group"}
    assert [part["first_step"] for part in run.attrs["segments"]] == ([0, 2] if name in parts else [0])
    if steps != list(range(6)):
        assert name == "told_twice"
        assert steps == [0, 1]
        assert [each["step"] for each in run.attrs["notices"] if each["topic"].startswith("skipped ")] == [2]
        assert "step 2 is not tracked" in caplog.text


def told_twice_on_one_rank(rank: int, size: int, group: Any, store: str) -> list[float]:
    """At step 2 the last rank tells its losses twice."""
    torch.manual_seed(0)
    net, loss_fn = mlp(), nn.CrossEntropyLoss()
    optimizer, norms = torch.optim.SGD(net.parameters(), lr=0.1), []
    options: dict[str, Any] = {"quantities": ["economy", NormTest(name="by_hand")], "schedule": every(1)}
    with DistCockpit(net, loss_fn, optimizer, store=store, process_group=group, **options) as cockpit:
        for step in range(5):
            optimizer.zero_grad()
            with cockpit.track(step):
                z = cockpit(V)
                for _ in range(2 if step == 2 and rank == size - 1 else 0):
                    cockpit.record_losses(F.cross_entropy(z, C, reduction="none"))
                loss_fn(z, C).backward()
            norms.append(float(sum(p.grad.square().sum() for p in net.parameters() if p.grad is not None)))
            optimizer.step()
    return norms


@pytest.mark.parametrize("size", [2, 4])
def test_a_step_is_left_out_on_all_ranks(ranks: Ranks, tmp_path: Path, size: int) -> None:
    said = ranks.run(size, told_twice_on_one_rank, str(tmp_path / "run"))
    assert all(len(norms) == 5 for norms in said)
    run = open_run(tmp_path / "run")
    assert run["by_hand"]["step"].values.tolist() == [0, 1, 3, 4] and not run["by_hand"]["norm_test"].isnull().any()
    assert run["alpha"]["step"].values.tolist() == [0, 3]
    (notice,) = run.attrs["notices"]
    assert notice["step"] == 2 and f"Rank {size - 1} could not finish tracked step 2" in notice["text"]


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
    else:
        assert there == [step for step in range(STEPS) if step != FAILS_AT]
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
    random.seed(0)  # two draws could be alike
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


# -- a failure half-way ------------------------------------------------------------------------------------------------


class Fails(q.Quantity, q.Statistic):
    """It fails on one rank, while statistics are asked for, in the walk, or when sums are taken."""

    def group(self, model: q.Model) -> q.Group:
        return q.Group({"fails": q.Field()})

    def fail(self, where: str) -> None:
        if self.name == where and torch.distributed.get_rank() == 1:
            raise MemoryError("no memory for blocks")

    def statistics(self, step: int, parameters: Any, memory: dict) -> dict:
        self.fail("statistics")
        return {"broken": self}

    def outer(self, *args: Any) -> None:
        self.fail("walk")

    block = outer

    def local(self, batch: q.LocalBatch, memory: dict) -> dict:
        self.fail("local")
        return {}

    def finalize(self, totals: Any, n: int) -> dict:
        return {"fails": 0.0}


def fail_half_way(rank: int, size: int, group: Any, store: str, where: str, eigenvalue: bool) -> list[str]:
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    model = DistributedDataParallel(net, process_group=group)
    x, y = cases.data("mlp", "mean", 0)
    chosen = [q.InnerTest(), q.MeanGSNR(), Fails(name=where)] + ([q.HessMaxEV()] if eigenvalue else [])
    cockpit = DistCockpit(model, loss_fn, store=store, quantities=chosen, schedule=every(1))
    said = []
    for step in range(2):
        try:
            with cockpit.track(step):
                loss_fn(cockpit(x), y).backward()
            said.append("went on")
        except (MemoryError, RuntimeError) as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("eigenvalue", [False, True])
@pytest.mark.parametrize("where", ["statistics", "walk", "local"])
def test_a_rank_that_fails_half_way_leaves_nobody_waiting(
    ranks: Ranks, tmp_path: Path, where: str, eigenvalue: bool
) -> None:
    """The others hear of it at once: at a first step they compare their sums, and before an iteration they ask."""
    said = ranks.run(4, fail_half_way, str(tmp_path / "run"), where, eigenvalue)
    assert said[1] == ["no memory for blocks"] * 2
    for rank in (0, 2, 3):
        words = "1 rank(s) could not finish" if eigenvalue and where != "local" else "Rank 1 could not finish"
        assert [words in each for each in said[rank]] == [True, True], said[rank]
