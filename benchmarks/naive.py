"""What one monitor per rank says of a batch, and what is true of it: the numbers of docs/pooled.md.

    python -m benchmarks.naive

A batch of 14 samples is split, 5 on one rank and 9 on the other. Each rank computes a statistic of its own samples, as
Cockpit does in every process of a job; their mean is what a dashboard shows. The last column holds all samples.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from distcockpit import DistCockpit, open_run
from distcockpit import quantities as q

SHOWN = {
    "norm_test": ("norm test", q.NormTest()),
    "inner_test": ("inner product test", q.InnerTest()),
    "ortho_test": ("orthogonality test", q.OrthoTest()),
    "mean_gsnr": ("mean GSNR", q.MeanGSNR()),
    "early_stopping": ("early stopping", q.EarlyStopping()),
    "grad_norm": ("gradient norm, first weight", q.GradNorm()),
}


def measured(x: torch.Tensor, y: torch.Tensor, store: Path) -> dict[str, float]:
    """Each statistic of these samples."""
    torch.manual_seed(0)
    net, loss_fn = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with DistCockpit(net, loss_fn, optimizer, store=store, quantities=[one for _, one in SHOWN.values()]) as cockpit:
        with cockpit.track(0):
            loss_fn(cockpit(x), y).backward()
        optimizer.step()
    run = open_run(store)
    return {name: float(run[name][name].values.ravel()[0]) for name in SHOWN}


def main() -> None:
    torch.manual_seed(1)
    x, y = torch.randn(14, 6), torch.randint(3, (14,))
    parts = {"rank 0 (5)": slice(0, 5), "rank 1 (9)": slice(5, 14), "whole batch": slice(0, 14)}
    with tempfile.TemporaryDirectory() as folder:
        told = {name: measured(x[part], y[part], Path(folder) / name) for name, part in parts.items()}
    first, second, whole = told.values()
    table = Table()
    for column in ("", "rank 0 (5)", "rank 1 (9)", "mean of both", "whole batch", "error of the mean"):
        table.add_column(column, justify="right" if column else "left")
    for name, (words, _) in SHOWN.items():
        mean = (first[name] + second[name]) / 2
        numbers = (first[name], second[name], mean, whole[name])
        table.add_row(words, *(f"{value:.3g}" for value in numbers), f"{mean / whole[name] - 1:+.0%}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
