"""How much memory a tracked step takes at its peak, above a plain step; and Cockpit's.

    python -m benchmarks.memory                        # the MLP; --model 3c3d
    python -m benchmarks.memory --model gpt            # a GPT of 10.9 million parameters, 8 x 128 tokens
    python -m benchmarks.memory --model gpt2           # GPT-2 small, 124 million parameters, 2 x 128 tokens
    python -m benchmarks.memory --model gpt2 --ranks 2 # of a DDP job, the most on any rank, each with such a batch
    python -m benchmarks.memory --model gpt --ranks 4 --sharded  # the same of a model sharded with fully_shard

Each loop runs in a process of its own. What counts is the growth of its resident memory from before the first step to
the peak over some steps (Linux resets and reports that peak), so that libraries do not count; the median of several
runs, less that of the plain loop: of the first step, of the next three, two of which check themselves as the first
does, and of three that do not. Beside it stands the peak of torch's allocator in one more such step, also above the
plain loop's, and what `Time` says that a step held at its end, in MiB: factors (inputs and output gradients of layers)
and copies of parameters, on top of which a step uses at most `memory_budget` (256 MiB).

glibc keeps what was freed, the more of it the larger the blocks that a process once had, so that resident memory grows
with holes, in plain loops as well. All loops run with a fixed threshold above which free memory goes back to the
system; ``--malloc default`` leaves it as it is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from benchmarks.collective import join
from benchmarks.setups import COCKPITS, LARGE, VARIANTS, CockpitLoop, Loop, fully_sharded, has_cockpit, make, write
from distcockpit import open_run
from distcockpit.quantities import Time

NAMES = {"mlp": ("GradHist2d", "economy", "business"), "3c3d": ("GradHist2d", "economy", "business")}
NAMES |= {kind: ("GradNorm", "NormTest", "Alpha", "economy without updates", "economy") for kind in LARGE}
PHASES = {"first step": 1, "with two that check": 3, "that check nothing": 3}
FIXED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}


def memory(field: str) -> int:
    """A field of the process status, in bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def allocated(step: Callable[[], object]) -> int:
    """The most that torch's allocator has in use during a step, in bytes, above what it has in use before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]  # negative if freed
    return max(itertools.accumulate(sizes, initial=0))


def growth(kind: str, name: str, folder: Path, wrap: Callable[[nn.Module], nn.Module] = lambda net: net) -> list[int]:
    """What a loop takes, in bytes: of resident memory in each phase; of the allocator; factors; copies."""
    warnings.simplefilter("ignore")
    store = None if name not in VARIANTS else folder
    warm = Loop(*make("mlp"), store and store / "warm", VARIANTS.get(name, []))  # libraries, compiled kernels
    warm.advance(3)
    warm.close()
    torch.manual_seed(0)
    model, x = make(kind)
    model = wrap(model)
    if name.startswith("Cockpit: "):
        loop: Loop = CockpitLoop(model, x, name.removeprefix("Cockpit: "))
    else:
        loop = Loop(model, x, store and store / "run", [*VARIANTS.get(name, []), Time()])
    before, peaks = memory("VmRSS"), []
    for steps in PHASES.values():
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        loop.advance(steps)
        peaks.append(memory("VmHWM") - before)
    loop.advance(1)  # the eighth, which checks itself
    peaks.append(allocated(loop.one))
    loop.close()
    if store is None or not (store / "run").exists():  # the plain loop, Cockpit, or another rank than the first
        return [*peaks, 0, 0]
    held = open_run(store / "run")["time"]
    return [*peaks, int(held["factor_bytes"][-1]), int(held["copy_bytes"][-1])]


def on_rank(rank: int, ranks: int, kind: str, name: str, folder: str, sharded: bool) -> None:
    """The same on one of several ranks; rank 0 prints the most that any of them takes."""
    join(rank, ranks, folder)
    found = growth(kind, name, Path(folder), fully_sharded if sharded else DistributedDataParallel)
    every: list[list[int]] = [[] for _ in range(ranks)]
    dist.all_gather_object(every, found)
    if rank == 0:
        print(json.dumps(np.max(every, 0).tolist()), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(NAMES), default="mlp")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--malloc", choices=["fixed", "default"], default="fixed", help="when free memory is returned")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), help="some of the quantities")
    parser.add_argument("--json", type=Path, help="write all measurements here")
    parser.add_argument("--ranks", type=int, default=1, help="of a DDP job")
    parser.add_argument("--sharded", action="store_true", help="with fully_shard instead of DDP")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        with tempfile.TemporaryDirectory() as folder:
            if args.ranks > 1:
                mp.spawn(on_rank, (args.ranks, args.model, args.one, folder, args.sharded), nprocs=args.ranks)
            else:
                print(json.dumps(growth(args.model, args.one, Path(folder))))
        return
    names = ["plain", *(args.only or NAMES[args.model])]
    if has_cockpit() and args.model not in LARGE and args.ranks == 1:
        names += [f"Cockpit: {name}" for name in names if name in COCKPITS]
    peaks: dict[str, list[list[int]]] = {name: [] for name in names}
    held: dict[str, list[list[int]]] = {name: [] for name in names}
    for name in track([name for _ in range(args.runs) for name in names], description=args.model):
        command = [sys.executable, "-m", "benchmarks.memory", "--model", args.model, "--ranks", str(args.ranks)]
        command += ["--one", name, *(["--sharded"] if args.sharded else [])]
        environment = os.environ | (FIXED if args.malloc == "fixed" else {})
        output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
        numbers = json.loads(output.splitlines()[-1])
        peaks[name].append(numbers[:-2])
        held[name].append(numbers[-2:])
    plain = np.median(peaks["plain"], 0)
    grown = ", ".join(f"{size / 2**20:.0f}" for size in plain[:-1])
    table = Table(
        title=f"{args.model}: peak memory; plain steps grow by {grown} MiB; ranks: {args.ranks}; malloc: {args.malloc}"
    )
    phases = [each for phase in (*PHASES, "allocator") for each in (phase, "from ... to")]
    for column in ("MiB above plain", *phases, "factors", "copies"):
        table.add_column(column, justify="left" if column == "MiB above plain" else "right")
    for name, values in peaks.items():
        above = (np.array(values) - plain) / 2**20
        cells = [(f"{np.median(each):.1f}", f"{each.min():.1f} to {each.max():.1f}") for each in above.T]
        kept = [f"{size / 2**20:.1f}" for size in np.median(held[name], 0)]
        table.add_row(name, *(cell for pair in cells for cell in pair), *kept)
    Console(width=150).print(table)
    if args.json:
        how = {"model": args.model, "ranks": args.ranks, "sharded": args.sharded}
        resident = {name: [run[:-1] for run in runs] for name, runs in peaks.items()}
        allocator = {name: [run[-1] for run in runs] for name, runs in peaks.items()}
        write(args.json, "memory", {**how, "bytes": resident, "allocated": allocator, "held": held})


if __name__ == "__main__":
    main()
