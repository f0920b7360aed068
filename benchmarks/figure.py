"""One figure from what the other programs measured.

python -m benchmarks.figure                        # benchmarks/results/*.json -> docs/benchmarks.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
OURS, THEIRS, PLAIN = "#0072b2", "#d55e00", "#777777"
SHOWN = (
    *("Alpha", "InnerTest", "NormTest", "OrthoTest", "MeanGSNR", "GradHist1d", "GradHist1d, adapted", "GradHist2d"),
    *("HessTrace diag_h", "TICDiag", "economy", "economy, every 16th step", "business"),
)
NAMES = {"mlp": "MLP 784-128-64-10, B = 128", "3c3d": "3c3d CNN, B = 32"}


def named(machine: dict[str, Any]) -> str:
    """What it was measured on."""
    return f"{machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}"


def overhead(axes: Any, result: dict[str, Any]) -> None:
    """Ratios to the plain step: medians, and quartiles as lines."""
    plain = np.array(result["ms"]["plain"])
    names = [name for name in SHOWN if name in result["ms"]]
    for prefix, colour, shift, label in (("", OURS, 0.2, "distcockpit"), ("Cockpit: ", THEIRS, -0.2, "Cockpit 1.0.2")):
        known = [(k, prefix + name) for k, name in enumerate(reversed(names)) if prefix + name in result["ms"]]
        if not known:
            continue
        ratios = np.array([np.quantile(np.array(result["ms"][name]) / plain, [0.25, 0.5, 0.75]) for _, name in known])
        places = np.array([k for k, _ in known]) + shift
        axes.barh(places, ratios[:, 1], 0.38, color=colour, label=label)
        axes.hlines(places, ratios[:, 0], ratios[:, 2], color="black", linewidth=1)
        for place, ratio in zip(places, ratios[:, 1], strict=True):
            axes.text(ratio * 1.08, place, f"{ratio:.1f}" if ratio < 20 else f"{ratio:.0f}", va="center", fontsize=7)
    again = np.quantile(np.array(result["ms"]["plain again"]) / plain, [0.25, 0.75])
    axes.axvspan(*again, color=PLAIN, alpha=0.4, label="plain again (quartiles)")
    axes.set_yticks(range(len(names)), list(reversed(names)))
    axes.set(
        xscale="log", xlabel="time of a step over plain", title=f"{NAMES[result['model']]} ({np.median(plain):.2g} ms)"
    )
    axes.set_xlim(0.8, axes.get_xlim()[1] * 2)
    axes.legend(fontsize=8, loc="upper right")


def memory(axes: Any, results: list[dict[str, Any]]) -> None:
    """Peak memory above plain, in MiB."""
    labels, values, colours = [], [], []
    for result in results:
        plain = np.median(result["bytes"]["plain"], 0).max()
        for name, colour in (("economy", OURS), ("Cockpit: economy", THEIRS)):
            if name in result["bytes"]:
                labels.append(f"{result['model']}: {name.replace('economy', '').strip(': ') or 'distcockpit'}")
                values.append((np.median(result["bytes"][name], 0).max() - plain) / 2**20)
                colours.append(colour)
    axes.barh(range(len(values)), values[::-1], color=colours[::-1])
    axes.set_yticks(range(len(values)), labels[::-1])
    axes.set(xlabel="peak memory above plain, MiB (economy)", title="Memory")
    for k, value in enumerate(values[::-1]):
        axes.text(value, k, f" {value:.0f}", va="center", fontsize=8)
    axes.set_xlim(0, max(values) * 1.15)


def scaling(axes: Any, result: dict[str, Any]) -> None:
    """What economy takes more than plain, against batch, width and depth."""
    for name, marker in (("batch", "o"), ("width", "s"), ("depth", "^")):
        sizes = result["ms"][name]
        more = [np.median(tracked) - np.median(plain) for plain, tracked in sizes.values()]
        numbers = np.array([int(size) for size in sizes])
        slope = np.polyfit(np.log(numbers), np.log(more), 1)[0]
        axes.plot(numbers / numbers[0], more, marker=marker, label=f"{name} from {numbers[0]}: slope {slope:.2f}")
    axes.set(xscale="log", yscale="log", xlabel="size over the smallest", ylabel="ms more than plain (economy)")
    axes.set_title("Growth")
    axes.legend(fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks.png"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    found = {path.stem: json.loads(path.read_text()) for path in sorted(args.results.glob("*.json"))}
    figure, axes = plt.subplots(2, 2, figsize=(13, 10), height_ratios=(3, 1.3), layout="constrained")
    for ax, model in zip(axes[0], ("mlp", "3c3d"), strict=True):
        overhead(ax, found[f"overhead_{model}"])
    memory(axes[1, 0], [found["memory_mlp"], found["memory_3c3d"]])
    scaling(axes[1, 1], found["scaling"])
    figure.suptitle(f"{named(found['overhead_mlp']['machine'])}; every step tracked, one process")
    figure.savefig(args.out, dpi=110)
    print(args.out)


if __name__ == "__main__":
    main()
