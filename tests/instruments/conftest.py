from __future__ import annotations

import cases
import pytest
import torch
import xarray as xr
from drawn_runs import STEPS
from torch import nn
from train import everything

from distcockpit import DistCockpit, every, open_run
from distcockpit import quantities as q


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> xr.DataTree:
    """A real run with the whole panel."""
    path = tmp_path_factory.mktemp("instruments") / "run.zarr"
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    chosen = [*everything(), q.HessTrace(curvature="hutchinson", samples=3, name="estimate")]
    with DistCockpit(net, loss_fn, optimizer, store=path, quantities=chosen, schedule=every(1)) as cockpit:
        for step in range(STEPS):
            x, y = cases.data("mlp", "mean", step)
            optimizer.zero_grad()
            with cockpit.track(step, epoch=step // 8):
                loss = loss_fn(net(x), y)
                loss.backward()
            optimizer.step()
            cockpit.log(step, epoch=step // 8, train_loss=loss, accuracy=step / STEPS, **{"val_f1": 1 - step / STEPS})
    return open_run(path)
