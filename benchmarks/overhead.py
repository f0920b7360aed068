"""What a tracked step costs: each quantity and preset, every step tracked, over the plain step; and Cockpit's.

    python -m benchmarks.overhead                      # the MLP 784-128-64-10, batch of 128
    python -m benchmarks.overhead --model 3c3d         # three convolutions and three linear layers, batch of 32
    python -m benchmarks.overhead --model gpt          # a GPT of 10.9 million parameters, 8 x 128 tokens
    python -m benchmarks.overhead --model gpt2         # GPT-2 small, 124 million parameters, 2 x 128 tokens
    python -m benchmarks.overhead --model gpt2-tiny    # GPT-2 of examples/gpt2.py, batch of 8
    python -m benchmarks.overhead --model vit          # a small vision transformer, batch of 64

One process. All loops are interleaved in rounds, so that a drift of the machine hits all alike; the table shows medians
over rounds of the ratio to the plain steps of the same round, and quartiles. "plain again" is the same as plain: its
spread is that of the machine. Cockpit 1.0.2 takes part where it is installed (the extra "bench").
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.setups import CHAINS_ONLY, COCKPITS, VARIANTS, CockpitLoop, Loop, has_cockpit, make, write
from distcockpit import presets

PERIOD = 16
EVERY_PERIOD = f"economy, every {PERIOD}th step"
CHAINS = ("mlp", "3c3d")  # models that BackPACK's diagonals and Cockpit can be had for


def loops(kind: str, folder: Path, names: list[str]) -> dict[str, Loop]:
    """All loops, by name."""

    def fresh() -> tuple[torch.nn.Module, torch.Tensor]:
        torch.manual_seed(0)
        return make(kind)

    found = {"plain": Loop(*fresh(), None, []), "plain again": Loop(*fresh(), None, [])}
    # The first step of a run is tracked and checks itself; warming up leaves it behind.
    found["not tracked"] = Loop(*fresh(), folder / "off", presets.economy(), 10**9)
    for name in names:
        found[name] = Loop(*fresh(), folder / name, VARIANTS[name])
    if "economy" in names:
        found[EVERY_PERIOD] = Loop(*fresh(), folder / "period", presets.economy(), PERIOD)
    if kind in CHAINS and has_cockpit():
        for name in set(COCKPITS).intersection(names):
            found[f"Cockpit: {name}"] = CockpitLoop(*fresh(), name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["mlp", "3c3d", "gpt", "gpt2", "gpt2-tiny", "vit"], default="mlp")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.2, help="of each loop in a round, at least one step")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), help="some of the quantities")
    parser.add_argument("--json", type=Path, help="write all measurements here")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # of Cockpit's, about BackPACK's hooks
    names = args.only or [name for name in VARIANTS if args.model in CHAINS or name not in CHAINS_ONLY]
    with tempfile.TemporaryDirectory() as folder:
        running = loops(args.model, Path(folder), names)
        steps = {}
        for name, loop in running.items():
            loop.advance(PERIOD)  # the next step that checks itself, if all are tracked, comes after as many again
            steps[name] = max(1, min(50, int(args.seconds * 1e3 / loop.advance(1))))
        steps[EVERY_PERIOD] = PERIOD * max(1, steps["plain"] // PERIOD)
        times: dict[str, list[float]] = {name: [] for name in running}
        for _ in range(args.rounds):
            for name, loop in running.items():
                times[name].append(loop.advance(steps[name]))
        for loop in running.values():
            loop.close()
    plain = np.array(times["plain"])
    table = Table(title=f"{args.model}: {torch.get_num_threads()} threads, torch {torch.__version__}")
    for column in ("", "ms per step", "over plain", "quartiles"):
        table.add_column(column, justify="left" if not column else "right")
    for name, values in times.items():
        low, middle, high = np.quantile(np.array(values) / plain, [0.25, 0.5, 0.75])
        table.add_row(name, f"{np.median(values):.2f}", f"{middle:.2f}", f"{low:.2f} to {high:.2f}")
    Console(width=100).print(table)
    if args.json:
        write(args.json, "overhead", {"model": args.model, "ms": times})


if __name__ == "__main__":
    main()
