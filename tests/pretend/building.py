"""Compiles `device.cpp` once per version of torch, under a lock, and makes the device known to torch."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

SOURCE = Path(__file__).with_name("device.cpp")
TORCH = Path(torch.__file__).parent
NAME = "_pretend"
DEVICE = "pretend"


def missing() -> str:
    """Why the device cannot be had here; empty if it can."""
    return "" if shutil.which("g++") else "no g++ to compile the device with"


def built() -> Path:
    """The library, compiled unless that was done before."""
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    folder = Path(os.environ.get("PRETEND_CACHE", Path(tempfile.gettempdir()) / f"pretend-{os.getuid()}")) / key
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{NAME}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            include = [TORCH / "include", TORCH / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
            command = ["g++", "-O1", "-std=c++20", "-shared", "-fPIC", "-w", f"-DTORCH_EXTENSION_NAME={NAME}"]
            command += [f"-I{path}" for path in include]
            command += [str(SOURCE), f"-L{TORCH / 'lib'}", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
            subprocess.run([*command, "-o", str(library) + ".part"], check=True, capture_output=True, text=True)
            Path(str(library) + ".part").rename(library)
    return library


def loaded() -> ModuleType:
    """The library, and the device known to torch as "pretend"."""
    global library  # noqa: PLW0603 - torch takes one device of this kind per process
    if library is None:
        spec = importlib.util.spec_from_file_location(NAME, built())
        assert spec is not None and spec.loader is not None
        library = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(library)
        torch.utils.rename_privateuse1_backend("pretend")
        torch._register_device_module("pretend", _module(library))
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
        # `Module.to` makes new parameters for devices of this kind: what is tied would be apart, as it is not on CUDA.
        torch.__future__.set_swap_module_params_on_conversion(True)
        torch.distributed.Backend.register_backend("pretend_ccl", _collectives, devices=["pretend"])
    return library


library: ModuleType | None = None


def _collectives(store: Any, rank: int, size: int, timeout: Any) -> Any:
    assert library is not None
    return library.collectives(torch.distributed.ProcessGroupGloo(store, rank, size, timeout))


def _module(library: ModuleType) -> ModuleType:
    """What ``torch.get_device_module`` returns: the functions of ``torch.cuda`` that device-independent code uses."""
    made = ModuleType("torch.pretend")

    def index(device: Any = None) -> int:
        device = torch.device(device) if isinstance(device, str) else device
        number = device if isinstance(device, int) else device.index if device is not None else None
        return library.current_device() if number is None else number

    @contextlib.contextmanager
    def on(device: Any) -> Generator[None, None, None]:
        before = library.current_device()
        library.set_device(index(device))
        try:
            yield
        finally:
            library.set_device(before)

    def stream_on(device: Any = None, **options: Any) -> torch.Stream:
        return torch.Stream(torch.device("pretend", index(device)), **options)

    def state(device: Any = None) -> torch.Tensor:
        return library.default_generator(index(device)).get_state()

    def seed(number: int) -> None:
        for k in range(2):
            library.default_generator(k).manual_seed(number)

    functions = {
        "_is_in_bad_fork": lambda: False,
        "current_device": library.current_device,
        "set_device": lambda device: library.set_device(index(device)),
        "device": on,
        "device_count": lambda: 2,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "manual_seed": lambda number: library.default_generator(library.current_device()).manual_seed(number),
        "manual_seed_all": seed,
        "get_rng_state": state,
        "set_rng_state": lambda state, device=None: library.default_generator(index(device)).set_state(state),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "Stream": stream_on,
        "Event": lambda **options: torch.Event("pretend", **options),
        "stream": lambda stream: stream,
        "current_stream": lambda device=None: torch.accelerator.current_stream(torch.device("pretend", index(device))),
        "synchronize": lambda device=None: torch.accelerator.synchronize(torch.device("pretend", index(device))),
    }
    for name, function in functions.items():
        setattr(made, name, function)
    return made
