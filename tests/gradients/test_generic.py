"""Calls that are run again, a few samples at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import architectures
import cases
import numpy as np
import oracle
import pytest
import torch
from own_quantities import Moments
from steps import run_steps
from torch import Tensor, nn

from distcockpit import DistCockpit, every, open_run
from distcockpit.gradients import parts
from distcockpit.quantities import NormTest


class DroppingAttention(nn.Module):
    """Attention with dropout: a layer of the generic rule that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(12, 2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack([x, -x, x.roll(1, 1)], 1)
        return self.head(torch.dropout(self.attend(x, x, x)[0].mean(1), 0.3, self.training))


class Notes:
    """Batch sizes; no list, so that it is not among what replays restore."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.whole_only = False


class Gated(nn.Module):
    """A parameter of its own, attention with another layout, and random numbers."""

    def __init__(self, gate: str, can_be_mapped: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.3)
        self.gate, self.can_be_mapped, self.notes = gate, can_be_mapped, Notes()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.notes.sizes.append(len(x))
        if not self.can_be_mapped:
            float(x.detach().sum())  # which `vmap` does not allow
        if self.notes.whole_only and len(x) < 19:
            if self.gate == "later":
                raise ValueError("not a part of the batch")
            x = 2 * x
        z = (
            torch.cat([x.flatten(0, 1)]) * self.scale
        )  # a call whose rows are no samples, and nothing tells whose they are
        z = z.view_as(x).transpose(0, 1)
        z = self.attention(z, z, z, need_weights=False)[0].transpose(0, 1)
        if self.gate == "noise":
            return z * torch.rand(len(x), 1, 6, dtype=x.dtype)
        if self.gate == "size of the batch":
            return z * len(x)
        return nn.functional.dropout(z, 0.4, self.training)


@pytest.mark.parametrize("can_be_mapped", [True, False], ids=["mapped", "in parts"])
@pytest.mark.parametrize("gate", ["dropout", "noise", "size of the batch", "later", "later, silently"])
def test_a_few_samples_at_a_time(tmp_path: Path, gate: str, can_be_mapped: bool) -> None:
    """Single samples, or parts, get the batch's random numbers; what depends on the size of the batch is not cut."""
    torch.manual_seed(0)
    n, gated, expected, sizes = 19, Gated(gate, can_be_mapped).double(), [], []
    net = nn.Sequential(gated, nn.Flatten(), nn.Linear(24, 5)).double()
    x, y, loss_fn = torch.randn(n, 4, 6, dtype=torch.float64), torch.arange(n) % 5, nn.CrossEntropyLoss()
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=[Moments()], schedule=every(1)) as cockpit:
        for step in range(10):
            torch.manual_seed(step)
            losses = nn.functional.cross_entropy(net(x), y, reduction="none")
            after = torch.rand(3)
            rows = [torch.autograd.grad(loss, list(net.parameters()), retain_graph=True) for loss in losses]
            expected.append([sum(row[k].square().sum() for row in rows) / n for k in range(len(rows[0]))])
            torch.manual_seed(step)
            gated.notes.sizes = []
            gated.notes.whole_only = gate.startswith("later") and step > 4
            with cockpit.track(step):
                loss_fn(cockpit(x), y).backward()
            sizes.append(gated.notes.sizes)
            gated.notes.sizes = []
            assert torch.equal(torch.rand(3), after), "the random numbers of the run are others"
    # The training, what is drawn and comes out, the parts. Some calls ask whether that works.
    parts_of = [1] if can_be_mapped else [8, 8, 3]
    usual = {"size of the batch": [n, n], "later": [n, n, parts_of[0], n]}.get(gate, [n, n, *parts_of])
    assert usual in sizes, sizes
    found = open_run(tmp_path / "run")["moments"]["mean_of"].values
    unknown = np.isnan(found[:, 0])  # that of the scale, where a part is not what it is in the whole batch
    assert unknown.any() == (gate == "later, silently") and not unknown[:2].any() and not np.isnan(found[:, 1:]).any()
    expected = np.array(expected)
    np.testing.assert_allclose(found[~unknown], expected[~unknown], rtol=1e-9)
    np.testing.assert_allclose(found[:, 1:], expected[:, 1:], rtol=1e-9)


