"""Buckets of parameters: what they hold, and that nothing of a step is larger."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import Ranks
from steps import run_steps
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from train import bucketed

from distcockpit import DistCockpit, every, open_run
from distcockpit import quantities as q
from distcockpit.gradients.factors import WHOLE
from distcockpit.tracking.buckets import BucketWalk
from distcockpit.tracking.setup import FEWEST_ELEMENTS, Bucket, buckets

SHAPES = st.lists(st.one_of(st.just(()), st.tuples(st.integers(1, 9)), st.tuples(st.integers(1, 9), st.integers(1, 9))))


@given(shapes=SHAPES, elements=st.integers(1, 40))
def test_every_element_is_in_one_bucket(shapes: list[tuple[int, ...]], elements: int) -> None:
    parameters = {f"p{k}": torch.arange(int(np.prod(shape))).view(shape) for k, shape in enumerate(shapes)}
    seen: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for bucket in buckets(parameters, elements):
        parts = {
            name: p if (p := parameters[name]).dim() == 0 or rows == WHOLE else p[rows] for name, rows in bucket.items()
        }
        single = all(rows != WHOLE and rows.stop - rows.start == 1 for rows in bucket.values())
        alone = len(bucket) == 1 and (single or all(p.dim() == 0 or len(p) == 1 for p in parts.values()))
        assert sum(p.numel() for p in parts.values()) <= elements or alone
        for name, part in parts.items():
            seen[name].append(part.reshape(-1))
    for name, parts in seen.items():
        assert torch.equal(torch.cat(parts), parameters[name].reshape(-1))
    assert len(buckets(parameters, 10**6)) == 1


class Wide(TorchDispatchMode):
    """The largest float64 tensor that any operation returned."""

    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.dtype == torch.float64:
                self.largest = max(self.largest, leaf.numel())
        return result


class Tied(nn.Module):
    """Four times as many rows as a bucket holds, used as an embedding and as a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.body = nn.Embedding(FEWEST_ELEMENTS // 64, 256), nn.Linear(256, 256)
        nn.init.normal_(self.tokens.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(self.tokens(x))) @ self.tokens.weight.T


def tokens(n: int) -> tuple[Tensor, Tensor]:
    x = torch.randint(1024, (n, 5), generator=torch.Generator().manual_seed(0))
    return x, x.roll(1, 1)


def loss_fn(z: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(z.flatten(0, 1), y.flatten())


CHOSEN = [q.GradNorm(), q.NormTest(), q.InnerTest(), q.OrthoTest(), q.MeanGSNR(), q.RankDisagreement(), q.Alpha()]


def train_wide(
    rank: int, size: int, group: Any, store: str, chosen: list[q.Quantity], shards: list[int], budget: int
) -> int:
    torch.manual_seed(0)
    net = Tied()
    model = net if group is None else DistributedDataParallel(net, process_group=group)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    x, y = (t[sum(shards[:rank]) : sum(shards[: rank + 1])] for t in tokens(sum(shards)))
    options = {"quantities": chosen, "schedule": every(1), "memory_budget": budget}
    with bucketed(1, FEWEST_ELEMENTS), DistCockpit(model, optimizer=optimizer, store=store, **options) as cockpit:
        for step in range(6):
            optimizer.zero_grad()
            with Wide() as wide, cockpit.track(step):
                loss_fn(cockpit(x), y).backward()
            optimizer.step()
    return wide.largest  # of a step that checks nothing


@pytest.mark.parametrize("shards", [[6], [4, 2]], ids=str)
@pytest.mark.parametrize("chosen", [CHOSEN, CHOSEN[:4], CHOSEN[:2]], ids=["all", "projections", "norms"])
@pytest.mark.parametrize("budget", [1, 1 << 28], ids=["forms rows again", "keeps rows"])
def test_no_sum_is_larger_than_its_buckets(
    ranks: Ranks, tmp_path: Path, chosen: list[q.Quantity], shards: list[int], budget: int
) -> None:
    """The whole would be 327,680 elements; vectors of G and of squares are exchanged together."""
    store = str(tmp_path / "run")
    if len(shards) == 1:
        largest = [train_wide(0, 1, None, store, chosen, shards, budget)]
    else:
        largest = ranks.run(2, train_wide, store, chosen, shards, budget)
    assert max(largest) <= 2 * FEWEST_ELEMENTS
    torch.manual_seed(0)
    net = Tied()
    run, (x, y) = open_run(store), tokens(6)

    def terms(z: Tensor, y: Tensor) -> tuple[Tensor, float]:
        return nn.functional.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="sum") / 5, 1.0

    batch = oracle.batch(net, net.state_dict(), terms, x, y)
    np.testing.assert_allclose(run["grad_norm"]["total"][0], np.linalg.norm(batch.flat.mean(0)), rtol=1e-5)
    for name in {"norm_test", "inner_test", "ortho_test"}.intersection(run.children):
        np.testing.assert_allclose(run[name][name][0], getattr(oracle, name)(batch), rtol=1e-4, err_msg=name)
    if chosen is CHOSEN:
        np.testing.assert_allclose(run["mean_gsnr"]["mean_gsnr"][0], oracle.mean_gsnr(batch), rtol=1e-3)
        assert np.isfinite(run["alpha"]["alpha"]).all()
    assert "notices" not in run.attrs  # such as of a slow route, on which the check of gradients would fall back


def order_of_walk(rank: int, size: int, group: Any, store: str) -> str:
    """Of a step that checks nothing: which buckets are begun, and ended."""
    order, begin, end = [], BucketWalk._begin, BucketWalk._end

    def begins(self: BucketWalk, rows: Bucket) -> Any:
        order.append("b")
        return begin(self, rows)

    def ends(self: BucketWalk, begun: Any) -> None:
        order.append("e")
        end(self, begun)

    with mock.patch.object(BucketWalk, "_begin", begins), mock.patch.object(BucketWalk, "_end", ends):
        train_wide(rank, size, group, store, CHOSEN, [3] * size, 1 << 28)
    return "".join(order[-len(order) // 6 :])  # of six steps


def test_the_next_bucket_is_walked_while_ranks_add_up_one(ranks: Ranks, tmp_path: Path) -> None:
    """A single rank adds up nothing, and holds one at a time."""
    assert order_of_walk(0, 1, None, str(tmp_path / "one")) == "be" * 6
    assert ranks.run(2, order_of_walk, str(tmp_path / "two")) == ["bbebebebebee"] * 2


def most_elements(rank: int, size: int, group: Any, store: str, budget: int) -> int:
    asked: list[int] = []

    def deal(parameters: Any, elements: int) -> list[Bucket]:
        asked.append(elements)
        return buckets(parameters, elements)

    net = nn.Linear(2, 2)
    model = net if group is None else DistributedDataParallel(net, process_group=group)
    options = {"quantities": [q.GradNorm()], "schedule": every(1), "memory_budget": budget}
    with mock.patch("distcockpit.tracking.setup.buckets", deal), DistCockpit(model, store=store, **options) as cockpit:
        with cockpit.track(0):
            nn.functional.mse_loss(cockpit(torch.ones(3, 2)), torch.zeros(3, 2)).backward()
    return asked[0]


@pytest.mark.parametrize(
    "budget, most", [(1, FEWEST_ELEMENTS), (1 << 24, 1 << 18), (1 << 28, 1 << 22), (1 << 40, 1 << 22)]
)
def test_eight_vectors_of_the_buckets_fit_into_the_budget(ranks: Ranks, tmp_path: Path, budget: int, most: int) -> None:
    """In float64; of the two that are there where several ranks add them up."""
    assert most_elements(0, 1, None, str(tmp_path / "one"), budget) == most
    assert ranks.run(2, most_elements, str(tmp_path / "two"), budget) == [max(most // 2, FEWEST_ELEMENTS)] * 2


def test_ranks_without_memory_for_copies_sum_up_themselves(ranks: Ranks, tmp_path: Path) -> None:
    """DDP averages what arrives, and copies of it do not fit: G is summed from the calls, a sample at a time."""
    store, net, (x, y) = str(tmp_path / "run"), Tied(), tokens(6)
    ranks.run(2, train_wide, store, [q.GradNorm(), q.RankDisagreement()], [4, 2], 1)
    torch.manual_seed(0)
    net = Tied()
    grads = torch.autograd.grad(loss_fn(net(x), y), list(net.parameters()))
    run = open_run(store)
    np.testing.assert_allclose(run["grad_norm"]["grad_norm"][0], [float(g.double().norm()) for g in grads], rtol=1e-5)
    parts = [torch.autograd.grad(loss_fn(net(x[a:b]), y[a:b]), list(net.parameters())) for a, b in ((0, 4), (4, 6))]
    norms = [float(torch.cat([g.flatten() for g in part]).double().norm()) for part in parts]
    np.testing.assert_allclose(run["rank_disagreement"]["grad_norm"][0], norms, rtol=1e-5)
    assert "notices" not in run.attrs


@dataclass(frozen=True, kw_only=True)
class Fails(q.Quantity):
    """Its `reduce` fails at one step."""

    @property
    def needs(self) -> q.Needs:
        return q.Needs(bucket_sums=True)

    def group(self, model: q.Model) -> q.Group:
        return q.Group({"largest": q.Field(), "same": q.Field()})

    def reduce(self, bucket: q.BucketSums, memory: dict[str, Any]) -> dict[str, Tensor]:
        if bucket.step == 2:
            raise ValueError("not at this step")
        return {"squares": bucket.mean_squared.sum()}

    def local(self, batch: q.LocalBatch, memory: dict[str, Any]) -> dict[str, Any]:
        return {"squares": batch.reduced["squares"] / batch.world_size, "same": batch.replicated(1.0)}

    def finalize(self, totals: Any, n: int) -> dict[str, Any]:
        return {"largest": totals["squares"], "same": totals["same"]}


def test_a_reduction_that_fails_costs_its_row_alone(tmp_path: Path) -> None:
    net, data = nn.Linear(4, 3), (torch.randn(6, 4), torch.arange(6) % 3)
    done = run_steps(tmp_path / "run", net, data, 5, loss_fn=nn.CrossEntropyLoss(), quantities=[Fails(), q.GradNorm()])
    row, norm = done.run["fails"], done.run["grad_norm"]["total"].values
    assert np.isnan(row["largest"].values).tolist() == [False, False, True, False, False]
    assert np.isnan(row["same"].values).tolist() == [False, False, True, False, False]
    np.testing.assert_allclose(row["largest"].values[[0, 1, 3, 4]], norm[[0, 1, 3, 4]] ** 2, rtol=1e-6)
    assert np.isfinite(norm).all() and "not at this step" in done.run.attrs["notices"][0]["text"]


class Teacher(nn.Module):
    """A part that is not trained, but follows the other, and a function of both that is run again by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4, 3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,io->bo", x, self.own * self.other)


def test_a_part_that_is_not_trained_but_changes(tmp_path: Path) -> None:
    """It is not copied at first: one row of alpha says so, and from then on it is."""
    torch.manual_seed(0)
    net, data, loss_fn = Teacher(), (torch.randn(6, 4), torch.arange(6) % 3), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD([net.own], lr=0.1)

    def then(step: int, cockpit: DistCockpit) -> None:
        with torch.no_grad():
            net.other.lerp_(net.own, 0.1)

    done = run_steps(
        tmp_path / "run", net, data, 6, loss_fn=loss_fn, optimizer=optimizer, quantities=[q.Alpha()], then=then
    )
    row = done.run["alpha"]
    names = row["status"].attrs["flag_meanings"].split()
    assert [names[k] == "inputs_changed" for k in row["status"].values] == [True, False, False, False, False]
    for step in range(1, 5):
        net.load_state_dict(done.states[step])
        (g,) = torch.autograd.grad(loss_fn(net(data[0]), data[1]), [net.own])
        d = done.states[step + 1]["own"] - done.states[step]["own"]
        np.testing.assert_allclose(row["slope_start"][step], float((g * d).sum() / d.norm()), rtol=1e-4)
