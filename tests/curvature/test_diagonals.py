"""Curvature diagonals by BackPACK: whatever the model looks like, or a clear error."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cases
import numpy as np
import oracle
import pytest
import torch
from changing_runs import go
from failing_runs import FAILS_AT, data, small_mlp
from ranks import Ranks
from small_batches import B, one_step
from small_models import ResNet
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from train import bucketed

from distcockpit import DistCockpit, every, open_run
from distcockpit import quantities as q
from distcockpit.curvature import diagonals
from distcockpit.quantities import HessTrace, NormTest


@dataclass(frozen=True, kw_only=True)
class Curved(q.Quantity):
    """This rank's range of the diagonal, alone."""

    of: q.Quantity = q.TICDiag()

    @property
    def needs(self) -> q.Needs:
        return q.Needs(curvature=self.of.needs.curvature, pooled_curvature=True)

    def group(self, model: q.Model) -> q.Group:
        return q.Group({"axes": q.Field()})

    def reduce(self, bucket: q.BucketSums, memory: dict) -> dict:
        (flat,) = bucket.shard.curvature.values()
        assert flat.shape == (10,) and flat.dtype == torch.float64
        return {"axes": torch.tensor(float(flat.dim()))}

    def local(self, batch: q.LocalBatch, memory: dict) -> dict:
        return batch.reduced

    def finalize(self, totals: Any, n: int) -> dict:
        return {"axes": totals["axes"]}


def test_one_parameter_is_flat_too(tmp_path: Path) -> None:
    run, _ = go(tmp_path / "r", nn.Sequential(nn.Linear(5, 2, bias=False)), ((4, 5), (4, 2)), [Curved()], 1)
    assert run["curved"]["axes"][0] == 1


def test_sums_cannot_be_pooled_element_by_element(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"summed=True.*such as TICDiag\(\).needs.curvature"):
        DistCockpit(nn.Linear(5, 2), nn.MSELoss(), store=tmp_path, quantities=[Curved(of=q.HessTrace())])


def test_traces_beside_a_diagonal_are_its_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is run again once for both, and the traces are those without the diagonal."""
    replays, differentiate = [], diagonals.differentiate
    monkeypatch.setattr(diagonals, "differentiate", lambda *args: replays.append(1) or differentiate(*args))
    traces = []
    for name, chosen in (("alone", [HessTrace()]), ("beside", [HessTrace(), q.TICDiag(), q.TICTrace()])):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 4), nn.Sigmoid(), nn.Linear(4, 2))
        with bucketed(1, 8):  # which are parts of parameters
            run, _ = go(tmp_path / name, net, ((4, 5), (4, 2)), chosen, 1)
        traces.append(run["hess_trace"]["trace"].values)
        assert len(replays) == len(traces)
    assert np.allclose(traces[0], traces[1], rtol=1e-5, atol=0) and (traces[0] != 0).all()


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


class Skips(nn.Module):
    """Sums, a scaling and a transposition between modules: BackPACK needs its converter for it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 5)
        self.one, self.two = nn.Tanh(), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        z = self.second(self.one(self.first(x))) + x
        return self.head(self.two(z) + 0.5 * z)


class Functional(Skips):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.sin(self.second(self.first(x))) + self.two(x))


def test_the_converter_makes_models_with_skips_fit(tmp_path: Path) -> None:
    torch.manual_seed(4)
    net, loss_fn = Skips(), nn.CrossEntropyLoss()
    names, (x, y) = [name for name, _ in net.named_modules()], cases.data("mlp", "mean", 0)
    chosen = [q.HessTrace(curvature="diag_ggn_exact"), q.HessTrace(curvature="diag_ggn_mc", mc_samples=500, name="mc")]
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=chosen, schedule=every(1)) as cockpit:
        for step in range(2):
            with cockpit.track(step):
                loss_fn(cockpit(x), y).backward()
    exact = [d.sum() for d in oracle.ggn_diagonal(net, net.state_dict(), loss_fn, x, y).values()]
    run = open_run(tmp_path / "run")
    np.testing.assert_allclose(run["hess_trace"]["trace"], [exact, exact], rtol=1e-4)
    np.testing.assert_allclose(run["mc"]["trace"], [exact, exact], rtol=0.2)
    assert [name for name, _ in net.named_modules()] == names  # the converter worked on a copy
    assert all(not m._forward_hooks and not m._backward_hooks for m in net.modules())


@pytest.mark.parametrize("identity", ["in place", "out of place"])
def test_a_residual_network(tmp_path: Path, identity: str) -> None:
    """Blocks as torchvision writes them: one ReLU used twice, ``out += identity``, batch norm in eval mode."""
    torch.manual_seed(5)
    net, loss_fn = ResNet(in_place=identity == "in place").eval(), nn.CrossEntropyLoss()
    x, y = torch.randn(6, 3, 8, 8), torch.arange(6) % 5
    exact = [d.sum() for d in oracle.ggn_diagonal(net, net.state_dict(), loss_fn, x, y).values()]
    chosen = [q.HessTrace(curvature="diag_ggn_exact")]
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=chosen, schedule=every(1)) as cockpit:
        for step in range(2):
            with cockpit.track(step):
                loss_fn(cockpit(x), y).backward()
    np.testing.assert_allclose(open_run(tmp_path / "run")["hess_trace"]["trace"], [exact, exact], rtol=1e-4)


