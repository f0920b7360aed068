"""Estimates of curvature traces: against dense matrices, and the same number for every sharding."""

from __future__ import annotations

from pathlib import Path

import architectures
import cases
import numpy as np
import oracle
import pytest
import torch
import xarray as xr
from ranks import Ranks
from torch import nn
from train import SHARDINGS, Spec, train

from distcockpit import DistCockpit, every, open_run
from distcockpit import quantities as q

SAMPLES = 200


def estimate(
    ranks: Ranks, store: Path, model: str, loss: str, sharding: str, samples: int = 8
) -> tuple[list, xr.DataTree]:
    chosen = [
        q.HessTrace(curvature="hutchinson", samples=samples),
        q.HessTrace(curvature="hutchinson_ggn", samples=samples, name="ggn"),
        q.TICTrace(curvature="hutchinson", samples=samples),
    ]
    shards = tuple(SHARDINGS[sharding])
    spec = Spec(str(store), model, loss, shards=shards, steps=1, options={"quantities": chosen})
    states = train(0, 1, None, spec) if len(shards) == 1 else ranks.run(len(shards), train, spec)[0]
    return states, open_run(store)


@pytest.mark.parametrize("model, loss", [("attention", "mean"), ("tokens", "token_mean")])
def test_estimates_lie_within_their_errors(ranks: Ranks, tmp_path: Path, model: str, loss: str) -> None:
    states, run = estimate(ranks, tmp_path / "run", model, loss, "one", SAMPLES)
    net, loss_fn = cases.initialised(model), cases.LOSSES[loss].module()
    hessian = oracle.hessian(net, states[0], loss_fn, *cases.data(model, loss, 0))
    rows = run["hess_trace"].isel(step=0)
    exact = np.array([d.sum() for d in oracle.diagonal_of(hessian, net).values()])
    assert (np.abs(rows["trace"] - exact) <= 4.5 * rows["standard_error"] + 1e-6 * np.abs(exact).max()).all()
    assert np.abs(rows["total"] - exact.sum()) < 4 * rows["total_standard_error"] < 0.5 * abs(exact.sum())
    # The variance of v^T H v is twice the squared norm of what lies off the diagonal.
    off = hessian - np.diag(np.diag(hessian))
    expected = np.sqrt(2 * (off**2).sum() / SAMPLES)
    np.testing.assert_allclose(rows["total_standard_error"], expected, rtol=0.3)
    noise = run["tic_trace"].isel(step=0)["tic_trace"] * rows["total"]
    assert float(noise) > 0


def test_gauss_newton(ranks: Ranks, tmp_path: Path) -> None:
    states, run = estimate(ranks, tmp_path / "run", "sigmoid", "mean", "one", 8 * SAMPLES)
    net, loss_fn = cases.initialised("sigmoid"), nn.CrossEntropyLoss()
    exact = oracle.ggn_diagonal(net, states[0], loss_fn, *cases.data("sigmoid", "mean", 0))
    traces, rows = np.array([d.sum() for d in exact.values()]), run["ggn"].isel(step=0)
    assert (np.abs(rows["trace"] - traces) <= 4.5 * rows["standard_error"]).all()
    assert rows["total_standard_error"] < 0.1 * traces.sum()
    hessian = oracle.hessian(net, states[0], loss_fn, *cases.data("sigmoid", "mean", 0))
    assert np.abs(np.trace(hessian) - traces.sum()) > 5 * rows["total_standard_error"]  # they are different matrices


@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_the_same_for_every_sharding(ranks: Ranks, tmp_path: Path, loss: str) -> None:
    _, alone = estimate(ranks, tmp_path / "one", "attention", loss, "one")
    for sharding in ("uneven 2", "uneven 4", *(["empty rank"] if loss == "sum" else [])):
        _, run = estimate(ranks, tmp_path / sharding, "attention", loss, sharding)
        for group in ("hess_trace", "ggn", "tic_trace"):
            for name, values in alone[group].data_vars.items():
                assert np.abs(values).max() > 1e-3
                np.testing.assert_allclose(run[group][name], values, rtol=1e-3, atol=1e-4 * float(np.abs(values).max()))


def test_a_model_with_its_own_loss_and_dropout(tmp_path: Path) -> None:
    """GPT-2, whose loss is inside; the run goes on as without, random numbers included."""
    runs = []
    for watched in (True, False):
        net, batch = architectures.built("GPT-2"), architectures.data("GPT-2", 0, 6)
        chosen = [q.HessTrace(curvature="hutchinson", samples=20), q.HessMaxEV(tolerance=1e-2)]
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        torch.manual_seed(3)
        options = {"store": tmp_path / f"{watched}", "quantities": chosen, "schedule": every(1), "enabled": watched}
        with DistCockpit(net, None, optimizer, **options) as cockpit:
            for step in range(2):
                optimizer.zero_grad()
                with cockpit.track(step):
                    cockpit(**batch).loss.backward()
                optimizer.step()
        runs.append([*(p.detach() for p in net.parameters()), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    run = open_run(tmp_path / "True")
    assert (run["hess_trace"]["total_standard_error"] > 0).all() and np.isfinite(run["hess_trace"]["trace"]).all()
    assert (run["hess_max_ev"]["status"] == 0).all()


def test_one_vector_has_no_error(tmp_path: Path) -> None:
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    x, y = cases.data("mlp", "mean", 0)
    chosen = [q.HessTrace(curvature="hutchinson", samples=1)]
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=chosen) as cockpit, cockpit.track(0):
        loss_fn(cockpit(x), y).backward()
    rows = open_run(tmp_path / "run")["hess_trace"]
    assert np.isnan(rows["standard_error"]).all() and np.isfinite(rows["trace"]).all()


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: q.HessTrace(curvature="hutchinson", samples=0), ["samples=0", "at least 1"]),
        (lambda: q.TICDiag(curvature="hutchinson"), ["curvature='hutchinson'", "diag_h"]),
        (lambda: q.HessTrace(curvature="lanczos"), ["curvature='lanczos'", "hutchinson_ggn"]),
    ],
)
def test_options(make, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert all(word in str(error.value) for word in words)


def test_what_cannot_be_estimated(tmp_path: Path) -> None:
    net = cases.initialised("mlp")
    with pytest.raises(ValueError, match=r"'hess_trace' \(curvature='hutchinson_ggn'\) needs the loss as a module"):
        DistCockpit(net, None, store=tmp_path / "a", quantities=[q.HessTrace(curvature="hutchinson_ggn")])
    cockpit = DistCockpit(
        net, None, store=tmp_path / "b", quantities=[q.HessTrace(curvature="hutchinson")], schedule=every(1)
    )
    x, y = cases.data("mlp", "mean", 0)
    with pytest.raises(RuntimeError, match="let the model return its loss"), cockpit.track(0):
        nn.functional.cross_entropy(cockpit(x), y).backward()
