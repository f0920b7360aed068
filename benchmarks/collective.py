"""What a tracked step exchanges: collectives and bytes per rank; and what an element-wise vector costs to pool.

    python -m benchmarks.collective

Real gloo processes on this machine. The second table times the sum of a float64 vector over ranks: all-reduce against
reduce-scatter, after which each rank holds its own range, interleaved; medians.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel

from benchmarks.setups import VARIANTS, Loop, make, write
from distcockpit import open_run
from distcockpit import quantities as q

NAMES = ("NormTest", "InnerTest", "MeanGSNR", "GradHist1d", "Alpha", "economy", "business", "layers")
SIZES = (10_000, 100_000, 1_000_000)
STEPS = 4
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its name since torch 2.13


def join(rank: int, size: int, folder: str) -> None:
    """Begin as one of several ranks."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)


def work(rank: int, size: int, folder: str) -> None:
    """Train with each selection; then time the two collectives."""
    join(rank, size, folder)
    for name in NAMES:
        torch.manual_seed(0)
        model, x = make("mlp")
        ddp = DistributedDataParallel(model)
        loop = Loop(ddp, x[: 128 // size], Path(folder, name), [q.Time(), *VARIANTS[name]])
        loop.advance(STEPS)
        loop.close()
    times: dict[str, list[float]] = {}
    for elements in SIZES:
        vector = torch.randn(elements * size, dtype=torch.float64)[:elements]
        part = torch.empty(elements // size, dtype=torch.float64)
        for _ in range(15):
            for name in ("all_reduce", "reduce_scatter"):
                dist.barrier()
                start = time.perf_counter()
                if name == "all_reduce":
                    dist.all_reduce(vector)
                else:
                    REDUCE_SCATTER(part, vector[: len(part) * size].contiguous())
                times.setdefault(f"{name} {elements}", []).append((time.perf_counter() - start) * 1e3)
            vector /= size
    if rank == 0:
        torch.save(times, Path(folder, "times.pt"))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write all measurements here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (args.ranks, folder), nprocs=args.ranks)
        times = torch.load(Path(folder, "times.pt"))
        counted = {}
        for name in NAMES:
            row = open_run(Path(folder, name))["time"].isel(step=-1)  # the first steps also compare sizes
            counted[name] = {"exchanges": int(row["exchanges"]), "bytes": int(row["exchanged_bytes"])}
    parameters = sum(p.numel() for p in make("mlp")[0].parameters())
    table = Table(title=f"per tracked step and rank: MLP of {parameters:,} parameters, {args.ranks} ranks")
    for column in ("", "collectives", "bytes", "bytes per parameter"):
        table.add_column(column, justify="left" if not column else "right")
    for name, row in counted.items():
        table.add_row(name, str(row["exchanges"]), f"{row['bytes']:,}", f"{row['bytes'] / parameters:.2f}")
    Console(width=100).print(table)
    table = Table(title=f"ms to pool a float64 vector over {args.ranks} gloo ranks")
    for column in ("elements", "all-reduce", "reduce-scatter"):
        table.add_column(column, justify="right")
    for elements in SIZES:
        row = [np.median(times[f"{name} {elements}"]) for name in ("all_reduce", "reduce_scatter")]
        table.add_row(f"{elements:,}", *(f"{value:.2f}" for value in row))
    Console(width=100).print(table)
    if args.json:
        write(args.json, "collective", {"ranks": args.ranks, "parameters": parameters, "steps": counted, "ms": times})


if __name__ == "__main__":
    main()
