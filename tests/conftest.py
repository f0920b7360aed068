from __future__ import annotations

import signal
from collections.abc import Iterator

import dask
import pytest
import torch
from machine import machine
from ranks import Ranks
from stores import S3, s3_server

torch.set_num_threads(1)
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
