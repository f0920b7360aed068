"""Checks on a GPU whatever could not be known without one: numbers, waits, memory, and time on GPT-2 small.

    python -m benchmarks.gpu                            # on a machine with a GPU and the extra `all`
    python -m benchmarks.gpu --device cpu --model gpt   # the same program without one, but for the tests and the memory

First the tests that need a GPU: the table of quantities against the oracle, and steps during which nothing may wait.
Then each loop in turn: what a tracked step takes over a plain one, in rounds of both, and what the device held at its
peak above the plain loop.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.setups import VARIANTS, Loop, make

NAMES = ("GradNorm", "NormTest", "Alpha", "economy without updates", "economy")
ROOT = Path(__file__).parents[1]


class OnDevice(Loop):
    """A loop on a device; a step takes until the device has done it."""

    def __init__(self, model: str, device: str, folder: Path, name: str) -> None:
        torch.manual_seed(0)
        net, x = make(model)
        store = None if name == "plain" else folder / name.replace(" ", "-")
        super().__init__(net.to(device), x.to(device), store, VARIANTS.get(name, []))
        self.y, self._device = self.y.to(device), torch.device(device)

    def one(self) -> None:
        """One step, to its end."""
        super().one()
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)


def peak(loop: OnDevice, steps: int) -> int:
    """Bytes that the device held at most, in some steps; 0 where torch does not count them."""
    module = torch.get_device_module(loop.x.device)
    if not hasattr(module, "max_memory_allocated"):
        return 0
    module.reset_peak_memory_stats(loop.x.device)
    loop.advance(steps)
    return int(module.max_memory_allocated(loop.x.device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="gpt2", help="as of benchmarks.memory")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3, help="of each loop in a round")
    given = parser.parse_args()
    console = Console()
    if given.device == "cuda":
        tests = subprocess.run([sys.executable, "-m", "pytest", "tests/test_gpu.py", "-n", "0", "-v"], cwd=ROOT)
        console.print(f"tests on a GPU: {'passed' if tests.returncode == 0 else 'FAILED'}")
        console.print(torch.cuda.get_device_name())
    table = Table(title=f"{given.model} on {given.device}: tracked steps that check nothing, over plain ones")
    for column in ("tracked", "time, median", "quartiles", "memory above plain, MiB"):
        table.add_column(column)
    with tempfile.TemporaryDirectory() as folder:
        plain = OnDevice(given.model, given.device, Path(folder), "plain")
        plain.advance(5)
        held = peak(plain, 3)
        for name in NAMES:
            tracked = OnDevice(given.model, given.device, Path(folder), name)
            tracked.advance(9)  # the first, second, fourth and eighth step check themselves
            rounds = [(plain.advance(given.steps), tracked.advance(given.steps)) for _ in range(given.rounds)]
            ratios = [after / before for before, after in rounds]
            low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
            own = peak(tracked, 3)
            size = sum(p.numel() * p.element_size() for p in tracked.model.parameters())
            above = f"{(own - held - 2 * size) / 2**20:,.0f}" if own else "-"  # both models are there, and a gradient
            table.add_row(name, f"{middle:.2f}", f"{low:.2f} to {high:.2f}", above)
            tracked.close()
            del tracked
    console.print(table)


if __name__ == "__main__":
    main()
