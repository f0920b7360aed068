"""How the cost of a tracked step grows: with ranks, samples, width and depth; log-log slopes.

    python -m benchmarks.scaling

The cost is what a tracked step with economy takes more than a plain one, in the same loop and interleaved with it.
Batch, width and depth in one process; ranks are gloo processes with one thread and 32 samples each, of which a machine
with fewer cores than ranks runs several at once: there the ratio to the plain step tells more than the slope.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.collective import join
from benchmarks.setups import Loop, write
from distcockpit import presets

BATCHES, WIDTHS, DEPTHS, RANKS = (32, 64, 128, 256, 512), (64, 128, 256, 512, 1024), (2, 4, 8, 16), (1, 2, 4)
ROUNDS, STEPS = 7, 6


def network(width: int, depth: int) -> nn.Module:
    """A multi-layer perceptron."""
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def measured(model: nn.Module, x: torch.Tensor, folder: Path) -> tuple[list[float], list[float]]:
    """Milliseconds of plain and of tracked steps, by round."""
    plain, tracked = Loop(model, x, None, []), Loop(model, x, folder, presets.economy())
    plain.advance(5)
    tracked.advance(5)
    times = [(plain.advance(STEPS), tracked.advance(STEPS)) for _ in range(ROUNDS)]
    tracked.close()
    first, second = zip(*times, strict=True)
    return list(first), list(second)


def rank_main(rank: int, size: int, folder: str) -> None:
    """One of several ranks."""
    join(rank, size, folder)
    torch.manual_seed(0)
    model = DistributedDataParallel(network(256, 3))
    found = measured(model, torch.randn(32, 256), Path(folder, "run"))
    if rank == 0:
        torch.save(found, Path(folder, "times.pt"))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all measurements here")
    args = parser.parse_args()
    series: dict[str, dict[int, tuple[list[float], list[float]]]] = {"batch": {}, "width": {}, "depth": {}, "ranks": {}}
    with tempfile.TemporaryDirectory() as folder:
        for k, (name, size) in enumerate([(name, n) for name, sizes in SERIES.items() for n in sizes]):
            torch.manual_seed(0)
            batch, width, depth = (size if name == each else default for each, default in DEFAULTS.items())
            series[name][size] = measured(network(width, depth), torch.randn(batch, width), Path(folder, str(k)))
        for size in RANKS:
            with tempfile.TemporaryDirectory() as own:
                mp.spawn(rank_main, (size, own), nprocs=size)
                series["ranks"][size] = torch.load(Path(own, "times.pt"))
    table = Table(title="economy at every step: medians over rounds")
    for column in ("", "size", "plain ms", "tracked ms", "ratio", "ms more"):
        table.add_column(column, justify="left" if not column else "right")
    for name, sizes in series.items():
        more = []
        for size, (plain, tracked) in sizes.items():
            a, b = np.median(plain), np.median(tracked)
            more.append(b - a)
            ratio = np.median(np.array(tracked) / plain)
            table.add_row(name, str(size), f"{a:.2f}", f"{b:.2f}", f"{ratio:.1f}", f"{b - a:.2f}")
        slope = np.polyfit(np.log(list(sizes)), np.log(more), 1)[0]
        table.add_row("", "", "", "", "log-log slope", f"{slope:.2f}", end_section=True)
    Console(width=100).print(table)
    if args.json:
        write(args.json, "scaling", {"ms": series})


DEFAULTS = {"batch": 64, "width": 256, "depth": 3}
SERIES = {"batch": BATCHES, "width": WIDTHS, "depth": DEPTHS}

if __name__ == "__main__":
    main()
