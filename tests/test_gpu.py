"""The table on a GPU, where there is one: ``pytest tests/test_gpu.py``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import cases
import pytest
import torch
from checks import check
from conv_and_norm import data, network, without_waiting
from torch import nn
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


@pytest.mark.parametrize("preset", ["economy", "layers"])
@pytest.mark.parametrize("model", ["mlp", "cnn", "tied"])
def test_presets_wait_for_nothing_but_one_event(tmp_path: Path, model: str, preset: str) -> None:
    """`set_sync_debug_mode` tells of copies and reads that wait, and not of events: one is left, for the divisor."""
    net = cases.initialised(model).cuda()
    optimizer, loss_fn = torch.optim.SGD(net.parameters(), lr=0.1), nn.CrossEntropyLoss()
    with DistCockpit(net, loss_fn, optimizer, store=tmp_path / "r", quantities=preset, schedule=every(1)) as cockpit:
        for step in range(7):
            x, y = (t.cuda() for t in cases.data(model, "mean", step))
            checks_itself = (step + 1) & step == 0
            torch.cuda.set_sync_debug_mode("default" if checks_itself else "error")
            try:
                with cockpit.track(step):
                    loss_fn(cockpit(x), y).backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            optimizer.step()
            optimizer.zero_grad()
    assert open_run(tmp_path / "r")["loss"].sizes["step"] == 7


def test_no_synchronisation_inside_track(tmp_path: Path) -> None:
    net, loss_fn = network().cuda(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    chosen = without_waiting()
    with DistCockpit(net, loss_fn, optimizer, store=tmp_path / "r", quantities=chosen, schedule=every(1)) as cockpit:
        for step in range(7):
            x, y = (t.cuda() for t in data(step))
            checks_everything = (step + 1) & step == 0
            torch.cuda.set_sync_debug_mode("default" if checks_everything else "error")
            try:
                with cockpit.track(step):
                    loss_fn(cockpit(x), y).backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            optimizer.step()
            optimizer.zero_grad()
    assert open_run(tmp_path / "r")["grad_norm"].sizes["step"] == 7
