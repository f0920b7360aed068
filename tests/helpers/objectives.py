"""Losses as people write them, beside what one sample's loss is by the textbook.

A loop is given what the model returned, and the data of its part of the batch. The oracle is given one sample at a
time: the sum of its terms, and what it adds to the number that the terms of all samples are divided by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

N, C, T = 24, 5, 3
WEIGHT, POS_WEIGHT = torch.tensor([0.5, 1.0, 2.0, 1.5, 0.7]), torch.tensor([1.0, 2.0, 0.5, 3.0, 1.5])


@dataclass
class Data:
    """Some samples, and what a loop knows beside them."""

    x: Tensor  # [n, 12]
    y: Tensor  # [n], classes
    micro_batches: int = 1
    ranks: int = 1
    all_tokens: float = 1.0  # that count, of all micro-batches and ranks
    all_weights: float = 1.0  # those of the classes, of all micro-batches and ranks

    @property
    def target(self) -> Tensor:
        return self.x[:, :C].tanh()

    @property
    def bits(self) -> Tensor:
        return (self.x[:, 2 : 2 + C] > 0).to(self.x.dtype)

    @property
    def weight(self) -> Tensor:
        return self.x[:, 0].sigmoid() + 0.1

    @property
    def returns(self) -> Tensor:
        return self.x[:, 1]

    @property
    def other(self) -> Tensor:
        return (self.y + 1) % C

    @property
    def chosen(self) -> Tensor:
        return self.x[:, 3] > -0.5

    @property
    def tokens(self) -> Tensor:
        """Some of the labels do not count; the first of a sample does."""
        labels = (self.y[:, None] + torch.arange(T)) % C
        return labels.masked_fill((self.x[:, :T] > 0.3) & (torch.arange(T) > 0), -100)


def nll(z: Tensor, y: Tensor) -> Tensor:
    """Cross-entropies by the textbook, for logits ``[..., C]``."""
    return z.logsumexp(-1) - (z * F.one_hot(y, C)).sum(-1)


def square(z: Tensor, target: Tensor) -> Tensor:
    return ((z - target) ** 2).sum(-1) / C


# -- models ------------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Logits ``[n, C]``."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(12, 8), nn.Linear(8, C)

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.tanh(self.body(x)))


class Tokens(Net):
    """Logits ``[n, T, C]``."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x.unflatten(1, (T, 4)))


class TwoHeads(Net):
    """A dictionary of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.aux = nn.Linear(12, C)

    def forward(self, x: Tensor) -> Any:
        return {"main": super().forward(x), "aux": self.aux(x)}


class Learned(Net):
    """With weights of its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.s = nn.Parameter(torch.tensor([0.1, -0.2]))


class Vae(Net):
    """A reconstruction, and the parameters of a Gaussian; the noise is a function of the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.decoder = nn.Linear(8, 4), nn.Linear(2, 12)

    def forward(self, x: Tensor) -> Any:
        mean, log_variance = super().forward(x).chunk(2, -1)
        return self.decoder(mean + (log_variance / 2).exp() * (3 * x[..., :2]).sin()), mean, log_variance


class Gpt(Tokens):
    """Returns logits and, as nanoGPT does, its loss; labels come with the input."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        z = super().forward(x)
        if labels is None:
            return z
        return z, F.cross_entropy(z.view(-1, z.size(-1)), labels.view(-1), ignore_index=-100)


class OnlyLoss(Tokens):
    """Returns nothing but its loss, made of terms of its own."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        z = super().forward(x)
        if labels is None:
            return z
        counted = (labels != -100).to(z.dtype)
        terms = F.cross_entropy(z.flatten(0, 1), labels.flatten(), reduction="none").view_as(counted)
        return (terms * counted).sum() / counted.sum()


class Focal(nn.Module):
    """A loss module of the user's own."""

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        log_p = z.log_softmax(-1).gather(1, y[:, None]).squeeze(1)
        return (-((1 - log_p.exp()) ** 2) * log_p).mean()


# -- losses ------------------------------------------------------------------------------------------------------------

Roots = Tensor | Sequence[Tensor]
Terms = tuple[Tensor, Tensor | float]


@dataclass
class Objective:
    """A loss in a loop, and the terms of one sample."""

    loss: Callable[[Any, Data, nn.Module], Roots]
    terms: Callable[[Any, Data, nn.Module], Terms]
    model: type[nn.Module] = Net
    call: Callable[[Any, Data], Any] = lambda model, d: model(d.x)
    divides: bool = True  # whether the loop divides it by the number of micro-batches
    backward: Callable[[Any], None] = lambda root: root.backward()
    rate: float = 0.3  # of learning
    syncs: bool = True  # whether DDP averages the gradients, which it does for one backward call of a forward pass


