"""The least that a norm test can take: hooks for inputs and output gradients, sums in float64, and nothing else.

    python -m benchmarks.floor

The MLP of `benchmarks.overhead`, whose plain step is short. No store, no check, no other rank, no micro-batches: what a
tracked step takes beyond this is what these cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.setups import make

ROUNDS, STEPS = 21, 60


class Bare:
    """A training loop that takes sum_i |g_i|^2 and |G|^2 of the linear layers."""

    def __init__(self) -> None:
        self.net, self.x = make("mlp")
        self.y, self.loss_fn = torch.randint(10, (len(self.x),)), nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.seen: list[list[Tensor]] = []

    def plain(self) -> None:
        """A step."""
        self.optimizer.zero_grad()
        self.loss_fn(self.net(self.x), self.y).backward()
        self.optimizer.step()

    def tracked(self) -> Tensor:
        """The same step, and the two sums."""
        self.seen.clear()
        handles = [m.register_forward_hook(self._keep) for m in self.net.modules() if isinstance(m, nn.Linear)]
        self.plain()
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            return self._sums()

    def _keep(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        pair = [args[0].detach()]
        self.seen.append(pair)
        output.register_hook(lambda gradient: pair.append(gradient.clone()))

    def _sums(self) -> Tensor:
        squares, mean_squared = torch.zeros(2, dtype=torch.float64)
        for kept, delta in self.seen:
            d, x = delta.mul_(len(delta)).double(), kept.double()
            squares += d.square().sum(1) @ (x.square().sum(1) + 1)  # the bias has an input of 1
            mean_squared += (d.T @ x / len(d)).square().sum() + (d.sum(0) / len(d)).square().sum()
        return torch.stack([squares, mean_squared])


def milliseconds(step: Callable[[], object]) -> float:
    """Per step."""
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    return (time.perf_counter() - start) / STEPS * 1e3


def main() -> None:
    torch.manual_seed(0)
    loop = Bare()
    milliseconds(loop.tracked)
    times = np.array([[milliseconds(loop.plain), milliseconds(loop.tracked)] for _ in range(ROUNDS)])
    low, middle, high = np.quantile(times[:, 1] / times[:, 0], [0.25, 0.5, 0.75])
    plain, tracked = np.median(times, 0)
    Console().print(f"{tracked:.2f} ms over {plain:.2f} ms: {middle:.2f} times ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
