"""Runs of the losses in `objectives`, and what autograd says of them."""

from __future__ import annotations

import copy
from typing import Any

import objectives
import oracle
import torch
from objectives import Data, Objective
from torch import Tensor, nn


def data(step: int) -> Data:
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(objectives.N, 12, generator=generator)
    x[-1, 3] = 1.0  # chosen by masks; it may be alone on its rank
    return Data(x, torch.randint(0, objectives.C, (objectives.N,), generator=generator))


def initialised(objective: Objective) -> nn.Module:
    torch.manual_seed(3)
    return objective.model()


class Whole(nn.Module):
    """For the oracle: the model, with what the loop makes of one sample; it tells the model that was called."""

    def __init__(self, objective: Objective, called: list[nn.Module]) -> None:
        super().__init__()
        self.net = initialised(objective)
        self.call, self.note = objective.call, called.append

    def __deepcopy__(self, memo: dict[int, Any]) -> Whole:
        other = copy.copy(self)
        other._modules = {"net": copy.deepcopy(self.net, memo)}
        return other

    def forward(self, x: Tensor) -> Any:
        self.note(self.net)
        d = Data(x, torch.zeros(len(x), dtype=torch.int64))
        passes = self.call in (objectives.pairs, objectives.triplets, objectives.adversarial)
        return self.call(self.net, d) if passes else self.net(x)


def expected(objective: Objective, state: dict[str, Tensor], step: int) -> oracle.Batch:
    """The batch as one process sees it, a sample at a time."""
    everything, called = data(step), []
    of_all = float((everything.tokens != -100).sum()), float(objectives.WEIGHT[everything.y].sum())

    def terms(out: Any, i: Tensor) -> tuple[Tensor, Any]:
        return objective.terms(out, Data(everything.x[i].double(), everything.y[i], 1, 1, *of_all), called[-1])

    whole, places = Whole(objective, called), torch.arange(objectives.N)
    return oracle.batch(whole, {f"net.{k}": v for k, v in state.items()}, terms, everything.x, places)
