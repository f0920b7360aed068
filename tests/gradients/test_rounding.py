"""Small variances: sums that are rounded to float32 are seen, and summed up again on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distcockpit import DistCockpit, every, open_run
from distcockpit import quantities as q
from distcockpit.gradients.factors import PRODUCTS, Factors, Occurrences, grams
from distcockpit.gradients.rounding import STEPS_IN_DOUBT, RoundedNorms, Verdict
from distcockpit.gradients.statistics import GradientSum
from distcockpit.tracking import buckets, setup

N, LENGTH, NAMES = 24, 4, ("norm_test", "inner_test", "ortho_test")


def noisy(noise: float) -> Tensor:
    """Sequences, all alike but for this."""
    generator = torch.Generator().manual_seed(0)
    return 100 * (1 + noise * torch.randn(N, LENGTH, 6, generator=generator))


class Net(nn.Module):
    """Positive outputs, so that the gradient of their mean is linear in the input."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = scale
        self.wide = nn.Linear(6, 30, bias=False)
        self.flat = nn.Linear(6, 30, bias=False)  # whose sums are always exact
        nn.init.uniform_(self.wide.weight, 0.1, 1)
        nn.init.uniform_(self.flat.weight, 0.1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (self.wide(x) + self.flat(x[:, 0])[:, None])


def train_three_steps(
    rank: int,
    size: int,
    group: Any,
    store: str,
    noise: float,
    shards: list[int],
    fails: str = "",
    scale: float = 1.0,
    steps: int = 3,
    at_first: list[int] | None = None,
) -> dict[str, Any]:
    """Tracked steps; which parameters were summed up again, and what an error said."""
    x, again, said = noisy(noise), [], "nothing"
    net, loss_fn = Net(scale), nn.L1Loss()
    model = net if group is None else DistributedDataParallel(net, process_group=group)
    original, original_walk = buckets.BucketWalk.sum_exactly, buckets.walk
    is_again = False

    def sum_exactly(self: buckets.BucketWalk, name: str, *args: Any) -> None:
        nonlocal is_again
        again.append([name])
        is_again = True
        original(self, name, *args)
        is_again = False

    def walk(batches: Any, values: Any, names: list[str], *args: Any) -> int:
        if rank == 1 and {"before": True, "meanwhile": is_again, "later": names == ["flat.weight"]}.get(fails):
            raise MemoryError("no memory for blocks")
        return original_walk(batches, values, names, *args)

    buckets.BucketWalk.sum_exactly, buckets.walk = sum_exactly, walk
    original_buckets = setup.buckets
    if fails == "later":
        setup.buckets = lambda parameters, _: [{name: slice(None)} for name in parameters]
    chosen = [q.NormTest(), q.InnerTest(), q.OrthoTest(), q.GradientNoiseScale(), q.RankDisagreement()]
    cockpit = DistCockpit(model, loss_fn, store=store, quantities=chosen, schedule=every(1))
    try:
        for step in range(steps):  # the third one checks nothing
            split = at_first if at_first and not step else shards
            mine = x[sum(split[:rank]) : sum(split[: rank + 1])]
            with cockpit.track(step):
                loss_fn(cockpit(mine), torch.zeros(len(mine), LENGTH, 30)).backward()
    except (MemoryError, RuntimeError) as error:
        said = str(error)
    else:
        cockpit.close()
    finally:
        buckets.BucketWalk.sum_exactly, buckets.walk = original, original_walk
        setup.buckets = original_buckets
    return {"again": again, "said": said}


def the_batch(noise: float, scale: float = 1.0) -> oracle.Batch:
    x = noisy(noise)
    net = Net(scale)

    def terms(z: Tensor, y: Tensor) -> tuple[Tensor, float]:
        return (z - y).abs().sum() / (LENGTH * 30), 1.0

    return oracle.batch(net, dict(net.state_dict()), terms, x, torch.zeros(N, LENGTH, 30))


def compare(store: Path, noise: float, shards: list[int], scale: float = 1.0) -> None:
    batch, run = the_batch(noise, scale), open_run(store)
    for name in NAMES:
        np.testing.assert_allclose(run[name][name], getattr(oracle, name)(batch), rtol=2e-3, err_msg=name)
    noise_scale = run["gradient_noise_scale"]["noise"]
    np.testing.assert_allclose(noise_scale, oracle.noise_scale(batch)[0], rtol=2e-3)
    norms = [norm for norm, *_ in oracle.rank_disagreement(batch, shards)]
    np.testing.assert_allclose(run["rank_disagreement"]["grad_norm"][1], norms, rtol=1e-5)


@pytest.mark.parametrize("noise, is_lost", [(3.0, False), (1e-2, True), (1e-4, True)])
def test_a_small_variance_is_summed_up_again(tmp_path: Path, noise: float, is_lost: bool) -> None:
    done = train_three_steps(0, 1, None, str(tmp_path / "run"), noise, [N])
    # Matrices in float64 do not do either, since the sum is lost: the third step begins with sums in float64.
    assert done == {"again": [["wide.weight"]] * 2 * is_lost, "said": "nothing"}
    compare(tmp_path / "run", noise, [N])


@pytest.mark.parametrize("noise, is_lost", [(3.0, False), (1e-4, True)])
@pytest.mark.parametrize("shards", [[9, 15], [1, 0, 20, 3]], ids=str)
def test_all_ranks_sum_up_again(ranks: Ranks, tmp_path: Path, noise: float, is_lost: bool, shards: list[int]) -> None:
    done = ranks.run(len(shards), train_three_steps, str(tmp_path / "run"), noise, shards)
    assert done == [{"again": [["wide.weight"]] * 2 * is_lost, "said": "nothing"}] * len(shards)
    compare(tmp_path / "run", noise, shards)


@pytest.mark.parametrize("fails", ["before", "meanwhile", "later"])
def test_a_rank_that_fails_leaves_nobody_waiting(ranks: Ranks, tmp_path: Path, fails: str) -> None:
    """Before the sums are pooled, others get NaN from it, which must not tell them to pool once more."""
    done = ranks.run(2, train_three_steps, str(tmp_path / "run"), 1e-4, [9, 15], fails)
    assert done[1]["said"] == "no memory for blocks"
    assert "Rank 1 could not finish" in done[0]["said"]
    ranks.stop(kill=True)


@pytest.mark.parametrize("scale", [1e-19, 1e24])
def test_gram_matrices_out_of_range_are_taken_again(tmp_path: Path, scale: float) -> None:
    """Squares of output gradients in float32 are subnormal, or infinite; the gradients are neither."""
    done = train_three_steps(0, 1, None, str(tmp_path / "run"), 3.0, [N], "", scale)
    assert done == {"again": [["wide.weight"]], "said": "nothing"}  # from then on, matrices are in float64
    compare(tmp_path / "run", 3.0, [N], scale)


def test_a_rank_without_samples_doubts_with_the_others(ranks: Ranks, tmp_path: Path) -> None:
    """At the step at which float32 does not do, it has none; at the next one, all have matrices in float64."""
    arguments = str(tmp_path / "run"), 3.0, [9, 15], "", 1e24, 3, [N, 0]
    done = ranks.run(2, train_three_steps, *arguments)
    assert done == [{"again": [["wide.weight"]], "said": "nothing"}] * 2
    compare(tmp_path / "run", 3.0, [9, 15], 1e24)


def test_autograds_sums_are_tried_again(tmp_path: Path) -> None:
    """Once after the steps that do without them: of the first two, the second has matrices in float64."""
    done = train_three_steps(0, 1, None, str(tmp_path / "run"), 1e-2, [N], steps=2 + STEPS_IN_DOUBT + 1)
    assert done == {"again": [["wide.weight"]] * 3, "said": "nothing"}


def train_with_noises(rank: int, size: int, group: Any, store: str, noises: list[float], shards: list[int]) -> Any:
    """One tracked step for each; which parameters had matrices in float64 from the beginning."""
    net, loss_fn, in_double = Net(1.0), nn.L1Loss(), []
    model = net if group is None else DistributedDataParallel(net, process_group=group)

    class Spied(RoundedNorms):
        def __init__(self, parameters: Any, sources: Any, doubted: Any) -> None:
            super().__init__(parameters, sources, doubted)
            in_double.append(sorted(doubted))

    original = buckets.RoundedNorms
    buckets.RoundedNorms = Spied
    cockpit = DistCockpit(model, loss_fn, store=store, quantities=[q.NormTest()], schedule=every(1))
    try:
        for step, noise in enumerate(noises):
            mine = noisy(noise)[sum(shards[:rank]) : sum(shards[: rank + 1])]
            with cockpit.track(step):
                loss_fn(cockpit(mine), torch.zeros(len(mine), LENGTH, 30)).backward()
    finally:
        buckets.RoundedNorms = original
        cockpit.close()
    return in_double


@pytest.mark.parametrize("shards", [[9, 15], [24, 0]], ids=str)
def test_float64_ends_when_the_variance_has_grown(ranks: Ranks, tmp_path: Path, shards: list[int]) -> None:
    """Not after some steps: as long as it is small, float32 would only have to be taken again."""
    noises = [*[0.1] * (STEPS_IN_DOUBT + 3), 3.0, 3.0, 0.1, 3.0]
    ends = len(noises) - 3
    done = ranks.run(2, train_with_noises, str(tmp_path / "run"), noises, shards)
    wide = ["wide.weight"]
    assert done == [[[], *[wide] * (ends - 1), [], [], wide]] * 2
    expected = {noise: oracle.norm_test(the_batch(noise)) for noise in set(noises)}
    found = open_run(tmp_path / "run")["norm_test"]["norm_test"]
    np.testing.assert_allclose(found, [expected[noise] for noise in noises], rtol=1e-4)


def test_autograds_sums_would_lose_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the check is for: without it the noise of 1e-4 is gone."""
    monkeypatch.setattr(buckets, "verdict", lambda *_: Verdict([], []))
    train_three_steps(0, 1, None, str(tmp_path / "run"), 1e-4, [N])
    with pytest.raises(AssertionError):
        compare(tmp_path / "run", 1e-4, [N])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", [(8, 128, 64, 96), (3, 40, 300, 7), (16, 2, 8, 8)], ids=str)
@pytest.mark.parametrize("offset", [0.0, 3.0])
@pytest.mark.parametrize("in_blocks", [False, True])
def test_rounding_is_far_below_its_bound(
    seed: int, shape: tuple[int, int, int, int], offset: float, in_blocks: bool
) -> None:
    """Both parts, against float64: S2 from products in float32, and the square of a sum in float32."""
    generator = torch.Generator().manual_seed(seed)
    n, t, o, i = shape
    delta, x = torch.randn(n, t, o, generator=generator), torch.randn(n, t, i, generator=generator) + offset
    delta = delta.abs() if seed % 2 else delta  # and with the offset nearly all products are positive, too
    weight = torch.zeros(o, i)
    factors = Factors(delta, lambda samples: x[samples], i)
    quick, exact = RoundedNorms({"w": weight}, {"w": [factors]}), GradientSum({"w": weight})
    if in_blocks:
        quick.block("w", factors.products(slice(0, n)), slice(0, n))
    else:
        quick.sequence("w", delta, x, slice(0, n))
    exact.sequence("w", delta, x, slice(0, n))
    true = torch.bmm(delta.double().transpose(1, 2), x.double()).square().sum()
    rounded = (delta.flatten(0, 1).T @ x.flatten(0, 1)).double()
    squares, error, of_sum, _ = quick.bounds("w")
    assert abs(squares - true) < error / 10
    g, e = exact.sums["w"].square().sum() / n**2, rounded.square().sum() / n**2
    assert n * abs(g - e) < 2 * (g * of_sum).sqrt() / 3


def test_sums_of_many_products_are_added_up_in_parts() -> None:
    """Ones after a large number are lost in float32, unless they are added up by themselves."""
    x = torch.ones(1, 2, 2 * PRODUCTS)
    x[:, :, :PRODUCTS] = 0
    x[:, :, 0] = 2**12
    for gram in grams([(x, x)]):
        assert gram.unique().tolist() == [2**24 + PRODUCTS]


@pytest.mark.parametrize("value", [0.1, 0.3, 0.7, 1.1])
@pytest.mark.parametrize("o", [100, 3000])
def test_errors_of_one_sign_are_below_the_bound(value: float, o: int) -> None:
    """Where all products are alike, all roundings of a sum go in the same direction."""
    delta, x = torch.full((2, 8, o), value), torch.full((2, 8, 700), 1.7)
    norms = RoundedNorms({"w": torch.zeros(o, 700)}, {"w": [Factors(delta, lambda samples: x[samples], 700)]})
    norms.sequence("w", delta, x, slice(0, 2))
    squares, error, *_ = norms.bounds("w")
    true = torch.bmm(delta.double().transpose(1, 2), x.double()).square().sum()
    assert abs(squares - true) < error < 1e-5 * true


def test_the_bound_of_blocks_does_not_grow_with_them() -> None:
    """Squares are added up in float64, so that a head of many tokens need not be summed up again."""
    generator = torch.Generator().manual_seed(0)
    delta, x = torch.randn(2, 16, 3000, generator=generator), torch.randn(2, 16, 5, generator=generator)
    factors = Factors(delta, lambda samples: x[samples], 5)
    norms = RoundedNorms({"w": torch.zeros(3000, 5)}, {"w": [factors]})
    norms.block("w", factors.products(slice(0, 2)), slice(0, 2))
    squares, error, *_ = norms.bounds("w")
    assert error < 1e-6 * squares


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("part", [slice(0, 90), slice(20, 40)], ids=str)
def test_several_uses_together(seed: int, in_blocks: bool, part: slice) -> None:
    """A head, an embedding that shares its weight and has seen padding, and a second head, without forming anything."""
    generator = torch.Generator().manual_seed(seed)
    n, o, i = 5, 90, 30
    deltas = [torch.randn(n, t, o, generator=generator) for t in (4, 3)]
    xs = [torch.randn(n, t, i, generator=generator) + 2 for t in (4, 3)]
    index = torch.randint(-1, o, (n, 6), generator=generator)
    index[:, 3] = index[:, 0]
    inner = torch.randn(n, 6, i, generator=generator)
    heads = [Factors(delta, lambda samples, x=x: x[samples], i) for delta, x in zip(deltas, xs, strict=True)]
    sources = [each.of_rows(part) for each in (heads[0], Occurrences(index, inner, o), heads[1])]
    true = sum(torch.bmm(d.double().transpose(1, 2), x.double()) for d, x in zip(deltas, xs, strict=True))
    for sample, position in np.ndindex(n, 6):
        if index[sample, position] >= 0:
            true[sample, index[sample, position]] += inner[sample, position]
    true = true[:, part]
    quick = RoundedNorms({"w": true[0].float()}, {"w": sources})
    assert quick.prefers_uses(sources) == (part.stop == 90)
    if in_blocks:
        quick.block("w", true.float(), slice(0, n))
    else:
        quick.uses("w", [source.pair(slice(0, n)) for source in sources], slice(0, n))
    squares, error, of_sum, _ = quick.bounds("w")
    assert abs(squares - true.square().sum()) < error / 3 < 1e-4 * squares
    rounded = sum(d.flatten(0, 1).T @ x.flatten(0, 1) for d, x in zip(deltas, xs, strict=True))
    seen = index >= 0
    rounded = rounded.index_add(0, index[seen], inner[seen])[part].double()
    g, e = true.sum(0).square().sum() / n**2, rounded.square().sum() / n**2
    assert n * abs(g - e) < 2 * (g * of_sum).sqrt()


@pytest.mark.parametrize("scale", [1.0, 1e-19, 1e-22, 1e19, 1e24])
def test_float64_knows_the_bound_of_float32(scale: float) -> None:
    """With rows whose squares float32 has no numbers for, that is infinite, or larger than the sum."""
    generator = torch.Generator().manual_seed(0)
    delta, x = scale * torch.randn(8, 16, 64, generator=generator), torch.randn(8, 16, 96, generator=generator)
    factors, bounds = Factors(delta, lambda samples: x[samples], 96), []
    for in_double in ([], ["w"]):
        norms = RoundedNorms({"w": torch.zeros(64, 96)}, {"w": [factors]}, in_double)
        norms.sequence("w", delta, x, slice(0, 8))
        bounds.append(norms.bounds("w"))
    (squares, error, of_sum, same), (exact, small, also_of_sum, known) = bounds
    if scale == 1.0:
        torch.testing.assert_close(torch.stack([known, same]), torch.stack([error, error]), rtol=1e-5, atol=0)
        torch.testing.assert_close(of_sum, also_of_sum, rtol=1e-5, atol=0)
        assert small < 1e-8 * error
    elif scale > 1:
        assert squares == known == torch.inf > small
    else:
        assert known > 1e-3 * exact > small


class Tied(nn.Module):
    """Tokens, times numbers that differ little between samples, and a head of the same weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.head = nn.Embedding(80, 24, padding_idx=3), nn.Linear(24, 80, bias=False)
        nn.init.uniform_(self.head.weight, 0.1, 1)
        self.tokens.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.tokens((x[..., 0] / 40).long() + torch.arange(LENGTH)) * x)


