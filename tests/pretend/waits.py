"""Which lines of the package make the host wait for the device."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from types import FrameType

import distcockpit
from pretend.building import loaded

PACKAGE = Path(distcockpit.__file__).parent


@contextlib.contextmanager
def counted() -> Generator[Counter[tuple[str, str]], None, None]:
    """Inside, each wait of a thread that is not the writer's adds to ``(file:function, what it waits for)``."""
    seen: Counter[tuple[str, str]] = Counter()

    def note(what: str) -> None:
        if threading.current_thread().name.startswith("distcockpit"):
            return
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if PACKAGE in path.parents:
                seen[f"{path.relative_to(PACKAGE)}:{frame.f_code.co_name}", what] += 1
                return
            frame = frame.f_back
        seen["elsewhere", what] += 1

    library = loaded()
    library.tell(note)
    try:
        yield seen
    finally:
        library.tell(None)
