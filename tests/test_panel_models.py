"""The panel on models that nobody expects, and quantities of one's own."""

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
from ranks import Ranks
from test_capture import mean_terms
from test_panel import meaning, track_batches
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distcockpit import DistCockpit, every, open_run, presets
from distcockpit import quantities as q
from distcockpit.curvature import diagonals

# -- quantities of one's own -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Reads(q.Quantity):
    """It reads an attribute of the batch, with or without asking, and returns a plain number."""

    attribute: str = "projections"
    asked: Any = ()

    @property
    def needs(self) -> q.Needs:
        return q.Needs(**dict.fromkeys(self.asked, True))

    def group(self, model: q.Model) -> q.Group:
        return q.Group({"value": q.Field()})

    def local(self, batch: q.LocalBatch, memory: dict) -> dict:
        return {"value": float(getattr(batch, self.attribute).sum())}

    def finalize(self, totals: Any, n: int) -> dict:
        return {"value": totals["value"] / n}


def test_a_need_that_was_forgotten_is_an_error(tmp_path: Path) -> None:
    batch = cases.data("mlp", "mean", 0)
    for attribute in ("projections", "squared_norms"):
        with pytest.raises(AttributeError, match=rf"Needs\({attribute}="):  # also where another quantity asked for it
            track_batches(tmp_path / attribute, nn.Linear(12, 5), [batch], [Reads(attribute=attribute), q.OrthoTest()])
    run = track_batches(tmp_path / "run", nn.Linear(12, 5), [batch], [Reads(asked=("projections",)), q.GradNorm()])
    np.testing.assert_allclose(run["reads"]["value"], run["grad_norm"]["total"] ** 2, rtol=1e-5)  # <g_i, G> on average


@dataclass(frozen=True, kw_only=True)
class OwnUpdate(q.Quantity):
    """It needs the update, and does not know that this takes two steps."""

    @property
    def needs(self) -> q.Needs:
        return q.Needs(update=True)

    def group(self, model: q.Model) -> q.Group:
        return q.Group({"value": q.Field()})

    def local(self, batch: q.LocalBatch, memory: dict) -> dict:
        return {} if batch.update is None else {"value": batch.replicated(batch.update.norm)}

    def finalize(self, totals: Any, n: int) -> dict | None:
        return {"value": totals["value"]} if "value" in totals else None


def test_an_own_quantity_of_updates_is_given_both_ends(tmp_path: Path) -> None:
    batches = [cases.data("mlp", "mean", step) for step in range(6)]
    run = track_batches(tmp_path / "run", nn.Linear(12, 5), batches, [OwnUpdate(), q.UpdateSize()], schedule=every(3))
    assert list(run["own_update"]["step"].values) == [0, 3]
    np.testing.assert_allclose(run["own_update"]["value"], run["update_size"]["total"], rtol=1e-5)


def only_early(step: int) -> bool:
    return step < 2


def own_schedules(rank: int, size: int, group: Any, store: str) -> None:
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    model, optimizer = DistributedDataParallel(net, process_group=group), torch.optim.SGD(net.parameters(), lr=0.1)
    chosen = [
        q.Loss(schedule=only_early),
        q.GradHist1d(adapt=q.GradAbsMax(schedule=only_early)),
        # A set, whose order differs between processes.
        Reads(asked=frozenset({"losses", "projections", "squared_norms", "loss", "mean_gradient"})),
    ]
    with DistCockpit(model, loss_fn, optimizer, store=store, quantities=chosen, schedule=every(2)) as cockpit:
        for step in range(3):
            with cockpit.track(step):
                loss_fn(cockpit(torch.ones(2, 12)), torch.arange(2)).backward()


def test_schedules_of_ones_own_are_the_same_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """They are compared by name, not by address."""
    ranks.run(2, own_schedules, str(tmp_path / "run"))
    run = open_run(tmp_path / "run")
    assert list(run["loss"]["step"].values) == [0, 1] and list(run["learning_rate"]["step"].values) == [0, 1, 2]


