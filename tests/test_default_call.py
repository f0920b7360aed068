"""``DistCockpit(model, optimizer=..., store=...)`` and nothing else: the preset is tracked on any loop, to its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distcockpit import DistCockpit, every, open_run, presets
from distcockpit.quantities import Alpha, NormTest

X, Y = torch.arange(48).view(8, 6) * 7 % 11, torch.arange(48).view(8, 6) * 5 % 11
V, C = torch.sin(torch.arange(40.0)).view(8, 5), torch.arange(8) % 3


class Gpt(nn.Module):
    """Returns scores and, where it is given targets, the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions, self.head = nn.Embedding(11, 8), nn.Embedding(6, 8), nn.Linear(8, 11)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = self.head(torch.tanh(self.tokens(x) + self.positions(torch.arange(x.shape[1]))))
        return z, F.cross_entropy(z.view(-1, 11), y.view(-1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def written_by_hand(model: Any) -> Tensor:
    return -model(V).log_softmax(1).gather(1, C[:, None]).mean()


LOOPS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Tensor]]] = {
    "a model that returns its loss": (Gpt, lambda model: model(X, Y)[1]),
    "cross entropy": (mlp, lambda model: F.cross_entropy(model(V), C)),
    "label smoothing": (mlp, lambda model: F.cross_entropy(model(V), C, label_smoothing=0.1)),
    "mse": (mlp, lambda model: F.mse_loss(model(V), V[:, :3])),
    "bce": (mlp, lambda model: F.binary_cross_entropy_with_logits(model(V), V[:, :3].sigmoid())),
    "by hand": (mlp, written_by_hand),
    "a sum divided by N": (mlp, lambda model: F.cross_entropy(model(V), C, reduction="sum") / len(V)),
    "a mean of terms": (mlp, lambda model: F.cross_entropy(model(V), C, reduction="none").mean()),
    "half of it": (mlp, lambda model: 0.5 * F.cross_entropy(model(V), C)),
}


def train(net: nn.Module, loss: Callable[[Any], Tensor], store: Path, **options: Any) -> list[float]:
    """Norms of the gradients that the optimizer got."""
    optimizer, norms = torch.optim.SGD(net.parameters(), lr=0.1), []
    with DistCockpit(net, optimizer=optimizer, store=store, schedule=every(1), **options) as cockpit:
        for step in range(4):
            optimizer.zero_grad()
            with cockpit.track(step):
                loss(cockpit).backward()
            norms.append(float(sum(p.grad.square().sum() for p in net.parameters() if p.grad is not None)) ** 0.5)
            optimizer.step()
    return norms


@pytest.mark.parametrize("name", LOOPS)
def test_the_preset_is_tracked(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, loss = LOOPS[name]
    with caplog.at_level("WARNING"):
        norms = train(make(), loss, tmp_path / "run")
    run = open_run(tmp_path / "run")
    np.testing.assert_allclose(np.linalg.norm(run["grad_norm"]["grad_norm"], axis=1), norms, rtol=1e-4)
    status = run["alpha"]["status"]
    assert status.attrs["flag_meanings"].split()[int(status[0])] == "losses_unknown"
    assert run["alpha"]["alpha"].isnull().all() and not run["alpha"]["slope_end"].isnull().any()
    for quantity in ("norm_test", "inner_test", "ortho_test", "update_size", "distance"):
        assert len(run[quantity]["step"]) >= 3
        assert not run[quantity][quantity].isnull().any()
    said = [record.getMessage() for record in caplog.records if "alpha: NaN" in record.getMessage()]
    assert len(said) == 1 and "loss_fn=..." in said[0]


def test_what_is_asked_for_by_hand_is_an_error(tmp_path: Path) -> None:
    make, loss = LOOPS["cross entropy"]
    with pytest.raises(RuntimeError, match=r"Quantities \['alpha'\] need individual losses"):
        train(make(), loss, tmp_path / "a", quantities=[*presets.economy()[1:], Alpha()])
    train(make(), loss, tmp_path / "b", quantities=[*presets.economy(), NormTest(name="twice")])
