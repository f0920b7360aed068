"""Give memory back to the system that was needed for a while, and is free now."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


def give_back() -> None:
    """Give free memory back; what the C library keeps would count as the process's own. Takes milliseconds.

    Free memory of accelerators stays with torch, which hands it to the next step.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Any:
    """Return ``malloc_trim`` of glibc, or ``None``."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library; Windows has no such handle
        return None
