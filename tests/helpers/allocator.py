"""An allocator that has no memory at one allocation, in the cockpit's own work and not in that of the loop."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import distcockpit
from distcockpit import DistCockpit

PACKAGE = str(Path(distcockpit.__file__).parent)
OF_THE_LOOP = {"__torch_function__", "call_and_remember"}  # which call what the loop calls; so does the wrapped model


class Allocator(TorchDispatchMode):
    """Counts the allocations of torch's operations that the package calls, and fails at one of them.

    Args:
        fails_at: Which one, from 0; never if it is negative.
    """

    def __init__(self, fails_at: int = -1) -> None:
        super().__init__()
        self.fails_at, self.count = fails_at, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if _is_ours(sys._getframe(1)) and _is_new(result, (args, kwargs)):
            self.count += 1
            if self.count == self.fails_at + 1:
                raise torch.OutOfMemoryError(f"no memory at allocation {self.fails_at}")
        return result


def _is_ours(frame: Any) -> bool:
    """True if the package calls the operation, and not the loop through it."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE):
            return frame.f_code.co_name not in OF_THE_LOOP and frame.f_code is not DistCockpit.__call__.__code__
        if "/torch/" not in name and not name.startswith("<"):
            return False
        frame = frame.f_back
    return False


def _is_new(result: Any, given: Any) -> bool:
    """True if an operation returned memory that it was not given."""
    old = {t.untyped_storage()._cdata for t in tree_leaves(given) if isinstance(t, torch.Tensor)}
    tensors = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
    return any(t.numel() and t.untyped_storage()._cdata not in old for t in tensors)
