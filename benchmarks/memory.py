"""How much memory a tracked step takes at its peak, above a plain step; and Cockpit's.

    python -m benchmarks.memory                        # the MLP; --model 3c3d

Each loop runs in a process of its own. What counts is the growth of its resident memory from before the first step to
the peak over further steps (Linux resets and reports that peak), so that libraries do not count; the median of several
runs, less that of the plain loop.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.setups import COCKPITS, VARIANTS, CockpitLoop, Loop, has_cockpit, make, write

NAMES = ("GradHist2d", "economy", "business")
STEPS = 12


def memory(field: str) -> int:
    """A field of the process status, in bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def growth(kind: str, name: str) -> int:
    """Peak resident memory of some steps above what there was before the first, in bytes."""
    warnings.simplefilter("ignore")
    store = None if name not in VARIANTS else Path(tempfile.mkdtemp())
    warm = Loop(*make("mlp"), store and store / "warm", VARIANTS.get(name, []))  # libraries, compiled kernels
    warm.advance(3)
    warm.close()
    torch.manual_seed(0)
    model, x = make(kind)
    if name.startswith("Cockpit: "):
        loop: Loop = CockpitLoop(model, x, name.removeprefix("Cockpit: "))
    else:
        loop = Loop(model, x, store and store / "run", VARIANTS.get(name, []))
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    loop.advance(STEPS)
    return memory("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["mlp", "3c3d"], default="mlp")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all measurements here")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(growth(args.model, args.one)))
        return
    names = ["plain", *NAMES]
    if has_cockpit():
        names += [f"Cockpit: {name}" for name in NAMES if name in COCKPITS]
    peaks: dict[str, list[int]] = {name: [] for name in names}
    for name in track([name for _ in range(args.runs) for name in names], description=args.model):
        command = [sys.executable, "-m", "benchmarks.memory", "--model", args.model, "--one", name]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        peaks[name].append(json.loads(output.splitlines()[-1]))
    plain = np.median(peaks["plain"])
    table = Table(title=f"{args.model}: peak memory, plain grows by {plain / 2**20:.0f} MiB")
    for column in ("", "MiB above plain", "smallest to largest"):
        table.add_column(column, justify="left" if not column else "right")
    for name, values in peaks.items():
        above = (np.array(values) - plain) / 2**20
        table.add_row(name, f"{np.median(above):.1f}", f"{above.min():.1f} to {above.max():.1f}")
    Console(width=100).print(table)
    if args.json:
        write(args.json, "memory", {"model": args.model, "bytes": peaks})


if __name__ == "__main__":
    main()
