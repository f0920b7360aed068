"""Every row of a store against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import cases
import numpy as np
import oracle
import torch
import xarray as xr
from ranks import Ranks
from torch import Tensor
from train import Spec, parameter_groups, train

from distcockpit import every, open_run


def run(ranks: Ranks, spec: Spec, curvature: bool = True) -> tuple[list[dict], xr.DataTree]:
    if len(spec.shards) == 1:
        states = train(0, 1, None, spec, curvature)
    else:
        states, *others = ranks.run(len(spec.shards), train, spec, curvature)
        for other in others:  # the cockpit did not drive the replicas apart
            for a, b in zip(states, other, strict=True):
                assert all((a[k] == b[k]).all() for k in a)
    return states, open_run(spec.store)


Check = Callable[[xr.Dataset, "Case"], None]


@dataclass
class Case:
    """One step of one run, as a single process with the whole batch sees it."""

    spec: Spec
    step: int
    states: list[dict]  # parameters and buffers before each step, and after the last
    pooled: list[oracle.Batch]  # of each step

    @property
    def batch(self) -> oracle.Batch:
        return self.pooled[self.step]

    @property
    def previous(self) -> oracle.Batch | None:
        return self.pooled[self.step - 1] if self.step else None

    @cached_property
    def model(self) -> torch.nn.Module:
        return cases.initialised(self.spec.model)

    @cached_property
    def mean_loss(self) -> torch.nn.Module:
        return cases.LOSSES["mean" if self.spec.loss == "sum" else self.spec.loss].module()

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        return cases.data(self.spec.model, self.spec.loss, self.step, sum(self.spec.shards))

    @cached_property
    def hessian(self) -> np.ndarray:
        return oracle.hessian(self.model, self.states[self.step], self.mean_loss, *self.data)

    @cached_property
    def ggn_diagonal(self) -> dict[str, np.ndarray]:
        return oracle.ggn_diagonal(self.model, self.states[self.step], self.mean_loss, *self.data)

    def parameters(self, step: int) -> dict[str, np.ndarray]:
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        return {name: self.states[step][name].double().numpy() for name in names}

    @property
    def update(self) -> dict[str, np.ndarray]:
        after = self.parameters(self.step + 1)
        return {name: after[name] - before for name, before in self.parameters(self.step).items()}

    @cached_property
    def rates(self) -> list[tuple[float, list[str]]]:
        """Learning rate and parameters of each group."""
        named = {id(p): name for name, p in self.model.named_parameters()}
        groups = parameter_groups(self.spec.optimizer, self.model)
        return [(group["lr"], [named[id(p)] for p in group["params"]]) for group in groups]

    @property
    def layers(self) -> dict[str, list[str]]:
        """Parameters by the module that owns them first."""
        owner: dict[str, str] = {}
        for path, module in self.model.named_modules():
            for name, p in self.model.named_parameters():
                whole = isinstance(module, torch.nn.MultiheadAttention)
                if name not in owner and any(p is own for own in module.parameters(recurse=whole)):
                    owner[name] = path
        return {path: [n for n in owner if owner[n] == path] for path in owner.values()}


def check(
    spec: Spec, states: list[dict], run: xr.DataTree, curvature: bool = True, more: dict[str, Check] | None = None
) -> None:
    """Every row of the store against the oracle; ``more``: of quantities that only this run has."""
    model, loss = cases.initialised(spec.model), cases.LOSSES[spec.loss]
    n = sum(spec.shards)
    pooled = [
        oracle.batch(model, state, loss.terms, *cases.data(spec.model, spec.loss, step, n))
        for step, state in enumerate(states[:-1])
    ]
    each_step = [Case(spec, step, states, pooled) for step in range(spec.steps)]
    chosen = spec.chosen(curvature)
    checks = CHECKS | (more or {})
    wanted = {quantity.name: quantity.schedule or every(1) for quantity in chosen} | dict.fromkeys(more or {}, every(1))
    assert set(run.children) == set(wanted) | {"learning_rate", "log"} and set(wanted) < set(checks)
    for name in [*wanted, "learning_rate"]:
        rows = run[name].to_dataset().load()
        steps = [step for step in range(spec.steps) if wanted.get(name, every(1))(step)]
        assert list(rows["step"].values) == (steps[:-1] if name.startswith("alpha") else steps), name
        for step in rows["step"].values:
            row = rows.sel(step=step)
            assert int(row["batch_size"]) == n and row["epoch"] == step // 2
            checks[name](row, each_step[int(step)])


def close(actual: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-7) -> None:
    """Within tolerance; and the oracle's value says something."""
    expected = np.asarray(expected, dtype=float)
    assert np.isfinite(expected).any() and (np.nan_to_num(expected) != 0).any()
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol)


