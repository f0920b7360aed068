"""Runs an example of a framework, and writes down the individual gradients of this rank's samples, by autograd.

torchrun --nproc_per_node=2 tests/helpers/framework_jobs.py lightning STORE FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

STEPS, MICROS = 4, 2
FOUND: list[tuple[np.ndarray, np.ndarray, float, np.ndarray]] = []  # of each micro-batch


def write_down(model: nn.Module, losses: Tensor, terms: float) -> None:
    """Sums of the loss terms of each sample, their gradients, the number of terms, and the parameters."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
    flat = np.stack([np.concatenate([g.double().numpy().ravel() for g in row]) for row in rows])
    values = np.concatenate([p.detach().double().numpy().ravel() for p in parameters])
    FOUND.append((losses.detach().double().numpy(), flat, terms, values))


def run_lightning() -> None:
    from digits import make_model
    from lightning_digits import Digits, main

    class Watched(Digits):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            (x, y), twin = batch, make_model("mlp")  # what is called on the model itself would be tracked
            twin.load_state_dict(self.net.state_dict())
            write_down(twin, F.cross_entropy(twin(x), y, reduction="none"), len(y))
            return super().training_step(batch, batch_idx)

    main(Watched)


def run_lightning_sharded() -> None:
    """With fully_shard."""
    from lightning.pytorch.strategies import ModelParallelStrategy
    from lightning_digits import Digits, main
    from torch.distributed.fsdp import fully_shard

    class Sharded(Digits):
        def configure_model(self) -> None:
            mesh = self.device_mesh["data_parallel"]
            for layer in self.net:
                if any(True for _ in layer.parameters()):
                    fully_shard(layer, mesh=mesh)
            fully_shard(self.net, mesh=mesh)

    size = int(os.environ["WORLD_SIZE"])
    main(Sharded, ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1))


def run_transformers() -> None:
    from gpt2 import make_model
    from transformers import Trainer
    from transformers_gpt2 import main

    class Watched(Trainer):
        def compute_loss(self, model: Any, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
            twin = make_model(32)
            twin.load_state_dict(getattr(model, "module", model).state_dict())
            torch.manual_seed(len(FOUND))  # of dropout
            z = twin(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
            y = inputs["labels"][:, 1:]
            terms = F.cross_entropy(z.transpose(1, 2), y, reduction="none")
            # The Trainer divides by all labels, also by those of first tokens, which are no target of any prediction.
            write_down(twin, terms.sum(1), float((inputs["labels"] != -100).sum()))
            torch.manual_seed(len(FOUND) - 1)
            return super().compute_loss(model, inputs, *args, **kwargs)

    main(Watched)


if __name__ == "__main__":
    framework, store, folder = sys.argv[1:]
    sys.argv[1:] = ["--store", store, "--steps", str(STEPS), "--every", "1", "--accumulate", str(MICROS)]
    jobs = {"lightning": run_lightning, "sharded": run_lightning_sharded, "transformers": run_transformers}
    jobs[framework]()
    for k, (losses, gradients, terms, values) in enumerate(FOUND[: STEPS * MICROS]):
        path = f"{folder}/{os.environ.get('RANK', '0')}-{k}.npz"
        np.savez(path, losses=losses, gradients=gradients, terms=terms, values=values)
