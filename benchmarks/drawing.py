"""How long each instrument takes to draw a run of a million rows, and how long the page of it takes.

python -m benchmarks.drawing
python -m benchmarks.drawing --rows 100000 --rounds 3
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from distcockpit import open_run
from distcockpit import quantities as q
from distcockpit.instruments import INSTRUMENTS
from distcockpit.quantities.batch import Model
from distcockpit.store.keys import FolderKeys
from distcockpit.store.run_store import RunStore, State
from distcockpit.view.page.content import content
from distcockpit.view.page.html import html

SHAPES = {f"layers.{k}.{part}": (8, 8) for k in range(4) for part in ("weight", "bias")}
QUANTITIES = [
    q.Alpha(),
    q.Distance(),
    q.UpdateSize(),
    q.CABS(),
    q.GradNorm(),
    q.NormTest(),
    q.InnerTest(),
    q.OrthoTest(),
    q.GradientNoiseScale(),
    q.GradHist1d(bins=20),
    q.MeanGSNR(),
    q.EarlyStopping(),
    q.OutputGradientGeometry(),
    q.HessTrace(),
    q.TICDiag(),
    q.HessMaxEV(),
    q.RankDisagreement(),
    q.RankHealth(),
    q.Loss(),
    q.LearningRate(),
]


def write(path: Path, rows: int) -> None:
    """A run with so many rows of every quantity; blocks of random numbers."""
    layers = {f"layers.{k}": [f"layers.{k}.weight", f"layers.{k}.bias"] for k in range(4)}
    model = Model(
        shapes=SHAPES, leaves=dict.fromkeys(layers, False), layers=layers, dtypes=dict.fromkeys(SHAPES, "float32"),
        every_parameter=list(SHAPES), n_parameter_groups=1, world_size=8,
    )  # fmt: skip
    groups = {one.name: one.described_group(model) for one in QUANTITIES}
    store = RunStore(FolderKeys(path), "w-", groups, {"parameters": {}, "config": {}, "world_size": 8})
    random = np.random.default_rng(0)
    block = 1000
    for start in range(0, rows, block):
        numbers = {
            (name, field): random.lognormal(size=(block, *(group.size(d) for d in one.dims))).astype(one.dtype)
            for name, group in groups.items()
            for field, one in group.fields.items()
        }
        for k in range(min(block, rows - start)):
            at = {"wall_time": 1.8e9 + start + k, "epoch": (start + k) // 1000, "batch_size": 64}
            for name, group in groups.items():
                store.append(name, start + k, {field: numbers[name, field][k] for field in group.fields}, at)
        store.commit()
    store.commit(State("closed"))
    store.release()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--store", type=Path, help="a store that an earlier run left, or where to leave it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.store or Path(folder) / "run.zarr"
        if not path.exists():
            write(path, args.rows)
        table = Table(title=f"{args.rows:,} rows of each quantity, {args.rounds} rounds")
        for column in ("what", "median", "least", "most"):
            table.add_column(column, justify="left" if column == "what" else "right")
        for name, one in INSTRUMENTS.items():
            if not one.pictures(open_run(path)):
                continue
            times = []
            for _ in range(args.rounds):
                run = open_run(path)
                began = time.perf_counter()
                figure = Figure(figsize=(8, 5))
                one(figure.add_subplot(), run)
                FigureCanvasAgg(figure).draw()
                times.append(time.perf_counter() - began)
            table.add_row(name, *(f"{f(times):.2f} s" for f in (statistics.median, min, max)))
        began = time.perf_counter()
        page = html(content({"run": open_run(path)}))
        table.add_row(f"page ({len(page) / 1e6:.1f} MB)", f"{time.perf_counter() - began:.2f} s", "", "")
        Console().print(table)


if __name__ == "__main__":
    main()