def ce(z: Tensor, d: Data, _: Any) -> Terms:
    return nll(z, d.y).sum(), 1


def tokens(z: Tensor, d: Data, _: Any) -> Terms:
    counted = d.tokens != -100
    return (nll(z, d.tokens.clamp(min=0)) * counted).sum(), counted.sum()


def both(first: float, second: float) -> Callable[[Tensor, Data, Any], Terms]:
    return lambda z, d, _: ((first * nll(z, d.y) + second * square(z, d.target)).sum(), 1)


def smoothed(z: Tensor, d: Data, _: Any) -> Terms:
    every = z.logsumexp(-1, keepdim=True) - z
    return (0.9 * nll(z, d.y) + 0.1 * every.mean(-1)).sum(), 1


def weighted(z: Tensor, d: Data, _: Any) -> Terms:
    weight = WEIGHT.to(z)[d.y]
    return (weight * nll(z, d.y)).sum(), weight.sum()


def tokens_and_samples(z: Tensor, d: Data, _: Any) -> Terms:
    return N / d.all_tokens * tokens(z, d, _)[0] + 0.5 * square(z.mean(1), d.target).sum(), 1


def weighted_and_samples(z: Tensor, d: Data, _: Any) -> Terms:
    return N / d.all_weights * weighted(z, d, _)[0] + square(z, d.target).sum(), 1


def some(z: Tensor, d: Data, _: Any) -> Terms:
    return (nll(z, d.y) * d.chosen).sum(), d.chosen.sum()


def huber(z: Tensor, d: Data, _: Any) -> Terms:
    e = (z - d.target).abs()
    return torch.where(e < 0.5, e**2 / 2, 0.5 * (e - 0.25)).sum(-1).sum() / C, 1


def bits(z: Tensor, d: Data, _: Any) -> Terms:
    p = z.sigmoid()
    return -(POS_WEIGHT.to(z) * d.bits * p.log() + (1 - d.bits) * (1 - p).log()).sum() / C, 1


def distilled(z: Tensor, d: Data, _: Any) -> Terms:
    teacher = (d.target / 2).softmax(-1)
    kl = (teacher * (teacher.log() - (z / 2).log_softmax(-1))).sum()
    return 0.3 * nll(z, d.y).sum() + 0.7 * 4 * kl, 1


def distillation(z: Tensor, d: Data, _: Any) -> Tensor:
    kl = F.kl_div(F.log_softmax(z / 2, -1), F.softmax(d.target / 2, -1), reduction="batchmean")
    return 0.3 * F.cross_entropy(z, d.y) + 0.7 * kl * 2**2


def ppo(z: Tensor, d: Data, _: Any) -> Tensor:
    policy = torch.distributions.Categorical(logits=z)
    ratio = (policy.log_prob(d.y) + math.log(C)).exp()
    surrogate = torch.min(ratio * d.returns, ratio.clamp(0.8, 1.2) * d.returns)
    return -surrogate.mean() + 0.5 * F.mse_loss(z[:, 0], d.returns) - 0.01 * policy.entropy().mean()


def ppo_terms(z: Tensor, d: Data, _: Any) -> Terms:
    ratio = C * (-nll(z, d.y)).exp()
    surrogate = torch.minimum(ratio * d.returns, ratio.clamp(0.8, 1.2) * d.returns)
    entropy = -(z.softmax(-1) * z.log_softmax(-1)).sum(-1)
    return (-surrogate + 0.5 * (z[:, 0] - d.returns) ** 2 - 0.01 * entropy).sum(), 1


def vae(out: Any, d: Data, _: Any) -> Tensor:
    x, mean, log_variance = out
    kl = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp(), dim=1)
    return F.mse_loss(x, d.x, reduction="none").sum(1).mean() + 0.1 * kl.mean()


def vae_sums(out: Any, d: Data, _: Any) -> Tensor:
    x, mean, log_variance = out
    return F.mse_loss(x, d.x, reduction="sum") - 0.05 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())


def vae_terms(out: Any, d: Data, _: Any) -> Terms:
    x, mean, log_variance = out
    return ((x - d.x) ** 2).sum() + 0.05 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(), 1


def focal_terms(z: Tensor, d: Data, _: Any) -> Terms:
    p = (-nll(z, d.y)).exp()
    return ((1 - p) ** 2 * nll(z, d.y)).sum(), 1


