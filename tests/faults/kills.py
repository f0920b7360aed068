"""Kill a tracked run at random moments, resume it, and compare every row with a run that was not killed:

python tests/faults/kills.py --kills 200

A process trains, tracks every step, commits as often as it can, and saves a checkpoint with the cockpit's state now and
then. It is killed (SIGKILL) at a random moment of its life, also while it opens, cuts or writes the store. After each
kill the store must open and hold every chunk; every row of every quantity must be what was handed to the store, bit for
bit (a journal beside it tells), and that of the other run but for rounding. Then the run is resumed in the store.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import pickle
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from distcockpit import DistCockpit, StoreOptions, every, open_run
from distcockpit import quantities as q
from distcockpit.run import verify
from distcockpit.store import run_store as store_module

CHECKPOINT_STEPS = 7
ROWS_PER_CHUNK = 16


def chosen() -> list[q.Quantity]:
    return [
        q.Alpha(),
        q.Distance(),
        q.UpdateGeometry(schedule=every(2)),
        q.GradHist1d(bins=12, adapt=q.GradAbsMax()),
        q.GradHist2d(bins=(4, 5), schedule=every(3)),
        q.NormTest(),
        q.MeanGSNR(),
        q.GradientGeometry(),
        q.OutputGradientGeometry(),
        q.Loss(),
    ]


def train(store: str, checkpoint: str, steps: int, opening: Any, stepping: Any) -> None:
    """From the checkpoint, if there is one, to the end."""
    store_module.MAX_CHUNK_ROWS = ROWS_PER_CHUNK  # many chunks
    store_module.STEP_CHUNK_ROWS = 2 * ROWS_PER_CHUNK
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net, loss_fn = nn.Sequential(nn.Linear(6, 5), nn.Sigmoid(), nn.Linear(5, 3)), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    journal = os.open(f"{store}.journal", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    append = store_module.RunStore.append

    def journaled(self: Any, group: str, step: int, row: Any, coordinates: Any) -> bool:
        os.write(journal, pickle.dumps((group, step, {name: np.asarray(value) for name, value in row.items()})))
        return append(self, group, step, row, coordinates)

    store_module.RunStore.append = journaled  # type: ignore[method-assign]
    opening.set()
    options = {
        "quantities": chosen(),
        "schedule": every(1),
        "mode": "a",
        "store_options": StoreOptions(flush_seconds=0.02),
    }
    with DistCockpit(net, loss_fn, optimizer, store=store, **options) as cockpit:
        first = 0
        if Path(checkpoint).exists():
            saved = torch.load(checkpoint, weights_only=True)
            net.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            cockpit.load_state_dict(saved["cockpit"])
            first = saved["step"] + 1
        for step in range(first, steps):
            generator = torch.Generator().manual_seed(step)
            x, y = torch.randn(9, 6, generator=generator), torch.randint(3, (9,), generator=generator)
            optimizer.zero_grad()
            with cockpit.track(step, epoch=step // 10):
                loss_fn(cockpit(x), y).backward()
            optimizer.step()
            cockpit.log(step, squared=step * step)
            stepping.set()
            if step % CHECKPOINT_STEPS == CHECKPOINT_STEPS - 1:
                saved = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save({**saved, "cockpit": cockpit.state_dict()}, f"{checkpoint}.new")
                os.replace(f"{checkpoint}.new", checkpoint)


def expect_rows(store: Path, whole: Any) -> int:
    """Every committed row is there, bit for bit; their number."""
    assert verify(store) == [], verify(store)
    run, rows = open_run(store).load(), 0
    handed: dict[tuple[str, int], list[Any]] = {}
    with Path(f"{store}.journal").open("rb") as journal:
        try:
            while True:
                group, step, row = pickle.load(journal)
                handed.setdefault((group, step), []).append(row)
        except (EOFError, pickle.UnpicklingError):  # the last entry may be torn: it was not appended
            pass
    for name, node in whole.children.items():
        theirs, mine = node.to_dataset(), run[name].to_dataset()
        n = mine.sizes["step"]
        rows += n
        assert list(mine.data_vars) == list(theirs.data_vars) or n == 0, name
        np.testing.assert_array_equal(mine["step"].values, theirs["step"].values[:n])
        for field, values in mine.data_vars.items():
            np.testing.assert_allclose(values, theirs[field][:n], rtol=1e-6, atol=1e-9, err_msg=f"{name}/{field}")
            for step, value in zip(mine["step"].values, values.values, strict=True):
                rows_handed = [row[field] for row in handed[name, int(step)] if field in row]
                candidates = [row.astype(value.dtype).tobytes() for row in rows_handed]
                assert value.tobytes() in candidates, f"{name}/{field} at step {step}"
    return rows


def main(kills: int, steps: int, seed: int, folder: str) -> dict[str, int]:
    """Kill so often; what was seen."""
    context, chance = mp.get_context("forkserver"), random.Random(seed)
    context.set_forkserver_preload(["torch", "backpack", "distcockpit", "numba"])
    seen = {"kills": 0, "rows compared": 0, "runs finished": 0, "while opening": 0, "resumed": 0, "cut": 0}
    whole_store = f"{folder}/whole"
    events = context.Event(), context.Event()
    process = context.Process(target=train, args=(whole_store, f"{folder}/whole.pt", steps, *events))
    process.start()
    process.join()
    assert process.exitcode == 0
    whole = open_run(whole_store).load()
    life, generation, name = 0, 0, 0
    while seen["kills"] < kills:
        store, checkpoint = Path(folder, f"run{name}"), f"{folder}/run{name}.pt"
        opening, stepping = context.Event(), context.Event()
        process = context.Process(target=train, args=(str(store), checkpoint, steps, opening, stepping))
        process.start()
        opens = chance.random() < 0.2
        (opening if opens else stepping).wait()
        process.join(chance.uniform(0, 0.2) if opens else chance.choice([0.05, 0.3, 1.5]) * chance.random())
        if process.is_alive():
            os.kill(process.pid or 0, signal.SIGKILL)
            process.join()
            seen["kills"] += 1
        else:
            assert process.exitcode == 0
        if not (store / "zarr.json").exists() or not open_run(store).children:  # before its first commit
            seen["while opening"] += 1
            continue
        seen["rows compared"] += expect_rows(store, whole)
        attributes = open_run(store).attrs
        seen["resumed"] += life > 0
        seen["cut"] += attributes["generation"] - generation
        life, generation = life + 1, attributes["generation"]
        if attributes["state"] == "closed":
            seen["runs finished"] += 1
            assert attributes["committed_step"] == steps - 1
            life, generation, name = 0, 0, name + 1
    return seen


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--steps", type=int, default=240, help="of a whole run")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    sys.path.insert(0, str(Path(__file__).parent))
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(main(arguments.kills, arguments.steps, arguments.seed, folder)))
