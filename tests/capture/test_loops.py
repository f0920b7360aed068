"""Loops as people write them: each step's individual gradients are those of the loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import loops
import numpy as np
import oracle
import pytest
import torch
import torch.distributed as dist
import xarray as xr
from checks import Case, check, close, mean_gradient
from loops import LOOPS, shows
from ranks import Ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from train import SHARDINGS, Spec

from distcockpit import DistCockpit, every, open_run
from distcockpit.quantities import Alpha, HessTrace, Loss, MeanGSNR


def flat(arrays: dict[str, Any]) -> np.ndarray:
    return np.concatenate([np.asarray(a, dtype=float).ravel() for a in arrays.values()])


def check_part(name: str) -> Any:
    """Alpha of one of two optimizers: matrices, and the rest."""

    def check(row: xr.Dataset, case: Case) -> None:
        mine = {k: d for k, d in case.update.items() if (d.ndim > 1) == (name == "matrices")}
        ends = [
            sum((mean_gradient(batch)[k] * d).sum() for k, d in mine.items())
            for batch in (case.batch, case.pooled[case.step + 1])
        ]
        norm = np.linalg.norm(flat(mine))
        close(row["update_norm"], norm)
        close([row["slope_start"], row["slope_end"]], np.array(ends) / norm, 1e-4)
        assert row["status"].attrs["flag_meanings"].split()[int(row["status"])] == (
            "minimum" if ends[1] > ends[0] else "concave"
        )
        np.testing.assert_allclose(row["alpha"], -ends[1] / ends[0] if ends[1] > ends[0] else -1, rtol=1e-3)

    return check


@pytest.mark.parametrize("name, sharding", [(name, k) for name in LOOPS for k in ("uneven 2", "uneven 4")])
def test_loop(ranks: Ranks, tmp_path: Path, name: str, sharding: str) -> None:
    loop = LOOPS[name]
    shards = tuple(max(loop.least, n) for n in SHARDINGS[sharding])
    spec = Spec(str(tmp_path / "run.zarr"), loop.model, loop.loss, loop.optimizer, shards)
    (states, kept), *others = ranks.run(len(spec.shards), loops.train, name, spec)
    for other, _ in others:
        assert all((a[k] == b[k]).all() for a, b in zip(states, other, strict=True) for k in a)
    more = {f"alpha_{k}": check_part(k) for k in ("matrices", "rest")} if name == "SeveralOptimizers" else {}
    check(spec, states, open_run(spec.store), curvature=False, more=more)
    if name == "TwoCockpits":
        check(spec, states, open_run(f"{spec.store}.inner"), curvature=False)
    assert kept.get("compiled graphs", 1) == 1
    if name == "Closure":
        assert kept["calls"] > spec.steps  # the others were at other parameters


# -- several cockpits, several models ----------------------------------------------------------------------------------


def individual(losses: Tensor, parameters: list[Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Losses, and gradients of single ones, one after the other: ``[n, P]``."""
    each = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
    rows = [np.concatenate([g.double().numpy().ravel() for g in gradients]) for gradients in each]
    return losses.detach().double().numpy(), np.stack(rows)


def train_gan(rank: int, size: int, group: Any, folder: str, shards: tuple[int, ...], order: str) -> Any:
    """A discriminator and a generator, each with its own cockpit; both are trained on each batch."""
    torch.manual_seed(3)
    d, g = nn.Sequential(nn.Linear(12, 6), nn.Sigmoid(), nn.Linear(6, 1)), nn.Linear(4, 12)
    loss_fn, names = nn.BCEWithLogitsLoss(), ("d", "g")
    optimizers = {"d": torch.optim.SGD(d.parameters(), lr=0.3), "g": torch.optim.SGD(g.parameters(), lr=0.3)}
    wrapped = {"d": DistributedDataParallel(d, process_group=group)}
    wrapped["g"] = DistributedDataParallel(g, process_group=group)
    rows: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {name: [] for name in names}
    quantities = [MeanGSNR(), Loss(), Alpha()]
    cockpits = {
        name: DistCockpit(
            wrapped[name], loss_fn, optimizers[name], store=f"{folder}/{name}", quantities=quantities, schedule=every(1)
        )
        for name in names
    }
    for step in range(3):
        x, _ = cases.data("sigmoid", "mean", step, sum(shards))
        noise = torch.randn(sum(shards), 4, generator=torch.Generator().manual_seed(step))
        mine = slice(sum(shards[:rank]), sum(shards[: rank + 1]))
        x, noise, n = x[mine], noise[mine], shards[rank]
        one, zero = torch.ones(n, 1), torch.zeros(n, 1)

        fake = g(noise).detach()
        each = [F.binary_cross_entropy_with_logits(d(z), t, reduction="none") for z, t in ((x, one), (fake, zero))]
        losses = torch.cat(each).squeeze(1)
        rows["d"].append(individual(losses, list(d.parameters())))
        optimizers["d"].zero_grad()
        with cockpits["d"].track(step), wrapped["d"].no_sync():
            if order == "at once":
                real, other = d(x), d(fake)
                total = loss_fn(real, one) + loss_fn(other, zero)
            else:
                total = loss_fn(d(x), one)
                total = total + loss_fn(d(fake), zero)
            (total / 2).backward()
        for p in d.parameters():
            dist.all_reduce(p.grad, group=group)
            p.grad /= size
        optimizers["d"].step()

        losses = F.binary_cross_entropy_with_logits(d(g(noise)), one, reduction="none").squeeze(1)
        rows["g"].append(individual(losses, list(g.parameters())))
        optimizers["g"].zero_grad()
        with cockpits["g"].track(step):
            loss_fn(d(cockpits["g"](noise)), one).backward()
        optimizers["g"].step()
    for cockpit in cockpits.values():
        cockpit.close()
    return rows


