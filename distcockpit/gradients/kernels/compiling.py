"""Compiled loops are compiled once per machine: by one process, while the others wait, and not without a word."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import llvmlite.binding
import numba

logger = logging.getLogger("distcockpit")

EVERY = 3.0  # seconds between two lines that say how far it is
PATIENCE = 120.0  # seconds, after which a process compiles on its own


def once_per_machine(exercise: Callable[[], Iterator[str]], modules: Sequence[ModuleType], folder: Path) -> None:
    """Compile the loops, unless a process of this machine has done so.

    Args:
        exercise: Calls all loops, and says before each how far it is.
        modules: Where they are written.
        folder: Where Numba keeps what is compiled.
    """
    files = [Path(str(module.__file__)).stat() for module in modules]
    told = (numba.__version__, llvmlite.binding.get_host_cpu_name(), *((f.st_size, f.st_mtime_ns) for f in files))
    mark = folder / f"distcockpit-{hashlib.sha256(repr(told).encode()).hexdigest()[:16]}.compiled"
    with contextlib.suppress(OSError, ImportError):  # not all systems have locks, nor all file systems
        if mark.exists():
            return
        folder.mkdir(parents=True, exist_ok=True)
        logger.info("distcockpit: compiling kernels, once per machine (about 10 s).")
        with _alone(folder / "distcockpit.lock"):
            if not mark.exists():
                for module in modules:  # Numba keeps a loop compiled as it was when only one that it calls has changed
                    for stale in folder.glob(f"{module.__name__.rpartition('.')[2]}.*.nb[ci]"):
                        stale.unlink(missing_ok=True)
                began = said = time.monotonic()
                for done in exercise():
                    if time.monotonic() - said > EVERY:
                        said = time.monotonic()
                        logger.info("distcockpit: compiling kernels, %s done.", done)
                mark.touch()
                logger.info("distcockpit: kernels compiled in %.0f s.", time.monotonic() - began)


@contextlib.contextmanager
def _alone(lock: Path) -> Generator[None, None, None]:
    """Inside, no other process holds the lock, or one has held it for too long."""
    import fcntl  # noqa: PLC0415 - not on all systems

    ends = time.monotonic() + PATIENCE
    with lock.open("w") as file:
        while time.monotonic() < ends:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
        yield
