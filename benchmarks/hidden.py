"""How much of the time of the exchanges is hidden: one bucket's sums are on their way while the next is walked.

    python -m benchmarks.hidden                        # a GPT of 10.9 million parameters, 4 ranks, 2 x 128 tokens each

Real gloo processes on this machine. The same steps are timed with and without waiting for each exchange as soon as it
has begun, in turn. What is hidden is the share of the time waited in the latter that is not waited in the former. Where
ranks share their cores, as here, an exchange takes from the walk what it is given: the steps themselves say what is
gained.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel

from benchmarks.collective import join
from benchmarks.setups import VARIANTS, Loop, make, write
from distcockpit.tracking.exchanges import Exchanges, Pooled

NAMES = ("NormTest", "MeanGSNR")
FIRST = 17  # steps before anything is timed; the next one that checks itself is the 32nd
start = Exchanges.start


class Waits:
    """Stands in for `Exchanges.start`: notes the bytes of each bucket, and the time waited for it.

    Args:
        at_once: Whether to wait as soon as an exchange has begun.
    """

    def __init__(self, *, at_once: bool) -> None:
        self._at_once = at_once
        self.bytes: list[int] = []
        self.waited: list[float] = []

    def begin(self, exchanges: Exchanges, sizes: Mapping[str, int], vectors: Mapping[object, Sequence[Any]]) -> Pooled:
        """Begin to exchange a bucket."""
        pooled = start(exchanges, sizes, vectors)
        self.bytes.append(sum(sizes.values()) * len(exchanges.kinds) * 8)
        if not self._at_once:
            return lambda: self._wait(pooled)
        found = self._wait(pooled)
        return lambda: found

    def _wait(self, pooled: Callable[[], Mapping[object, Any]]) -> Mapping[object, Any]:
        before = time.perf_counter()
        found = pooled()
        self.waited.append((time.perf_counter() - before) * 1e3)
        return found


def work(rank: int, size: int, folder: str, rounds: int) -> None:
    """Time both kinds of steps."""
    join(rank, size, folder)
    results: dict[str, Any] = {}
    for name in NAMES:
        torch.manual_seed(0)
        model, x = make("gpt")
        loop = Loop(DistributedDataParallel(model), x[:2], Path(folder, name), VARIANTS[name])
        loop.advance(FIRST)
        found = results[name] = {"hidden": [], "waits": [], "bytes": []}
        for _ in range(rounds):
            for kind in ("hidden", "waits"):
                waits = Waits(at_once=kind == "waits")
                Exchanges.start = lambda *args, begin=waits.begin: begin(*args)  # type: ignore[method-assign]
                dist.barrier()
                ms = loop.advance(1)
                found[kind].append((ms, waits.waited))
                found["bytes"] = waits.bytes
        Exchanges.start = start  # type: ignore[method-assign]
        loop.close()
    if rank == 0:
        torch.save(results, Path(folder, "results.pt"))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write all measurements here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (args.ranks, folder, args.rounds), nprocs=args.ranks)
        results = torch.load(Path(folder, "results.pt"))
    for name, found in results.items():
        table = Table(title=f"{name}: ms waited by rank 0 for each bucket; {args.ranks} ranks")
        for column in ("bucket", "bytes", "hidden", "waiting at once"):
            table.add_column(column, justify="right")
        hidden, waits = (np.array([waited for _, waited in found[kind]]) for kind in ("hidden", "waits"))
        for k, size in enumerate(found["bytes"]):
            table.add_row(str(k), f"{size:,}", f"{np.median(hidden[:, k]):.1f}", f"{np.median(waits[:, k]):.1f}")
        totals = np.median(hidden.sum(1)), np.median(waits.sum(1))
        table.add_row("all", f"{sum(found['bytes']):,}", *(f"{total:.1f}" for total in totals), style="bold")
        Console(width=100).print(table)
        shares = 1 - hidden.sum(1) / waits.sum(1)
        low, middle, high = np.quantile(shares, [0.25, 0.5, 0.75])
        steps = [[ms for ms, _ in found[kind]] for kind in ("hidden", "waits")]
        print(f"hidden: {middle:.0%} ({low:.0%} to {high:.0%}); a step: {np.median(steps[0]):.0f} ms,", end=" ")
        print(f"with waits {np.median(steps[1]):.0f} ms")
    if args.json:
        write(args.json, "hidden", {"ranks": args.ranks, "steps": results})


if __name__ == "__main__":
    main()
