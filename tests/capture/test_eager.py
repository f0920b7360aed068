"""Compiled models and functions in tracked steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import torch
from loops import shows
from odd_loops import check_norm_test, each, linear, six_samples, track_body
from torch import nn

from distcockpit import DistCockpit, every, open_run
from distcockpit.quantities import Alpha, Loss, MeanGSNR, NormTest

# -- compiled parts ----------------------------------------------------------------------------------------------------


def test_a_compiled_loss_module_stays_what_it_was(tmp_path: Path) -> None:
    plain = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    compiled, net, (x, y) = torch.compile(plain, backend="eager"), linear(), six_samples()
    run = track_body(tmp_path, net, compiled, lambda c: compiled(c(x), y).backward(), quantities=[Loss()])
    assert plain.reduction == "mean" and plain.weight.tolist() == [1, 2, 3]
    np.testing.assert_allclose(run["loss"]["loss"][0], float(plain(net(x), y).detach()), rtol=1e-6)


def test_compiled_submodules(tmp_path: Path) -> None:
    torch.manual_seed(4)
    first, last = nn.Linear(3, 4), nn.Linear(4, 3)
    net = nn.Sequential(torch.compile(first, backend="eager"), nn.Tanh(), torch.compile(last, backend="eager"))
    loss_fn, (x, y) = nn.CrossEntropyLoss(), six_samples()
    check_norm_test(tmp_path, net, loss_fn, lambda c: loss_fn(c(x), y).backward(), each(last(torch.tanh(first(x))), y))


@pytest.mark.filterwarnings("ignore")  # of the compiler
@shows("Refused with an error", "`track` inside a compiled function")
def test_track_inside_a_compiled_function(tmp_path: Path) -> None:
    net, loss_fn, (x, y) = linear(), nn.CrossEntropyLoss(), six_samples()
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=[NormTest()], schedule=every(1)) as cockpit:

        def step() -> None:
            with cockpit.track(0):
                loss_fn(cockpit(x), y).backward()

        with pytest.raises(RuntimeError, match="around the call of the compiled function, not inside it"):
            torch.compile(step, backend="eager")()


# -- compiled code -----------------------------------------------------------------------------------------------------


def compiled_graphs(tmp_path: Path, tracked: bool, kind: str) -> tuple[int, int, np.ndarray]:
    """How many graphs a run compiles, how often they run, and its losses; every third step is tracked."""
    torch.compiler.reset()
    calls: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append("compiled")

        def run(*args: Any) -> Any:
            calls.append("ran")
            return graph.forward(*args)

        return run

    net, loss_fn = cases.initialised("deep"), nn.CrossEntropyLoss()
    model, compute = net, lambda x, y: loss_fn(model(x), y)
    if kind == "step":
        compute = torch.compile(compute, backend=backend)
    else:
        model = torch.compile(net, backend=backend)
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.3), []
    quantities = [MeanGSNR(), Alpha()]
    with DistCockpit(
        model,
        loss_fn,
        optimizer,
        store=tmp_path / str(tracked),
        quantities=quantities,
        schedule=every(3, 1),
        enabled=tracked,
    ) as cockpit:
        for step in range(9):
            x, y = cases.data("deep", "mean", step)
            optimizer.zero_grad()
            with cockpit.track(step):
                loss = compute(x, y)
                loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return calls.count("compiled"), calls.count("ran"), np.array(losses)


@pytest.mark.parametrize("kind", ["model", "step"])
def test_nothing_is_compiled_because_of_us(tmp_path: Path, kind: str) -> None:
    """Steps 1, 4, 7 are tracked, and 2, 5, 8 end an update: they run eagerly, the others as compiled before."""
    graphs, runs, losses = compiled_graphs(tmp_path, False, kind)
    assert runs == 9
    ours, ran, same = compiled_graphs(tmp_path, True, kind)
    assert (ours, ran) == (graphs, 3) and graphs >= 1
    np.testing.assert_allclose(same, losses, rtol=1e-6)
    run, net = open_run(tmp_path / "True"), cases.initialised("deep")
    assert list(run.attrs["parameters"]) == [name for name, _ in net.named_parameters()]
    assert list(run["mean_gsnr"]["step"].values) == list(run["alpha"]["step"].values) == [1, 4, 7]
