from __future__ import annotations

from pathlib import Path

import cases
import numpy as np
import oracle
import pytest
import torch
from test_capture import mean_terms

from distcockpit import DistCockpit, every, open_run
from distcockpit.quantities import Alpha
from distcockpit.quantities.alpha import fit_alpha


def test_fit_equals_least_squares_on_the_whitened_system() -> None:
    rng = np.random.default_rng(0)
    statuses = []
    for _ in range(200):
        norm = 10 ** rng.uniform(-4, 1)
        slopes = rng.normal([-1, 0.5], 1) * 10 ** rng.uniform(-2, 2)
        loss = rng.uniform(0.1, 5)
        means = np.array([loss, loss + norm * slopes.mean() * rng.uniform(0.5, 1.5), *slopes])
        variances = 10 ** rng.uniform(-4, 2, 4)
        value, status = fit_alpha(means, variances, norm)
        expected, mu = oracle.fit_alpha(means, variances, norm)
        statuses.append(status)
        assert (status == "concave") == (mu[2] <= 0)
        np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert 20 < statuses.count("concave") < 180  # both kinds of problems were among them


def parabola(minimum: float, norm: float) -> np.ndarray:
    return np.array([minimum**2, (norm - minimum) ** 2, -2 * minimum, 2 * (norm - minimum)])


@pytest.mark.parametrize("minimum, alpha", [(1.0, 0.0), (2.0, -0.5), (0.5, 1.0)])
def test_meaning(minimum: float, alpha: float) -> None:
    """0 at the minimum, -0.5 halfway to it, 1 mirrored beyond it."""
    value, status = fit_alpha(parabola(minimum, 1.0), np.ones(4), 1.0)
    assert status == "minimum"
    assert value == pytest.approx(alpha, abs=1e-12)


def test_conventions() -> None:
    good, variances = parabola(1.0, 1.0), np.ones(4)
    assert fit_alpha(good, variances, 0.0) == (-1.0, "no_step")
    assert fit_alpha(-good, variances, 1.0) == (-1.0, "concave")
    value, status = fit_alpha(np.array([1.0, np.nan, 1, 1]), variances, 1.0)
    assert np.isnan(value) and status == "singular"
    # A zero variance counts as 1e-10.
    zero = fit_alpha(np.array([1.0, 1.2, -1, 2]), np.array([0.0, 1, 0, 1]), 1.0)
    assert zero == fit_alpha(np.array([1.0, 1.2, -1, 2]), np.array([1e-10, 1, 1e-10, 1]), 1.0)


def test_batches_of_different_sizes_at_the_two_ends(tmp_path: Path) -> None:
    """As at the last batch of an epoch."""
    net, loss_fn = cases.initialised("sigmoid"), torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    pooled = []
    with DistCockpit(
        net, loss_fn, optimizer, store=tmp_path / "run", quantities=[Alpha()], schedule=every(1)
    ) as cockpit:
        for step, n in enumerate((24, 7, 15)):
            x, y = cases.data("sigmoid", "mean", step)
            pooled.append(oracle.batch(net, net.state_dict(), mean_terms, x[:n], y[:n]))
            optimizer.zero_grad()
            with cockpit.track(step):
                loss_fn(cockpit(x[:n]), y[:n]).backward()
            optimizer.step()
    run = open_run(tmp_path / "run")["alpha"].to_dataset()
    for step in range(2):
        expected = oracle.alpha(pooled[step], pooled[step + 1])
        for name in ("alpha", "f_start", "f_end", "slope_start", "slope_end", "f_start_variance", "slope_end_variance"):
            np.testing.assert_allclose(run[name].sel(step=step), expected[name], rtol=1e-4, err_msg=name)
