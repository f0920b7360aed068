"""What crosses ranks: agreements, disagreements, groups that are not the world."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from construction import CE
from conv_and_norm import data, network
from ranks import Ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distcockpit import DistCockpit, every, open_run
from distcockpit import quantities as q
from distcockpit.quantities import GradHist1d, MeanGSNR, OutputGradientGeometry
from distcockpit.world import HEADER, _names_of_our_own

# -- exchanges ---------------------------------------------------------------------------------------------------------


def count_exchanges(rank: int, size: int, group: Any, store: str, model: str) -> dict[str, int]:
    """Collectives per step: of DDP alone, and with everything tracked."""
    import torch.distributed as dist
    from train import everything

    names = [n for n in dir(dist) if n.startswith(("all_", "reduce", "broadcast", "gather", "scatter", "barrier"))]
    names += ["send", "recv", "isend", "irecv", "batch_isend_irecv"]
    calls: list[str] = []

    def counted(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        return call

    net, loss_fn = cases.initialised(model), nn.CrossEntropyLoss()
    ddp = DistributedDataParallel(net, process_group=group)
    originals = {n: getattr(dist, n) for n in names if callable(getattr(dist, n))}
    per_step = {}
    chosen = [q for q in everything() if q.needs.eigenvalue is None]  # which makes two exchanges per product
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with DistCockpit(ddp, loss_fn, optimizer, store=store, quantities=chosen, schedule=every(2)) as cockpit:
        for step in range(6):
            x, y = cases.data(model, "mean", step)
            cockpit.log(step, reduce="mean", value=float(rank))
            for n, original in originals.items():
                setattr(dist, n, counted(n, original))
            with cockpit.track(step):
                loss_fn(cockpit(x), y).backward()
            for n, original in originals.items():
                setattr(dist, n, original)
            per_step[step] = len(calls)
            calls.clear()
    return per_step


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_exchanges_per_step(ranks: Ranks, tmp_path: Path, model: str) -> None:
    for per_step in ranks.run(4, count_exchanges, str(tmp_path / "r"), model):
        assert per_step[0] == 6  # once: the numbers of neurons; names and lengths of the sums, with a header
        assert per_step[2] == per_step[4] == 3  # header, element-wise sums, sums
        assert per_step[1] == 4 and per_step[3] == per_step[5] == 2  # the end of alpha's update: header, sums
    assert (open_run(tmp_path / "r")["log"]["value"] == 1.5).all()


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
    header, parameters = len(HEADER), sum(sizes)  # without sequences nothing is rounded, and no bounds are exchanged
    sums = 2  # of the norms, and of ranks without memory; what all ranks know is not sent
    assert list(row["exchanges"].values) == [2, 4, 3]  # once: a header before the names of the sums are compared
    numbers = [header + parameters, header + sums + header + parameters, sums + header + parameters]
    assert list(row["exchanged_bytes"].values) == [8 * n for n in numbers]


# -- ranks that disagree ---------------------------------------------------------------------------------------------


def disagree(rank: int, size: int, group: Any, store: str, how: str) -> str:
    """What this rank is told."""
    torch.manual_seed(0)
    net, loss_fn = nn.Linear(12, 5 + (how == "shape" and rank == 1)), CE()
    bins = 10 + (how == "bins" and rank == 1)
    chosen: list[Any] = [GradHist1d(bins=bins), MeanGSNR()]
    budget = "1MiB" if how == "budget" and rank == 1 else "64MiB"
    if how == "quantities" and rank == 1:
        chosen.pop()
    if how == "arguments" and rank == 1:
        chosen = [GradHist1d(), GradHist1d()]
    schedule = (lambda step: step != 1 or rank == 0) if how == "schedule" else every(1)
    x, y = cases.data("mlp", "mean", 0)
    try:
        cockpit = DistCockpit(
            net,
            loss_fn,
            store=store,
            quantities=chosen,
            schedule=schedule,
            process_group=group,
            mode="w",
            memory_budget=budget,
        )
        for step in range(3):
            with cockpit.track(step + (how == "steps" and rank == 1 and step == 1)):
                if how != "no backward" or rank == 0:
                    loss_fn(net(x), y).backward()
                else:
                    loss_fn(net(x), y)
            if how == "names":
                cockpit.log(step, reduce="mean", **{f"name_{rank}": 1.0})
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "how, words, own",
    [
        ("bins", ["rank 1 has quantity 'grad_hist_1d'", "'bins': '11'", "'bins': '10'"], None),
        ("quantities", ["rank 1 has quantity 'mean_gsnr' = nothing"], None),
        ("shape", ["rank 1 has parameter 0 = 'weight' (6, 12)", "rank 0 has parameter 0 = 'weight' (5, 12)"], None),
        ("budget", ["rank 1 has memory_budget = 1048576, rank 0 has memory_budget = 67108864"], None),
        ("arguments", ["could not be constructed on rank 1", "'grad_hist_1d'"], ["2 are named"]),
        ("steps", ["rank 0 tracks step 1, rank 1 tracks step 2"], None),
        ("schedule", ["rank 0 tracks step 1, rank 1 tracks step 2"], None),
        ("names", ["Rank 1 logged different names", "0/name_1", "0/name_0", "log(..., reduce=...)"], None),
        ("no backward", ["Rank 1 could not finish tracked step 0"], ["no backward"]),
    ],
)
def test_ranks_that_disagree(ranks: Ranks, tmp_path: Path, how: str, words: list[str], own: Any) -> None:
    first, second = ranks.run(2, disagree, str(tmp_path / "run"), how)
    assert all(word in first for word in words), first
    assert all(word in second for word in own or words), second


@dataclass(frozen=True, kw_only=True)
class ShapeOfRank(MeanGSNR):
    """Sums whose length depends on the rank, from the first step or a later one."""

    since: int = 0

    def local(self, batch: Any, memory: dict[str, Any]) -> dict[str, Any]:
        longer = batch.rank == 1 and batch.step >= self.since
        return {"part": batch.vector([1.0] * (3 + longer))}

    def finalize(self, totals: Any, n: int) -> None:
        return None


def sums_of_different_shapes(rank: int, size: int, group: Any, store: str, since: int) -> list[str]:
    net, loss_fn, said = cases.initialised("mlp"), CE(), []
    options: dict[str, Any] = {"quantities": [ShapeOfRank(since=since)], "schedule": every(1)}
    cockpit = DistCockpit(net, loss_fn, store=store, process_group=group, **options)
    for step in range(4):
        x, y = cases.data("mlp", "mean", step)
        try:
            with cockpit.track(step):
                loss_fn(net(x), y).backward()
            said.append("")
        except RuntimeError as error:
            return [*said, str(error)]
    return said


@pytest.mark.parametrize("since", [0, 2])
def test_sums_of_different_shapes(ranks: Ranks, tmp_path: Path, since: int) -> None:
    """Gloo would end the process: 'op.preamble.length <= op.nbytes'."""
    for said in ranks.run(2, sums_of_different_shapes, str(tmp_path / "run"), since):
        assert said[:since] == [""] * since
        if since == 0:
            assert "the sum 'part' has shape (4,) on rank 1, but (3,) on rank 0" in said[0]
        else:
            assert "different steps: rank 0 tracks step 3, rank 1 compares the sums of step 2" in said[-1]
    ranks.stop(kill=True)


# -- ranks -------------------------------------------------------------------------------------------------------------


def options_differ(rank: int, size: int, group: Any, store: str, what: str) -> str:
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 5))
    smoothing = 0.1 * rank if what == "loss" else 0.0
    options: dict[str, Any] = {"quantities": [MeanGSNR(), GradHist1d()]}
    if what == "order" and rank:
        options["quantities"].reverse()
    if what == "modules":
        options["quantities"] = [OutputGradientGeometry(skip_activation=False)]
        options["exclude"] = ["1"] if rank else None
    if what == "batch norm":
        options["track_batchnorm"] = bool(rank)
    try:
        DistCockpit(net, nn.CrossEntropyLoss(label_smoothing=smoothing), store=store, process_group=group, **options)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "what, word",
    [("loss", "label_smoothing"), ("order", "order"), ("modules", "modules"), ("batch norm", "track_batchnorm")],
)
def test_options_that_differ_between_ranks(ranks: Ranks, tmp_path: Path, what: str, word: str) -> None:
    for said in ranks.run(2, options_differ, str(tmp_path / "run"), what):
        assert "The ranks disagree: rank 1 has" in said and word in said


# -- a rank without memory ---------------------------------------------------------------------------------------------


def no_memory_for_an_exchange(rank: int, size: int, group: Any, store: str) -> tuple[list[str], int]:
    """What each step says, and how often rank 1 tried to get memory."""
    net, loss_fn, said, tries = cases.initialised("mlp"), CE(), [], []
    options: dict[str, Any] = {"quantities": [MeanGSNR()], "schedule": every(1), "timeout_seconds": 2}
    cockpit = DistCockpit(net, loss_fn, store=store, process_group=group, **options)
    world = cockpit._session.setup.world

    def make() -> None:
        tries.append(1)
        raise MemoryError("of step 1")

    for step in range(3):
        x, y = cases.data("mlp", "mean", step)
        try:
            if (rank, step) == (1, 1):
                world.insist(make)
            with cockpit.track(step):
                loss_fn(net(x), y).backward()
            said.append("")
        except (MemoryError, RuntimeError) as error:
            assert world.is_broken
            said.append(str(error))
    return said, len(tries)


def test_a_rank_without_memory_for_an_exchange(ranks: Ranks, tmp_path: Path) -> None:
    """It asks twice, and then takes no part any more: it would be one exchange behind, and sums would be mixed."""
    (first, _), (second, tries) = ranks.run(2, no_memory_for_an_exchange, str(tmp_path / "run"))
    assert tries == 2 and second[:2] == ["", "of step 1"] and "Rank 1 had no memory left" in second[2]
    assert first[0] == "" and "Rank 0 could not finish a tracked step" in first[1].replace(":", "")
    ranks.stop(kill=True)


# -- groups of some ranks ----------------------------------------------------------------------------------------------


def groups_of_some_ranks(rank: int, size: int, group: Any, store: str) -> list[float]:
    """Cockpits on two ranks of four, on other two, and on all; between them groups as loops make them."""
    import torch.distributed as dist

    def track(name: str, ranks: Any, members: list[int]) -> None:
        if rank not in members:
            return
        net, loss_fn = cases.initialised("mlp"), CE()
        options = {"quantities": [q.Loss()], "schedule": every(1), "process_group": ranks, "timeout_seconds": 20}
        with DistCockpit(net, loss_fn, store=f"{store}/{name}", **options) as cockpit, cockpit.track(0):
            x, y = cases.data("mlp", "mean", 0)
            loss_fn(net(x), y).backward()

    def total(ranks: Any) -> float:
        value = torch.tensor(float(rank))
        dist.all_reduce(value, group=ranks)
        return value.item()

    first = dist.new_group([0, 1])
    for k in range(2):
        track(f"first_{k}", first, [0, 1])
    sums = [total(dist.new_group())]  # of all ranks, two of which have made more groups
    second = dist.new_group([1, 2])
    track("second", second, [1, 2])
    track("all", None, [0, 1, 2, 3])
    track("first_2", first, [0, 1])
    in_this_order: Any = {"sort_ranks": False} if torch.__version__ >= "2.13" else {}
    track("unsorted", dist.new_group([1, 0], **in_this_order), [0, 1])
    return [*sums, total(dist.new_group())]


def test_groups_of_some_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Ranks that made more groups than others wait for nobody, neither in ours nor in the user's."""
    found = ranks.run(4, groups_of_some_ranks, str(tmp_path))
    assert found == [[6.0, 6.0]] * 4
    for name in ("first_0", "first_1", "first_2", "second", "all", "unsorted"):
        assert len(open_run(tmp_path / name)["loss"]["step"]) == 1, name


def of_another_group(rank: int, size: int, group: Any, store: str) -> str:
    import torch.distributed as dist

    first = dist.new_group([0])
    try:
        DistCockpit(nn.Linear(12, 5), CE(), store=store, process_group=first).close()
    except ValueError as error:
        return str(error)
    return ""


def test_a_rank_that_is_not_in_the_group(ranks: Ranks, tmp_path: Path) -> None:
    said = ranks.run(4, of_another_group, str(tmp_path / "run"))
    assert said[0] == "" and "process_group= does not contain this rank, 2 of 4" in said[2]


def test_names_begin_anew_with_a_new_default_group(tmp_path: Path) -> None:
    """A rank that is started anew, with others that were there before, makes the same names as these."""
    import torch.distributed as dist

    found = []
    for k in range(2):
        dist.init_process_group("gloo", init_method=f"file://{tmp_path / str(k)}", rank=0, world_size=1)
        with _names_of_our_own([0]):
            found.append([dist.new_group([0]).group_name for _ in range(2)])
        dist.destroy_process_group()
    assert found[0] == found[1] and found[0][0] != found[0][1]