def by_name(values: dict[str, float]) -> list[float]:
    return list(values.values())


def norms(arrays: dict[str, np.ndarray]) -> list[float]:
    return [float(np.linalg.norm(a)) for a in arrays.values()]


def check_norms(row: xr.Dataset, name: str, arrays: dict[str, np.ndarray], rtol: float = 1e-5) -> None:
    """Per parameter, and the whole. Differences of float32 parameters round at 1e-8 or so."""
    assert list(row["parameter"].values) == list(arrays)
    close(row[name], norms(arrays), rtol, atol=1e-7)
    close(row["total"], np.linalg.norm(norms(arrays)), rtol)


def mean_gradient(batch: oracle.Batch) -> dict[str, np.ndarray]:
    return {name: g.mean(0) for name, g in batch.gradients.items()}


def check_loss(row: xr.Dataset, case: Case) -> None:
    close(row["loss"], case.batch.losses.mean(), rtol=1e-6)


def check_scalar(name: str, definition: Callable[[oracle.Batch], float], rtol: float = 1e-4) -> Check:
    return lambda row, case: close(row[name], definition(case.batch), rtol)


def check_cabs(row: xr.Dataset, case: Case) -> None:
    expected = [
        oracle.cabs(case.batch, rate, [n for n in names if n in case.batch.gradients]) for rate, names in case.rates
    ]
    close(row["per_group"], expected, 1e-4)
    close(row["cabs"], sum(expected), 1e-4)


def check_learning_rate(row: xr.Dataset, case: Case) -> None:
    close(row["learning_rate"], [rate for rate, _ in case.rates], rtol=1e-12)


def check_distance(row: xr.Dataset, case: Case) -> None:
    now, first = case.parameters(case.step), case.parameters(0)
    moved = {name: now[name] - first[name] for name in now}
    if case.step == 0:
        assert (row["distance"] == 0).all() and row["total"] == 0
    else:
        check_norms(row, "distance", moved)


def check_parameters(row: xr.Dataset, case: Case) -> None:
    for name, value in case.parameters(case.step).items():
        np.testing.assert_array_equal(row[name], value)
        assert row[name].dtype == np.float32


def check_time(row: xr.Dataset, case: Case) -> None:
    assert 0 < row["time"]


def leaves(model: torch.nn.Module) -> list[str]:
    """Modules without others below them; attention counts as one."""
    whole = [path for path, m in model.named_modules() if isinstance(m, torch.nn.MultiheadAttention)]
    inside = tuple(f"{path}." for path in whole)
    bottom = [path for path, m in model.named_modules() if not any(m.children()) and not path.startswith(inside)]
    return whole + bottom


def check_outputs(rms: int) -> Check:
    def check(row: xr.Dataset, case: Case) -> None:
        expected = oracle.output_norm(case.batch)
        seen = [path for path in row["layer"].values if path in expected]
        assert set(row["layer"].values) == set(leaves(case.model)) and len(seen) >= 1
        close(row["output_norm"].sel(layer=seen), [expected[path][rms] for path in seen])

    return check


def check_activation(row: xr.Dataset, case: Case) -> None:
    seen = [path for path in row["layer"].values if path in case.batch.values]
    kinds = (torch.nn.ReLU, torch.nn.Sigmoid, torch.nn.Tanh)
    activations = [p for p, m in case.model.named_modules() if isinstance(m, kinds)]
    assert seen and set(row["layer"].values) == set(activations or leaves(case.model))
    for path in seen:
        active, dead = oracle.output_activation(case.batch, path)
        np.testing.assert_allclose(row["active"].sel(layer=path), active, atol=2e-4)
        np.testing.assert_allclose(row["dead"].sel(layer=path), dead, atol=1e-12)
        assert 0.1 < active


