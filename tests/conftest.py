from __future__ import annotations

from collections.abc import Iterator

import dask
import pytest
import torch
from ranks import Ranks
from stores import S3, s3_server

torch.set_num_threads(1)
dask.config.set(scheduler="synchronous")  # threads take longer than what they read in tests


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
