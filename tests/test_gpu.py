"""The table on a GPU, where there is one: ``pytest tests/test_gpu.py``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from checks import check
from conv_and_norm import data, network, without_waiting
from torch import Tensor, nn
from train import Spec, train

from distcockpit import DistCockpit, every, open_run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("model", ["mlp", "cnn", "sigmoid", "tokens", "attention", "scaled"])
def test_table_on_a_gpu(tmp_path: Path, model: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    loss = "token_mean" if model == "tokens" else "mean"
    spec = replace(Spec(str(tmp_path / "run"), model, loss), device="cuda")
    curvature = model in ("mlp", "cnn", "sigmoid")
    states = train(0, 1, None, spec, curvature)
    check(spec, states, open_run(spec.store), curvature)


def nothing_waits(net: nn.Module, batch: Callable[[int], tuple[Tensor, Tensor]], quantities: Any, store: Path) -> None:
    """Seven steps; at those that do not check themselves, torch makes a read or a copy that waits an error."""
    optimizer, loss_fn = torch.optim.SGD(net.cuda().parameters(), lr=0.1), nn.CrossEntropyLoss()
    with DistCockpit(net, loss_fn, optimizer, store=store, quantities=quantities, schedule=every(1)) as cockpit:
        for step in range(7):
            x, y = (t.cuda() for t in batch(step))
            checks_itself = (step + 1) & step == 0
            torch.cuda.set_sync_debug_mode("default" if checks_itself else "error")
            try:
                with cockpit.track(step):
                    loss_fn(cockpit(x), y).backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            optimizer.step()
            optimizer.zero_grad()
    assert open_run(store)["grad_norm"].sizes["step"] == 7


@pytest.mark.parametrize("model", ["mlp", "cnn", "tied"])
def test_economy_waits_for_nothing_but_one_event(tmp_path: Path, model: str) -> None:
    """`set_sync_debug_mode` does not tell of events: one is left, for the divisor."""
    nothing_waits(cases.initialised(model), partial(cases.data, model, "mean"), "economy", tmp_path / "r")


def test_no_synchronisation_inside_track(tmp_path: Path) -> None:
    nothing_waits(network(), data, without_waiting(), tmp_path / "r")
