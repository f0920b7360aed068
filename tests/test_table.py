"""Quantities x cases x shardings: what the store holds is what one process with the whole batch computes."""

from __future__ import annotations

from pathlib import Path

import cases
import numpy as np
import oracle
import pytest
import xarray as xr
from ranks import Ranks
from train import SHARDINGS, Spec, train

from distcockpit import open_run


def run(ranks: Ranks, spec: Spec, quantities: str = "six") -> tuple[list[dict], xr.DataTree]:
    if len(spec.shards) == 1:
        states = train(0, 1, None, spec, quantities)
    else:
        states, *others = ranks.run(len(spec.shards), train, spec, quantities)
        for other in others:  # the cockpit did not drive the replicas apart
            for a, b in zip(states, other, strict=True):
                assert all((a[k] == b[k]).all() for k in a)
    return states, open_run(spec.store)


def check(spec: Spec, states: list[dict], run: xr.DataTree, curvature: bool = True) -> None:
    """Every row of the store against the oracle."""
    model, loss = cases.initialised(spec.model), cases.LOSSES[spec.loss]
    n = sum(spec.shards)
    previous = None
    pooled = []
    for step, state in enumerate(states[:-1]):
        x, y = cases.data(spec.model, spec.loss, step, n)
        pooled.append(oracle.batch(model, state, loss.terms, x, y))
    for step, batch in enumerate(pooled):
        at = {name: node.to_dataset().sel(step=step) for name, node in run.children.items() if step in node["step"]}
        assert int(at["mean_gsnr"]["batch_size"]) == n and at["mean_gsnr"]["epoch"] == step // 2
        check_grad_hist_1d(at["grad_hist_1d"], batch)
        check_grad_hist_2d(at["grad_hist_2d"], batch)
        gsnr = oracle.mean_gsnr(batch)
        assert gsnr > 1e-4
        np.testing.assert_allclose(at["mean_gsnr"]["mean_gsnr"], gsnr, rtol=1e-4)
        check_geometry(at["output_gradient_geometry"], batch, previous, step)
        if step + 1 < len(pooled):
            check_alpha(at["alpha"], oracle.alpha(batch, pooled[step + 1]))
        if curvature:
            x, y = cases.data(spec.model, spec.loss, step, n)
            mean = cases.LOSSES["mean" if spec.loss == "sum" else spec.loss].module()
            for name, definition in (("hess_trace", oracle.hess_trace), ("ggn_trace", oracle.ggn_trace)):
                expected = definition(model, states[step], mean, x, y)
                trace = at[name]["trace"]
                assert list(trace["parameter"].values) == list(expected)
                largest = max(map(abs, expected.values()))
                assert largest > 1e-2
                np.testing.assert_allclose(trace, list(expected.values()), rtol=1e-4, atol=1e-6 * largest)
        previous = batch
    assert list(run["alpha"]["step"].values) == list(range(spec.steps - 1))


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
    below, above = (batch.flat < -0.5).sum(), (batch.flat > 0.5).sum()
    assert [int(row[k]) for k in ("below", "above", "nan", "pos_inf", "neg_inf")] == [below, above, 0, 0, 0]


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


def check_geometry(row: xr.Dataset, batch: oracle.Batch, previous: oracle.Batch | None, step: int) -> None:
    expected = oracle.output_geometry(batch, previous)
    reached = [layer for layer in row["layer"].values if layer in expected]
    assert len(reached) >= 1
    for layer in reached:
        norm, cosine = expected[layer]
        assert norm > 1e-6
        np.testing.assert_allclose(row["norm"].sel(layer=layer), norm, rtol=1e-4)
        np.testing.assert_allclose(row["correlation"].sel(layer=layer), cosine, atol=1e-4)
        assert np.isnan(cosine) == (previous is None)
    assert int(row["previous_step"]) == step - 1


def check_alpha(row: xr.Dataset, expected: dict[str, float]) -> None:
    assert row["status"].attrs["flag_meanings"].split()[int(row["status"])] == (
        "minimum" if expected["curvature_of_fit"] > 0 else "concave"
    )
    np.testing.assert_allclose(row["alpha"], expected["alpha"], rtol=1e-3, atol=1e-3)
    for name in ("update_norm", "f_start", "f_end", "slope_start", "slope_end"):
        assert abs(expected[name]) > 1e-6
        np.testing.assert_allclose(row[name], expected[name], rtol=1e-5, atol=1e-6)
        if name != "update_norm":
            np.testing.assert_allclose(row[f"{name}_variance"], expected[f"{name}_variance"], rtol=1e-4)


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("model", ["mlp", "cnn", "sigmoid"])
def test_six_quantities(ranks: Ranks, tmp_path: Path, model: str, optimizer: str, sharding: str) -> None:
    # The mean loss of an empty batch is NaN, so a run with an empty rank uses the sum.
    loss = "sum" if sharding == "empty rank" else "mean"
    spec = Spec(str(tmp_path / "run.zarr"), model, loss, optimizer, tuple(SHARDINGS[sharding]))
    check(spec, *run(ranks, spec))


@pytest.mark.parametrize("sharding", ["one", "uneven 2", "uneven 4"])
@pytest.mark.parametrize("loss", ["mse", "class_weights"])
def test_losses(ranks: Ranks, tmp_path: Path, loss: str, sharding: str) -> None:
    spec = Spec(str(tmp_path / "run.zarr"), "sigmoid", loss, "sgd", tuple(SHARDINGS[sharding]))
    curvature = loss == "mse"
    check(spec, *run(ranks, spec, "six" if curvature else "first order"), curvature=curvature)


@pytest.mark.parametrize("sharding", ["one", "uneven 2", "uneven 4"])
@pytest.mark.parametrize(
    "model, loss",
    [
        ("tokens", "token_mean"),
        ("attention", "mean"),
        ("reused", "mean"),
        ("scaled", "mean"),
        ("eval_batchnorm", "mean"),
    ],
)
def test_layers(ranks: Ranks, tmp_path: Path, model: str, loss: str, sharding: str) -> None:
    ddp = {"find_unused_parameters": True} if model == "reused" else {}
    spec = Spec(str(tmp_path / "run.zarr"), model, loss, "adamw", tuple(SHARDINGS[sharding]), ddp=ddp)
    check(spec, *run(ranks, spec, "first order"), curvature=False)


@pytest.mark.parametrize("sharding", ["one", "uneven 2", "uneven 4"])
@pytest.mark.parametrize(
    "loop",
    [
        {"factor": 1024.0},
        {"accumulate": 2},
        {"accumulate": 3, "no_sync": True},
        {"backwards": 2},
        {"accumulate": 2, "factor": 512.0, "backwards": 2},
    ],
    ids=lambda loop: "-".join(f"{k}={v}" for k, v in loop.items()),
)
@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_loops(ranks: Ranks, tmp_path: Path, loss: str, loop: dict, sharding: str) -> None:
    shards = tuple(max(3, s) for s in SHARDINGS[sharding]) if loss == "mean" else tuple(SHARDINGS[sharding])
    spec = Spec(str(tmp_path / "run.zarr"), "sigmoid", loss, "sgd", shards, **loop)
    check(spec, *run(ranks, spec))