def test_a_schedule_that_knows_few_steps(tmp_path: Path) -> None:
    planned = [True, False]
    batches = [cases.data("mlp", "mean", step) for step in range(2)]
    run = track_batches(tmp_path / "run", nn.Linear(12, 5), batches, [q.Loss()], schedule=lambda step: planned[step])
    assert list(run["loss"]["step"].values) == [0]


# -- unusual models ----------------------------------------------------------------------------------------------------


def test_float64(tmp_path: Path) -> None:
    """Conversions to float64 are no copies there; the user's batch stays as it is."""
    net = cases.initialised("sigmoid").double()
    x, y = cases.data("sigmoid", "mean", 0)
    x = x.double()
    before, state = x.clone(), {k: v.clone() for k, v in net.state_dict().items()}
    chosen = [*presets.economy(), q.EarlyStopping(), q.MeanGSNR(), q.Parameters()]
    run = track_batches(tmp_path / "run", net, [(x, y)], chosen)
    assert torch.equal(x, before)
    batch = oracle.batch(net, state, mean_terms, x, y)
    for name in ("norm_test", "inner_test", "ortho_test", "early_stopping", "mean_gsnr"):
        np.testing.assert_allclose(run[name][name][0], getattr(oracle, name)(batch), rtol=1e-9, err_msg=name)
    np.testing.assert_allclose(run["gradient_noise_scale"]["noise"][0], oracle.noise_scale(batch)[0], rtol=1e-9)
    np.testing.assert_array_equal(run["parameters"]["0.weight"][0], state["0.weight"])
    assert run["parameters"]["0.weight"].dtype == np.float64


class Odd(nn.Module):
    """A number, an empty parameter, names that a store has for itself, and one that begins with an underscore."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self._inner = nn.Linear(12, 5)
        self.step = nn.Parameter(torch.tensor(1.5))
        self.w = nn.Parameter(torch.randn(5, 2) / 5)
        self.w_0 = nn.Parameter(torch.zeros(5))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self._inner(x) * self.step + (self.w + self.empty.sum()).sum(1) + self.w_0


def test_odd_parameters(tmp_path: Path) -> None:
    net = Odd()
    x, y = cases.data("mlp", "mean", 0)
    state = {k: v.clone() for k, v in net.state_dict().items()}
    chosen = [*presets.economy(), *presets.layers(), q.Parameters(), q.CABS(), q.HessMaxEV(), q.MeanGSNR()]
    run = track_batches(tmp_path / "run", net, [(x, y)], chosen)
    for group in set(run.children) - {"log", "alpha"}:
        assert run[group].sizes["step"] == 1, group
    batch = oracle.batch(net, state, mean_terms, x, y)
    for name in ("norm_test", "inner_test", "ortho_test", "mean_gsnr"):
        np.testing.assert_allclose(run[name][name][0], getattr(oracle, name)(batch), rtol=1e-4, err_msg=name)
    stored = run["parameters"].to_dataset()
    assert set(stored.data_vars) == {"_inner.weight", "_inner.bias", "step_", "w", "w_0"}
    for name in ("_inner.weight", "w", "w_0"):
        np.testing.assert_array_equal(stored[name][0], state[name])
    assert stored["step_"][0] == 1.5
    expected = oracle.hess_max_ev(oracle.hessian(net, state, nn.CrossEntropyLoss(), x, y), "LM")
    np.testing.assert_allclose(run["hess_max_ev"]["hess_max_ev"][0], expected, rtol=1e-4)


def test_no_matrix_no_activation(tmp_path: Path) -> None:
    """Groups whose dimensions are empty have rows all the same."""

    class Bias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(5))

        def forward(self, x: Tensor) -> Tensor:
            return x[:, :5] + self.bias

    run = track_batches(tmp_path / "run", Bias(), [cases.data("mlp", "mean", 0)], presets.layers())
    for group in set(run.children) - {"log"}:
        assert run[group].sizes["step"] == 1, group


def test_complex_parameters_are_refused(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 3, dtype=torch.cfloat))
    with pytest.raises(ValueError, match=r"'0' .*complex parameter 'weight'.*exclude=\['0'\]"):
        DistCockpit(net, store=tmp_path / "run", quantities=[q.GradNorm()])


def test_hooks_on_parameters_stay_out_of_replays(tmp_path: Path) -> None:
    """They would scale the Hessian, and see gradients that are not the run's."""
    net, loss_fn = cases.initialised("sigmoid"), nn.CrossEntropyLoss()
    x, y = cases.data("sigmoid", "mean", 0)
    chosen, seen = [q.HessMaxEV(), q.HessTrace()], []

    def hook(gradient: Tensor) -> Tensor:
        seen.append(gradient)
        return gradient * 0.1

    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=chosen, schedule=every(1)) as cockpit:
        with cockpit.track(0):
            loss_fn(cockpit(x), y).backward()
        handle = net[0].weight.register_hook(hook)
        with cockpit.track(1):
            loss_fn(cockpit(x), y).backward()
        assert len(seen) == 1
        net.zero_grad()
        loss_fn(net(x), y).backward()
        assert len(seen) == 2 and torch.equal(net[0].weight.grad, seen[1] * 0.1)
        handle.remove()
        loss_fn(net(x), y).backward()
        assert len(seen) == 2
    run = open_run(tmp_path / "run")
    np.testing.assert_allclose(*run["hess_max_ev"]["hess_max_ev"], rtol=1e-6)
    np.testing.assert_allclose(*run["hess_trace"]["trace"], rtol=1e-6)


