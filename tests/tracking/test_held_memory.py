"""What a tracked step holds at most beside what the plain step holds: bytes of tensors, counted as they come and go."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from live_memory import LiveMemory
from torch import nn

from distcockpit import DistCockpit, every, open_run
from distcockpit.quantities import Alpha, Distance, GradNorm, NormTest, OutputNorm, Quantity, RankHealth, Time

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
    cockpit = None if quantities is None else DistCockpit(net, nn.MSELoss(), quantities=quantities, **options)
    found = []
    with LiveMemory() as memory:
        for step in range(STEPS):
            memory.peak = memory.now
            x, y = torch.randn(2, ROWS, 16, WIDTH)
            optimizer.zero_grad()
            if cockpit is None:
                nn.functional.mse_loss(net(x), y).backward()
            else:
                with cockpit.track(step):
                    nn.functional.mse_loss(net(x), y).backward()
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
    """Output gradients and copies of parameters; while it checks itself also what one forward pass keeps."""
    (plain, *_) = peaks(tmp_path, None)
    found = peaks(tmp_path, [QUANTITIES[name]])
    copies = PARAMETERS if name == "an update" else 0
    other = [peak for step, peak in enumerate(found) if step not in THOROUGH]
    assert max(other) < plain + GRADIENTS + copies + 6 * ACTIVATION
    assert max(found) < max(other) + plain + (GRADIENTS + PARAMETERS if name == "sums" else 0)  # which keep no calls


def test_what_time_says_that_a_step_holds(tmp_path: Path) -> None:
    """The inputs of layers and the gradients at their outputs; the initial parameters, and those before the update."""
    peaks(tmp_path, [Time(), NormTest(), Alpha(), Distance()])
    time = open_run(tmp_path / "run")["time"]
    assert list(time["factor_bytes"].values) == [2 * DEPTH * ACTIVATION] * STEPS
    assert list(time["copy_bytes"].values) == [PARAMETERS, *[2 * PARAMETERS] * (STEPS - 1)]
