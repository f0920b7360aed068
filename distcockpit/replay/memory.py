"""Memory: what is free is given back, what a caught error holds is freed, and small things are made all the same."""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def give_back() -> None:
    """Give free memory back; what the C library keeps would count as the process's own. Takes milliseconds.

    Free memory of accelerators stays with torch, which hands it to the next step.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


def is_out_of_memory(error: BaseException | None) -> bool:
    """True if memory ran out, on the host or on a device, also if that caused another error."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            return True  # the latter is what torch says of the host
        error = error.__cause__
    return False


def release(error: BaseException) -> None:
    """Free what an error that was caught holds: the variables of all functions that it left.

    Its context may be an error of the user's, and keeps its variables; its cause is ours.
    """
    left: BaseException | None = error
    while left is not None:
        traceback.clear_frames(left.__traceback__)
        left = left.__cause__


def insist(make: Callable[[], T]) -> T:
    """Return what ``make`` returns; if there is no memory for it, free what is not used, and try once more.

    For what other ranks wait for, and little else: it is small.
    """
    try:
        return make()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        release(error)
    give_back()
    return make()


@cache
def _trim() -> Any:
    """Return ``malloc_trim`` of glibc, or ``None``."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library; Windows has no such handle
        return None
