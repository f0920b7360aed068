"""NaN and infinite numbers: which quantities show them, and that later rows are right."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import torch
from changing_runs import go
from ranks import Ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from train import everything, first_order, make_optimizer

from distcockpit import DistCockpit, every, open_run
from distcockpit import quantities as q
from distcockpit.quantities import GradAbsMax, GradHist1d, GradHist2d, MeanGSNR, OutputGradientGeometry

BAD_STEP, STEPS, SHARDS = 1, 3, [13, 11]


BAD = {"nan": float("nan"), "inf": float("inf")}


def network() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(12, 16), nn.Sigmoid(), nn.Linear(16, 5))


def spoil(value: float) -> Any:
    """A forward hook that lets gradients at the output be multiplied."""

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda g: g * value)

    return hook


def chosen(dtype: torch.dtype) -> list[q.Quantity]:
    adapted = [
        q.GradHist1d(name="adapted", bins=20, adapt=q.GradAbsMax()),
        q.GradHist2d(name="adapted_2d", bins=(8, 6), adapt=(q.GradAbsMax(), q.ParamAbsMax())),
        q.HessTrace(curvature="hutchinson", samples=2, name="estimate"),
        q.HessTrace(curvature="diag_ggn_mc", name="monte_carlo"),
    ]
    if dtype != torch.float32:
        return [*first_order(), *adapted[:2]]
    return [*everything(), *adapted]


def train_spoiled(
    rank: int, size: int, group: Any, store: str, what: str, kind: str, who: list[int], dtype_name: str
) -> tuple[list[str], list[int]]:
    """What was logged, and how many elements of this rank's individual gradients were (NaN, infinite)."""
    dtype, bad = getattr(torch, dtype_name), BAD[kind]
    net = network().to(dtype)
    model, loss_fn = DistributedDataParallel(net, process_group=group), nn.CrossEntropyLoss()
    optimizer = make_optimizer("sgd", net)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("distcockpit").addHandler(handler)
    counted = [0, 0]
    try:
        options = {"quantities": chosen(dtype), "schedule": every(1)}
        with DistCockpit(model, loss_fn, optimizer, store=store, **options) as cockpit:
            good = {k: v.clone() for k, v in net.state_dict().items()}
            for step in range(STEPS):
                x, y = cases.data("mlp", "mean", step)
                mine = slice(sum(SHARDS[:rank]), sum(SHARDS[: rank + 1]))
                x, y = x[mine].to(dtype), y[mine]
                is_bad = step == BAD_STEP and rank in who
                if is_bad and what == "input":
                    x[3, 2] = bad
                if step == BAD_STEP and what == "parameter":  # on all ranks, or they would not be replicas
                    with torch.no_grad():
                        net[0].weight[1, 1] = bad
                if is_bad and what == "overflow":
                    x[3] = torch.finfo(dtype).max
                handle = net[1].register_forward_hook(spoil(bad if is_bad and what == "gradient" else 1.0))
                optimizer.zero_grad()
                with cockpit.track(step):
                    loss = loss_fn(cockpit(x), y)
                    (loss * bad if is_bad and what == "loss" else loss).backward()
                if is_bad or (step == BAD_STEP and what == "parameter"):
                    counted = count(net, loss_fn, x, y, bad if what == "loss" else 1.0)
                handle.remove()
                optimizer.step()
                if step == BAD_STEP:  # as a guard of the training does
                    net.load_state_dict(good)
                    optimizer.state.clear()
                good = {k: v.clone() for k, v in net.state_dict().items()}
    finally:
        logging.getLogger("distcockpit").removeHandler(handler)
    return said, counted


def count(net: nn.Module, loss_fn: nn.Module, x: Tensor, y: Tensor, factor: float) -> list[int]:
    """(NaN, infinite) elements of the individual gradients, one sample at a time."""
    total = [0, 0]
    for i in range(len(x)):
        gradients = torch.autograd.grad(loss_fn(net(x[i : i + 1]), y[i : i + 1]) * factor, list(net.parameters()))
        total[0] += sum(int(g.isnan().sum()) for g in gradients)
        total[1] += sum(int(g.isinf().sum()) for g in gradients)
    return total


CASES = [
    (what, kind, who, "float32")
    for what in ("input", "loss", "gradient", "parameter")
    for kind, who in (("nan", [1]), ("inf", [0, 1]))
    if (what, kind) not in (("loss", "inf"), ("parameter", "inf"))
]


CASES += [("input", "nan", [0], "bfloat16"), ("gradient", "inf", [1], "float16"), ("overflow", "inf", [1], "float16")]


FINITE = ("distance", "parameters", "parameter_norm", "learning_rate", "time", "log", "replica_drift")