def heads(out: Any, d: Data, _: Any) -> Terms:
    return (nll(out["main"], d.y) + 0.3 * nll(out["aux"], d.other)).sum(), 1


def l2(model: nn.Module) -> Any:
    return sum(p.pow(2).sum() for p in model.parameters())


def orthogonal(model: nn.Module) -> Tensor:
    weight = model.get_parameter("head.weight")
    return (weight @ weight.T - torch.eye(C, dtype=weight.dtype)).abs().sum() + torch.linalg.vector_norm(weight, 1)


def in_autocast(loss: Callable[[Tensor, Data, Any], Tensor]) -> Callable[[Any, Data, Any], Tensor]:
    def lost(z: Tensor, d: Data, model: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(z, d, model)

    return lost


def in_place(z: Tensor, d: Data, _: Any) -> Tensor:
    loss = F.cross_entropy(z, d.y)
    loss *= 2
    loss += F.mse_loss(z, d.target)
    loss /= 4
    return loss


def written(z: Tensor, d: Data, _: Any) -> Tensor:
    """Losses of several tasks, which are written into one tensor."""
    losses = z.new_zeros(2)
    losses[0], losses[1] = F.cross_entropy(z, d.y), F.mse_loss(z, d.target)
    return losses.mean()


def with_labels(model: Any, d: Data) -> Any:
    return model(d.x, d.tokens)


def pairs(model: Any, d: Data) -> Any:
    return model(d.x), model(d.x.flip(1))


def triplets(model: Any, d: Data) -> Any:
    return model(d.x), model(d.x.flip(1)), model(-d.x)


def adversarial(model: Any, d: Data) -> Any:
    x = d.x.clone().requires_grad_()
    (at_inputs,) = torch.autograd.grad(model(x).square().sum(), x)
    return model(d.x + 0.1 * at_inputs.sign())


def divergence(out: Any, d: Data, _: Any) -> Tensor:
    """R-Drop: two passes, and what lies between them."""
    a, b = out
    kl = F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="none").sum(-1).mean()
    return (F.cross_entropy(a, d.y) + F.cross_entropy(b, d.y)) / 2 + 0.5 * kl


def divergence_terms(out: Any, d: Data, _: Any) -> Terms:
    a, b = out
    kl = (b.softmax(-1) * (b.log_softmax(-1) - a.log_softmax(-1))).sum(-1)
    return ((nll(a, d.y) + nll(b, d.y)) / 2 + 0.5 * kl).sum(), 1


def two_backwards(root: Any) -> None:
    root[0].backward(retain_graph=True)
    root[1].backward()