def check_direction(
    row: xr.Dataset, now: dict[str, np.ndarray], before: dict[str, np.ndarray] | None, step: int
) -> None:
    assert list(row["parameter"].values) == list(now) and int(row["previous_step"]) == step - 1
    close(row["norm"], norms(now), 1e-4, 1e-7)
    if before is None:
        assert np.isnan(row["correlation"]).all()
        return
    for name in now:
        size = np.linalg.norm(now[name]) * np.linalg.norm(before[name])
        cosine = row["correlation"].sel(parameter=name)
        if size == 0:
            assert np.isnan(cosine)
        elif size > 1e-9:
            np.testing.assert_allclose(cosine, oracle.cosine(now[name], before[name]), atol=1e-4)


def check_gradient_geometry(row: xr.Dataset, case: Case) -> None:
    before = None if case.previous is None else mean_gradient(case.previous)
    check_direction(row, mean_gradient(case.batch), before, case.step)


def check_update_geometry(row: xr.Dataset, case: Case) -> None:
    before = None if case.step == 0 else replace(case, step=case.step - 1).update
    check_direction(row, case.update, before, case.step)


def check_gradient_activation(row: xr.Dataset, case: Case) -> None:
    for name, g in mean_gradient(case.batch).items():
        active = np.abs(g.reshape(len(g), -1)) > 1e-8
        np.testing.assert_allclose(row["active"].sel(parameter=name), active.mean(), atol=0.01)
        np.testing.assert_allclose(row["dead"].sel(parameter=name), (~active.any(1)).mean(), atol=1e-12)
    assert row["active"].max() > 0.3


def check_condition(row: xr.Dataset, case: Case) -> None:
    matrices = {n: p.reshape(len(p), -1) for n, p in case.parameters(case.step).items() if p.ndim > 1}
    assert list(row["parameter"].values) == list(matrices)
    close(row["parameter_condition"], [np.linalg.cond(m) for m in matrices.values()], 1e-6)
    close(row["spectral_norm"], [np.linalg.norm(m, 2) for m in matrices.values()], 1e-9)


def check_noise_scale(row: xr.Dataset, case: Case) -> None:
    noise, signal = oracle.noise_scale(case.batch)
    close(row["noise"], noise, 1e-4)
    close(row["signal"], signal, 1e-4, 1e-5 * noise)
    trained = {path: [n for n in names if n in case.batch.gradients] for path, names in case.layers.items()}
    layers = {path: names for path, names in trained.items() if names}
    assert list(row["layer"].values) == [path or "(model)" for path in layers]
    each = np.array([oracle.noise_scale(case.batch, names) for names in layers.values()])
    close(row["layer_noise"], each[:, 0], 1e-4, 1e-6 * noise)
    close(row["layer_signal"], each[:, 1], 1e-4, 1e-5 * noise)
    noise, signal = oracle.noise_scale_between(case.batch, list(case.spec.shards))
    assert np.isnan(noise) == (np.count_nonzero(case.spec.shards) < 2)
    np.testing.assert_allclose(row["rank_noise"], noise, rtol=1e-4)
    np.testing.assert_allclose(row["rank_signal"], signal, rtol=1e-4, atol=1e-5)


def check_disagreement(row: xr.Dataset, case: Case) -> None:
    expected = np.array(oracle.rank_disagreement(case.batch, list(case.spec.shards)))
    for column, name in enumerate(("grad_norm", "cosine", "loss", "local_batch_size")):
        close(row[name], expected[:, column], 1e-4)


def check_health(row: xr.Dataset, case: Case) -> None:
    for name in ("nonfinite_losses", "nonfinite_gradients", "first_nonfinite_output", "first_nonfinite_gradient"):
        assert row[name].sizes == {"rank": len(case.spec.shards)} and (row[name] == 0).all()
    for name in ("track", "forward", "wait", "cockpit"):
        assert (row[f"{name}_seconds"] > 0).all(), name
    assert (row["forward_seconds"] < row["track_seconds"]).all()
    for name in ("step", "outside"):
        assert np.isnan(row[f"{name}_seconds"]).all() if case.step == 0 else (row[f"{name}_seconds"] > 0).all()


