"""Compiled models on tracked steps."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager

import torch


@contextmanager
def eagerly() -> Generator[None, None, None]:
    """Inside, what `torch.compile` made runs as it was written.

    Compiled code neither calls hooks that were put on after it was compiled, nor may it be compiled anew for a single
    step: what is compiled stays, and is used again afterwards.

    Raises:
        RuntimeError: If this is inside a function that is being compiled, or a graph of CUDA is being captured.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "A tracked step began while a CUDA graph is being captured. Capture and replay graphs on steps that are "
            "not tracked, and run tracked ones eagerly."
        )
    if "torch._dynamo" not in sys.modules:  # nothing is compiled; the import takes seconds
        yield
        return
    try:
        stance = torch.compiler.set_stance("force_eager")
    except RuntimeError as error:
        raise RuntimeError(
            "`track` was entered by a function that is being compiled. Put `with cockpit.track(step):` around the call "
            "of the compiled function, not inside it."
        ) from error
    with stance:
        yield
