"""Sequences cut into windows, with the state handed on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn
from torch.nn import functional as F

from distcockpit import DistCockpit, every, open_run

N, LENGTH, WINDOWS = 8, 12, 3


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(5, 7, batch_first=True), nn.Linear(7, 3)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        z, state = self.body(x, state)
        return self.head(z), state


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.at_input, self.at_state, self.head = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        state, outputs = torch.zeros(len(x), 7) if state is None else state, []
        for t in range(x.shape[1]):
            state = torch.tanh(self.at_input(x[:, t]) + self.at_state(state))
            outputs.append(self.head(state))
        return torch.stack(outputs, 1), state


def each(function: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    return lambda state: function(state) if isinstance(state, Tensor) else tuple(map(function, state))


HANDED_ON: dict[str, Callable[[Any], Any]] = {
    "detached": each(Tensor.detach),
    "its data": each(lambda t: t.data),
    "a copy": each(lambda t: t.detach().clone()),
    "damped": each(lambda t: 0.5 * t.detach()),
    "with its graph": lambda state: state,
}


def sequences(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(N, LENGTH, 5, generator=generator), torch.randint(0, 3, (N, LENGTH), generator=generator)


def windows(model: Any, x: Tensor, y: Tensor, hand_on: Callable[[Any], Any], *, one_root: bool) -> float:
    """A step of the loop, and its loss."""
    state, losses = None, []
    for at in range(0, LENGTH, LENGTH // WINDOWS):
        z, state = model(x[:, at : at + 4], None if state is None else hand_on(state))
        losses.append(F.cross_entropy(z.flatten(0, 1), y[:, at : at + 4].flatten()))
        if not one_root:
            losses[-1].backward()
    if one_root:
        torch.stack(losses).sum().backward()
    return float(sum(loss.item() for loss in losses))


def train_windows(
    rank: int, size: int, group: Any, model: type[nn.Module], how: str, one_root: bool, store: str
) -> tuple[list[dict[str, Tensor]], list[float]]:
    torch.manual_seed(0)
    net, states, losses = model(), [], []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    mine = slice(0, 5) if size > 1 and rank == 0 else slice(5, N) if size > 1 else slice(0, N)
    options: dict[str, Any] = {"store": store, "process_group": group, "schedule": every(1)}
    with DistCockpit(net, optimizer=optimizer, **options) as cockpit:
        for step in range(3):
            states.append({name: value.clone() for name, value in net.state_dict().items()})
            x, y = sequences(step)
            optimizer.zero_grad()
            with cockpit.track(step):
                losses.append(windows(cockpit, x[mine], y[mine], HANDED_ON[how], one_root=one_root))
            for p in net.parameters() if size > 1 else ():
                p.grad *= len(x[mine])
                torch.distributed.all_reduce(p.grad, group=group)
                p.grad /= N
            optimizer.step()
    return states, losses


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("how", "one_root"),
    [(how, False) for how in HANDED_ON if how != "with its graph"] + [(how, True) for how in HANDED_ON],
    ids=lambda each: {False: "a backward pass each", True: "one backward pass"}.get(each, each),
)
@pytest.mark.parametrize("model", [Lstm, ByHand])
def test_windows(ranks: Ranks, tmp_path: Path, model: type[nn.Module], how: str, one_root: bool, size: int) -> None:
    arguments = model, how, one_root, str(tmp_path / "run")
    states, _ = train_windows(0, 1, None, *arguments) if size == 1 else ranks.run(size, train_windows, *arguments)[0]
    run, alone = open_run(tmp_path / "run"), model()
    for step, state in enumerate(states):
        alone.load_state_dict(state)
        x, y = sequences(step)
        gradients, losses = [], []
        for i in range(N):
            alone.zero_grad()
            losses.append(windows(alone, x[i : i + 1], y[i : i + 1], HANDED_ON[how], one_root=one_root))
            gradients.append(torch.cat([p.grad.flatten() for p in alone.parameters()]).double())
        every_one = torch.stack(gradients)
        mean = every_one.mean(0)
        assert run["loss"]["batch_size"][step] == N
        np.testing.assert_allclose(run["loss"]["loss"][step], np.mean(losses), rtol=1e-5)
        np.testing.assert_allclose(run["grad_norm"]["total"][step], mean.norm(), rtol=1e-4)
        variance = (every_one - mean).square().sum() / (N - 1) / N
        np.testing.assert_allclose(run["norm_test"]["norm_test"][step], (variance.sqrt() / mean.norm()), rtol=1e-4)
    assert not run["alpha"]["alpha"].isnull().any() and "notices" not in run.attrs


class Centered(nn.Module):
    """Is given an average of what it returned before, as a loss against collapse has it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor, center: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * (1 + center)


@pytest.mark.parametrize("shape", [(3,), (1, 3)])
def test_an_average_of_outputs_is_no_state(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """The micro-batch that is given it has samples of its own."""
    torch.manual_seed(0)
    net, alone, center, gradients = Centered(), Centered(), torch.zeros(shape), []
    alone.load_state_dict(net.state_dict())
    x = torch.randn(2, N, 5)
    with DistCockpit(net, store=tmp_path / "run", schedule=every(1)) as cockpit, cockpit.track(0):
        for half in x:
            for sample in half.split(1):
                own = torch.autograd.grad(alone(sample, center).square().mean(), list(alone.parameters()))
                gradients.append(torch.cat([g.flatten() for g in own]).double())
            z = cockpit(half, center)
            (z.square().mean() / 2).backward()
            center = 0.9 * center + z.detach().mean(0).view(shape)
    run, every_one = open_run(tmp_path / "run"), torch.stack(gradients)
    mean = every_one.mean(0)
    assert run["loss"]["batch_size"].values == [2 * N]
    np.testing.assert_allclose(run["grad_norm"]["total"], [mean.norm()], rtol=1e-4)
    variance = (every_one - mean).square().sum() / (2 * N - 1) / (2 * N)
    np.testing.assert_allclose(run["norm_test"]["norm_test"], [variance.sqrt() / mean.norm()], rtol=1e-4)
