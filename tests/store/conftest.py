from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stored_runs import KINDS
from stores import S3, Place, place


@pytest.fixture(params=KINDS)
def where(request: Any, tmp_path: Path, s3: S3) -> Place:
    return place(request.param, tmp_path, s3)
