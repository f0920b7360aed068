"""What the tests run on, in one line, so that a failure on another machine can be read."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

SETTINGS = ("ATEN_", "DNNL_", "KMP_", "MKL_", "NUMBA_", "OMP_", "ONEDNN_", "OPENBLAS_")


def machine() -> str:
    """CPU, cores, load, what torch makes of it, and the settings that change its kernels."""
    told = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    cpu = dict(line.split(":", 1) for line in told.replace("\t", "").splitlines() if ":" in line)
    vector = [flag for flag in cpu.get("flags", "").split() if flag.startswith(("avx", "amx", "fma"))]
    settings = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)]
    return "; ".join([
        f"{cpu.get('model name', platform.processor()).strip()} ({platform.machine()}, {' '.join(vector)})",
        f"{os.cpu_count()} cores, {len(os.sched_getaffinity(0))} of them for us",
        f"load {' '.join(f'{load:.1f}' for load in os.getloadavg())}",
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        f"torch {torch.__version__}, capability {torch.backends.cpu.get_cpu_capability()}",
        f"MKL {torch.backends.mkl.is_available()}, oneDNN {torch.backends.mkldnn.is_available()}",
        " ".join(settings) or "no settings",
    ])
