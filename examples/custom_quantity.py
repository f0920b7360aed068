"""A quantity of your own: the hardest sample of the pooled batch, and the rank that holds it.

torchrun --nproc_per_node=4 examples/custom_quantity.py --store runs/custom.zarr
python examples/custom_quantity.py --store runs/custom.zarr          # the same in one process

Some of rank 1's labels are wrong; the rows read back at the end show it.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distcockpit import DistCockpit, every, open_run, presets
from distcockpit.quantities import Field, Group, Needs, Quantity


@dataclass(frozen=True, kw_only=True)
class HardestSample(Quantity):
    """Largest individual loss of the pooled batch, and the rank that holds it."""

    @property
    def needs(self):
        """What the tracked step must provide."""
        return Needs(losses=True)

    def group(self, model):
        """What a row looks like in the store."""
        return Group({"loss": Field((), "largest loss", "loss"), "rank": Field((), "its rank", dtype="int64")})

    def local(self, batch, memory):
        """This rank's part. Parts are summed over ranks, so a maximum needs one slot per rank."""
        return {"largest": batch.slot(batch.losses.max() if batch.local_n else -torch.inf)}

    def finalize(self, totals, n):
        """The row, from the totals over ranks."""
        return {"loss": totals["largest"].max(), "rank": totals["largest"].argmax()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="runs/custom.zarr", help="where the run is recorded (default: %(default)s)")
    args = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3))
    truth = torch.randn(20, 3)
    model = DistributedDataParallel(net) if dist.is_initialized() else net
    loss_fn, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.2)

    torch.manual_seed(1 + rank)
    with DistCockpit(
        model,
        loss_fn,
        optimizer,
        store=args.store,
        mode="w",
        quantities=presets.economy() + [HardestSample()],
        schedule=every(5),
    ) as cockpit:
        for step in range(100):
            x = torch.randn(32, 20)
            y = (x @ truth).argmax(1)
            if rank == 1:
                y[:8] = torch.randint(3, (8,))
            optimizer.zero_grad()
            with cockpit.track(step):
                loss_fn(cockpit(x), y).backward()
            optimizer.step()

    if rank == 0:
        rows = open_run(args.store)["hardest_sample"]
        counts = np.bincount(rows["rank"].values, minlength=world_size)
        print(f"Largest loss at the last tracked step: {float(rows['loss'][-1]):.2f}")
        for k, count in enumerate(counts):
            print(f"rank {k} held the hardest sample at {count} of {len(rows['step'])} tracked steps")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
