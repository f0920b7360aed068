from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import cases
import dask
import pytest
import torch
from machine import machine
from ranks import Ranks
from steps import run_steps
from stores import S3, s3_server
from torch import Tensor, nn
from train import first_order

from distcockpit import DistCockpit, every

torch.set_num_threads(1)
with socket.socket() as free:  # the port of torchrun: each worker its own, as several may run at once
    free.bind(("127.0.0.1", 0))
    os.environ["PET_MASTER_PORT"] = str(free.getsockname()[1])
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # So it is in a background job of a shell; programs that tests interrupt would inherit it, and never end.
    signal.signal(signal.SIGINT, signal.default_int_handler)
dask.config.set(scheduler="synchronous")  # threads take longer than what they read in tests


def pytest_sessionstart(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not hasattr(session.config, "workerinput"):
        reporter.write_line(machine())  # as a report header it would be left out by -q


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def s3_of_session() -> Iterator[S3]:
    with s3_server() as s3:
        yield s3


@pytest.fixture
def s3(s3_of_session: S3) -> Iterator[S3]:
    s3_of_session.proxy.mode, s3_of_session.proxy.refused = "ok", 0
    yield s3_of_session
    s3_of_session.proxy.mode = "ok"


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three epochs, with a loss that the loop logs."""
    net, path = cases.initialised("mlp"), tmp_path_factory.mktemp("cli") / "real.zarr"
    losses: dict[int, float] = {}

    def body(cockpit: DistCockpit, x: Tensor, y: Tensor) -> None:
        loss = nn.CrossEntropyLoss()(net(x), y)
        loss.backward()
        losses[len(losses)] = loss.item()

    run_steps(
        path,
        net,
        partial(cases.data, "mlp", "mean"),
        24,
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        quantities=first_order(),
        schedule=every(2),
        track=lambda step: {"epoch": step // 8},
        body=body,
        then=lambda step, cockpit: cockpit.log(step, train_loss=losses[step]),
    )
    return path


@pytest.fixture(autouse=True)
def no_mode_is_left() -> Iterator[None]:
    """What sees the calls of torch functions must be gone when a test ends: it would see, and slow down, all others."""
    yield
    left = torch.overrides._get_current_function_mode_stack()
    while torch.overrides._get_current_function_mode_stack():
        torch.overrides._pop_mode()
    assert not left