def check_drift(row: xr.Dataset, case: Case) -> None:
    assert row["replica_drift"] == 0 and (row["differs"] == 0).all()
    assert row["differs"].shape == (len(list(case.model.parameters())), len(case.spec.shards))


def check_trace(diagonal: str) -> Check:
    def check(row: xr.Dataset, case: Case) -> None:
        expected = {name: h.sum() for name, h in diagonals(case, diagonal).items()}
        assert list(row["parameter"].values) == list(expected)
        largest = max(map(abs, expected.values()))
        assert largest > 1e-2
        close(row["trace"], by_name(expected), 1e-4, 1e-6 * largest)

    return check


def diagonals(case: Case, kind: str) -> dict[str, np.ndarray]:
    return case.ggn_diagonal if kind == "ggn" else oracle.diagonal_of(case.hessian, case.model)


def check_tic_diag(row: xr.Dataset, case: Case) -> None:
    """Ill-conditioned where h + epsilon is near zero: the bar is what an error of 1e-6 of the largest h makes."""
    h = np.concatenate([d.ravel() for d in diagonals(case, "hessian").values()])
    second = (case.batch.flat**2).mean(0)
    sensitivity = (second / (np.abs(h + 1e-7) + 1e-30) ** 2).sum() * 1e-6 * np.abs(h).max()
    expected = oracle.tic_diag(case.batch, diagonals(case, "hessian"))
    assert abs(row["tic_diag"] - expected) <= 1e-4 * abs(expected) + sensitivity


def check_tic_ggn(row: xr.Dataset, case: Case) -> None:
    close(row["tic_diag"], oracle.tic_diag(case.batch, diagonals(case, "ggn"), epsilon=1e-3), 1e-4)


def check_tic_trace(row: xr.Dataset, case: Case) -> None:
    close(row["tic_trace"], oracle.tic_trace(case.batch, diagonals(case, "hessian")), 1e-4)


def check_eigenvalue(which: str) -> Check:
    def check(row: xr.Dataset, case: Case) -> None:
        assert row["status"] == 0 and row["products"] > 5
        close(row["hess_max_ev"], oracle.hess_max_ev(case.hessian, which), 1e-4)

    return check


def check_counts(counts: np.ndarray, exact: np.ndarray, values: np.ndarray, edges: np.ndarray) -> None:
    """Totals are equal; beside values within float32 rounding of an edge, at most 1e-5 are in a neighbouring bin."""
    assert counts.sum() == exact.sum() == values.size
    moved = np.abs(np.cumsum(counts) - np.cumsum(exact))[:-1]
    rounding = 1e-6 * np.abs(values).max()
    near = np.array([(np.abs(values - edge) <= rounding).sum() for edge in edges[1:-1]])
    assert (moved <= near + 1e-5 * values.size).all()
    assert (exact > 0).sum() > 5


def check_grad_hist_1d(row: xr.Dataset, batch: oracle.Batch) -> None:
    np.testing.assert_array_equal(row["edges"], oracle.edges(-0.5, 0.5, 60))
    check_counts(row["counts"].values, oracle.grad_hist_1d(batch, row["edges"].values), batch.flat, row["edges"].values)
    assert [int(row[k]) for k in ("nan", "pos_inf", "neg_inf")] == [0, 0, 0]
    rounding = 1e-6 * np.abs(batch.flat).max()
    for name, values in (("below", -batch.flat), ("above", batch.flat)):
        near = (np.abs(values - 0.5) <= rounding).sum()
        assert abs(int(row[name]) - (values > 0.5).sum()) <= near, name


