"""The least that a tracked step can take: what its sums and products cost, and nothing else.

    python -m benchmarks.floor                  # a norm test of the MLP of benchmarks.overhead
    python -m benchmarks.floor --model gpt      # the matrix products that quantities of the GPT cannot do without

No store, no check, no other rank, no micro-batches: what a tracked step takes beyond this is what these cost. Of the
GPT it is the linear layers' products alone: hooks keep inputs and output gradients, which are multiplied once more.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.setups import Loop, make

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


class Products:
    """Training steps of the GPT, and the products of what its linear layers were given and got back."""

    def __init__(self) -> None:
        model, x = make("gpt")
        self.loop = Loop(model, x, None, [])
        self._layers: dict[nn.Module, list[Tensor]] = {m: [] for m in model.modules() if isinstance(m, nn.Linear)}
        handles = [m.register_forward_hook(self._keep) for m in self._layers]
        self.loop.one()
        for handle in handles:
            handle.remove()

    def _keep(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self._layers[module] = [args[0].detach()]
        output.register_hook(lambda gradient: self._layers[module].append(gradient.clone()))

    @torch.no_grad()
    def grams(self) -> None:
        """Inner products between the positions of each sample, of which norms are made."""
        for pair in self._layers.values():
            for factor in pair:
                torch.bmm(factor, factor.transpose(1, 2))

    @torch.no_grad()
    def individual(self) -> None:
        """The gradient of each sample, some rows at a time, as they fit a cache."""
        for x, delta in self._layers.values():
            for rows in delta.transpose(1, 2).split(128, 1):
                torch.bmm(rows, x)

    @torch.no_grad()
    def update(self) -> None:
        """Inputs times the update, at one of its ends; the weights have its size."""
        for module, (x, _) in self._layers.items():
            nn.functional.linear(x, cast(nn.Linear, module).weight)


def of_products() -> None:
    """Print what these take, over the plain step."""
    products = Products()
    jobs = {
        "NormTest": [products.grams],
        "GradHist1d, MeanGSNR": [products.individual],
        "Alpha": [products.update, products.update],
        "economy": [products.individual, products.update],  # which serve the other end
    }
    times: dict[str, list[float]] = {name: [] for name in ("plain", *jobs)}
    for _ in range(ROUNDS):
        times["plain"].append(products.loop.advance(1))
        for name, parts in jobs.items():
            start = time.perf_counter()
            for part in parts:
                part()
            times[name].append((time.perf_counter() - start) * 1e3)
    plain = np.array(times["plain"])
    table = Table(title=f"gpt: a plain step of {np.median(plain):.0f} ms, {torch.get_num_threads()} threads")
    for column in ("at least", "products, ms", "over plain", "quartiles"):
        table.add_column(column, justify="left" if column == "at least" else "right")
    for name in jobs:
        low, middle, high = np.quantile(1 + np.array(times[name]) / plain, [0.25, 0.5, 0.75])
        table.add_row(name, f"{np.median(times[name]):.0f}", f"{middle:.2f}", f"{low:.2f} to {high:.2f}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["mlp", "gpt"], default="mlp")
    torch.manual_seed(0)
    if parser.parse_args().model == "gpt":
        of_products()
        return
    loop = Bare()
    milliseconds(loop.tracked)
    times = np.array([[milliseconds(loop.plain), milliseconds(loop.tracked)] for _ in range(ROUNDS)])
    low, middle, high = np.quantile(times[:, 1] / times[:, 0], [0.25, 0.5, 0.75])
    plain, tracked = np.median(times, 0)
    Console().print(f"{tracked:.2f} ms over {plain:.2f} ms: {middle:.2f} times ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
