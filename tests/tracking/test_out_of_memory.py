"""Memory runs out in the cockpit's own work, at any allocation: the training does not notice, and one row is lost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from allocator import Allocator
from ranks import Ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from train import bucketed, fully_sharded

from distcockpit import DistCockpit, every, open_run, presets
from distcockpit import quantities as q
from distcockpit.quantities.alpha import STATUS
from distcockpit.shards import local

FIRST, CHECKING = 4, 3
"""When memory first runs out: not at the first steps, where users hear of everything; a step that checks itself."""

EVERY_ONE = "DISTCOCKPIT_EVERY_ALLOCATION" in os.environ  # see .ci/allocations


class Words(nn.Module):
    """An embedding, positions that are a parameter, a norm, and two linear layers on sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(7, 4), nn.Parameter(torch.ones(3, 4))
        self.first, self.norm, self.last = nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(self.tokens(x) + self.positions).relu())).mean(1)


def chosen(what: str) -> list[q.Quantity]:
    if what.startswith("economy"):
        return presets.economy()
    return [q.Alpha(), q.MeanGSNR(), q.NormTest(), q.UpdateSize(), q.OutputNorm(), q.GradHist2d()]


def train(
    rank: int, size: int, group: Any, store: str, what: str, steps: int, failing: dict[int, int]
) -> tuple[list[Tensor], list[int]]:
    """Train; return the parameters at the end, and how many allocations each step made.

    Args:
        rank: The rank; the last one has no memory.
        size: The number of ranks.
        group: The group, or ``None``.
        store: The store.
        what: The quantities.
        steps: How many.
        failing: By step: at which allocation there is no memory; these are the steps whose allocations are counted.
    """
    torch.manual_seed(0)
    net = Words()
    if "sharded" in what:
        model = fully_sharded(net, "leaves" if "economy" in what else "root", group)
    else:
        model = net if group is None else DistributedDataParallel(net, process_group=group)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(1 + rank)
    loss_fn, counts = nn.CrossEntropyLoss(), []
    options = {"quantities": chosen(what), "schedule": every(1), "process_group": group}
    buckets = bucketed(1, 20 if "buckets" in what else 0)
    with buckets, DistCockpit(model, loss_fn, optimizer, store=store, **options) as cockpit:
        for step in range(steps):
            x, y = (torch.randint(7, shape, generator=generator) for shape in ((3, 3), (3,)))
            optimizer.zero_grad()
            fails = failing.get(step) if rank == size - 1 else None
            allocator = Allocator(-1 if fails is None else fails)
            with nullcontext() if fails is None else allocator, cockpit.track(step):
                loss_fn(cockpit(x), y).backward()
            optimizer.step()
            counts.append(allocator.count)
    return [local(p).clone() for p in net.parameters()], counts


def compare(store: Path, expected: Path, spoilt: set[int]) -> Iterator[str]:
    """Name what differs between the rows of two runs, except those that may be lost."""
    here, there = open_run(store).load(), open_run(expected).load()
    for name in there.children:
        if name == "log":
            continue
        mine, theirs = here[name].to_dataset(), there[name].to_dataset()
        lost = set(theirs["step"].values.tolist()) - set(mine["step"].values.tolist())
        if lost - spoilt:
            yield f"{name}: no rows at {sorted(lost - spoilt)[:5]}"
        steps = [s for s in theirs["step"].values.tolist() if s not in spoilt and s not in lost]
        for field in theirs.data_vars:
            a, b = (np.asarray(each[field].sel(step=steps).values, dtype=object) for each in (mine, theirs))
            if theirs[field].dtype.kind == "f" and "seconds" not in str(field):
                a, b = a.astype(float), b.astype(float)
                if not np.allclose(a, b, rtol=1e-5, atol=1e-7, equal_nan=True):
                    yield f"{name}/{field}"


def run(ranks: Ranks, size: int, *arguments: Any) -> list[tuple[list[Tensor], list[int]]]:
    return [train(0, 1, None, *arguments)] if size == 1 else ranks.run(size, train, *arguments)


