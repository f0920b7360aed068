"""A rank of a small run, started by tests that let something happen to it:

RANK=0 WORLD_SIZE=2 RENDEZVOUS=/tmp/file python tests/faults/worker.py STORE '{"steps": 5}'

Prints a line for each step, and what became of the run.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from distcockpit import DistCockpit, StoreOptions, every
from distcockpit.quantities import GradHist1d, HessTrace, Loss, MeanGSNR, UpdateSize
from distcockpit.store import writer
from distcockpit.tracking import signals


def say(*words: object) -> None:
    print(*words, flush=True)


def pause_before(exchange: str, step: int, go: Path) -> None:
    """Before the header or the sums of a step, wait for a file."""
    name = {"header": "all_gather", "sums": "all_reduce"}[exchange]
    calls, collective = [0], getattr(dist, name)

    def paused(*args: Any, **kwargs: Any) -> Any:
        calls[0] += now[0] == step
        if now[0] == step and calls[0] == 1:
            say("pauses")
            while not go.exists():
                time.sleep(0.01)
        return collective(*args, **kwargs)

    setattr(dist, name, paused)


now = [-1]


# On a busy machine, writing at the end may take longer than a launcher would wait.
signals.SECONDS = writer.GRACE_SECONDS = 600.0


def main() -> None:
    store, options = sys.argv[1], json.loads(sys.argv[2])
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net, loss_fn, model = nn.Sequential(nn.Linear(12, 9), nn.Sigmoid(), nn.Linear(9, 5)), nn.CrossEntropyLoss(), None
    if size > 1:
        file = os.environ.get("RENDEZVOUS")
        method = {"init_method": f"file://{file}", "rank": rank, "world_size": size} if file else {}
        dist.init_process_group("gloo", timeout=timedelta(seconds=600), **method)
        model = DistributedDataParallel(net) if options.get("ddp", True) else net
        if options.get("sharded"):
            model = fully_shard(net, mesh=init_device_mesh("cpu", (size,)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    settings = {"schedule": every(1), "timeout_seconds": 600, **options.get("cockpit", {})}
    settings["store_options"] = StoreOptions(**settings.get("store_options", {}))
    checkpoint = Path(options.get("checkpoint", store + ".pt"))
    quantities = [Loss(), MeanGSNR(), GradHist1d(bins=20), UpdateSize()]
    quantities += [HessTrace()] if options.get("slow") else []
    if options.get("user_handler"):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    first = 0
    cockpit = DistCockpit(model or net, loss_fn, optimizer, store=store, quantities=quantities, **settings)
    if settings.get("mode") == "a" and checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        cockpit.load_state_dict(saved["cockpit"])
        first = saved["step"] + 1
    fault, at = options.get("faults", {}).get(str(rank), ["none", -1])
    if "pause" in options:
        pause_before(*options["pause"], Path(options["go"]))
    say("begins", first, os.getpid())
    try:
        for step in range(first, options["steps"]):
            now[0] = step
            if step == at and fault == "kill" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            if step == at and fault == "stall":
                time.sleep(10**6)
            if step == at and fault == "leave":
                break
            generator = torch.Generator().manual_seed(1000 * step + rank)
            x, y = torch.randn(8, 12, generator=generator), torch.randint(5, (8,), generator=generator)
            optimizer.zero_grad()
            if step == at and fault == "skip":
                loss_fn(cockpit(x), y).backward()
            else:
                with cockpit.track(step):
                    loss_fn(cockpit(x), y).backward()
            optimizer.step()
            cockpit.log(step, value=step)
            if step % options.get("every_checkpoint", 10**9) == 0:
                saved = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                saved["cockpit"] = cockpit.state_dict()
                if rank == 0:
                    torch.save(saved, f"{checkpoint}.new")
                    os.replace(f"{checkpoint}.new", checkpoint)
            if options.get("flush"):
                cockpit.flush()
            say("step", step)
            time.sleep(options.get("rest", 0))
        if options.get("hang_at_end") == rank:
            time.sleep(10**6)
        if options.get("forget") != rank:
            cockpit.close()
            say("closed")
    except RuntimeError as error:
        say("error", " ".join([str(error), *getattr(error, "__notes__", [])]).replace("\n", " "))
        sys.exit(3)


if __name__ == "__main__":
    main()
