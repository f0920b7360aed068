"""Three bugs in a training run, and what distcockpit shows for each; explained in docs/three_bugs.md.

torchrun --nproc_per_node=4 examples/three_bugs.py
torchrun --nproc_per_node=4 examples/three_bugs.py --folder runs/bugs --figures docs
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distcockpit import DistCockpit, every, open_run, presets
from distcockpit.findings import check
from distcockpit.instruments import draw as draw_picture
from distcockpit.instruments import panels

STEPS, PER_RANK = 150, 32

# Which figures show a bug, next to the run without it.
STORY = {
    "learning_rate": ["alpha", "losses"],
    "one_rank": ["ranks/loss, healthy", "ranks/loss, one_rank", "ranks/cosine, healthy", "ranks/cosine, one_rank"],
    "vanishing": ["grad_norm, healthy", "grad_norm, vanishing"],
}


def perceptron() -> nn.Module:
    """Leaky ReLUs, so that it diverges on every machine if steps are too large; plain ReLU units might just die."""
    return nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.3), nn.Linear(64, 10))


def deep_sigmoid() -> nn.Module:
    """Six layers of sigmoids: each makes the gradient at least four times smaller."""
    hidden = [part for _ in range(5) for part in (nn.Linear(64, 64), nn.Sigmoid())]
    return nn.Sequential(nn.Linear(64, 64), nn.Sigmoid(), *hidden, nn.Linear(64, 10))


# By run: the network, the learning rate, and the rank that gets raw images.
RUNS: dict[str, tuple[Callable[[], nn.Module], float, int | None]] = {
    "healthy": (perceptron, 0.1, None),
    "learning_rate": (perceptron, 2.0, None),
    "one_rank": (perceptron, 0.1, 2),
    "vanishing": (deep_sigmoid, 0.1, None),
}


def train(store: Path, net: nn.Module, learning_rate: float, raw_rank: int | None, seed: int) -> None:
    """Train on digits; the images of ``raw_rank`` are not divided by 16."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    digits = load_digits()
    scale = 1 if rank == raw_rank else 16
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / scale, torch.tensor(digits.target)
    images, labels = images[rank::world_size], labels[rank::world_size]
    generator = torch.Generator().manual_seed(1000 * seed + rank)

    model = DistributedDataParallel(net) if dist.is_initialized() else net
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    quantities = presets.economy(every(2))
    with DistCockpit(model, loss_fn, optimizer, store=store, mode="w", quantities=quantities) as cockpit:
        for step in range(STEPS):
            chosen = torch.randint(len(images), (PER_RANK,), generator=generator)
            optimizer.zero_grad()
            with cockpit.track(step):
                loss = loss_fn(cockpit(images[chosen]), labels[chosen])
                loss.backward()
            optimizer.step()
            cockpit.log(step, reduce="mean", train_loss=loss)


def draw(folder: Path, figures: Path) -> None:
    """Draw a figure for each bug, next to the run without it."""
    figures.mkdir(parents=True, exist_ok=True)
    for bug, wanted in STORY.items():
        runs = {name: open_run(folder / f"{name}.zarr") for name in ("healthy", bug)}
        pictures = {name: picture for place in panels(runs) for name, picture in place.by_page().items()}
        for run, tree in runs.items():
            pictures |= {f"{n}, {run}": p for place in panels({run: tree}) for n, p in place.by_page().items()}
        figure = Figure(figsize=(12, 3.8 * -(-len(wanted) // 2)), layout="constrained")
        for axes, name in zip(figure.subplots(-(-len(wanted) // 2), 2).flat, wanted, strict=True):
            draw_picture(axes, pictures[name])
        figure.savefig(figures / f"bug_{bug}.png", dpi=80)
        print(f"Figure: {figures / f'bug_{bug}.png'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/bugs"), help="where the runs go (default: %(default)s)"
    )
    parser.add_argument("--figures", type=Path, help="where the figures go (default: there, too)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data: the findings do not depend on it")
    args = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    for name, (make, learning_rate, raw_rank) in RUNS.items():
        torch.manual_seed(args.seed)
        train(args.folder / f"{name}.zarr", make(), learning_rate, raw_rank, args.seed)
    if not dist.is_initialized() or dist.get_rank() == 0:
        for name in RUNS:
            found = check(open_run(args.folder / f"{name}.zarr")).findings
            print(f"{name}: {'nothing looks wrong' if not found else ''}")
            for finding in found:
                print(f"  {finding.severity}: {finding.title}")
        draw(args.folder, args.figures or args.folder)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
