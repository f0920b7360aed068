"""What a tracked step costs: each quantity and preset, every step tracked, over the plain step.

    python -m benchmarks.overhead                      # the MLP 784-128-64-10, batch of 128
    python -m benchmarks.overhead --model 3c3d         # three convolutions and three linear layers, batch of 32
    python -m benchmarks.overhead --model gpt2         # GPT-2 of examples/gpt2.py, batch of 8: one slow route

One process. Plain and tracked steps are interleaved in rounds, so that a drift of the machine hits all alike; the
table shows medians over rounds and their quartiles.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from distcockpit import DistCockpit, every, presets
from distcockpit import quantities as q

VARIANTS: dict[str, list[q.Quantity]] = {
    "Alpha": [q.Alpha()],
    "MeanGSNR": [q.MeanGSNR()],
    "GradNorm": [q.GradNorm()],
    "NormTest": [q.NormTest()],
    "InnerTest": [q.InnerTest()],
    "OrthoTest": [q.OrthoTest()],
    "GradHist1d": [q.GradHist1d()],
    "GradHist1d, adapted": [q.GradHist1d(adapt=q.GradAbsMax())],
    "GradHist2d": [q.GradHist2d()],
    "HessTrace diag_h": [q.HessTrace()],
    "TICDiag": [q.TICDiag()],
    "HessTrace hutchinson": [q.HessTrace(curvature="hutchinson")],
    "HessMaxEV": [q.HessMaxEV()],
    "GradientNoiseScale": [q.GradientNoiseScale()],
    "RankDisagreement": [q.RankDisagreement()],
    "RankHealth": [q.RankHealth()],
    "ReplicaDrift": [q.ReplicaDrift()],
    "economy": presets.economy(),
    "business": presets.business(),
    "full": presets.full(),
    "layers": presets.layers(),
}


CHAINS_ONLY = ("HessTrace diag_h", "TICDiag", "business", "full")  # quantities that need BackPACK's diagonals


class Gpt2(nn.Module):
    """GPT-2 as a classifier of what comes after 48 characters."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2Model  # noqa: PLC0415 - slow to import

        self.body = GPT2Model(GPT2Config(vocab_size=67, n_positions=48, n_embd=64, n_layer=2, n_head=4))
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores from the last position."""
        return self.head(self.body(x).last_hidden_state[:, -1])


def make(kind: str) -> tuple[nn.Module, torch.Tensor]:
    if kind == "mlp":
        layers = [nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)]
        return nn.Sequential(*layers), torch.rand(128, 784)
    if kind == "gpt2":
        return Gpt2(), torch.randint(67, (8, 48))
    layers, channels = [], 3
    for out, kernel, padding in ((64, 5, 0), (96, 3, 0), (128, 3, 1)):
        layers += [nn.Conv2d(channels, out, kernel, padding=padding), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True)]
        channels = out
    layers += [nn.Flatten(), nn.Linear(1152, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)]
    return nn.Sequential(*layers), torch.rand(32, 3, 32, 32)


class Loop:
    """A training loop that can be advanced by a few steps."""

    def __init__(
        self, kind: str, store: Path | None, quantities: list[q.Quantity], period: int = 1, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.model, self.x = make(kind)
        self.y = torch.randint(10, (len(self.x),))
        self.loss_fn = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        options |= {"enabled": False, "store": ""} if store is None else {"store": store, "quantities": quantities}
        self.cockpit = DistCockpit(self.model, self.loss_fn, self.optimizer, schedule=every(period), **options)
        self.step = 0

    def advance(self, steps: int) -> float:
        """Milliseconds per step."""
        start = time.perf_counter()
        for _ in range(steps):
            self.optimizer.zero_grad()
            with self.cockpit.track(self.step):
                self.loss_fn(self.cockpit(self.x), self.y).backward()
            self.optimizer.step()
            self.step += 1
        return (time.perf_counter() - start) / steps * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["mlp", "3c3d", "gpt2"], default="mlp")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5, help="steps per round and variant")
    parser.add_argument("--json", type=Path, help="write all measurements here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        loops = {"plain": Loop(args.model, None, []), "plain again": Loop(args.model, None, [])}
        # The first step of a run is tracked and checks itself; warming up leaves it behind.
        loops["not tracked"] = Loop(args.model, Path(folder, "off"), presets.economy(), 10**9)
        for name, quantities in VARIANTS.items():
            if args.model != "gpt2" or name not in CHAINS_ONLY:
                loops[name] = Loop(args.model, Path(folder, name), quantities)
        if args.model == "gpt2":
            loops["economy, no slow route"] = Loop(
                args.model, Path(folder, "fast"), presets.economy(), exclude=["*.wpe"]
            )
        for loop in loops.values():
            loop.advance(3)
        times: dict[str, list[float]] = {name: [] for name in loops}
        for _ in range(args.rounds):
            for name, loop in loops.items():
                times[name].append(loop.advance(args.steps))
        for loop in loops.values():
            loop.cockpit.close()
    plain = np.array(times["plain"])
    table = Table(
        title=f"{args.model}: {torch.get_num_threads()} threads, torch {torch.__version__}, {platform.machine()}"
    )
    for column in ("", "ms per step", "over plain", "quartiles"):
        table.add_column(column, justify="left" if not column else "right")
    for name, values in times.items():
        ratio = np.array(values) / plain
        low, middle, high = np.quantile(ratio, [0.25, 0.5, 0.75])
        table.add_row(name, f"{np.median(values):.2f}", f"{middle:.2f}", f"{low:.2f} to {high:.2f}")
    Console(width=100).print(table)
    if args.json:
        args.json.write_text(json.dumps({"model": args.model, "torch": torch.__version__, "ms": times}, indent=1))


if __name__ == "__main__":
    main()