def test_settings_of_the_backend_do_not_matter(tmp_path: Path) -> None:
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    try:
        run = track_batches(tmp_path / "run", nn.Linear(12, 5), [cases.data("mlp", "mean", 0)], [q.HessMaxEV()])
    finally:
        torch.backends.cudnn.conv.fp32_precision = before
    assert run["hess_max_ev"]["status"][0] == 0 and torch.backends.cudnn.enabled


def test_a_group_without_learning_rate(tmp_path: Path) -> None:
    net, loss_fn = nn.Linear(12, 5), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = None
    x, y = cases.data("mlp", "mean", 0)
    with DistCockpit(net, loss_fn, optimizer, store=tmp_path / "run", quantities=[q.CABS()]) as cockpit:
        with cockpit.track(0):
            loss_fn(cockpit(x), y).backward()
    run = open_run(tmp_path / "run")
    assert np.isnan(run["learning_rate"]["learning_rate"]).all() and np.isnan(run["cabs"]["cabs"]).all()


def test_condition_of_a_matrix_without_full_rank(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(12, 4, bias=False), nn.Linear(4, 5, bias=False))
    with torch.no_grad():
        net[0].weight.fill_(1.0)
        net[1].weight.zero_()
    run = track_batches(tmp_path / "run", net, [cases.data("mlp", "mean", 0)], [q.ParameterCondition()])
    np.testing.assert_array_equal(run["parameter_condition"]["parameter_condition"][0], [np.inf, np.inf])
    np.testing.assert_allclose(run["parameter_condition"]["spectral_norm"][0], [np.sqrt(48), 0])


@pytest.mark.parametrize("condition", [1.0, 1e3, 0.9e4, 1.1e4, 1e6, 1e9])
@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
@pytest.mark.parametrize("shape", [(9, 40), (40, 9), (12, 12)])
def test_condition_numbers_are_precise(condition: float, scale: float, shape: tuple[int, int]) -> None:
    """Where squares would lose digits, overflow or vanish, too."""
    random = np.random.default_rng(0)
    n = min(shape)
    left, right = (np.linalg.qr(random.normal(size=(length, n)))[0] for length in shape)
    matrix = (left * (scale * np.geomspace(1, 1 / condition, n))) @ right.T
    row = q.ParameterCondition().finalize({"w": matrix}, 1)
    np.testing.assert_allclose(
        row["parameter_condition"], [condition], rtol=1e-7 + 50 * condition * np.finfo(float).eps
    )
    np.testing.assert_allclose(row["spectral_norm"], [scale], rtol=1e-12)


