"""Models, losses and data of the table of tests, used by the ranks and by the oracle alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

N = 24


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 5))


def sigmoid() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 9), nn.Sigmoid(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 5))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 5),
    )


def tokens() -> nn.Module:
    """Linear layers with a sequence axis, embedding, norm, recurrence: closed forms, and generic blocks."""
    return nn.Sequential(
        nn.Embedding(7, 6, padding_idx=0),
        nn.LayerNorm(6),
        TakeFirst(nn.GRU(6, 6, batch_first=True)),
        nn.Linear(6, 5),
        Transpose(),
    )


class TakeFirst(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


class Transpose(nn.Module):
    """[N, T, C] -> [N, C, T], the layout of nn.CrossEntropyLoss."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(12, 2, batch_first=True)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(len(x), 1, 12) * torch.arange(1, 4, dtype=x.dtype, device=x.device)[:, None] / 3
        return self.head(self.attend(x, x, x, need_weights=False)[0].mean(1))


class Reused(nn.Module):
    """One layer called twice, one weight shared by two layers, one parameter that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(12, 12)
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        self.second.weight = self.first.weight
        self.head = nn.Linear(12, 5)
        self.spare = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sigmoid(self.twice(torch.sigmoid(self.twice(x))))
        return self.head(torch.sigmoid(self.second(torch.sigmoid(self.first(x)))))


class Scaled(nn.Module):
    """A parameter used directly in a parent's forward, a skip connection in place, grouped and transposed convs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, 1, 1))
        self.first = nn.Conv2d(1, 4, 3, padding=1, padding_mode="reflect")
        self.second = nn.Conv2d(4, 4, 3, padding=1, groups=2, dilation=1)
        self.up = nn.ConvTranspose2d(4, 2, 2, stride=2)
        self.norm = nn.GroupNorm(1, 2)
        self.head = nn.Linear(2 * 16 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x), inplace=True)
        out = self.second(x) * self.scale
        out += x
        return self.head(self.norm(self.up(out)).flatten(1))


class EvalBatchNorm(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 5))
        self[1].running_mean.copy_(torch.tensor([0.1, -0.2, 0.3]))
        self[1].running_var.copy_(torch.tensor([0.5, 1.5, 2.0]))
        self.train()

    def train(self, mode: bool = True) -> EvalBatchNorm:
        super().train(mode)
        self[1].eval()
        return self


class Tied(nn.Module):
    """Tokens whose embedding is the head as well, and a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.body = nn.Embedding(7, 6), nn.Linear(6, 6)
        self.back = nn.Parameter(torch.randn(6, 6) / 3)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.body(self.tokens(x))) @ self.back
        return F.linear(z, self.tokens.weight)[..., :5].transpose(1, 2)


class Deep(nn.Module):
    """A part in the middle that may be checkpointed: ``checkpoint`` holds whether reentrantly."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 9), nn.Linear(7, 5)
        self.middle = nn.Sequential(nn.Sigmoid(), nn.Linear(9, 7), nn.Tanh())
        self.checkpoint: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x)
        z = self.middle(z) if self.checkpoint is None else checkpoint(self.middle, z, use_reentrant=self.checkpoint)
        return self.last(z)


class Block(nn.Module):
    """A residual block whose last matrix is a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(6), nn.Linear(6, 10)
        self.down = nn.Parameter(torch.randn(10, 6) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(self.norm(x))) @ self.down


class Transformer(nn.Module):
    """Tokens, positions, blocks, and a head; ``checkpoint`` as in `Deep`."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(7, 6), nn.Parameter(torch.randn(5, 6) / 3)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 5, bias=False)
        self.checkpoint: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        z = self.tokens(x) + self.positions[: x.shape[1]]
        for block in self.blocks:
            z = block(z) if self.checkpoint is None else checkpoint(block, z, use_reentrant=self.checkpoint)
        return self.head(self.norm(z)).transpose(1, 2)


def partly_frozen() -> nn.Module:
    """Frozen tokens, and a layer of which only the bias is trained, as in BitFit."""
    net = Transformer()
    for frozen in (net.tokens.weight, net.blocks[0].up.weight):
        frozen.requires_grad_(False)
    return net


def partly_frozen_recurrence() -> nn.Module:
    """A call that is run again, with a parameter that is not trained."""
    net = tokens()
    net[2].inner.weight_ih_l0.requires_grad_(False)
    return net


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "sigmoid": sigmoid,
    "deep": Deep,
    "cnn": cnn,
    "tokens": tokens,
    "tied": Tied,
    "attention": Attention,
    "reused": Reused,
    "scaled": Scaled,
    "eval_batchnorm": EvalBatchNorm,
    "transformer": Transformer,
    "partly_frozen": partly_frozen,
    "partly_frozen_recurrence": partly_frozen_recurrence,
}
ON_TOKENS = ("tokens", "tied", "transformer", "partly_frozen", "partly_frozen_recurrence")

CLASS_WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 3.0, 0.25])


def _nll(prediction: Tensor, target: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sum over terms of weighted negative log likelihood, and the sum of the weights; -100 is ignored."""
    log_p = prediction.log_softmax(1)
    kept = target != -100
    index = target.where(kept, 0)
    w = kept.to(log_p.dtype) * (1 if weight is None else weight.to(log_p.dtype)[index])
    return -(log_p.gather(1, index.unsqueeze(1)).squeeze(1) * w).sum(), w.sum()


@dataclass(frozen=True)
class Loss:
    module: Callable[[], nn.Module]
    terms: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | float]]  # for one sample
    target: str = "class"


LOSSES: dict[str, Loss] = {
    "mean": Loss(nn.CrossEntropyLoss, lambda z, y: (_nll(z, y)[0], 1)),
    "sum": Loss(lambda: nn.CrossEntropyLoss(reduction="sum"), lambda z, y: (_nll(z, y)[0], 1)),
    "mse": Loss(nn.MSELoss, lambda z, y: (((z - y) ** 2).mean(), 1), "real"),
    "class_weights": Loss(
        lambda: nn.CrossEntropyLoss(weight=CLASS_WEIGHTS.clone()), lambda z, y: _nll(z, y, CLASS_WEIGHTS)
    ),
    "two": Loss(nn.CrossEntropyLoss, lambda z, y: (_nll(z, y)[0] + 0.3 * _nll(z, (y + 1) % 5)[0], 1)),
    "token_mean": Loss(nn.CrossEntropyLoss, _nll, "tokens"),
}


def data(model: str, loss: str, step: int, n: int = N) -> tuple[Tensor, Tensor]:
    """The pooled batch of a step; every class occurs in it."""
    generator = torch.Generator().manual_seed(1000 + step)
    shape = {"cnn": (1, 8, 8), "scaled": (1, 8, 8), "eval_batchnorm": (1, 8, 8)}.get(model, (12,))
    x = torch.randn(n, *shape, generator=generator)
    y = torch.arange(n) % 5
    y = y[torch.randperm(n, generator=generator)]
    if LOSSES[loss].target == "real":
        y = torch.randn(n, 5, generator=generator)
    if model in ON_TOKENS:
        x = torch.randint(0, 7, (n, 4), generator=generator)
        y = torch.randint(0, 5, (n, 4), generator=generator)
        y[torch.rand(n, 4, generator=generator) < 0.3] = -100
        y[:, 0] = torch.arange(n) % 5
    return x, y


def initialised(model: str) -> nn.Module:
    torch.manual_seed(7)
    return MODELS[model]()
