"""Train a small GPT-2 from Hugging Face transformers on characters of a book, with distcockpit switched on.

The text, alice.txt, is in the public domain: chapters I to V of Lewis Carroll, Alice's Adventures in Wonderland (1865).

torchrun --nproc_per_node=4 examples/gpt2.py --store runs/gpt2.zarr
distcockpit plot runs/gpt2.zarr -o runs/gpt2.png
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel

from distcockpit import DistCockpit, every, open_run, presets

TEXT = Path(__file__).with_name("alice.txt").read_text()
CHARACTERS = sorted(set(TEXT))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="runs/gpt2.zarr", help="where the run is recorded (default: %(default)s)")
    parser.add_argument("--quantities", choices=list(presets.PRESETS), default="economy", help="default: economy")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--every", type=int, default=10, metavar="N", help="track every N-th step (default: 10)")
    parser.add_argument("--batch-size", type=int, default=32, help="sequences per step, all ranks (default: 32)")
    parser.add_argument("--length", type=int, default=48, help="characters per sequence (default: 48)")
    parser.add_argument("--mode", choices=["w-", "w"], default="w", help="w replaces an earlier run (default)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def make_model(length: int) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=len(CHARACTERS),
        n_positions=length,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def draw(tokens: Tensor, n: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Characters, and the next characters as targets: [n, length] each."""
    first = torch.randint(len(tokens) - length, (n, 1), generator=generator)
    index = first + torch.arange(length + 1)
    return tokens[index[:, :-1]], tokens[index[:, 1:]]


def main() -> None:
    args = parse_arguments()
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    tokens = torch.tensor([CHARACTERS.index(c) for c in TEXT])
    generator = torch.Generator().manual_seed(1000 * args.seed + rank)  # each rank draws different passages

    net = make_model(args.length).to(device).train()
    model = DistributedDataParallel(net) if dist.is_initialized() else net
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
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
        for step in range(args.steps):
            x, y = draw(tokens, args.batch_size // world_size, args.length, generator)
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            with cockpit.track(step):
                logits = cockpit(input_ids=x).logits
                loss = loss_fn(logits.flatten(0, 1), y.flatten())
                loss.backward()
            optimizer.step()
            cockpit.log(step, reduce="mean", train_loss=loss)
            progress.set_postfix(train_loss=f"{loss.detach():.2f}", refresh=False)
            progress.update()
        if rank == 0:
            print(cockpit.coverage())
    progress.close()

    if rank == 0 and os.path.exists(args.store):  # it does not with DISTCOCKPIT=off
        run = open_run(args.store)
        last = run["log"]["train_loss"].values[-1]
        size = sum(p.numel() for p in net.parameters())
        print(f"Trained {size:,} parameters for {args.steps} steps on {world_size} ranks, to a loss of {last:.2f}.")
        print(f"Store: {args.store}. Look at it with: distcockpit report {args.store} -o report.html")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