def train_tied(
    rank: int, size: int, group: Any, store: str, noise: float, shards: list[int], chosen: list[q.Quantity]
) -> tuple[bool, list[str], bool]:
    """Tracked steps; whether norms came from all uses together, and what was summed up, again or from the beginning."""
    x, net, together, again, summed = noisy(noise).repeat(1, 1, 4), Tied(), 0, [], set()
    model = net if group is None else DistributedDataParallel(net, process_group=group)
    original, original_again, original_sum = RoundedNorms.uses, buckets.BucketWalk.sum_exactly, GradientSum.__init__

    def summing(self: GradientSum, parameters: dict[str, Tensor], *args: Any, **options: Any) -> None:
        summed.update(parameters)
        original_sum(self, parameters, *args, **options)

    def uses(self: RoundedNorms, *args: Any) -> None:
        nonlocal together
        together += 1
        original(self, *args)

    def sum_exactly(self: buckets.BucketWalk, name: str, *args: Any) -> None:
        again.append(name)
        original_again(self, name, *args)

    RoundedNorms.uses, buckets.BucketWalk.sum_exactly, GradientSum.__init__ = uses, sum_exactly, summing
    mine = x[sum(shards[:rank]) : sum(shards[: rank + 1])]
    options = {"quantities": chosen, "schedule": every(1), "process_group": group}
    try:
        with DistCockpit(model, None, torch.optim.SGD(net.parameters(), 0.0), store=store, **options) as cockpit:
            for step in range(3):
                summed.clear()  # of earlier steps, which check themselves
                with cockpit.track(step):
                    cockpit(mine).abs().mean().backward()
    finally:
        RoundedNorms.uses, buckets.BucketWalk.sum_exactly, GradientSum.__init__ = original, original_again, original_sum
    return together > 0, again, "tokens.weight" in summed


