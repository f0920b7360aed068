"""Write a million steps of a mixed schedule and read them back:

python tests/faults/rows.py --steps 1000000 --store runs/rows.zarr

Ten scalars and five vectors of 100 every step, three histograms of 100 bins every 10 steps, two of 40 x 50 every 1000.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from distcockpit import open_run
from distcockpit.run import verify
from distcockpit.store.keys import FolderKeys
from distcockpit.store.run_store import CLOSED, RunStore
from distcockpit.store.schema import Field, Group

SCALARS, VECTORS, HISTOGRAMS, LARGE = 10, 5, 3, 2
EVERY = {"scalar": 1, "vector": 1, "histogram": 10, "large": 1000}


def groups() -> dict[str, Group]:
    found = {f"scalar{i}": Group({"value": Field()}) for i in range(SCALARS)}
    vector = Group({"value": Field(("parameter",), dtype="float32")}, {"parameter": 100})
    found |= {f"vector{i}": vector for i in range(VECTORS)}
    fields = {"counts": Field(("bin",), dtype="int64"), "edges": Field(("edge",))}
    found |= {f"histogram{i}": Group(fields, {"bin": 100, "edge": 101}) for i in range(HISTOGRAMS)}
    large = Group({"counts": Field(("a", "b"), dtype="int64")}, {"a": 40, "b": 50})
    return found | {f"large{i}": large for i in range(LARGE)}


def row(name: str, step: int) -> dict[str, Any]:
    """What a group holds at a step; anyone can compute it again."""
    kind, i = name.rstrip("0123456789"), int(name[-1])
    if kind == "scalar":
        return {"value": step / (3 + i)}
    if kind == "vector":
        return {"value": np.arange(100, dtype=np.float32) + np.float32(step % 65536 + i)}
    if kind == "histogram":
        return {"counts": (np.arange(100) * step + i) % 997, "edges": np.linspace(-step - 1, step + 1, 101)}
    return {"counts": (np.arange(2000).reshape(40, 50) * step + i) % 99991}


def main(steps: int, path: Path) -> dict[str, float]:
    """Write and read; seconds and sizes."""
    store = RunStore(FolderKeys(path), "w", groups(), {"parameters": {}, "config": {}})
    names, at = list(groups()), {"wall_time": 0.0, "epoch": 0.0, "batch_size": 1}
    began, slowest, commits = time.monotonic(), 0.0, 0
    for step in range(steps):
        due = False
        for name in names:
            if step % EVERY[name[:-1]] == 0:
                due |= store.append(name, step, row(name, step), at)
        if due or step % 5000 == 4999:
            before = time.monotonic()
            store.commit()
            slowest, commits = max(slowest, time.monotonic() - before), commits + 1
    store.commit(CLOSED)
    store.release()
    told = {"steps": steps, "write_seconds": time.monotonic() - began, "commits": commits, "slowest_commit_s": slowest}
    files = [p.stat().st_size for p in path.rglob("*") if p.is_file()]
    told |= {"files": len(files), "megabytes": sum(files) / 1e6}
    began = time.monotonic()
    run = open_run(path)
    told["open_seconds"] = time.monotonic() - began
    began = time.monotonic()
    for name in names:
        node = run[name].to_dataset()
        expected = np.arange(0, steps, EVERY[name[:-1]])
        np.testing.assert_array_equal(node["step"].values, expected)
        for start in range(0, len(expected), 4096):
            part = node.isel(step=slice(start, start + 4096)).load()
            for k in {0, len(part["step"]) // 2, len(part["step"]) - 1} if start % 65536 else range(len(part["step"])):
                for field, value in row(name, int(part["step"][k])).items():
                    np.testing.assert_array_equal(part[field].values[k], value)
    told["read_seconds"] = time.monotonic() - began
    began = time.monotonic()
    assert verify(path) == []
    told["verify_seconds"] = time.monotonic() - began
    began = time.monotonic()
    again = RunStore(FolderKeys(path), "a", groups(), {"parameters": {}, "config": {}})
    again.begin(steps - 7, {})
    told["resume_seconds"] = time.monotonic() - began
    again.release()
    assert open_run(path)["scalar0"].sizes["step"] == steps - 7
    return told


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10**6)
    parser.add_argument("--store", type=Path, required=True)
    arguments = parser.parse_args()
    print(json.dumps({k: round(v, 3) for k, v in main(arguments.steps, arguments.store).items()}))