@pytest.mark.parametrize("what, kind, who, dtype", CASES)
def test_rows_go_on(ranks: Ranks, tmp_path: Path, what: str, kind: str, who: list[int], dtype: str) -> None:
    told = ranks.run(2, train_spoiled, str(tmp_path / "run"), what, kind, who, dtype)
    said = told[0][0]
    assert not [text for text in said if "lost" in text or "could not" in text], said
    run = open_run(tmp_path / "run").load()
    for name, node in run.children.items():
        steps = node["step"].values
        quantity = next((each for each in chosen(getattr(torch, dtype)) if each.name == name), None)
        if quantity is not None and quantity.schedule is None:
            whole = STEPS - quantity.needs.update
            assert list(steps) == list(range(whole)), name
    affected = {0, 1} if what == "parameter" else set(who)
    nans = [counted[0] for _, counted in told]
    infinities = [counted[1] for _, counted in told]
    for name in ("grad_hist_1d", "adapted"):
        row = run[name].sel(step=BAD_STEP)
        n_elements = sum(p.numel() for p in network().parameters()) * sum(SHARDS)
        assert int(row["counts"].sum() + row["nan"]) == n_elements
        if what == "loss":  # the factor on the loss is divided out, and this one cannot be: nothing is known
            assert int(row["nan"]) >= sum(p.numel() for p in network().parameters()) * sum(SHARDS[r] for r in who)
        elif dtype == "float32":
            assert int(row["nan"]) == sum(nans), (name, nans)
            assert int(row["below"] + row["above"]) >= sum(infinities)  # they are counted in the edge bins
    assert np.isfinite(run["adapted"]["edges"]).all() and np.isfinite(run["adapted_2d"]["grad_edges"]).all()
    health = run["rank_health"].sel(step=BAD_STEP)
    for rank in range(2):
        fields = ("nonfinite_losses", "nonfinite_gradients", "first_nonfinite_output")
        is_hit = sum(int(health[field][rank]) for field in fields) > 0
        assert bool(is_hit) == (rank in affected), (rank, health)
        outputs = health["first_nonfinite_output"].attrs["flag_meanings"].split()
        first = outputs[int(health["first_nonfinite_output"][rank])]
        if rank in affected and what in ("input", "parameter", "overflow"):
            assert first == ("0" if (what, kind) != ("input", "inf") or True else first)
        if what in ("loss", "gradient"):
            assert first == "none"
    assert any(f"rank {min(affected)}" in text and "non-finite" in text for text in said), said
    for name, node in run.children.items():  # the steps after are as if nothing had been
        for field, values in node.data_vars.items():
            last = values.sel(step=STEPS - 1 - (name in ("alpha",))) if STEPS - 1 in node["step"] else None
            if last is not None and name not in ("parameter_condition",) and last.dtype.kind == "f":
                if "correlation" not in str(field) and dtype == "float32":
                    assert np.isfinite(last).all() or "seconds" in str(field) or name == "log", (name, field)
    pooled = run["loss"]["loss"].sel(step=BAD_STEP)
    hidden = what in ("gradient", "loss") or kind == "inf"  # sigmoids make infinities finite
    assert hidden or not np.isfinite(pooled)
    for name in ("grad_norm", "mean_gsnr", "norm_test", "inner_test"):
        values = np.concatenate([
            np.ravel(v.sel(step=BAD_STEP)) for v in run[name].data_vars.values() if v.dtype.kind == "f"
        ])
        assert np.isfinite(values).all() == (sum(nans) + sum(infinities) == 0), name


class Spectrum(nn.Module):
    """An output of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(x * self.w)


class Modulus(nn.Module):
    """Makes them real."""

    def __init__(self) -> None:
        super().__init__()
        self.spectrum, self.last = Spectrum(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.spectrum(x).abs())


@pytest.mark.smoke
def test_complex_gradients_at_outputs(tmp_path: Path) -> None:
    run, _ = go(tmp_path / "r", Modulus(), ((4, 5), (4, 2)), [q.RankHealth()], 2)
    assert (run["rank_health"]["first_nonfinite_gradient"] == 0).all()


def test_numbers_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    net, loss_fn = nn.Linear(2, 1, bias=False), nn.MSELoss()
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[0.5, -3.0]]))
    x = torch.tensor([[1.0, 0.0], [torch.nan, 0.1], [torch.inf, 0.2], [1e3, 1e3], [-torch.inf, 0.2]])
    chosen = [
        GradHist1d(bins=2, range=(-1, 1), adapt=GradAbsMax()),
        GradHist2d(bins=(2, 2)),
        MeanGSNR(),
        OutputGradientGeometry(),
    ]
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=chosen, schedule=every(1)) as cockpit:
        for step in range(2):
            with cockpit.track(step):
                loss_fn(net(x), torch.zeros(5, 1)).backward()
    run = open_run(tmp_path / "run")
    # Individual gradients: 2 (w x) x = [1, 0], [nan, nan], [inf, inf], [-5e6, -5e6], [inf, -inf].
    row = run["grad_hist_1d"].to_dataset().sel(step=0)
    counted = {k: int(row[k]) for k in ("below", "above", "nan", "pos_inf", "neg_inf")}
    assert counted == {"below": 3, "above": 3, "nan": 2, "pos_inf": 3, "neg_inf": 1}
    np.testing.assert_array_equal(row["counts"], [3, 5])
    assert row["counts"].sum() + row["nan"] == 5 * 2
    two = run["grad_hist_2d"].to_dataset().sel(step=0)
    assert two["counts"].sum() + two["nan"] == 10
    assert int(two["param_below"]) == 5 and int(two["grad_nan"]) == 2 and int(two["grad_pos_inf"]) == 3
    np.testing.assert_allclose(run["grad_hist_1d"]["edges"][1, -1], 5e6, rtol=1e-3)  # the largest finite one
    assert np.isnan(run["mean_gsnr"]["mean_gsnr"]).all()
