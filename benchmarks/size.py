"""Time and memory of a tracked step against the size of the model: GPTs from 0.1 to 124 million parameters.

    python -m benchmarks.size --figure docs/size.png

All see 2 x 128 tokens, at every step; the largest is GPT-2 small. Each point is measured in a process of its own: first
the peak of resident memory above what there was before the first step, of steps that check nothing, as in
`benchmarks.memory`, then the time over the plain step, in rounds of both, of which the figure shows medians and
quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from rich.progress import track

from benchmarks.figure import named
from benchmarks.memory import FIXED, memory
from benchmarks.setups import VARIANTS, Gpt, Loop, machine, make, write

mpl.use("Agg")
import matplotlib.pyplot as plt

SIZES = {"tiny": (60, 2), "small": (180, 2), "medium": (384, 6), "large": (768, 5)}  # width and depth of a `Gpt`
NAMES = ("GradNorm", "NormTest", "economy without updates", "economy")
COLOURS = ("#009e73", "#0072b2", "#e69f00", "#d55e00")


def model_of(size: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """A model and a batch."""
    torch.manual_seed(0)
    if size == "gpt2":
        return make("gpt2")
    width, depth = SIZES[size]
    return Gpt(width=width, depth=depth), torch.randint(512, (2, 128))


def point(size: str, name: str, rounds: int) -> dict[str, Any]:
    """Peak memory in bytes, and milliseconds of both kinds of steps."""
    warnings.simplefilter("ignore")
    store = Path(tempfile.mkdtemp())
    warm = Loop(*make("mlp"), None if name == "plain" else store / "warm", VARIANTS.get(name, []))  # libraries, kernels
    warm.advance(3)
    warm.close()
    model, x = model_of(size)
    before = memory("VmRSS")
    loop = Loop(model, x, None if name == "plain" else store / "run", VARIANTS.get(name, []))
    loop.advance(4)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    loop.advance(3)
    result = {"parameters": sum(p.numel() for p in model.parameters()), "bytes": memory("VmHWM") - before}
    if name != "plain":
        plain = Loop(*model_of(size), None, [])
        plain.advance(2)
        loop.advance(10)  # the next step that checks itself comes after as many again
        steps = max(1, int(200 / plain.advance(1)))
        pairs = [(plain.advance(steps), loop.advance(1 if steps == 1 else 2)) for _ in range(rounds)]
        result |= {"plain": [a for a, _ in pairs], "ms": [b for _, b in pairs]}
    loop.close()
    return result


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Two panels against the number of parameters."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    sizes = [*SIZES, "gpt2"]
    x = [results[f"{size}/plain"]["parameters"] for size in sizes]
    for name, colour in zip(NAMES, COLOURS, strict=True):
        found = [results[f"{size}/{name}"] for size in sizes]
        ratios = [np.quantile(np.array(each["ms"]) / each["plain"], [0.25, 0.5, 0.75]) for each in found]
        low, middle, high = np.array(ratios).T
        left.errorbar(x, middle, [middle - low, high - middle], color=colour, marker="o", markersize=4, capsize=2)
        above = [results[f"{size}/{name}"]["bytes"] - results[f"{size}/plain"]["bytes"] for size in sizes]
        right.plot(x, np.maximum(np.array(above) / 2**20, 1), color=colour, marker="o", markersize=4, label=name)
    right.plot(x, 4 * np.array(x) / 2**20, color="#777777", linestyle="--", label="the parameters")
    left.set(xscale="log", xlabel="parameters", ylabel="time of a step over plain", ylim=(0, None))
    left.axhline(1, color="#777777", linewidth=1)
    right.set(xscale="log", yscale="log", xlabel="parameters", ylabel="MiB above a plain step")
    right.legend(fontsize=8, loc="lower right")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.suptitle(named(machine()), fontsize=9)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write all measurements here")
    parser.add_argument("--figure", type=Path, help="draw them here")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(point(*args.one, args.rounds)))
        return
    results = {}
    for size in track([*SIZES, "gpt2"]):
        for name in ("plain", *NAMES):
            command = [sys.executable, "-m", "benchmarks.size", "--rounds", str(args.rounds), "--one", size, name]
            run = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | FIXED)
            results[f"{size}/{name}"] = json.loads(run.stdout.splitlines()[-1])
    for name in NAMES:
        for size in (*SIZES, "gpt2"):
            found, plain = results[f"{size}/{name}"], results[f"{size}/plain"]["bytes"]
            low, middle, high = np.quantile(np.array(found["ms"]) / found["plain"], [0.25, 0.5, 0.75])
            above = (found["bytes"] - plain) / 2**20
            print(
                f"{name:25}{found['parameters'] / 1e6:8.2f} M {middle:6.2f} ({low:.2f} to {high:.2f}) {above:8.0f} MiB"
            )
    if args.json:
        write(args.json, "size", {"points": results})
    if args.figure:
        draw(results, args.figure)


if __name__ == "__main__":
    main()