def check(ranks: Ranks, size: int, folder: Path, what: str, steps: int, failing: dict[int, int]) -> None:
    """The training is that without faults, and so are the rows of all other steps."""
    plain, failed = str(folder / "plain"), str(folder / "failed")
    found = run(ranks, size, failed, what, steps, failing)
    expected = run(ranks, size, plain, what, steps, {}) if not Path(plain).exists() else None
    for (mine, _), (theirs, _) in zip(found, expected or found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    # A failure may cost the end of the update that began the step before.
    spoilt = failing.keys() | {step - 1 for step in failing}
    assert list(compare(Path(failed), Path(plain), set(spoilt))) == [], failing if len(failing) < 9 else ""


@pytest.mark.parametrize(
    "what, size, every_so_many",
    [
        ("economy", 1, 1),
        ("economy", 2, 4),
        ("named", 2, 4),
        ("named, buckets of 20", 2, 37),  # while memory runs out, sums of another bucket are on their way
        ("economy, sharded", 2, 9),
        ("named, sharded", 2, 9),
    ],
)
def test_any_allocation_of_a_step(ranks: Ranks, tmp_path: Path, what: str, size: int, every_so_many: int) -> None:
    """Every second step has no memory at a later allocation, so that the next one shows that all goes on."""
    n = run(ranks, size, str(tmp_path / "first"), what, FIRST + 1, {FIRST: -1})[-1][1][FIRST]
    assert n > 100
    failing = {FIRST + 2 * i: k for i, k in enumerate(range(0, n, 1 if EVERY_ONE else every_so_many))}
    check(ranks, size, tmp_path, what, FIRST + 2 * len(failing), failing)
    stored = open_run(tmp_path / "failed").load()
    alpha = stored["alpha"].to_dataset()
    assert not (alpha["status"] == STATUS.index("failed")).any()
    lost = alpha.where(alpha["status"] == STATUS.index("out_of_memory"), drop=True)
    assert len(lost["step"]) and lost["alpha"].isnull().all()
    texts = " ".join(notice["text"] for notice in stored.attrs["notices"])
    assert "is lost" not in texts
    assert ("out of memory (no memory at allocation" if size == 1 else "Rank 1 could not finish") in texts


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_that_checks_itself(ranks: Ranks, tmp_path: Path, size: int) -> None:
    """The same at the fourth tracked step, with its second passes: some allocations, each in a run of its own."""
    counts = run(ranks, size, str(tmp_path / "plain"), "economy", FIRST + 3, {CHECKING: -1, FIRST: -1})[-1][1]
    assert counts[CHECKING] > 2 * counts[FIRST]
    for k in range(0, counts[CHECKING], 1 if EVERY_ONE else counts[CHECKING] // 8):
        check(ranks, size, tmp_path, "economy", FIRST + 3, {CHECKING: k})
        shutil.rmtree(tmp_path / "failed")


class Largest(q.Quantity, q.Statistic):
    """The largest block of individual gradients that each step formed; at one step there is no memory for it."""

    sizes: ClassVar[list[int]] = []

    def group(self, model: q.Model) -> q.Group:
        return q.Group({"largest": q.Field()})

    def statistics(self, step: int, parameters: Any, memory: dict) -> dict:
        self.sizes.append(0)
        return {"blocks": self}

    def outer(self, *args: Any) -> None:
        pass

    def block(self, name: str, gradients: Tensor, samples: slice, part: slice = slice(None)) -> None:
        if len(self.sizes) == FIRST:
            raise MemoryError("no memory for a block")
        self.sizes[-1] = max(self.sizes[-1], gradients.numel())

    def local(self, batch: q.LocalBatch, memory: dict) -> dict:
        return {"largest": 0.0}

    def finalize(self, totals: Any, n: int) -> dict:
        return {"largest": totals["largest"]}


def test_blocks_are_half_as_large_from_then_on(tmp_path: Path) -> None:
    Largest.sizes.clear()
    net = nn.Linear(64, 64, bias=False)
    with DistCockpit(net, store=tmp_path, quantities=[Largest()], schedule=every(1), memory_budget=1 << 18) as cockpit:
        for step in range(FIRST + 2):
            with cockpit.track(step):
                cockpit(torch.randn(8, 3, 64)).square().sum((1, 2)).mean().backward()
    before, (failed, *after) = Largest.sizes[: FIRST - 1], Largest.sizes[FIRST - 1 :]
    assert failed == 0 and set(before) == {1 << 14} and set(after) == {1 << 13}
    rows = open_run(tmp_path)["largest"]["largest"]
    assert rows.isnull().values.tolist() == [step == FIRST - 1 for step in range(FIRST + 2)]
