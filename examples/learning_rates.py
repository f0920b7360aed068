"""Three learning rates seen by α, as in the Cockpit paper; explained in docs/learning_rates.md.

torchrun --nproc_per_node=4 examples/learning_rates.py
torchrun --nproc_per_node=4 examples/learning_rates.py --folder runs/rates --figures docs
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distcockpit import DistCockpit, every, open_run
from distcockpit import quantities as q

RATES = (0.01, 0.1, 0.6)
TRAINED_ON = 1500
COLOURS = ("#0072b2", "#009e73", "#d55e00")


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 10)),
    )


def train(store: Path, learning_rate: float, steps: int, seed: int) -> None:
    """SGD on digits: 32 samples on each rank."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(seed)
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    net = cnn()
    model = DistributedDataParallel(net) if dist.is_initialized() else net
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    quantities = [q.Alpha(schedule=every(2)), q.Loss(schedule=every(2)), q.GradNorm(schedule=every(2))]
    with DistCockpit(model, loss_fn, optimizer, store=store, mode="w", quantities=quantities) as cockpit:
        for step in range(steps):
            chosen = torch.randint(TRAINED_ON // world_size, (32,), generator=generator) * world_size + rank
            optimizer.zero_grad()
            with cockpit.track(step):
                loss = loss_fn(cockpit(images[chosen]), labels[chosen])
                loss.backward()
            optimizer.step()
        with torch.no_grad():
            right = (net(images[TRAINED_ON:]).argmax(1) == labels[TRAINED_ON:]).float().mean()
        cockpit.log(steps - 1, test_accuracy=right)


def draw(folder: Path, figures: Path) -> None:
    """The loss of each run, and how its α are distributed."""
    figures.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for rate, colour in zip(RATES, COLOURS, strict=True):
        run = open_run(folder / f"{rate:g}.zarr")
        alpha = run["alpha"]["alpha"].dropna("step").values
        accuracy = float(run["log"]["test_accuracy"].values[-1])
        print(f"learning rate {rate:g}: median α {np.median(alpha):.2f}, test accuracy {accuracy:.1%}")
        left.plot(run["loss"]["step"], run["loss"]["loss"], color=colour, label=f"learning rate {rate:g}")
        right.hist(np.clip(alpha, -1.5, 2), np.linspace(-1.5, 2, 71), color=colour, alpha=0.6)
        right.axvline(np.median(alpha), color=colour)
    left.set(xlabel="step", ylabel="loss of the whole batch", yscale="log")
    left.legend()
    right.set(xlabel="α (lines: medians)", ylabel="tracked steps")
    figure.savefig(figures / "learning_rates.png", dpi=110)
    print(f"Figure: {figures / 'learning_rates.png'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/rates"), help="where runs go (default: %(default)s)")
    parser.add_argument("--figures", type=Path, help="where the figure goes (default: there, too)")
    parser.add_argument("--steps", type=int, default=400, help="of each run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    for rate in RATES:
        train(args.folder / f"{rate:g}.zarr", rate, args.steps, args.seed)
    if not dist.is_initialized() or dist.get_rank() == 0:
        draw(args.folder, args.figures or args.folder)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
