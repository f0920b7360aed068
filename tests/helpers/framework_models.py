"""What the tests of frameworks train."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# -- the Trainer of transformers ---------------------------------------------------------------------------------------


class Small(nn.Module):
    """Models as in transformers: they compute their loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        n_outputs = 1 if kind in ("squares", "whole numbers") else 3
        self.kind, self.calls = kind, 0
        first = nn.Embedding(3, 5) if kind == "next token" else nn.Linear(6, 5)
        self.net = nn.Sequential(first, nn.Tanh(), nn.Linear(5, n_outputs))
        if kind == "next token":
            self.net[2].weight.data *= 0.01
            self.net[2].bias.data *= 0.01

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        z = self.net(x)
        losses = {
            "classes": lambda: nn.functional.cross_entropy(z, labels),
            "squares": lambda: nn.functional.mse_loss(z.squeeze(-1), labels),
            "several classes": lambda: nn.functional.binary_cross_entropy_with_logits(z, labels),
            # Near the loss of the same token: the nearest one is the model's.
            "next token": lambda: nn.functional.cross_entropy(z[:, :-1].flatten(0, 1), labels[:, 1:].flatten()),
            "whole numbers": lambda: nn.functional.mse_loss(z.squeeze(-1), labels.float()),
            "diverges": lambda: nn.functional.cross_entropy(z * (torch.nan if self.calls > 3 else 1), labels),
            "penalty": lambda: nn.functional.cross_entropy(z, labels) + z.square().mean(),
        }
        self.calls += 1
        return {"loss": losses[self.kind](), "logits": z}


def samples(kind: str) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 6, generator=generator)
    labels: Any = torch.randint(3, (64,), generator=generator)
    if kind == "squares":
        labels = x.sum(1)
    if kind == "next token":
        x = labels = torch.randint(3, (64, 96), generator=generator)
    if kind == "several classes":
        labels = (x[:, :3] > 0).float()
    return [{"x": a, "labels": b} for a, b in zip(x, labels, strict=True)]


def lightning_module(kind: str) -> Any:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
            if kind == "own parameter":
                self.temperature = nn.Parameter(torch.ones(3))
            if kind != "function":
                self.loss_fn = nn.CrossEntropyLoss()
            self.automatic_optimization, self.skipped = kind != "manual", False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x) * self.temperature if kind == "own parameter" else self.net(x)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
            x, y = batch
            if kind == "skips" and self.global_step == 1 and batch_idx == 1 and not self.skipped:
                self.skipped = True
                return None
            if kind == "raises" and self.global_step == 1 and batch_idx == 3:
                raise ValueError("the user's own")
            if kind == "function":
                losses = nn.functional.cross_entropy(self(x), y, reduction="none")
                (callback,) = [c for c in self.trainer.callbacks if hasattr(c, "cockpit")]
                callback.cockpit.record_losses(losses)
                return losses.mean()
            return self.loss_fn(self(x), y)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    return Module()
