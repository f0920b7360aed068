"""Models of text and pictures as people write them out, in one file, without a library."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from small_models import LENGTH, VOCABULARY, WIDTH
from torch import Tensor, nn
from torch.nn.utils import parametrize


class CausalAttention(nn.Module):
    """Queries, keys and values in one product."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.size()
        q, k, v = (z.view(n, t, self.heads, -1).transpose(1, 2) for z in self.c_attn(x).split(c, dim=2))
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(z.transpose(1, 2).contiguous().view(n, t, c))


class LayerNorm(nn.Module):
    """One whose bias may be left out, by the function."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class GptBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = LayerNorm(width), CausalAttention(width, heads), LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGpt(nn.Module):
    """Tied embeddings, positions by ``arange``, and the loss inside, tokens folded into the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(VOCABULARY, WIDTH),
            "wpe": nn.Embedding(2 * LENGTH, WIDTH),
            "h": nn.ModuleList(GptBlock(WIDTH, 2) for _ in range(2)),
            "ln_f": LayerNorm(WIDTH),
        })
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(0, x.size(1), dtype=torch.long, device=x.device)
        z = self.transformer["wte"](x) + self.transformer["wpe"](positions)
        for block in self.transformer["h"]:
            z = block(z)
        z = self.lm_head(self.transformer["ln_f"](z))
        return z, F.cross_entropy(z.view(-1, z.size(-1)), y.view(-1), ignore_index=-1)


class UNet(nn.Module):
    """Down and up again, with what was left on the way down beside it."""

    def __init__(self, channels: int = 2, width: int = 4, conditioned: bool = False) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        self.down = nn.Sequential(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.GroupNorm(2, 2 * width))
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.last = nn.Conv2d(2 * width, channels, 1)
        self.time = nn.Sequential(nn.Linear(8, 2 * width), nn.SiLU()) if conditioned else None

    def forward(self, x: Tensor, t: Tensor | None = None) -> Tensor:
        left = torch.relu(self.first(x))
        z = torch.relu(self.down(left))
        if self.time is not None and t is not None:
            angles = t[:, None] * torch.exp(-math.log(100) * torch.arange(4) / 4)
            z = z + self.time(torch.cat([angles.sin(), angles.cos()], 1))[:, :, None, None]
        z = self.up(torch.relu(self.middle(z)))
        return self.last(torch.cat([left, z], 1))


class Diffusion(nn.Module):
    """Learns to tell noise, which it draws in forward, at times that it draws there, too; returns its loss."""

    def __init__(self, steps: int = 10) -> None:
        super().__init__()
        self.net = UNet(conditioned=True)
        self.register_buffer("kept", torch.linspace(0.99, 0.05, steps))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        t = torch.randint(0, len(self.kept), (x.shape[0],), device=x.device)
        noise, kept = torch.randn_like(x), self.kept[t][:, None, None, None]
        told = self.net(kept.sqrt() * x + (1 - kept).sqrt() * noise, t.float())
        return F.mse_loss(told, noise), (told - noise).square()


class Lora(nn.Module):
    """A frozen linear layer with a product of two small matrices beside it."""

    def __init__(self, base: nn.Linear, rank: int = 2, merged: bool = False) -> None:
        super().__init__()
        self.base, self.merged = base.requires_grad_(False), merged
        self.a, self.b = nn.Parameter(torch.randn(rank, WIDTH)), nn.Parameter(torch.randn(WIDTH, rank))

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            return F.linear(x, self.base.weight + 0.5 * self.b @ self.a, self.base.bias)
        return self.base(x) + 0.5 * (x @ self.a.T @ self.b.T)


class LoraModules(nn.Module):
    """The same by two linear layers, as libraries have it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, rank, bias=False), nn.Linear(rank, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.up(self.down(F.dropout(x, 0.0)))


def lora(merged: bool) -> nn.Module:
    first, second, third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
    return nn.Sequential(Lora(first, merged=merged), nn.Tanh(), LoraModules(second), nn.Tanh(), third)


class Symmetric(nn.Module):
    """A matrix from its upper half."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


class Twofold(nn.Module):
    """Calls a parametrized layer twice, with its weight made once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = parametrize.register_parametrization(nn.Linear(WIDTH, WIDTH), "weight", Symmetric())

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return self.layer(torch.tanh(self.layer(x)))