NORMS = [q.NormTest(), q.GradientNoiseScale(), q.RankDisagreement()]
PROJECTED = [*NORMS, q.InnerTest()]


@pytest.mark.parametrize("noise, is_lost", [(0.3, False), (1e-4, True)])
@pytest.mark.parametrize("shards", [[9, 15], [1, 0, 20, 3]], ids=str)
@pytest.mark.parametrize("chosen", [NORMS, PROJECTED, [*PROJECTED, q.GradHist1d()]], ids=["norms", "along", "formed"])
def test_a_tied_embedding(
    ranks: Ranks, tmp_path: Path, noise: float, is_lost: bool, shards: list[int], chosen: list[q.Quantity]
) -> None:
    done = ranks.run(len(shards), train_tied, str(tmp_path / "run"), noise, shards, chosen)
    formed = len(chosen) > len(PROJECTED)
    times = (1 if formed else 2) * is_lost  # matrices in float64 are tried first
    assert done == [(n > 0 and not formed, ["tokens.weight"] * times, is_lost or not n) for n in shards]

    def terms(z: Tensor, y: Tensor) -> tuple[Tensor, float]:
        return z.abs().sum() / (LENGTH * 80), 1.0

    net = Tied()
    batch = oracle.batch(net, dict(net.state_dict()), terms, noisy(noise).repeat(1, 1, 4), torch.zeros(N))
    run = open_run(tmp_path / "run")
    for name in {"norm_test", "inner_test"}.intersection(run.children):
        np.testing.assert_allclose(run[name][name], getattr(oracle, name)(batch), rtol=2e-3, err_msg=name)
    np.testing.assert_allclose(run["gradient_noise_scale"]["noise"], oracle.noise_scale(batch)[0], rtol=2e-3)
    norms = [norm for norm, *_ in oracle.rank_disagreement(batch, shards)]
    np.testing.assert_allclose(run["rank_disagreement"]["grad_norm"][1], norms, rtol=1e-5)


def test_an_embedding_is_not_formed_beside_a_projection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its norms follow from the rows that it has, and projections from the derivative of its output."""
    formed, prepared = [], Occurrences.prepared
    monkeypatch.setattr(Occurrences, "prepared", lambda self, samples: formed.append(1) or prepared(self, samples))
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Embedding(500, 8), nn.Tanh()), torch.randint(500, (N, LENGTH))
    chosen = [q.NormTest(), q.InnerTest(), q.OrthoTest()]
    with DistCockpit(net, store=tmp_path / "run", quantities=chosen, schedule=every(1)) as cockpit:
        for step in range(3):
            formed.clear()  # by earlier steps, which check themselves
            with cockpit.track(step):
                cockpit(x).square().mean().backward()
    assert not formed

    def terms(z: Tensor, y: Tensor) -> tuple[Tensor, float]:
        return z.square().sum() / (LENGTH * 8), 1.0

    batch = oracle.batch(net, dict(net.state_dict()), terms, x, torch.zeros(N))
    run = open_run(tmp_path / "run")
    for name in NAMES:
        np.testing.assert_allclose(run[name][name], getattr(oracle, name)(batch), rtol=1e-4, err_msg=name)
