"""Quantities of the user's own, and what they may ask for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
from changing_runs import go
from panel_runs import track_batches
from reading_quantities import Reads
from torch import nn

from distcockpit import DistCockpit, every, open_run
from distcockpit import quantities as q
from distcockpit.quantities import HessTrace
from distcockpit.quantities.base import snake_case


class Odd(q.Quantity):
    """A row that does not fit in its second field."""

    def group(self, model: q.Model) -> q.Group:
        return q.Group({"a": q.Field(), "b": q.Field((), dtype="int64"), "c": q.Field()})

    def local(self, batch: q.LocalBatch, memory: dict) -> dict:
        return {"step": batch.replicated(batch.step)}

    def finalize(self, totals: Any, n: int) -> dict:
        step = float(totals["step"])
        return {"a": step, "b": float("nan") if step == 1 else step, "c": step}


def test_a_row_that_does_not_fit_leaves_no_trace(tmp_path: Path) -> None:
    run, _ = go(tmp_path / "r", nn.Linear(5, 2), ((4, 5), (4, 2)), [Odd()], 4)
    for field in ("a", "b", "c", "step"):
        assert list(run["odd"][field].values) == [0, 2, 3]


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


# -- names, presets, schedules, epochs ---------------------------------------------------------------------------------


def test_names() -> None:
    names = {"GradHist1d": "grad_hist_1d", "CABS": "cabs", "TICDiag": "tic_diag", "HessMaxEV": "hess_max_ev"}
    names |= {"MeanGSNR": "mean_gsnr", "OutputGradientGeometry": "output_gradient_geometry", "Alpha": "alpha"}
    assert {k: snake_case(k) for k in names} == names
    assert HessTrace(name="mine").name == "mine"


@dataclass(frozen=True, kw_only=True)
class OldName(q.GradNorm):
    """Written for an earlier release."""

    name: str = "old_name"

    def local(self, batch: q.LocalBatch, memory: dict[str, Any]) -> dict[str, Any]:
        return {"squares": batch.once(batch.mean_squared)}


def test_the_old_name_of_replicated_values_works_with_a_warning(tmp_path: Path) -> None:
    net, loss_fn, (x, y) = cases.initialised("mlp"), nn.CrossEntropyLoss(), cases.data("mlp", "mean", 0)
    chosen = [OldName(), q.GradNorm()]
    with (
        pytest.warns(DeprecationWarning, match="batch.replicated"),
        DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=chosen, schedule=every(1)) as cockpit,
        cockpit.track(0),
    ):
        loss_fn(net(x), y).backward()
    run = open_run(tmp_path / "run")
    assert float(run["old_name"]["total"][0]) == float(run["grad_norm"]["total"][0]) > 0
