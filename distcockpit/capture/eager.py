"""Compiled models on tracked steps."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager

import torch


@contextmanager
def eagerly() -> Generator[None, None, None]:
    """Inside, modules and functions compiled by `torch.compile` run eagerly.

    Compiled code does not call hooks registered after compilation, and must not be recompiled for a single step: the
    compiled code is kept, and used again afterwards.

    Raises:
        RuntimeError: If this is inside a function that is being compiled, or a CUDA graph is being captured.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "A tracked step began during CUDA graph capture. Capture and replay graphs on untracked steps, and run "
            "tracked steps eagerly."
        )
    if "torch._dynamo" not in sys.modules:  # nothing is compiled; the import takes seconds
        yield
        return
    try:
        stance = torch.compiler.set_stance("force_eager")
    except RuntimeError as error:
        raise RuntimeError(
            "`track` was entered inside a function that is being compiled. Put `with cockpit.track(step):` around the "
            "call of the compiled function, not inside it."
        ) from error
    with stance:
        yield