@shows("Several cockpits", "one for each of two models (a GAN), with the discriminator's two losses in either order")
@pytest.mark.parametrize("order", ["at once", "one by one"])
@pytest.mark.parametrize("sharding", ["uneven 2", "uneven 4"])
def test_gan(ranks: Ranks, tmp_path: Path, sharding: str, order: str) -> None:
    shards = tuple(SHARDINGS[sharding])
    reports = ranks.run(len(shards), train_gan, str(tmp_path), shards, order)
    for name in ("d", "g"):
        run = open_run(tmp_path / name)
        for step in range(3):
            parts = [report[name][step] for report in reports]
            batch = oracle.Batch(
                np.concatenate([losses for losses, _ in parts]), {"": np.concatenate([g for _, g in parts])}, {}, {}
            )
            close(run["loss"]["loss"].sel(step=step), batch.losses.mean())
            close(run["mean_gsnr"]["mean_gsnr"].sel(step=step), oracle.mean_gsnr(batch), 1e-4)
        assert run["alpha"].sizes["step"] == 2 and np.isfinite(run["alpha"]["alpha"]).all()


def train_pair(rank: int, size: int, group: Any, folder: str, shards: tuple[int, ...]) -> list[dict]:
    """Ranks 0 and 2 train one model, 1 and 3 another: data-parallel groups that are not the world.

    Ranks 0 and 1 are in one more group than the others, by which torch names groups.
    """
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    own, place = pairs[rank % 2], rank // 2
    spec = Spec(f"{folder}/{rank % 2}", "sigmoid", "mean", "sgd", shards)
    states, _ = loops.train(place, 2, own, "AccumulatedWithoutSync", spec)
    return states


@shows("DDP", "a data-parallel group that is not the world (`process_group=`)")
def test_groups_that_are_not_the_world(ranks: Ranks, tmp_path: Path) -> None:
    shards = (17, 7)
    reports = ranks.run(4, train_pair, str(tmp_path), shards)
    for k in (0, 1):
        spec = Spec(str(tmp_path / str(k)), "sigmoid", "mean", "sgd", shards)
        check(spec, reports[k], open_run(spec.store), curvature=False)
        assert open_run(spec.store).attrs["world_size"] == 2


# -- outputs that DDP copies -------------------------------------------------------------------------------------------


def train_flattened(rank: int, size: int, group: Any, store: str, shards: tuple[int, ...], option: str) -> list[dict]:
    """The loss takes the output of DDP, which is a copy of the model's with these options, with its axes flattened."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 5))
    model, loss_fn = DistributedDataParallel(net, process_group=group, **{option: True}), nn.CrossEntropyLoss()
    optimizer, states = torch.optim.SGD(net.parameters(), lr=0.3), []
    quantities = [MeanGSNR(), Loss(), Alpha(), HessTrace(curvature="hutchinson_ggn", samples=2)]
    with DistCockpit(model, loss_fn, optimizer, store=store, quantities=quantities, schedule=every(1)) as cockpit:
        for step in range(3):
            states.append({k: v.clone() for k, v in net.state_dict().items()})
            x, y = flattened_data(step, sum(shards))
            mine = slice(sum(shards[:rank]), sum(shards[: rank + 1]))
            optimizer.zero_grad()
            with cockpit.track(step):
                loss_fn(cockpit(x[mine]).view(-1, 5), y[mine].view(-1)).backward()
            optimizer.step()
    return states


def flattened_data(step: int, n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(n, 4, 12, generator=generator), torch.randint(5, (n, 4), generator=generator)


@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters"])
def test_outputs_that_ddp_copies(ranks: Ranks, tmp_path: Path, option: str) -> None:
    shards = (9, 4)
    states, _ = ranks.run(2, train_flattened, str(tmp_path / "run"), shards, option)
    net = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 5))
    run = open_run(tmp_path / "run")
    for step, state in enumerate(states):

        def terms(z: Tensor, y: Tensor) -> tuple[Tensor, float]:
            return F.cross_entropy(z[0], y[0], reduction="sum"), 4.0

        batch = oracle.batch(net, state, terms, *flattened_data(step, sum(shards)))
        close(run["loss"]["loss"].sel(step=step), batch.losses.mean())
        close(run["mean_gsnr"]["mean_gsnr"].sel(step=step), oracle.mean_gsnr(batch), 1e-4)
    assert run["alpha"].sizes["step"] == 2 and (run["hess_trace"]["total"] > 0).all()