@pytest.mark.smoke
def test_what_a_hook_keeps_can_be_used(tmp_path: Path) -> None:
    """Layers are run again after the step, and the user's hooks with them: what these keep are ordinary tensors."""
    torch.manual_seed(0)
    kept: dict[str, torch.Tensor] = {}
    net = nn.Sequential(architectures.Net(architectures.Attention(), 24))
    attention = net[0].body.attend
    attention.register_forward_hook(lambda module, args, output: kept.update(output=output[0]))
    loss_fn, x, y = nn.CrossEntropyLoss(), torch.randn(12, 4, 6), torch.arange(12) % 5
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=[Moments()], schedule=every(1)) as cockpit:
        for step in range(3):
            with cockpit.track(step):
                loss_fn(cockpit(x), y).backward()
            assert kept["output"].detach().square().mean().item() > 0 and len(str(kept["output"])) > 100


def test_parts_do_not_depend_on_what_is_asked_for() -> None:
    """What is known of a part holds for every sample in it, also where one sample at a time is asked for."""
    assert parts.pieces(slice(0, 19), 19) == [slice(0, 8), slice(8, 16), slice(16, 19)]
    assert parts.pieces(slice(9, 10), 19) == [slice(8, 16)] and parts.pieces(slice(15, 17), 19)[1] == slice(16, 19)


def test_which_rows_agree() -> None:
    nan, inf = torch.nan, torch.inf
    expected = {0: torch.tensor([1.0, nan, inf, 1000.0, 1.0]), 2: torch.ones(5, 2, 3)}
    found = {0: torch.tensor([1.1, nan, inf, 1000.5, nan]), 2: torch.ones(5, 2, 3)}
    assert parts.rows_agree(found, expected, slice(0, 5), 1e-3).tolist() == [True, True, True, True, False]
    found[2][3, 1, 1] = 2.0
    assert parts.rows_agree(found, expected, slice(0, 5), 1e-3).tolist() == [True, True, True, False, False]
    assert parts.rows_agree({0: torch.ones(3, 0)}, {0: torch.ones(3, 0)}, slice(0, 3), 1e-3).all()


class Counting(torch.autograd.Function):
    """Multiplies by the number of rows, where ``counts`` is true: 1 for the whole batch, less for parts of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, counts: bool) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.factor = len(x) / 12 if counts else 1.0
        return ctx.factor * x @ w

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        return ctx.factor * delta @ w.T, ctx.factor * x.T @ delta, None


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.counts = nn.Parameter(torch.randn(4, 3)), False

    def forward(self, x: Tensor) -> Tensor:
        return Counting.apply(x, self.w, self.counts)


def test_a_module_that_treats_parts_differently_from_some_step_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x, y = nn.Sequential(Counts()), torch.randn(12, 4), torch.arange(12) % 3
    batch = oracle.batch(net, net.state_dict(), cases.LOSSES["mean"].terms, x, y)

    def before(step: int) -> None:
        net[0].counts = step >= 3

    done = run_steps(
        tmp_path / "run", net, (x, y), 9, loss_fn=nn.CrossEntropyLoss(), quantities=[NormTest()], before=before
    )
    rows = done.run["norm_test"]["norm_test"].values
    right = [0, 1, 2, 4, 5, 6, 7, 8]  # at step 3 rows of parts are not those of the whole; at step 4 all is checked
    np.testing.assert_allclose(rows[right], oracle.norm_test(batch), rtol=1e-5)
    assert np.isnan(rows[3])
    (notice,) = done.run.attrs["notices"]
    assert notice["step"] == 4 and "no longer treats parts of a batch the same" in notice["text"]
