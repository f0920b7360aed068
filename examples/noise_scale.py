"""The gradient noise scale of a small GPT against its batch size; explained in docs/noise_scale.md.

torchrun --nproc_per_node=2 examples/noise_scale.py
torchrun --nproc_per_node=2 examples/noise_scale.py --folder runs/noise --figures docs
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from gpt2 import CHARACTERS, TEXT, make_model
from gpt2 import draw as draw_batch
from matplotlib.figure import Figure
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distcockpit import DistCockpit, every, open_run
from distcockpit import quantities as q
from distcockpit.run import noise_scale

LENGTH = 32
BATCHES = (8, 32, 128)
COLOURS = ("#d55e00", "#009e73", "#0072b2")
GOAL = 2.4  # nats per character


def train(store: Path, batch_size: int, steps: int, seed: int) -> None:
    """AdamW with one learning rate for all; the batch is shared among the ranks."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(seed)
    tokens = torch.tensor([CHARACTERS.index(c) for c in TEXT])
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    net = make_model(LENGTH).eval()  # without dropout, whose noise is not of the batch
    model = DistributedDataParallel(net) if dist.is_initialized() else net
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    quantities = [q.GradientNoiseScale(schedule=every(2)), q.Loss(schedule=every(2))]
    with DistCockpit(model, loss_fn, optimizer, store=store, mode="w", quantities=quantities) as cockpit:
        for step in range(steps):
            x, y = draw_batch(tokens, batch_size // world_size, LENGTH, generator)
            optimizer.zero_grad()
            with cockpit.track(step):
                loss = loss_fn(cockpit(input_ids=x).logits.flatten(0, 1), y.flatten())
                loss.backward()
            optimizer.step()


def draw(folder: Path, figures: Path) -> None:
    """The noise scale and the loss of each batch size."""
    figures.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for batch_size, colour in zip(BATCHES, COLOURS, strict=True):
        run = open_run(folder / f"{batch_size}.zarr")
        scale = noise_scale(run["gradient_noise_scale"], 0.9)
        loss = run["loss"]["loss"].rolling(step=5, min_periods=1).median()
        reached = run["loss"]["step"].values[loss.values < GOAL]
        when = f"a loss of {GOAL:g} at step {reached[0]}" if len(reached) else f"no loss of {GOAL:g}"
        print(f"batch size {batch_size}: noise scale {float(scale[-1]):.0f} sequences at the end, {when}")
        left.plot(scale["step"], scale, color=colour, label=f"batch of {batch_size} (dotted)")
        left.axhline(batch_size, color=colour, linestyle="dotted", linewidth=1)
        right.plot(loss["step"] * batch_size, loss, color=colour)
    left.set(xlabel="step", ylabel="noise scale [sequences]", yscale="log")
    left.legend()
    right.set(xlabel="sequences seen", ylabel="loss of the whole batch", xscale="log")
    figure.savefig(figures / "noise_scale.png", dpi=110)
    print(f"Figure: {figures / 'noise_scale.png'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/noise"), help="where runs go (default: %(default)s)")
    parser.add_argument("--figures", type=Path, help="where the figure goes (default: there, too)")
    parser.add_argument("--steps", type=int, default=400, help="of each run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    for batch_size in BATCHES:
        train(args.folder / f"{batch_size}.zarr", batch_size, args.steps, args.seed)
    if not dist.is_initialized() or dist.get_rank() == 0:
        draw(args.folder, args.figures or args.folder)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
