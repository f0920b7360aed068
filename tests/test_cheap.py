"""What a step costs is not timed here: it is shown by what happens, and by what does not."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from ranks import Ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from train import everything
from waiting import HANG

from distcockpit import DistCockpit, StoreOptions, every, open_run, presets
from distcockpit import quantities as q
from distcockpit.gradients import kernels
from distcockpit.gradients.convolution import ConvolutionRule
from distcockpit.store.keys import FolderKeys
from distcockpit.world import HEADER

# What makes the host wait for a device: a value is read, or the shape of a result depends on values.
WAITS = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "_unique", "unique_", "bincount", "equal")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 6), nn.LayerNorm(6), nn.Linear(6, 3)
    )


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(5, 2, 4, 4, generator=generator), torch.randint(3, (5,), generator=generator)


class Operations(TorchDispatchMode):
    """The operations of torch on this thread, and what of them waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    @property
    def waits(self) -> list[str]:
        return [name for name in self.names if name.startswith(WAITS)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def without_waiting() -> list[q.Quantity]:
    """All but the curvature, whose programs are BackPACK's and ARPACK's."""
    needs = ("curvature", "trace", "eigenvalue")
    chosen = [quantity for quantity in everything() if not any(getattr(quantity.needs, need) for need in needs)]
    return [*chosen, q.GradHist1d(name="adapted", adapt=q.GradAbsMax())]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("names", [None, ["InnerTest", "GradNorm"], ["NormTest", "GradNorm"]])
def test_no_wait_for_the_device_inside_track(tmp_path: Path, monkeypatch: Any, names: list[str] | None) -> None:
    monkeypatch.setattr(kernels, "numba_cpu", None)  # what runs on an accelerator
    chosen = [quantity for quantity in without_waiting() if names is None or type(quantity).__name__ in names]
    net, loss_fn = network(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen = {}
    with DistCockpit(net, loss_fn, optimizer, store=tmp_path / "r", quantities=chosen, schedule=every(1)) as cockpit:
        for step in range(7):
            x, y = data(step)
            with Operations() as operations, cockpit.track(step):
                loss_fn(cockpit(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen[step] = operations.waits
            assert operations.names
    assert seen[3]  # a step that checks everything reads its verdict, so the test can see a wait
    verdict = ["nonzero"] if names and "NormTest" in names else []  # on the rounding of sums, which all ranks need
    assert seen[2] == seen[4] == seen[5] == seen[6] == verdict, seen
    assert open_run(tmp_path / "r")["grad_norm"].sizes["step"] == 7


def test_an_untracked_step_does_nothing(tmp_path: Path) -> None:
    def operations(cockpit: DistCockpit, net: nn.Module, step: int) -> tuple[list[str], int]:
        x, y = data(step)
        hooks = 0
        with Operations() as seen, cockpit.track(step):
            loss = loss_fn(cockpit(x), y)
            for module in net.modules():
                hooks += len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
            hooks += sum(len(p._backward_hooks or ()) for p in net.parameters())
            loss.backward()
        return seen.names, hooks

    options = {"quantities": presets.economy(), "schedule": every(4)}
    net, off, loss_fn = network(), network(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with (
        DistCockpit(off, store="", enabled=False) as nothing,
        DistCockpit(net, loss_fn, optimizer, store=tmp_path / "r", **options) as cockpit,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        for step in range(4):
            with_it, hooks = operations(cockpit, net, step)
            without, none = operations(nothing, off, step)
            assert none == 0
            if step < 2:  # the step itself, and the end of alpha's update
                assert hooks > 0 and len(with_it) > len(without)
            else:
                assert hooks == 0 and with_it == without


def test_training_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: Any) -> None:
    """The store hangs until the training is over: it would never be over if `track` waited for it."""
    net, loss_fn, steps = network(), nn.CrossEntropyLoss(), 30
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    is_over, waited, put = threading.Event(), [], FolderKeys.put

    def hangs(self: FolderKeys, items: Any) -> None:
        waited.append(is_over.wait(HANG))
        put(self, items)

    options = {"quantities": "economy", "schedule": every(1), "store_options": StoreOptions(flush_seconds=1e-3)}
    with DistCockpit(net, loss_fn, optimizer, store=tmp_path / "r", **options) as cockpit:
        monkeypatch.setattr(FolderKeys, "put", hangs)
        for step in range(steps):
            x, y = data(step)
            with cockpit.track(step):
                loss_fn(cockpit(x), y).backward()
            optimizer.step()
        is_over.set()
    assert waited and all(waited)
    assert open_run(tmp_path / "r")["grad_norm"].sizes["step"] == steps


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
    for budget, samples in (("256MiB", 5), (4 * per_sample * 2, 2), ("1B", 1)):
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
    rows, calls, first = {}, {}, 5 * 4 * (4 * 2 * 9 + 4)  # bytes of all individual gradients of the first layer
    for budget in ("256MiB", first, 1):
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
    assert calls[first] == ["0"] * 2 + ["2"] * 2 + ["along 2"] * 4
    assert calls[1] == ["0"] * 2 + ["2"] * 2 + ["along 0"] * 4 + ["along 2"] * 4
    for other in (rows[first], rows[1]):
        for name, fields in rows["256MiB"].items():
            for key, values in fields.items():
                np.testing.assert_allclose(other[name][key], values, rtol=2e-4, atol=1e-7, err_msg=f"{name}/{key}")


@pytest.mark.parametrize("budget", ["", "lots", "-1MiB", 0, -5, "0", "12XB", "1e9"])
def test_a_budget_that_is_none(tmp_path: Path, budget: Any) -> None:
    with pytest.raises(ValueError, match="memory_budget=.*must be a positive number of bytes, or a string"):
        DistCockpit(network(), nn.CrossEntropyLoss(), store=tmp_path / "r", memory_budget=budget)


@pytest.mark.parametrize("budget", [None, True, 1.5])
def test_a_budget_of_another_kind(tmp_path: Path, budget: Any) -> None:
    with pytest.raises(TypeError, match="memory_budget=.*must be a positive number of bytes, or a string"):
        DistCockpit(network(), nn.CrossEntropyLoss(), store=tmp_path / "r", memory_budget=budget)


# -- traffic -----------------------------------------------------------------------------------------------------------


def exchange(rank: int, size: int, group: Any, store: str) -> None:
    net, loss_fn = network(), nn.CrossEntropyLoss()
    ddp = DistributedDataParallel(net, process_group=group)
    options = {"quantities": [q.Time(), q.NormTest()], "schedule": every(1)}
    with DistCockpit(ddp, loss_fn, store=store, **options) as cockpit:
        for step in range(3):
            x, y = data(step)
            with cockpit.track(step):
                loss_fn(cockpit(x), y).backward()


def test_bytes_are_counted(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, exchange, str(tmp_path / "r"))
    row = open_run(tmp_path / "r")["time"]
    sizes = [p.numel() for p in network().parameters()]
    header, parameters = len(HEADER), sum(sizes) + 3 * len(sizes)  # the sums, and what bounds their rounding
    sums = 1  # sum of the norms; what all ranks know is not sent
    assert list(row["exchanges"].values) == [2, 4, 3]  # once: a header before the names of the sums are compared
    numbers = [header + parameters, header + sums + header + parameters, sums + header + parameters]
    assert list(row["exchanged_bytes"].values) == [8 * n for n in numbers]
