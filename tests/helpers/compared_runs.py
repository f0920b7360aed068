"""Runs of a small network, compared with the oracle row by row."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cases
import numpy as np
import oracle
from steps import run_steps
from torch import Tensor, nn

from distcockpit import DistCockpit, open_run
from distcockpit.quantities import Alpha, GradHist1d, MeanGSNR, OutputGradientGeometry

N = cases.N


def mean_terms(z: Tensor, y: Tensor) -> tuple[Tensor, float]:
    return cases._nll(z, y)[0], 1


def check(store: Path, model: nn.Module, states: list[dict], batches: list[tuple[Tensor, Tensor]], terms: Any) -> None:
    """GSNR, histogram, geometry and (if stored) alpha of every step against the oracle."""
    run = open_run(store)
    pooled = [oracle.batch(model, state, terms, x, y) for state, (x, y) in zip(states, batches, strict=True)]
    assert list(run["mean_gsnr"]["step"].values) == list(range(len(pooled)))
    for step, batch in enumerate(pooled):
        np.testing.assert_allclose(run["mean_gsnr"]["mean_gsnr"].sel(step=step), oracle.mean_gsnr(batch), rtol=1e-4)
        row = run["grad_hist_1d"].to_dataset().sel(step=step)
        moved = np.abs(np.cumsum(row["counts"]) - np.cumsum(oracle.grad_hist_1d(batch, row["edges"].values)))
        assert row["counts"].sum() == batch.flat.size and moved.max() <= 2
        geometry = run["output_gradient_geometry"].to_dataset().sel(step=step)
        for layer, (norm, _) in oracle.output_geometry(batch, None).items():
            if layer in geometry["layer"]:
                np.testing.assert_allclose(geometry["norm"].sel(layer=layer), norm, rtol=1e-4)
    if "alpha" in run.children:
        for step in range(len(pooled) - 1):
            row, expected = run["alpha"].to_dataset().sel(step=step), oracle.alpha(*pooled[step : step + 2])
            np.testing.assert_allclose(row["alpha"], expected["alpha"], rtol=1e-3, atol=1e-3)
            np.testing.assert_allclose(row["f_start"], expected["f_start"], rtol=1e-5)
            np.testing.assert_allclose(row["slope_end"], expected["slope_end"], rtol=1e-4)


def quantities(alpha: bool = True) -> list[Any]:
    first = [MeanGSNR(), GradHist1d(range=(-0.5, 0.5), bins=40), OutputGradientGeometry()]
    return [*first, Alpha()] if alpha else first


def train_sigmoid(
    store: Path,
    step_function: Callable[[DistCockpit, nn.Module, Tensor, Tensor], None],
    model: nn.Module | None = None,
    loss_fn: nn.Module | None = None,
    alpha: bool = True,
    target: str = "mean",
    **options: Any,
) -> tuple[nn.Module, list[dict], list[tuple[Tensor, Tensor]]]:
    """The model, its states before each step, and the batches."""
    net = cases.initialised("sigmoid") if model is None else model
    done = run_steps(
        store,
        net,
        partial(cases.data, "tokens" if target == "token_mean" else "sigmoid", target),
        loss_fn=loss_fn,
        body=lambda cockpit, x, y: step_function(cockpit, net, x, y),
        rate=0.3,
        **{"quantities": quantities(alpha), **options},
    )
    return net, done.states, done.batches
