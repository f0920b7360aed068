"""What a tracked step costs where the model is sharded with fully_shard (FSDP2), over plain FSDP2.

    python -m benchmarks.sharded                       # a GPT of 10.9 million parameters, 8 x 128 tokens on each rank
    python -m benchmarks.sharded --ranks 4 --model mlp

Real gloo processes on this machine, one thread each. All loops are interleaved in rounds; the table shows medians over
rounds of the ratio to the plain steps of the same round, and quartiles. "waiting" is the part of a tracked step in
which rank 0 waits in the cockpit's exchanges, for other ranks and for sums. Memory: `benchmarks.memory --sharded`.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

from benchmarks.collective import join
from benchmarks.setups import VARIANTS, Loop, fully_sharded, make, write
from distcockpit import open_run
from distcockpit import quantities as q

NAMES = ("GradNorm", "NormTest", "Alpha", "economy")


def work(rank: int, ranks: int, model: str, names: list[str], rounds: int, folder: str, results: dict) -> None:
    """Train with each selection, a step of each in turn."""
    join(rank, ranks, folder)
    warnings.simplefilter("ignore")

    def fresh() -> tuple[torch.nn.Module, torch.Tensor]:
        torch.manual_seed(0)
        net, x = make(model)
        return fully_sharded(net), x

    loops = {"plain": Loop(*fresh(), None, []), "plain again": Loop(*fresh(), None, [])}
    loops |= {name: Loop(*fresh(), Path(folder, name), [q.RankHealth(), *_without(name)]) for name in names}
    for loop in loops.values():
        loop.advance(5)  # the first, second and fourth tracked step check themselves
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(rounds):
        for name, loop in loops.items():
            if loop.step in (7, 15, 31):
                loop.advance(1)
            dist.barrier()
            times[name].append(loop.advance(1))
    for loop in loops.values():
        loop.close()
    if rank == 0:
        found = {}
        for name in names:
            health = open_run(Path(folder, name)).load()["rank_health"].isel(rank=0, step=slice(5, None))
            found[name] = float(np.median(health["wait_seconds"])) * 1e3
        results.update(ms=times, waiting=found)
    dist.destroy_process_group()


def _without(name: str) -> list[q.Quantity]:
    return [each for each in VARIANTS[name] if not isinstance(each, q.RankHealth)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["mlp", "gpt", "gpt2", "gpt2-tiny"], default="gpt")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(NAMES))
    parser.add_argument("--json", type=Path, help="write all measurements here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(work, (args.ranks, args.model, args.only, args.rounds, folder, results), nprocs=args.ranks)
        times, waiting = dict(results["ms"]), dict(results["waiting"])
    plain = np.array(times["plain"])
    table = Table(title=f"{args.model}: {args.ranks} ranks, fully_shard, torch {torch.__version__}")
    for column in ("", "ms per step", "over plain", "quartiles", "waiting, ms"):
        table.add_column(column, justify="left" if not column else "right")
    for name, values in times.items():
        low, middle, high = np.quantile(np.array(values) / plain, [0.25, 0.5, 0.75])
        waits = f"{waiting[name]:.1f}" if name in waiting else ""
        table.add_row(name, f"{np.median(values):.1f}", f"{middle:.2f}", f"{low:.2f} to {high:.2f}", waits)
    Console(width=100).print(table)
    if args.json:
        write(args.json, "sharded", {"model": args.model, "ranks": args.ranks, "ms": times, "waiting": waiting})


if __name__ == "__main__":
    main()
