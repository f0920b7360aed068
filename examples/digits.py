"""Train on scikit-learn's handwritten digits (1,797 real images, no download) with distcockpit switched on.

torchrun --nproc_per_node=4 examples/digits.py --store runs/digits.zarr
python examples/digits.py --store runs/digits.zarr          # the same in one process
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split
from tqdm import tqdm

from distcockpit import DistCockpit, every, open_run, presets


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="runs/digits.zarr", help="where the run is recorded (default: %(default)s)")
    parser.add_argument("--model", choices=["mlp", "cnn"], default="mlp")
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default="sgd")
    parser.add_argument("--quantities", choices=list(presets.PRESETS), default="economy", help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps (default: %(default)s)")
    parser.add_argument(
        "--every", type=int, default=5, metavar="N", help="track every N-th step (default: %(default)s)"
    )
    parser.add_argument("--batch-size", type=int, default=128, help="samples per step, all ranks (default: 128)")
    parser.add_argument("--mode", choices=["w-", "w"], default="w", help="w replaces an earlier run (default)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def make_model(kind: str) -> nn.Module:
    if kind == "mlp":
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
        )
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def make_data(seed: int) -> tuple[TensorDataset, TensorDataset]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    everything = TensorDataset(images, torch.tensor(digits.target))
    train, test = random_split(everything, [1500, len(everything) - 1500], torch.Generator().manual_seed(seed))
    return train, test


def main() -> None:
    args = parse_arguments()
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)

    train, test = make_data(args.seed)
    sampler = DistributedSampler(train, world_size, rank, seed=args.seed)
    loader = DataLoader(train, batch_size=args.batch_size // world_size, sampler=sampler)
    test_images, test_labels = (t.to(device) for t in test[:])

    net = make_model(args.model).to(device)
    model = DistributedDataParallel(net) if dist.is_initialized() else net
    loss_fn = nn.CrossEntropyLoss()
    if args.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    step, epoch = 0, 0
    progress = tqdm(total=args.steps, unit="step", mininterval=0.5, disable=rank != 0)
    with DistCockpit(
        model,
        loss_fn,
        optimizer,
        store=args.store,
        mode=args.mode,
        quantities=args.quantities,
        schedule=every(args.every),
    ) as cockpit:
        while step < args.steps:
            sampler.set_epoch(epoch)
            for images, labels in loader:
                images, labels = images.to(device), labels.to(device)
                optimizer.zero_grad()
                with cockpit.track(step, epoch=epoch):
                    loss = loss_fn(cockpit(images), labels)
                    loss.backward()
                optimizer.step()
                cockpit.log(step, epoch=epoch, reduce="mean", train_loss=loss)
                if step % 25 == 0:
                    with torch.no_grad():
                        accuracy = (net(test_images).argmax(1) == test_labels).float().mean()
                    cockpit.log(step, test_accuracy=accuracy)
                    progress.set_postfix(test_accuracy=f"{accuracy:.3f}")
                step += 1
                progress.update()
                if step == args.steps:
                    break
            epoch += 1
    progress.close()

    if rank == 0 and os.path.exists(args.store):  # it does not with DISTCOCKPIT=off
        run = open_run(args.store)
        tracked = ", ".join(f"{name} ({node.sizes['step']})" for name, node in run.children.items())
        print(f"Trained the {args.model} with {args.optimizer} for {step} steps on {world_size} ranks.")
        print(f"Recorded, with the number of rows: {tracked}.")
        print(f"Store: {args.store}. Look at it with: distcockpit report {args.store} -o report.html")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
