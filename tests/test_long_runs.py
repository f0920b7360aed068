"""Programs that run for long, shortened."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from waiting import run_program

FAULTS = Path(__file__).parent / "faults"


def run(*command: str) -> dict[str, float]:
    """The figures that a program prints at its end."""
    done = run_program(sys.executable, *command)
    return json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])


@pytest.mark.smoke
def test_kills() -> None:
    seen = run(str(FAULTS / "kills.py"), "--kills", "4", "--steps", "60")
    assert seen["kills"] == 4


@pytest.mark.smoke
def test_rows(tmp_path: Path) -> None:
    assert run(str(FAULTS / "rows.py"), "--steps", "1500", "--store", str(tmp_path / "rows"))["steps"] == 1500


@pytest.mark.smoke
def test_soak(tmp_path: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(FAULTS / "soak.py")]
    assert run(*launch, "--store", str(tmp_path / "soak"), "--minutes", "0.02")["steps"] >= 50
