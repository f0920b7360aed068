"""Faults that no test on a CPU can see, each put into a copy of the package: a test on the device sees it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from paths import ROOT
from waiting import HANG

from pretend.test_device import available, free_port


@dataclass(frozen=True)
class Fault:
    """A line of the package, by what it is replaced."""

    file: str
    right: str
    wrong: str
    program: str
    seen: str  # in what the program says


WORLD, DEVICES, STATISTICS = "world.py", "replay/devices.py", "gradients/statistics.py"
SAME, WAITS, TRAINING = "alike.same_way(store, 'economy')", "waits(store)", "programs.training_is_unchanged(store)"
CURVATURE, AUTOCAST, RANKS = (
    "alike.same_way(store, 'curvature of any model')",
    "programs.autocast_alike(store)",
    "ranks(store)",
)
DROPPED = "programs.nobody_waits()"
DEFAULT = "alike.same_architecture(store, 'positions [T]')"

FAULTS = {
    "early read of a pinned copy": Fault(
        WORLD, "                    self._ready.synchronize()\n", "                    pass\n", SAME, "Not equal|nan"
    ),
    "event recorded before the copy": Fault(
        WORLD,
        "                self._host.copy_(buffer, non_blocking=True)\n                self._ready = module.Event()\n"
        "                self._ready.record(side)\n",
        "                self._ready = module.Event()\n                self._ready.record(side)\n"
        "                self._host.copy_(buffer, non_blocking=True)\n",
        SAME,
        "Not equal|nan",
    ),
    "copy that does not wait for what it copies": Fault(
        WORLD, "            side.wait_stream(module.current_stream(buffer.device))\n", "", SAME, "does not wait"
    ),
    "memory that another stream still uses": Fault(
        WORLD, "            buffer.record_stream(side)\n", "", DROPPED, "memory is freed"
    ),
    "sums that are read before they are exchanged": Fault(
        WORLD,
        "                    work.wait()  # makes",
        "                    pass  # makes",
        RANKS,
        "does not wait|Not equal",
    ),
    "a device that is no CUDA device": Fault(
        DEVICES, '    return device.type == "cpu"\n', '    return device.type != "cuda"\n', SAME, "same device"
    ),
    "a header on the device's group": Fault(
        WORLD,
        "dist.all_gather(gathered, self._traffic.count(mine), group=self._header)",
        "dist.all_gather(gathered, self._traffic.count(mine), group=self._sums)",
        RANKS,
        "device type cpu|takes tensors on the device",
    ),
    "an accumulator on the CPU": Fault(
        STATISTICS,
        "        self.flat = torch.zeros(len(parameters), dtype=torch.float64, device=device)\n",
        '        self.flat = torch.zeros(len(parameters), dtype=torch.float64, device="cpu")\n',
        SAME,
        "same device|Not equal|nan",
    ),
    "a number that is read": Fault(
        STATISTICS,
        "        self.values[name] += kernels.inner_rows(delta, delta) @ kernels.inner_rows(x, x)\n",
        "        self.values[name] += (kernels.inner_rows(delta, delta) @ kernels.inner_rows(x, x)).item()\n",
        WAITS,
        "item",
    ),
    "a bincount": Fault(
        "gradients/kernels/reference.py",
        "    counts.scatter_add_(0, numbers, "
        "torch.ones((), dtype=torch.int64, device=numbers.device).expand_as(numbers))\n",
        "    counts += torch.bincount(numbers, minlength=counts.numel())\n",
        WAITS,
        "bincount",
    ),
    "a boolean mask": Fault(
        "gradients/kernels/reference.py",
        "    for part in values.reshape(-1).split(CHUNK):\n        _count(slots",
        "    for part in values.reshape(-1).split(CHUNK):\n        part = part[part < 1e9]\n        _count(slots",
        WAITS,
        "nonzero",
    ),
    "a tensor made on the device from numbers": Fault(
        DEVICES,
        "        return host if is_host(device) else host.pin_memory().to(device, non_blocking=True)\n",
        "        return torch.tensor(host.tolist(), dtype=dtype, device=device)\n",
        WAITS,
        "copy to the device",
    ),
    "a copy from memory that is not pinned": Fault(
        DEVICES, "host.pin_memory().to(device, non_blocking=True)", "host.to(device)", WAITS, "copy to the device"
    ),
    "a pinned source that is used again": Fault(
        DEVICES,
        "host.pin_memory().to(device, non_blocking=True)",
        'vars(torch).setdefault("PINNED", torch.empty(1 << 16, dtype=torch.float64, pin_memory=True))'
        "[: host.numel()].view(host.shape).copy_(host).to(device, dtype, non_blocking=True)",
        SAME,
        "overwritten before|Not equal|nan|AssertionError: alpha",
    ),
    "a generator of the CPU": Fault(
        "curvature/hutchinson.py",
        "torch.Generator(leaves[0].device)",
        "torch.Generator()",
        CURVATURE,
        "generator|Not equal|nan",
    ),
    "random numbers of the device that are not restored": Fault(
        "replay/rng.py",
        "        if self.device is not None:\n            torch.get_device_module(self.device).set_rng_state",
        "        if False:\n            torch.get_device_module(self.device).set_rng_state",
        TRAINING,
        "changed",
    ),
    "autocast of another device": Fault(
        "replay/snapshot.py",
        "torch.autocast(device.type, self.autocast",
        'torch.autocast("cpu", self.autocast',
        AUTOCAST,
        "assert|Error",
    ),
    "a host's tensor on the default device": Fault(
        WORLD,
        'dtype=buffer.dtype, device="cpu", pin_memory=True',
        "dtype=buffer.dtype, pin_memory=True",
        DEFAULT,
        "numpy",
    ),
}

PROGRAM = """
import sys
from pretend import alike, programs

def waits(store):
    found = programs.waits(store, "mlp", "economy")
    assert found == [("world.py:_arrived", "event.synchronize", 1)], found

def ranks(store):
    import multiprocessing, os
    each = [(k, 2, store, int(sys.argv[2]), "pretend_ccl") for k in range(2)]
    children = [multiprocessing.get_context("fork").Process(target=programs.rank, args=one) for one in each]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert all(child.exitcode == 0 for child in children)

if sys.argv[3] != "ranks(store)":
    programs.start()
store = sys.argv[1]
exec(sys.argv[3])
"""


def run(package: Path, tmp_path: Path, program: str) -> subprocess.CompletedProcess[str]:
    port = free_port()
    paths = [str(package), str(ROOT / "tests"), str(ROOT / "tests/helpers")]
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "run"), str(port), program],
        env={**os.environ, "PYTHONPATH": ":".join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG,
        cwd=tmp_path,
    )


@pytest.mark.parametrize("program", sorted({fault.program for fault in FAULTS.values()}))
def test_without_a_fault(tmp_path: Path, program: str) -> None:
    available()
    done = run(ROOT, tmp_path, program)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", FAULTS)
def test_fault(tmp_path: Path, name: str) -> None:
    available()
    fault = FAULTS[name]
    shutil.copytree(ROOT / "distcockpit", tmp_path / "distcockpit")
    file = tmp_path / "distcockpit" / fault.file
    text = file.read_text()
    assert text.count(fault.right) == 1
    file.write_text(text.replace(fault.right, fault.wrong))
    done = run(tmp_path, tmp_path, fault.program)
    said = done.stdout + done.stderr
    assert done.returncode != 0, said
    assert any(word in said for word in fault.seen.split("|")), said
