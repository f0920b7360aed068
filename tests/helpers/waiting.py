"""How tests wait: for what they need to see, up to a limit that only a hang meets. No test fails by the clock."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any, TypeVar

Seen = TypeVar("Seen")

HANG = 1500.0
"""Seconds after which something hangs; less than the limit of a test, which would not say what was waited for."""


def until(look: Callable[[], Seen], what: Callable[[], object] | str = "") -> Seen:
    """Look again and again until there is something to see.

    Args:
        look: Returns something true once it is seen.
        what: What was waited for, or what tells it, for the error.

    Returns:
        What ``look`` returned.
    """
    ends = time.monotonic() + HANG
    while not (seen := look()):
        assert time.monotonic() < ends, f"not seen in {HANG:g} s: {what() if callable(what) else what}"
        time.sleep(0.02)
    return seen


def run_program(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, which must be a good one, and return what it said."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done
