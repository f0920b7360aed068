"""Train a small GPT that is sharded over ranks with fully_shard (FSDP2), with distcockpit switched on.

The text, alice.txt, is in the public domain: chapters I to V of Lewis Carroll, Alice's Adventures in Wonderland (1865).

torchrun --nproc_per_node=4 examples/fsdp2_gpt.py --store runs/fsdp2.zarr
distcockpit plot runs/fsdp2.zarr -o runs/fsdp2.png
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from tqdm import tqdm

from distcockpit import DistCockpit, every, open_run, presets

TEXT = Path(__file__).with_name("alice.txt").read_text()
CHARACTERS = sorted(set(TEXT))
WIDTH, HEADS = 64, 4


class Block(nn.Module):
    """Attention and two linear layers, each behind a layer norm and beside a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape, [n, length, width]."""
        q, k, v = self.attention(self.norm1(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(z.transpose(1, 2).flatten(2))
        return x + self.body(self.norm2(x))


class GPT(nn.Module):
    """Learned positions, and a head tied to the tokens."""

    def __init__(self, length: int, depth: int = 3) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(len(CHARACTERS), WIDTH), nn.Embedding(length, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(CHARACTERS), bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the next character, [n, length, characters]."""
        x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="runs/fsdp2.zarr", help="where the run is recorded (default: %(default)s)")
    parser.add_argument("--quantities", choices=list(presets.PRESETS), default="economy", help="default: economy")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--every", type=int, default=10, metavar="N", help="track every N-th step (default: 10)")
    parser.add_argument("--batch-size", type=int, default=32, help="sequences per step, all ranks (default: 32)")
    parser.add_argument("--length", type=int, default=48, help="characters per sequence (default: 48)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def draw(tokens: Tensor, n: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Characters, and the next characters as targets: [n, length] each."""
    first = torch.randint(len(tokens) - length, (n, 1), generator=generator)
    index = first + torch.arange(length + 1)
    return tokens[index[:, :-1]], tokens[index[:, 1:]]


def main() -> None:
    args = parse_arguments()
    has_gpus = torch.cuda.is_available()
    dist.init_process_group("nccl" if has_gpus else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)
    torch.manual_seed(args.seed)
    tokens = torch.tensor([CHARACTERS.index(c) for c in TEXT])
    generator = torch.Generator().manual_seed(1000 * args.seed + rank)  # each rank draws different passages

    mesh = init_device_mesh(device.type, (world_size,))
    model = GPT(args.length).to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    progress = tqdm(total=args.steps, unit="step", mininterval=0.5, disable=rank != 0)
    with DistCockpit(
        model,
        optimizer=optimizer,
        store=args.store,
        quantities=args.quantities,
        schedule=every(args.every),
        mode="w",
    ) as cockpit:
        for step in range(args.steps):
            x, y = draw(tokens, args.batch_size // world_size, args.length, generator)
            optimizer.zero_grad()
            with cockpit.track(step):
                loss = F.cross_entropy(cockpit(x.to(device)).flatten(0, 1), y.to(device).flatten())
                loss.backward()
            optimizer.step()
            cockpit.log(step, reduce="mean", train_loss=loss)
            progress.set_postfix(train_loss=f"{loss.detach():.2f}", refresh=False)
            progress.update()
    progress.close()

    if rank == 0 and os.path.exists(args.store):  # it does not with DISTCOCKPIT=off
        run = open_run(args.store)
        last = run["log"]["train_loss"].values[-1]
        size = sum(p.numel() for p in model.parameters())
        print(f"Trained {size:,} parameters for {args.steps} steps on {world_size} ranks, to a loss of {last:.2f}.")
        print(f"Store: {args.store}. Look at it with: distcockpit report {args.store} -o report.html")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