def test_no_update_without_a_step_of_the_optimizer(tmp_path: Path) -> None:
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    x, y = cases.data("mlp", "mean", 0)
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=[q.UpdateSize()], schedule=every(1)) as cockpit:
        for step in range(2):
            with cockpit.track(step):
                loss_fn(cockpit(x), y).backward()
    run = open_run(tmp_path / "run")["update_size"]
    assert list(run["step"].values) == [0] and run["total"][0] == 0  # the second may still have been to come


class Tokens(nn.Module):
    """The second half sees [B T, C], which begins with the batch axis only by chance."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.act, self.b, self.act2 = nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU()
        self.c = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        h = self.act(self.a(x))
        return self.c(self.act2(self.b(h).reshape(n * t, 4)).reshape(n, t, 4).mean(1))


def token_outputs(rank: int, size: int, group: Any, store: str, shapes: list[tuple[int, int]]) -> Tensor:
    net, loss_fn = Tokens(), nn.CrossEntropyLoss(reduction="sum")
    model = DistributedDataParallel(net, process_group=group)
    chosen = [q.OutputActivation(channel_axis=-1), q.OutputNorm(), q.RankHealth()]
    x = torch.randn(*shapes[rank], 5, generator=torch.Generator().manual_seed(rank))
    with DistCockpit(model, loss_fn, store=store, quantities=chosen, schedule=every(1), exclude=["b"]) as cockpit:
        with cockpit.track(0):
            loss_fn(cockpit(x), torch.arange(len(x)) % 3).backward()
        net.b.weight.data[0, 0] = torch.inf
        with cockpit.track(1):
            loss_fn(cockpit(x), torch.arange(len(x)) % 3).backward()
    return torch.relu(net.a(x)).detach()


@pytest.mark.parametrize("shapes", [[(4, 2), (3, 2)], [(4, 2), (0, 2)], [(4, 1), (3, 2)]])
def test_outputs_of_which_only_some_begin_with_the_batch(
    ranks: Ranks, tmp_path: Path, shapes: list[tuple[int, int]]
) -> None:
    first = ranks.run(2, token_outputs, str(tmp_path / "run"), shapes)
    run = open_run(tmp_path / "run")
    row = run["output_activation"].to_dataset().sel(step=0)
    active = torch.cat([z.flatten(0, 1) for z in first]) > 0
    np.testing.assert_allclose(row["active"].sel(layer="act"), active.float().mean(), rtol=1e-6)
    np.testing.assert_allclose(row["dead"].sel(layer="act"), (~active.any(0)).float().mean())
    norm = run["output_norm"]["output_norm"].sel(step=0)
    norms = torch.cat([z.flatten(1).norm(dim=1) for z in first])
    np.testing.assert_allclose(norm.sel(layer="act"), norms.mean(), rtol=1e-5)
    for value in (row["active"].sel(layer="act2"), row["dead"].sel(layer="act2"), norm.sel(layer="act2")):
        assert np.isnan(value)
    health = run["rank_health"].to_dataset().sel(step=1)
    assert meaning(health["first_nonfinite_output"])[0] == "act2"  # without a batch axis; b is left out


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
    assert re.search(f"step 1: hess_trace: NaN, .*{why}", caplog.text)
    traces = open_run(tmp_path / "b")["hess_trace"]["trace"]
    assert traces.isnull().all("parameter").values.tolist() == [False, True, True]


def test_a_diagonal_of_the_converted_form_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its largest elements must agree with products of the matrix; here one parameter's are half as large again."""
    right = diagonals._differentiate

    def wrong(extension: Any, form: nn.Module, *rest: Any) -> dict[str, Tensor]:
        diagonal = right(extension, form, *rest)
        return {k: 1.5 * d if k == "second.bias" else d for k, d in diagonal.items()}

    monkeypatch.setattr(diagonals, "_differentiate", wrong)
    net, loss_fn, (x, y) = Skips(), nn.CrossEntropyLoss(), cases.data("mlp", "mean", 0)
    chosen = [q.HessTrace(curvature="diag_ggn_exact")]
    cockpit = DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=chosen, schedule=every(1))
    with pytest.raises(RuntimeError, match="'second.bias' would be"), cockpit.track(0):
        loss_fn(cockpit(x), y).backward()
