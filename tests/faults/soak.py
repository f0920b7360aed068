"""A long tracked run on two ranks, with flat memory:

torchrun --nproc_per_node=2 tests/faults/soak.py --store runs/soak.zarr --minutes 60

Every step is tracked; now and then the state of the cockpit is taken. Rank 0 prints the memory of both ranks once a
minute; at the end every rank's must not have grown by more than a tenth of what it was after the first tenth, and the
store must hold a row for every step.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distcockpit import DistCockpit, StoreOptions, every, open_run, presets
from distcockpit.quantities import GradAbsMax, GradHist1d, GradientGeometry, MeanGSNR


def resident() -> float:
    """Memory of this process, in MB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between steps")
    parser.add_argument("--json", help="write the measurements here")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    model, loss_fn = DistributedDataParallel(net), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(net.parameters())
    chosen = [*presets.economy(), MeanGSNR(), GradientGeometry(), GradHist1d(name="adapted", adapt=GradAbsMax())]
    measured: list[list[float]] = []
    began, told = time.monotonic(), -1
    with DistCockpit(
        model,
        loss_fn,
        optimizer,
        store=arguments.store,
        quantities=chosen,
        schedule=every(1),
        mode="w",
        store_options=StoreOptions(flush_seconds=5),
    ) as cockpit:
        step, going = 0, torch.ones(())
        while going:
            x, y = torch.randn(24 + 8 * rank, 64), torch.randint(10, (24 + 8 * rank,))
            optimizer.zero_grad()
            with cockpit.track(step, epoch=step // 1000):
                loss = loss_fn(cockpit(x), y)
                loss.backward()
            optimizer.step()
            cockpit.log(step, reduce="mean", loss=loss)
            step += 1
            if step % 2000 == 0:
                cockpit.state_dict()
            if step % 50 == 0:
                going = torch.tensor(float(time.monotonic() - began < 60 * arguments.minutes))
                dist.all_reduce(going, op=dist.ReduceOp.MIN)
                told_by_clock = torch.tensor(int((time.monotonic() - began) / 60))
                dist.all_reduce(told_by_clock, op=dist.ReduceOp.MIN)  # the same on all ranks
                minute = int(told_by_clock)
                if minute > told:
                    told = minute
                    gc.collect()
                    memory = torch.zeros(size)
                    memory[rank] = resident()
                    dist.all_reduce(memory)
                    measured.append([minute, step, *memory.tolist()])
                    if rank == 0:
                        print(f"{minute:4d} min, step {step:8d}, resident MB {memory.tolist()}", flush=True)
            time.sleep(arguments.pause)
    if rank == 0:
        run = open_run(arguments.store)
        assert run.attrs["dropped_rows"] == 0 and run.attrs["state"] == "closed"
        assert all(run[q.name].sizes["step"] in (step, step - 1) for q in chosen)
        tenth = measured[len(measured) // 10]
        grown = [last - first for first, last in zip(tenth[2:], measured[-1][2:], strict=True)]
        summary = {"steps": step, "minutes": measured[-1][0], "resident_mb": measured, "grown_mb": grown}
        print(json.dumps({k: v for k, v in summary.items() if k != "resident_mb"}))
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(summary))
        assert all(growth < 0.1 * first for growth, first in zip(grown, tenth[2:], strict=True)), grown
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
