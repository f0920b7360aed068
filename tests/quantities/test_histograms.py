"""Histograms: ranges that adapt, values at their edges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import numpy as np
import oracle
import pytest
import torch
from changing_runs import go
from compared_runs import mean_terms
from ranks import Ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distcockpit import DistCockpit, every, open_run
from distcockpit import quantities as q
from distcockpit.quantities import GradAbsMax, GradHist1d, GradHist2d, ParamAbsMax


class Scaled(nn.Module):
    """A parameter without axes, and a layer without outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.none, self.last = nn.Parameter(torch.tensor(0.7)), nn.Linear(5, 0), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x * self.scale) + self.none(x).sum()


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_parameters_without_axes_or_elements_are_counted(tmp_path: Path) -> None:
    chosen = [q.GradHist2d(), q.GradHist1d(adapt=q.GradAbsMax()), q.NormTest()]
    run, _ = go(tmp_path / "r", Scaled(), ((4, 5), (4, 2)), chosen, 2)
    for name in ("grad_hist_1d", "grad_hist_2d"):
        assert (run[name]["counts"].sum([d for d in run[name]["counts"].dims if d != "step"]) == 4 * (1 + 10 + 2)).all()


def adaptive() -> list[Any]:
    return [
        GradHist1d(bins=10, adapt=GradAbsMax(padding=0.1)),
        GradHist1d(bins=10, adapt=GradAbsMax(schedule=every(2, 1)), schedule=every(2), name="other_steps"),
        GradHist2d(bins=(6, 8), adapt=(GradAbsMax(), ParamAbsMax(padding=0.5))),
        GradHist2d(bins=(6, 8), adapt=(None, ParamAbsMax(min_size=50.0)), name="wide"),
    ]


def train_adaptive(rank: int, size: int, group: Any, store: str, shards: list[int]) -> list[dict]:
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    model = net if group is None else DistributedDataParallel(net, process_group=group)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    states = []
    with DistCockpit(model, loss_fn, optimizer, store=store, quantities=adaptive(), schedule=every(1)) as cockpit:
        for step in range(5):
            states.append({k: v.clone() for k, v in net.state_dict().items()})
            x, y = cases.data("mlp", "mean", step)
            mine = slice(sum(shards[:rank]), sum(shards[: rank + 1]))
            optimizer.zero_grad()
            with cockpit.track(step):
                loss_fn(model(x[mine]), y[mine]).backward()
            optimizer.step()
    return states


@pytest.mark.parametrize("shards", [[24], [17, 7]])
def test_ranges_follow_the_pooled_maximum(ranks: Ranks, tmp_path: Path, shards: list[int]) -> None:
    store = str(tmp_path / "run")
    if len(shards) == 1:
        states = train_adaptive(0, 1, None, store, shards)
    else:
        states = ranks.run(2, train_adaptive, store, shards)[0]
    run, net = open_run(store), cases.initialised("mlp")
    pooled = [oracle.batch(net, s, mean_terms, *cases.data("mlp", "mean", k)) for k, s in enumerate(states)]
    largest = [np.abs(b.flat).max() for b in pooled]
    widest = [max(np.abs(p).max() for p in b.parameters.values()) for b in pooled]

    def ends(group: str, name: str = "edges") -> np.ndarray:
        edges = run[group][name].values
        np.testing.assert_array_equal(edges[:, 0], -edges[:, -1])
        np.testing.assert_array_equal(edges[:, edges.shape[1] // 2], 0)
        return edges[:, -1]

    np.testing.assert_allclose(ends("grad_hist_1d"), [2.0, *(1.1 * m for m in largest[:4])], rtol=1e-5)
    # Measured at the steps 1 and 3, effective at the histograms of the steps 2 and 4.
    np.testing.assert_allclose(ends("other_steps"), [2.0, largest[1], largest[3]], rtol=1e-5)
    np.testing.assert_allclose(ends("grad_hist_2d", "grad_edges"), [1.0, *largest[:4]], rtol=1e-5)
    np.testing.assert_allclose(ends("grad_hist_2d", "param_edges"), [2.0, *(1.5 * m for m in widest[:4])], rtol=1e-5)
    np.testing.assert_allclose(ends("wide", "param_edges"), [2.0, 25.0, 25.0, 25.0, 25.0])
    for step, batch in enumerate(pooled):
        row = run["grad_hist_1d"].to_dataset().sel(step=step)
        assert row["counts"].sum() == batch.flat.size
        moved = np.abs(np.cumsum(row["counts"]) - np.cumsum(oracle.grad_hist_1d(batch, row["edges"].values)))
        assert moved.max() <= 2
    assert list(run["other_steps"]["step"].values) == [0, 2, 4]


def test_smallest_range(tmp_path: Path) -> None:
    """All gradients are zero: the range is min_size wide."""
    net, loss_fn = nn.Linear(3, 1, bias=False), nn.MSELoss()
    chosen = [GradHist1d(bins=4, adapt=GradAbsMax(min_size=0.5))]
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=chosen, schedule=every(1)) as cockpit:
        for step in range(2):
            with cockpit.track(step):
                loss_fn(net(torch.zeros(2, 3)), torch.zeros(2, 1)).backward()
    edges = open_run(tmp_path / "run")["grad_hist_1d"]["edges"].values
    np.testing.assert_array_equal(edges[1], [-0.25, -0.125, 0.0, 0.125, 0.25])