def check_grad_hist_2d(row: xr.Dataset, batch: oracle.Batch) -> None:
    edges = row["grad_edges"].values, row["param_edges"].values
    exact = oracle.grad_hist_2d(batch, *edges)
    for axis, values in ((1, batch.flat), (0, np.concatenate([p.ravel() for p in batch.parameters.values()]))):
        marginal = row["counts"].values.sum(axis), exact.sum(axis)
        scale = batch.flat.size // values.size
        check_counts(marginal[0] // scale, marginal[1] // scale, values, edges[0] if axis else edges[1])
    near = sum((np.abs(batch.flat - e) <= 1e-6 * np.abs(batch.flat).max()).sum() for e in edges[0])
    assert np.abs(row["counts"].values - exact).sum() <= 2 * (near + 1e-5 * batch.flat.size)
    np.testing.assert_array_equal(row["counts_per_parameter"].sum("parameter"), row["counts"])
    for name in row["parameter"].values:
        one = oracle.grad_hist_2d(batch, *edges, name)
        assert row["counts_per_parameter"].sel(parameter=name).sum() == one.sum()
        difference = np.abs(row["counts_per_parameter"].sel(parameter=name) - one).sum()
        assert difference <= 2 * (near + 1e-5 * batch.flat.size)


def check_gsnr(row: xr.Dataset, case: Case) -> None:
    expected = oracle.mean_gsnr(case.batch)
    assert expected > 1e-4
    close(row["mean_gsnr"], expected, 1e-4)


def check_output_gradients(row: xr.Dataset, case: Case) -> None:
    expected = oracle.output_geometry(case.batch, case.previous)
    reached = [layer for layer in row["layer"].values if layer in expected]
    assert len(reached) >= 1
    for layer in reached:
        norm, cosine = expected[layer]
        assert norm > 1e-6
        np.testing.assert_allclose(row["norm"].sel(layer=layer), norm, rtol=1e-4)
        np.testing.assert_allclose(row["correlation"].sel(layer=layer), cosine, atol=1e-4)
        assert np.isnan(cosine) == (case.previous is None)
    assert int(row["previous_step"]) == case.step - 1


def check_alpha(row: xr.Dataset, case: Case) -> None:
    expected = oracle.alpha(case.batch, case.pooled[case.step + 1])
    assert row["status"].attrs["flag_meanings"].split()[int(row["status"])] == (
        "minimum" if expected["curvature_of_fit"] > 0 else "concave"
    )
    np.testing.assert_allclose(row["alpha"], expected["alpha"], rtol=1e-3, atol=1e-3)
    for name in ("update_norm", "f_start", "f_end", "slope_start", "slope_end"):
        assert abs(expected[name]) > 1e-6
        np.testing.assert_allclose(row[name], expected[name], rtol=1e-5, atol=1e-6)
        if name != "update_norm":
            np.testing.assert_allclose(row[f"{name}_variance"], expected[f"{name}_variance"], rtol=1e-4)


CHECKS: dict[str, Check] = {
    "alpha": check_alpha,
    "cabs": check_cabs,
    "distance": check_distance,
    "early_stopping": check_scalar("early_stopping", oracle.early_stopping),
    "ggn_trace": check_trace("ggn"),
    "grad_hist_1d": lambda row, case: check_grad_hist_1d(row, case.batch),
    "grad_hist_2d": lambda row, case: check_grad_hist_2d(row, case.batch),
    "grad_norm": lambda row, case: check_norms(row, "grad_norm", mean_gradient(case.batch), 1e-4),
    "gradient_activation": check_gradient_activation,
    "gradient_geometry": check_gradient_geometry,
    "gradient_noise_scale": check_noise_scale,
    "hess_max_ev": check_eigenvalue("LM"),
    "hess_trace": check_trace("hessian"),
    "inner_test": check_scalar("inner_test", oracle.inner_test),
    "largest_algebraic": check_eigenvalue("LA"),
    "learning_rate": check_learning_rate,
    "loss": check_loss,
    "mean_gsnr": check_gsnr,
    "norm_test": check_scalar("norm_test", oracle.norm_test),
    "ortho_test": check_scalar("ortho_test", oracle.ortho_test),
    "output_activation": check_activation,
    "output_gradient_geometry": check_output_gradients,
    "output_norm": check_outputs(rms=0),
    "output_rms": check_outputs(rms=1),
    "parameter_condition": check_condition,
    "parameter_norm": lambda row, case: check_norms(row, "parameter_norm", case.parameters(case.step), 1e-9),
    "parameters": check_parameters,
    "rank_disagreement": check_disagreement,
    "rank_health": check_health,
    "replica_drift": check_drift,
    "tic_diag": check_tic_diag,
    "tic_ggn": check_tic_ggn,
    "tic_trace": check_tic_trace,
    "time": check_time,
    "update_geometry": check_update_geometry,
    "update_size": lambda row, case: check_norms(row, "update_size", case.update),
}
