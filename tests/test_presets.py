"""The presets: everything that a model and a loop allow, and notices of the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from default_loops import LOOPS, Gpt, train_default
from panel_runs import track_batches
from ranks import Ranks
from reading_quantities import Reads
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distcockpit import DistCockpit, every, logspaced, open_run, presets
from distcockpit import quantities as q
from distcockpit.quantities import GradHist1d, MeanGSNR, OutputGradientGeometry


def test_a_preset_without_what_the_model_cannot_have(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Diagonals of the curvature want the loss module, and a chain of modules."""
    with caplog.at_level("WARNING"):
        train_default(Gpt(), LOOPS["a model that returns its loss"][1], tmp_path / "run", quantities="business")
    run = open_run(tmp_path / "run")
    assert run["norm_test"].sizes["step"] == 4 and "hess_trace" not in run and "tic_diag" not in run
    said = [r.getMessage() for r in caplog.records if "is left out" in r.getMessage()]
    assert [text.split()[1] for text in said] == ["tic_diag", "hess_trace"]


def test_the_presets_are_what_they_say(tmp_path: Path) -> None:
    """Each preset by name, on a model that BackPACK knows."""
    batches = [cases.data("cnn", "mean", step) for step in range(2)]
    for name in ("economy", "business", "full", "layers"):
        run = track_batches(tmp_path / name, cases.initialised("cnn"), batches, name)  # type: ignore[arg-type]
        assert set(run.children) == {*(x.name for x in presets.PRESETS[name]()), "learning_rate", "log"}
        for group in set(run.children) - {"log"}:
            expected = {"alpha": 1, "parameter_condition": 1}.get(group, 2)  # that one is looked at every 100th step
            assert run[group].sizes["step"] == expected, group


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


def test_presets_nest() -> None:
    economy, business, full = ({q.name for q in p()} for p in (presets.economy, presets.business, presets.full))
    assert economy < business < full
    ranks = {"gradient_noise_scale", "rank_disagreement", "rank_health", "replica_drift"}
    tests = {"norm_test", "inner_test", "ortho_test"}
    steps = {"alpha", "distance", "update_size"}
    assert economy == steps | tests | ranks | {"loss", "grad_norm", "grad_hist_1d"}
    assert business - economy == {"tic_diag", "hess_trace"} and full - business == {"hess_max_ev", "grad_hist_2d"}
    assert len(presets.layers()) == 8
    schedule = every(7)
    assert all(q.schedule is schedule for q in presets.full(schedule))
    assert [q.name for q in presets.economy() + [MeanGSNR()]][-1] == "mean_gsnr"


def test_schedules() -> None:
    assert [s for s in range(20) if every(5, 3)(s)] == [3, 8, 13, 18]
    assert [s for s in range(1001) if logspaced(1, 1000, 4)(s)] == [0, 1, 10, 100, 1000]


def test_own_schedules_and_the_default(tmp_path: Path) -> None:
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    chosen = [MeanGSNR(), GradHist1d(schedule=every(3, 1)), OutputGradientGeometry(schedule=lambda step: step == 4)]
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=chosen, schedule=every(4)) as cockpit:
        for step in range(9):
            x, y = cases.data("mlp", "mean", step)
            with cockpit.track(step):
                loss_fn(net(x), y).backward()
    run = open_run(tmp_path / "run")
    steps = {name: list(run[name]["step"].values) for name in ("mean_gsnr", "grad_hist_1d", "output_gradient_geometry")}
    assert steps == {"mean_gsnr": [0, 4, 8], "grad_hist_1d": [1, 4, 7], "output_gradient_geometry": [4]}