OBJECTIVES: dict[str, Objective] = {
    "F.cross_entropy(z, y)": Objective(lambda z, d, _: F.cross_entropy(z, d.y), ce),
    "nn.CrossEntropyLoss()(z, y)": Objective(lambda z, d, _: nn.CrossEntropyLoss()(z, d.y), ce),
    "label smoothing": Objective(lambda z, d, _: F.cross_entropy(z, d.y, label_smoothing=0.1), smoothed),
    "class weights": Objective(lambda z, d, _: F.cross_entropy(z, d.y, weight=WEIGHT), weighted),
    "a sum": Objective(lambda z, d, _: F.cross_entropy(z, d.y, reduction="sum"), ce, divides=False),
    "a sum divided by the samples": Objective(lambda z, d, _: F.cross_entropy(z, d.y, reduction="sum") / len(z), ce),
    'reduction="none", then mean': Objective(lambda z, d, _: F.cross_entropy(z, d.y, reduction="none").mean(), ce),
    "written by hand": Objective(lambda z, d, _: -z.log_softmax(1).gather(1, d.y[:, None]).mean(), ce),
    "F.nll_loss of log-softmax": Objective(lambda z, d, _: F.nll_loss(F.log_softmax(z, 1), d.y), ce),
    "half of it": Objective(
        lambda z, d, _: 0.5 * F.cross_entropy(z, d.y), lambda z, d, _: (0.5 * nll(z, d.y).sum(), 1)
    ),
    "a mean over tokens, some ignored": Objective(
        lambda z, d, _: F.cross_entropy(z.view(-1, C), d.tokens.view(-1), ignore_index=-100), tokens, Tokens
    ),
    "tokens, classes on axis 1": Objective(
        lambda z, d, _: F.cross_entropy(z.transpose(1, 2), d.tokens), tokens, Tokens
    ),
    "sum / num_items * world_size": Objective(
        lambda z, d, _: F.cross_entropy(z.flatten(0, 1), d.tokens.flatten(), reduction="sum") / d.all_tokens * d.ranks,
        tokens,
        Tokens,
        divides=False,
    ),
    "tokens chosen by a mask": Objective(
        lambda z, d, _: F.cross_entropy(z[d.tokens != -100], d.tokens[d.tokens != -100]), tokens, Tokens
    ),
    "a masked mean": Objective(
        lambda z, d, _: (F.cross_entropy(z, d.y, reduction="none") * d.chosen).sum() / d.chosen.sum(), some
    ),
    "losses chosen by a mask": Objective(
        lambda z, d, _: F.cross_entropy(z, d.y, reduction="none")[d.chosen].mean(), some
    ),
    "importance weights": Objective(
        lambda z, d, _: (d.weight * F.cross_entropy(z, d.y, reduction="none")).mean(),
        lambda z, d, _: ((d.weight * nll(z, d.y)).sum(), 1),
    ),
    "a weighted mean by a dot product": Objective(
        lambda z, d, _: F.cross_entropy(z, d.y, reduction="none") @ d.weight / d.weight.sum(),
        lambda z, d, _: ((d.weight * nll(z, d.y)).sum(), d.weight.sum()),
    ),
    "F.mse_loss": Objective(lambda z, d, _: F.mse_loss(z, d.target), both(0, 1)),
    "((z - t) ** 2).mean()": Objective(lambda z, d, _: ((z - d.target) ** 2).mean(), both(0, 1)),
    "(z - t).pow(2).mean(0).sum()": Objective(lambda z, d, _: (z - d.target).pow(2).mean(0).sum() / C, both(0, 1)),
    "F.huber_loss": Objective(lambda z, d, _: F.huber_loss(z, d.target, delta=0.5), huber),
    "binary cross-entropy, pos_weight": Objective(
        lambda z, d, _: F.binary_cross_entropy_with_logits(z, d.bits, pos_weight=POS_WEIGHT), bits
    ),
    "gaussian negative log-likelihood": Objective(
        lambda z, d, _: F.gaussian_nll_loss(z, d.target, z.exp()),
        lambda z, d, _: (((z + (z - d.target) ** 2 / z.exp()) / 2).sum() / C, 1),
    ),
    "0.1 * CE + MSE": Objective(lambda z, d, _: 0.1 * F.cross_entropy(z, d.y) + F.mse_loss(z, d.target), both(0.1, 1)),
    "0.5 * CE + 0.5 * MSE": Objective(
        lambda z, d, _: 0.5 * F.cross_entropy(z, d.y) + 0.5 * F.mse_loss(z, d.target), both(0.5, 0.5)
    ),
    "(CE + MSE) / 2": Objective(
        lambda z, d, _: (F.cross_entropy(z, d.y) + F.mse_loss(z, d.target)) / 2, both(0.5, 0.5)
    ),
    "torch.stack([CE, MSE]).mean()": Objective(
        lambda z, d, _: torch.stack([F.cross_entropy(z, d.y), F.mse_loss(z, d.target)]).mean(), both(0.5, 0.5)
    ),
    "CE and MSE in two backward calls": Objective(
        lambda z, d, _: [0.5 * F.cross_entropy(z, d.y), 0.5 * F.mse_loss(z, d.target)],
        both(0.5, 0.5),
        backward=two_backwards,
        syncs=False,
    ),
    "torch.autograd.backward([CE, MSE])": Objective(
        lambda z, d, _: [0.5 * F.cross_entropy(z, d.y), 0.5 * F.mse_loss(z, d.target)],
        both(0.5, 0.5),
        backward=lambda roots: torch.autograd.backward(list(roots)),
    ),
    "loss.backward(gradient)": Objective(
        lambda z, d, _: F.cross_entropy(z, d.y),
        lambda z, d, _: (0.25 * nll(z, d.y).sum(), 1),
        backward=lambda root: root.backward(torch.tensor(0.25)),
    ),
    "losses.backward(weights)": Objective(
        lambda z, d, _: F.cross_entropy(z, d.y, reduction="none"),
        ce,
        backward=lambda root: root.backward(torch.ones(len(root)) / len(root)),
    ),
    "under autocast": Objective(in_autocast(lambda z, d, _: F.cross_entropy(z, d.y)), ce),
    "two losses under autocast": Objective(
        in_autocast(lambda z, d, _: 0.5 * F.cross_entropy(z, d.y) + 0.5 * F.mse_loss(z, d.target)), both(0.5, 0.5)
    ),
    "written by hand, under autocast": Objective(
        in_autocast(lambda z, d, _: -z.log_softmax(1).gather(1, d.y[:, None]).mean()), ce
    ),
    "two losses, written into a tensor": Objective(written, both(0.5, 0.5)),
    "changed in place": Objective(in_place, both(0.5, 0.25)),
    "distillation": Objective(distillation, distilled),
    "a policy gradient": Objective(
        lambda z, d, _: -(z.log_softmax(-1)[torch.arange(len(z)), d.y] * d.returns).mean(),
        lambda z, d, _: ((nll(z, d.y) * d.returns).sum(), 1),
    ),
    "PPO": Objective(ppo, ppo_terms),
    "a variational autoencoder": Objective(vae, vae_terms, Vae),
    "a variational autoencoder, summed": Objective(vae_sums, vae_terms, Vae, divides=False, rate=1e-3),
    "mixup": Objective(
        lambda z, d, _: 0.3 * F.cross_entropy(z, d.y) + (1 - 0.3) * F.cross_entropy(z, d.other),
        lambda z, d, _: ((0.3 * nll(z, d.y) + 0.7 * nll(z, d.other)).sum(), 1),
    ),
    "a focal loss, a custom module": Objective(lambda z, d, _: Focal()(z, d.y), focal_terms),
    "an auxiliary classifier": Objective(
        lambda z, d, _: F.cross_entropy(z["main"], d.y) + 0.3 * F.cross_entropy(z["aux"], d.other), heads, TwoHeads
    ),
    "a loss inside the model": Objective(lambda out, d, _: out[1], tokens, Gpt, with_labels),
    "nothing but a loss from the model": Objective(lambda out, d, _: out, tokens, OnlyLoss, with_labels),
    "a loss inside the model, and another": Objective(
        lambda out, d, _: 0.5 * out[1] + 0.5 * out[1], tokens, Gpt, with_labels
    ),
    "means over tokens and over samples": Objective(
        lambda z, d, _: (
            F.cross_entropy(z.flatten(0, 1), d.tokens.flatten(), ignore_index=-100)
            + 0.5 * F.mse_loss(z.mean(1), d.target)
        ),
        tokens_and_samples,
        Tokens,
    ),
    "a mean weighted by class, and one over samples": Objective(
        lambda z, d, _: F.cross_entropy(z, d.y, weight=WEIGHT) + F.mse_loss(z, d.target), weighted_and_samples
    ),
    "means over tokens inside the model, and over samples": Objective(
        lambda out, d, _: out[1] + 0.5 * F.mse_loss(out[0].mean(1), d.target), tokens_and_samples, Gpt, with_labels
    ),
    "adversarial inputs": Objective(lambda z, d, _: F.cross_entropy(z, d.y), ce, call=adversarial),
    "two passes (R-Drop)": Objective(divergence, divergence_terms, call=pairs),
    "a triplet loss of three passes": Objective(
        lambda z, d, _: F.triplet_margin_loss(*z, margin=2.0),
        lambda z, d, _: (
            ((z[0] - z[1] + 1e-6).norm(dim=-1) - (z[0] - z[2] + 1e-6).norm(dim=-1) + 2).clamp(min=0).sum(),
            1,
        ),
        call=triplets,
    ),
    "learned weights of two losses": Objective(
        lambda z, d, net: (
            torch.exp(-net.s[0]) * F.cross_entropy(z, d.y)
            + torch.exp(-net.s[1]) * F.mse_loss(z, d.target)
            + net.s.sum()
        ),
        lambda z, d, net: (
            ((-net.s[0]).exp() * nll(z, d.y) + (-net.s[1]).exp() * square(z, d.target) + net.s.sum()).sum(),
            1,
        ),
        Learned,
    ),
    "a loss for each sample in a Python loop": Objective(
        lambda z, d, _: torch.stack([F.cross_entropy(z[i : i + 1], d.y[i : i + 1]) for i in range(len(z))]).mean(), ce
    ),
    "an L2 penalty": Objective(
        lambda z, d, model: F.cross_entropy(z, d.y) + 1e-2 * l2(model),
        lambda z, d, model: ((nll(z, d.y) + 1e-2 * l2(model)).sum(), 1),
    ),
    "an orthogonality penalty": Objective(
        lambda z, d, model: F.cross_entropy(z, d.y) + 1e-2 * orthogonal(model),
        lambda z, d, model: ((nll(z, d.y) + 1e-2 * orthogonal(model)).sum(), 1),
    ),
}


def table() -> str:
    """For docs/losses.md."""
    return "".join(f"- {name}\n" for name in OBJECTIVES)
