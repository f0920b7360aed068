"""Models and losses that the default call must track."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from steps import Steps, run_steps
from torch import Tensor, nn
from torch.nn import functional as F

from distcockpit import DistCockpit

X, Y = torch.arange(48).view(8, 6) * 7 % 11, torch.arange(48).view(8, 6) * 5 % 11


V, C = torch.sin(torch.arange(40.0)).view(8, 5), torch.arange(8) % 3


class Gpt(nn.Module):
    """Returns scores and, where it is given targets, the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions, self.head = nn.Embedding(11, 8), nn.Embedding(6, 8), nn.Linear(8, 11)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = self.head(torch.tanh(self.tokens(x) + self.positions(torch.arange(x.shape[1]))))
        return z, F.cross_entropy(z.view(-1, 11), y.view(-1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def written_by_hand(model: Any) -> Tensor:
    return -model(V).log_softmax(1).gather(1, C[:, None]).mean()


LOOPS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Tensor]]] = {
    "a model that returns its loss": (Gpt, lambda model: model(X, Y)[1]),
    "cross entropy": (mlp, lambda model: F.cross_entropy(model(V), C)),
    "label smoothing": (mlp, lambda model: F.cross_entropy(model(V), C, label_smoothing=0.1)),
    "mse": (mlp, lambda model: F.mse_loss(model(V), V[:, :3])),
    "bce": (mlp, lambda model: F.binary_cross_entropy_with_logits(model(V), V[:, :3].sigmoid())),
    "by hand": (mlp, written_by_hand),
    "a sum divided by N": (mlp, lambda model: F.cross_entropy(model(V), C, reduction="sum") / len(V)),
    "a mean of terms": (mlp, lambda model: F.cross_entropy(model(V), C, reduction="none").mean()),
    "half of it": (mlp, lambda model: 0.5 * F.cross_entropy(model(V), C)),
}


def train_default(net: nn.Module, loss: Callable[[Any], Tensor], store: Path, **options: Any) -> Steps:
    """Four steps on one batch."""

    def body(cockpit: DistCockpit, x: Tensor, y: Tensor) -> Tensor:
        value = loss(cockpit)
        value.backward()
        return value

    return run_steps(store, net, (V, C), 4, body=body, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), **options)


class Changing(nn.Module):
    """A body with a norm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm = nn.Linear(5, 7), nn.BatchNorm1d(7).eval()
        self.head, self.extra = nn.Linear(7, 3), nn.Linear(7, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.norm(self.body(x)))
        return self.head(z) + self.extra(z)
