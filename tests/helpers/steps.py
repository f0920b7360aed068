"""One loop for tests: a few training steps with a cockpit, and what happened in them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import xarray as xr
from torch import Tensor, nn

from distcockpit import DistCockpit, every, open_run

Batch = tuple[Any, Any]


@dataclass
class Steps:
    """What a loop did, and where its run is."""

    net: nn.Module
    where: tuple[Any, Any]  # store, storage_options
    batches: list[Batch] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)  # before each step
    gradients: list[list[Tensor]] = field(default_factory=list)  # of all parameters, zeros where there is none
    losses: list[float] = field(default_factory=list)  # what the body returned

    @property
    def run(self) -> xr.DataTree:
        return open_run(*self.where)

    @property
    def norms(self) -> list[float]:
        """Of the gradients that the optimizer got."""
        return [float(sum(g.square().sum() for g in each)) ** 0.5 for each in self.gradients]


def run_steps(
    store: Any,
    net: nn.Module,
    data: Callable[[int], Batch] | Batch,
    steps: int | range = 3,
    *,
    loss_fn: Any = None,
    body: Callable[[DistCockpit, Any, Any], Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    rate: float = 0.0,
    before: Callable[[int], None] | None = None,
    then: Callable[[int, DistCockpit], None] | None = None,
    track: Callable[[int], Mapping[str, Any]] | Mapping[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Steps:
    """Train with a cockpit around the model, every step tracked.

    Args:
        store: Where the run goes.
        net: The model.
        data: Inputs and targets of a step, or the same at each.
        steps: How many, or which.
        loss_fn: What DistCockpit is given.
        body: What happens inside `track`, given the cockpit, inputs and targets; may return the loss. By default
            ``loss_fn(cockpit(x), y).backward()``.
        optimizer: Given to DistCockpit, and stepped.
        rate: Where there is no optimizer: of plain SGD, of which DistCockpit knows nothing.
        before: Called before each step.
        then: Called after each step of the optimizer.
        track: Arguments of `track`.
        storage_options: Of the store.
        options: Of DistCockpit.
    """
    done = Steps(net, (store, storage_options))
    stepping = torch.optim.SGD(net.parameters(), lr=rate) if optimizer is None and rate else optimizer
    options = {"schedule": every(1), "storage_options": storage_options, **options}
    with DistCockpit(net, loss_fn, optimizer, store=store, **options) as cockpit:
        for step in range(steps) if isinstance(steps, int) else steps:
            if before is not None:
                before(step)
            x, y = data(step) if callable(data) else data
            done.batches.append((x, y))
            done.states.append({name: copy.deepcopy(value) for name, value in net.state_dict().items()})
            net.zero_grad()
            with cockpit.track(step, **((track(step) if callable(track) else track) or {})):
                if body is not None:
                    loss = body(cockpit, x, y)
                else:
                    loss = loss_fn(cockpit(x), y)
                    loss.backward()
            if isinstance(loss, Tensor):
                done.losses.append(loss.item())
            done.gradients.append([
                torch.zeros_like(p) if p.grad is None else p.grad.detach().to_dense().clone() for p in net.parameters()
            ])
            if stepping is not None:
                stepping.step()
            if then is not None:
                then(step, cockpit)
    return done
