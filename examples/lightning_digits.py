"""Train on scikit-learn's handwritten digits with Lightning, with distcockpit as a callback.

torchrun --nproc_per_node=2 examples/lightning_digits.py --store runs/lightning.zarr
"""

from __future__ import annotations

import argparse
import os

import lightning.pytorch as pl
import torch
from digits import make_data, make_model
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from distcockpit import every, open_run
from distcockpit.lightning import DistCockpitCallback


class Digits(pl.LightningModule):
    """A plain LightningModule: nothing in here knows about the cockpit."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.loss_fn = make_model("mlp"), nn.CrossEntropyLoss()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return self.loss_fn(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--store", default="runs/lightning.zarr", help="where the run is recorded (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--every", type=int, default=5, metavar="N", help="track every N-th step (default: 5)")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per step (default: %(default)s)")
    return parser.parse_args()


def main(module_class: type[pl.LightningModule] = Digits, strategy: Strategy | str = "ddp") -> None:
    arguments = parse_arguments()
    pl.seed_everything(0, verbose=False)
    loader = DataLoader(make_data(0)[0], batch_size=32, shuffle=True)
    callback = DistCockpitCallback(arguments.store, schedule=every(arguments.every), mode="w")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", 1)),  # under torchrun
        strategy=strategy if "WORLD_SIZE" in os.environ else "auto",
        max_steps=arguments.steps,
        accumulate_grad_batches=arguments.accumulate,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module_class(), loader)
    if trainer.is_global_zero:
        run = open_run(arguments.store)
        print(f"{arguments.store}: {run['alpha'].sizes['step']} values of alpha on {run.attrs['world_size']} ranks")


if __name__ == "__main__":
    main()
