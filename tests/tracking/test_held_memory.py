"""What a tracked step holds at most beside what the plain step holds: bytes of tensors, counted as they come and go."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from live_memory import LiveMemory
from torch import nn

from distcockpit import DistCockpit, every, open_run
from distcockpit.quantities import (
    Alpha,
    Distance,
    GradNorm,
    HessTrace,
    Loss,
    NormTest,
    OutputNorm,
    Quantity,
    RankHealth,
    Time,
)

ROWS, WIDTH, DEPTH = 64, 256, 8
ACTIVATION = ROWS * 16 * WIDTH * 4  # bytes of the output of a layer
PARAMETERS = DEPTH * (WIDTH + 1) * WIDTH * 4
GRADIENTS = DEPTH * ACTIVATION  # those at the outputs of layers
STEPS, THOROUGH = 7, (0, 1, 3)  # the first steps, and those of them that check everything


def peaks(tmp_path: Path, quantities: Sequence[Quantity] | None) -> list[int]:
    """Peak of each step, above what was held before the run."""
    torch.manual_seed(0)
    net = nn.Sequential(*(layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    options = {"store": tmp_path / "run", "schedule": every(1), "memory_budget": "1MiB"}
    loss_fn = nn.MSELoss()
    cockpit = None if quantities is None else DistCockpit(net, loss_fn, quantities=quantities, **options)
    found = []
    with LiveMemory() as memory:
        for step in range(STEPS):
            memory.peak = memory.now
            x, y = torch.randn(2, ROWS, 16, WIDTH)
            optimizer.zero_grad()
            if cockpit is None:
                loss_fn(net(x), y).backward()
            else:
                with cockpit.track(step):
                    loss_fn(net(x), y).backward()
            optimizer.step()
            found.append(memory.peak)
            del x, y
    if cockpit is not None:
        cockpit.close()
    return found


QUANTITIES: dict[str, Quantity] = {
    "sums": GradNorm(),
    "squares": NormTest(),
    "an update": Alpha(),
    "outputs": OutputNorm(),
    "outputs of all modules": RankHealth(),
}


@pytest.mark.parametrize("name", QUANTITIES)
def test_what_a_step_holds(tmp_path: Path, name: str) -> None:
    """Output gradients, if calls are kept, and copies of parameters; while it checks itself one forward pass more."""
    (plain, *_) = peaks(tmp_path, None)
    found = peaks(tmp_path, [QUANTITIES[name]])
    keeps_no_calls = name in ("sums", "outputs")
    gradients = 0 if keeps_no_calls else GRADIENTS
    copies = PARAMETERS if name in ("sums", "an update") else 0
    other = [peak for step, peak in enumerate(found) if step not in THOROUGH]
    assert max(other) < plain + gradients + copies + 6 * ACTIVATION
    assert max(found) < max(other) + plain + (GRADIENTS + PARAMETERS if keeps_no_calls else 0)


def test_what_time_says_that_a_step_holds(tmp_path: Path) -> None:
    """The inputs of layers and the gradients at their outputs; the initial parameters, and those before the update."""
    peaks(tmp_path, [Time(), NormTest(), Alpha(), Distance()])
    time = open_run(tmp_path / "run")["time"]
    assert list(time["factor_bytes"].values) == [2 * DEPTH * ACTIVATION] * STEPS
    assert list(time["copy_bytes"].values) == [PARAMETERS, *[2 * PARAMETERS] * (STEPS - 1)]


def test_losses_and_curvature_hold_no_factors(tmp_path: Path) -> None:
    """Only steps that check themselves do; the values are those beside a quantity that needs factors."""
    alone = [Time(), Loss(), HessTrace(curvature="hutchinson", samples=1)]
    peaks(tmp_path / "alone", alone)
    peaks(tmp_path / "beside", [*alone, NormTest()])
    found, expected = (open_run(tmp_path / name / "run").load() for name in ("alone", "beside"))
    factors = 2 * DEPTH * ACTIVATION
    assert list(found["time"]["factor_bytes"].values) == [factors if k in THOROUGH else 0 for k in range(STEPS)]
    assert list(expected["time"]["factor_bytes"].values) == [factors] * STEPS
    for name in ("loss", "hess_trace"):
        for field, values in expected[name].data_vars.items():
            assert np.array_equal(found[name][field], values, equal_nan=True) and len(values) == STEPS
