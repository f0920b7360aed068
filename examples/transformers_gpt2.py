"""Train a small GPT-2 on characters of a book with the Hugging Face Trainer, with distcockpit as a callback.

torchrun --nproc_per_node=2 examples/transformers_gpt2.py --store runs/trainer.zarr
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
from gpt2 import CHARACTERS, TEXT, make_model
from transformers import Trainer, TrainingArguments

from distcockpit import every, open_run
from distcockpit.transformers import DistCockpitCallback


class Sentences(torch.utils.data.Dataset):
    """Pieces of the book of different lengths, padded to the longest; padding has the label -100."""

    def __init__(self, length: int = 32) -> None:
        index = torch.tensor([CHARACTERS.index(c) for c in TEXT])
        self.pieces = index[: len(index) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        piece = self.pieces[i].clone()
        end = 12 + 5 * i % 20
        mask = torch.arange(len(piece)) < end
        return {"input_ids": piece, "attention_mask": mask.long(), "labels": piece.where(mask, -100)}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="runs/trainer.zarr", help="where the run is recorded (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--every", type=int, default=5, metavar="N", help="track every N-th step (default: 5)")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per step (default: %(default)s)")
    return parser.parse_args()


def main(trainer_class: type[Trainer] = Trainer) -> None:
    arguments = parse_arguments()
    torch.manual_seed(0)
    model = make_model(32)
    callback = DistCockpitCallback(arguments.store, schedule=every(arguments.every), mode="w")
    options = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        ddp_backend="gloo" if "WORLD_SIZE" in os.environ else None,
        max_steps=arguments.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=arguments.accumulate,
        learning_rate=1e-3,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        dataloader_pin_memory=False,
    )
    trainer = trainer_class(model=model, args=options, train_dataset=Sentences(), callbacks=[callback])
    trainer.train()
    if trainer.is_world_process_zero():
        run = open_run(arguments.store)
        print(f"{arguments.store}: {run['alpha'].sizes['step']} values of alpha on {run.attrs['world_size']} ranks")


if __name__ == "__main__":
    main()
