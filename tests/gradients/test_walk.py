"""The walk over individual gradients: how often each is formed, in which memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from conv_and_norm import data, network
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from watched_runs import everything

from distcockpit import DistCockpit, every, open_run
from distcockpit import quantities as q
from distcockpit.gradients.convolution import ConvolutionRule

# -- memory ------------------------------------------------------------------------------------------------------------


class Largest(q.Statistic):
    """The largest block, in elements, and the sum of squares."""

    def __init__(self) -> None:
        self.elements, self.squares = 0, 0.0

    def outer(self, name: str, delta: torch.Tensor, x: torch.Tensor, samples: slice) -> None:
        self.block(name, delta.unsqueeze(2) * x.unsqueeze(1), samples)

    def block(self, name: str, gradients: torch.Tensor, samples: slice, part: slice = slice(None)) -> None:
        if "0." in name:
            self.elements = max(self.elements, gradients.numel())
        self.squares += float(gradients.double().square().sum())


class Blocks(q.Quantity):
    """What `Largest` saw."""

    def group(self, model: q.Model) -> q.Group:
        return q.Group({"elements": q.Field(), "squares": q.Field()})

    def statistics(self, step: int, parameters: Any, memory: dict) -> dict:
        return {"largest": Largest()}

    def local(self, batch: q.LocalBatch, memory: dict) -> dict:
        largest = batch.statistics["largest"]
        return {"seen": torch.tensor([largest.elements, largest.squares], dtype=torch.float64)}

    def finalize(self, totals: Any, n: int) -> dict:
        return {"elements": totals["seen"][0], "squares": totals["seen"][1]}


def test_memory_budget_bounds_blocks_and_changes_no_number(tmp_path: Path) -> None:
    per_sample = 4 * 2 * 9 + 4 + (2 * 9) * 16  # weight and bias of the convolution, and what its places see
    seen = {}
    for budget, samples in (("256MiB", 5), (4 * 4 * per_sample * 2, 2), ("1B", 1)):
        net, loss_fn = network(), nn.CrossEntropyLoss()
        x, y = data(0)
        store = tmp_path / f"{samples}"
        options = {"quantities": [Blocks(), q.NormTest()], "schedule": every(1), "memory_budget": budget}
        with DistCockpit(net, loss_fn, store=store, **options) as cockpit, cockpit.track(0):
            loss_fn(cockpit(x), y).backward()
        run = open_run(store)
        assert run["blocks"]["elements"][0] == samples * 4 * 2 * 9
        seen[samples] = float(run["norm_test"]["norm_test"][0]), float(run["blocks"]["squares"][0])
    terms = nn.CrossEntropyLoss(reduction="sum")
    batch = oracle.batch(network(), network().state_dict(), lambda z, t: (terms(z, t), 1.0), *data(0))
    for norm_test, squares in seen.values():
        np.testing.assert_allclose(norm_test, oracle.norm_test(batch), rtol=1e-4)
        np.testing.assert_allclose(squares, seen[5][1], rtol=1e-6)


def test_what_is_formed_once_serves_all_walks(tmp_path: Path, monkeypatch: Any) -> None:
    """Variances, the projection on G, and at the next step that on the update; two micro-batches of unequal size."""
    asked: list[str] = []

    def counted(rule: Any, use: Any, names: Any, values: Any, blocks: Any = ConvolutionRule.blocks) -> Any:
        asked.append(use.layer.path)
        return blocks(rule, use, names, values)

    def counted_jvp(rule: Any, use: Any, direction: Any, jvp: Any = ConvolutionRule.jvp) -> Any:
        asked.append(f"along {use.layer.path}")
        return jvp(rule, use, direction)

    monkeypatch.setattr(ConvolutionRule, "blocks", counted)
    monkeypatch.setattr(ConvolutionRule, "jvp", counted_jvp)
    panel = [q.Alpha(), q.OrthoTest(), q.InnerTest(), q.NormTest(), q.GradHist1d(), q.MeanGSNR()]
    first = 5 * 4 * (4 * 2 * 9 + 4)  # bytes of all individual gradients of the first layer
    update = 4 * (4 * 2 * 9 + 4 + 3 * 4 * 9 + 3 + 3 * 12 + 3)  # bytes of the update, which is kept as well
    rows, calls, enough = {}, {}, 4 * (first + update)
    for budget in ("256MiB", enough, 1):
        torch.manual_seed(0)
        body = [nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 3), nn.Flatten(), nn.Linear(12, 3)]
        net, loss_fn, store = nn.Sequential(*body), nn.CrossEntropyLoss(reduction="sum"), tmp_path / f"{budget}"
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        with DistCockpit(
            net, loss_fn, store=store, quantities=panel, schedule=every(1), memory_budget=budget
        ) as cockpit:
            for step in range(6):
                x, y = data(step)
                optimizer.zero_grad()
                asked.clear()
                with cockpit.track(step):
                    for part in (slice(0, 3), slice(3, 5)):
                        loss_fn(cockpit(x[part]), y[part]).backward()
                optimizer.step()
        calls[budget] = sorted(asked)  # of a step that checks nothing
        run = open_run(store)
        rows[budget] = {p.name: {k: v.values for k, v in run[p.name].items() if k != "wall_time"} for p in panel}
    assert calls["256MiB"] == ["0"] * 2 + ["2"] * 2
    assert calls[enough] == ["0"] * 2 + ["2"] * 2 + ["along 2"] * 4
    assert calls[1] == ["0"] * 2 + ["2"] * 2 + ["along 0"] * 4 + ["along 2"] * 4
    for other in (rows[enough], rows[1]):
        for name, fields in rows["256MiB"].items():
            for key, values in fields.items():
                np.testing.assert_allclose(other[name][key], values, rtol=2e-4, atol=1e-7, err_msg=f"{name}/{key}")


class Sizes(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.largest = max(self.largest, leaf.numel())
        return result


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_nothing_holds_all_individual_gradients(tmp_path: Path, kind: str) -> None:
    """No operation of a tracked step returns as many elements as the largest layer's individual gradients have."""
    torch.manual_seed(0)
    if kind == "linear":
        net, x = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 5)), torch.randn(64, 256)
    else:
        net = nn.Sequential(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 4, 5))
        x = torch.randn(512, 32, 4, 4)  # more than one block
    chosen = [q for q in everything() if q.needs.curvature is None]
    loss_fn, y = nn.CrossEntropyLoss(), torch.arange(len(x)) % 5
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=chosen, schedule=every(1)) as cockpit:
        for step in range(2):
            with Sizes() as sizes, cockpit.track(step):
                loss_fn(net(x), y).backward()
            assert 0 < sizes.largest < len(x) * net[0].weight.numel()