def test_what_the_converter_cannot_do_is_said(tmp_path: Path) -> None:
    net, loss_fn = Functional(), nn.CrossEntropyLoss()
    chosen, (x, y) = [q.HessTrace(curvature="diag_ggn_exact")], cases.data("mlp", "mean", 0)
    cockpit = DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=chosen, schedule=every(1))
    with pytest.raises(RuntimeError, match="between 'second' and 'two'.*hutchinson_ggn"), cockpit.track(0):
        loss_fn(cockpit(x), y).backward()


class Growing(Skips):
    """Scales by a number that changes, which the converter takes for a constant."""

    scale, factor = 1.0, 2.0

    def forward(self, x: Tensor) -> Tensor:
        self.scale *= self.factor
        return self.head(self.scale * self.two(self.second(self.one(self.first(x)))) + x)


def test_a_converted_form_that_is_not_the_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At the first step an error, later a notice."""
    net, loss_fn, (x, y) = Growing(), nn.CrossEntropyLoss(), cases.data("mlp", "mean", 0)
    options = {"quantities": [q.HessTrace(curvature="diag_ggn_exact")], "schedule": every(1)}
    why = "model as converted by BackPACK (is not|no longer) .*hutchinson_ggn"
    cockpit = DistCockpit(net, loss_fn, store=tmp_path / "a", **options)
    with pytest.raises(RuntimeError, match=why), cockpit.track(0):
        loss_fn(cockpit(x), y).backward()
    net.factor = 1.0
    with DistCockpit(net, loss_fn, store=tmp_path / "b", **options) as cockpit:
        for step in range(3):
            with cockpit.track(step):
                loss_fn(cockpit(x), y).backward()
            net.factor = 2.0
    assert re.search(f"step 1: hess_trace: NaN. .*{why}", caplog.text)
    traces = open_run(tmp_path / "b")["hess_trace"]["trace"]
    assert traces.isnull().all("parameter").values.tolist() == [False, True, True]


def test_a_diagonal_of_the_converted_form_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its largest elements must agree with products of the matrix; here one parameter's are half as large again."""
    right = diagonals.differentiate

    def wrong(extension: Any, form: nn.Module, *rest: Any) -> dict[str, Tensor]:
        diagonal = right(extension, form, *rest)
        return {k: 1.5 * d if k == "second.bias" else d for k, d in diagonal.items()}

    monkeypatch.setattr(diagonals, "differentiate", wrong)
    net, loss_fn, (x, y) = Skips(), nn.CrossEntropyLoss(), cases.data("mlp", "mean", 0)
    chosen = [q.HessTrace(curvature="diag_ggn_exact")]
    cockpit = DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=chosen, schedule=every(1))
    with pytest.raises(RuntimeError, match="'second.bias' would be"), cockpit.track(0):
        loss_fn(cockpit(x), y).backward()


# -- Monte-Carlo curvature ---------------------------------------------------------------------------------------------


def monte_carlo(rank: int, size: int, group: Any, store: str, seed: int) -> Any:
    """Many estimates at fixed parameters."""
    net, loss_fn = cases.initialised("sigmoid"), nn.CrossEntropyLoss()
    model = DistributedDataParallel(net, process_group=group)
    chosen = [
        HessTrace(curvature="diag_ggn_mc", mc_samples=3, seed=seed),
        HessTrace(curvature="diag_ggn_exact", name="exact"),
    ]
    x, y = cases.data("sigmoid", "mean", 0, 12)
    x, y = x.repeat(2, 1), y.repeat(2)  # both ranks hold the same samples
    torch.manual_seed(5)
    with DistCockpit(model, loss_fn, store=store, quantities=chosen, schedule=every(1)) as cockpit:
        for step in range(150):
            with cockpit.track(step):
                loss_fn(model(x[rank * 12 : rank * 12 + 12]), y[rank * 12 : rank * 12 + 12]).backward()
    return torch.rand(3).tolist()


def test_monte_carlo_curvature(ranks: Ranks, tmp_path: Path) -> None:
    torch.manual_seed(5)
    untouched = torch.rand(3).tolist()
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        assert ranks.run(2, monte_carlo, str(tmp_path / name), seed) == [untouched, untouched]
    first, again, other = (
        open_run(tmp_path / name)["hess_trace"]["trace"].values for name in ("first", "again", "other")
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    exact = open_run(tmp_path / "first")["exact"]["trace"].values[0]
    error = first.std(0, ddof=1) / np.sqrt(len(first))
    assert (np.abs(first.mean(0) - exact) < 4.5 * error).all() and (error < 0.1 * exact).all()


def draws(rank: int, size: int, group: Any, store: str, shards: list[int]) -> None:
    """Each rank alone holds samples at one step; they are the same samples."""
    net, loss_fn = cases.initialised("sigmoid"), nn.CrossEntropyLoss(reduction="sum")
    model = DistributedDataParallel(net, process_group=group)
    x, y = cases.data("sigmoid", "sum", 0)
    chosen = [HessTrace(curvature="diag_ggn_mc")]
    with DistCockpit(model, loss_fn, store=store, quantities=chosen, schedule=every(1)) as cockpit:
        with cockpit.track(0):
            loss_fn(model(x[: shards[rank]]), y[: shards[rank]]).backward()


def test_draws_differ_between_ranks(ranks: Ranks, tmp_path: Path) -> None:
    for name, shards in (("a", [24, 0]), ("b", [0, 24])):
        ranks.run(2, draws, str(tmp_path / name), shards)
    a, b = (open_run(tmp_path / name)["hess_trace"]["trace"].values for name in "ab")
    assert (a > 0).all() and (b > 0).all() and not np.array_equal(a, b)


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
