"""Quantities about ranks: disagreement, health, drift, compression."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import cases
import loops
import numpy as np
import oracle
import pytest
import torch
from checks import mean_gradient
from loops import shows
from panel_runs import meaning
from ranks import Ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distcockpit import DistCockpit, every, open_run
from distcockpit import quantities as q
from distcockpit.quantities import CompressionError
from distcockpit.quantities.replica_drift import digest

# -- ranks -------------------------------------------------------------------------------------------------------------


SLOW = 2.0  # seconds


def unhealthy(rank: int, size: int, group: Any, store: str, fault: str) -> None:
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    model = DistributedDataParallel(net, process_group=group)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    faulty = rank == 2
    with DistCockpit(
        model, loss_fn, optimizer, store=store, quantities=[q.RankHealth(), q.RankDisagreement()], schedule=every(1)
    ) as cockpit:
        for step in range(4):
            x, y = cases.data("mlp", "mean", step)
            x, y = x[rank::size], y[rank::size]
            if faulty and fault == "loader":
                time.sleep(SLOW)
            if faulty and fault == "input":
                x[1, 0] = torch.nan
            if faulty and fault == "weight":
                net[2].weight.data[0, 0] = torch.inf
            optimizer.zero_grad()
            with cockpit.track(step):
                handle = net[2].register_forward_pre_hook(lambda *_: time.sleep(SLOW * (faulty and fault == "forward")))
                z = cockpit(x)
                if faulty and fault == "backward":
                    z.register_hook(lambda g: g * torch.inf)
                loss_fn(z, y).backward()
                handle.remove()
            if fault in ("loader", "forward"):
                optimizer.step()


@pytest.mark.parametrize(
    "fault, losses, output, gradient",
    [("input", 1, "0", "4"), ("weight", 6, "2", "4"), ("backward", 0, "none", "2")],
)
def test_health_names_rank_and_layer(
    ranks: Ranks, tmp_path: Path, fault: str, losses: int, output: str, gradient: str
) -> None:
    ranks.run(4, unhealthy, str(tmp_path / "run"), fault)
    row = open_run(tmp_path / "run")["rank_health"].to_dataset().isel(step=0)
    assert int(row["nonfinite_losses"].sel(rank=2)) == losses
    assert int(row["nonfinite_gradients"].sel(rank=2)) > 0
    well = row.sel(rank=[0, 1, 3])
    for name in ("nonfinite_losses", "nonfinite_gradients", "first_nonfinite_output", "first_nonfinite_gradient"):
        assert (well[name] == 0).all(), name
    assert meaning(row["first_nonfinite_output"])[2] == output
    assert meaning(row["first_nonfinite_gradient"])[2] == gradient


@pytest.mark.parametrize("fault, where", [("loader", "outside_seconds"), ("forward", "forward_seconds")])
def test_health_shows_the_slow_rank(ranks: Ranks, tmp_path: Path, fault: str, where: str) -> None:
    """It sleeps, for longer than any scheduler lets a process wait; the others wait in their backward pass."""
    ranks.run(4, unhealthy, str(tmp_path / "run"), fault)
    health = open_run(tmp_path / "run")["rank_health"].to_dataset().isel(step=slice(1, None)).median("step")
    assert health[where].values.argmax() == 2 and health[where].sel(rank=2) >= SLOW
    waiting = health["track_seconds"] - health["forward_seconds"]
    assert (waiting.sel(rank=[0, 1, 3]) > SLOW / 2).all() and waiting.values.argmin() == 2


def drift(rank: int, size: int, group: Any, store: str) -> list[str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("distcockpit").addHandler(handler)
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    net[0].requires_grad_(False)
    model = DistributedDataParallel(net, process_group=group)
    x, y = cases.data("mlp", "mean", 0)
    with DistCockpit(model, loss_fn, store=store, quantities=[q.ReplicaDrift()], schedule=every(1)) as cockpit:
        for step in range(3):
            if step and rank == 1:
                with torch.no_grad():
                    net[2].weight[3, 4] += 1e-7
            if step == 2 and rank in (0, 3):
                with torch.no_grad():
                    net[0].bias.neg_()  # frozen, and watched all the same
            with cockpit.track(step):
                loss_fn(cockpit(x), y).backward()
    logging.getLogger("distcockpit").removeHandler(handler)
    return [text for text in records if "differ" in text]


def test_drift_names_parameter_and_ranks(ranks: Ranks, tmp_path: Path) -> None:
    said = ranks.run(4, drift, str(tmp_path / "run"))
    run = open_run(tmp_path / "run")["replica_drift"].to_dataset()
    assert list(run["replica_drift"].values) == [0, 1, 2]
    np.testing.assert_array_equal(run["differs"].sel(step=1, parameter="2.weight"), [0, 1, 0, 0])
    assert run["differs"].sel(step=1).sum() == 1
    np.testing.assert_array_equal(run["differs"].sel(step=2, parameter="0.bias"), [0, 1, 1, 0])  # two against two
    assert len(said[0]) == 2 and not any(said[1:])
    assert "step 1:" in said[0][0] and "'2.weight' (ranks 1)" in said[0][0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_the_digest_sees_every_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(37, 11).to(dtype)
    first = digest(tensor)
    assert first == digest(tensor.clone()) == digest(tensor.T.contiguous().T) and 0 <= first < 2**53
    seen = {float(first)}
    for k in range(tensor.numel()):
        changed = tensor.clone()
        real = torch.view_as_real(changed).view(-1) if dtype.is_complex else changed.view(-1)
        bits = real.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[real.element_size()])
        bits[k] ^= 1 << (k % 13)
        seen.add(float(digest(changed)))
    assert len(seen) == tensor.numel() + 1
    swapped = tensor.clone()
    swapped[0], swapped[1] = tensor[1], tensor[0]
    assert digest(swapped) != first
    assert digest(torch.zeros(3)) != digest(torch.zeros(3).neg())


def flat(arrays: dict[str, Any]) -> np.ndarray:
    return np.concatenate([np.asarray(a, dtype=float).ravel() for a in arrays.values()])


# -- what DDP delivers -------------------------------------------------------------------------------------------------


def train_compressed(
    rank: int, size: int, group: Any, store: str, shards: tuple[int, ...], hook: str, micros: int, left: bool
) -> list[dict[str, np.ndarray]]:
    """What each step added to ``.grad``, in units of G."""
    net = cases.initialised("sigmoid")
    model, loss_fn = DistributedDataParallel(net, process_group=group), nn.CrossEntropyLoss()
    if hook == "fp16":
        model.register_comm_hook(group, loops.default_hooks.fp16_compress_hook)
    if hook == "powerSGD":
        state = loops.powerSGD_hook.PowerSGDState(group, 1, start_powerSGD_iter=2, min_compression_rate=1)
        model.register_comm_hook(state, loops.powerSGD_hook.powerSGD_hook)
    delivered = []
    with DistCockpit(model, loss_fn, store=store, quantities=[CompressionError()], schedule=every(1)) as cockpit:
        for step in range(4):
            x, y = cases.data("sigmoid", "mean", step, sum(shards))
            mine = slice(sum(shards[:rank]), sum(shards[: rank + 1]))
            with cockpit.track(step):
                net.zero_grad()
                if left:  # the same on all ranks, as an earlier average
                    for p in net.parameters():
                        p.grad = torch.full_like(p, 0.25)
                for part, target in zip(x[mine].tensor_split(micros), y[mine].tensor_split(micros), strict=True):
                    (loss_fn(cockpit(part), target) * 64).backward()
            before = 0.25 if left else 0.0
            delivered.append({k: (p.grad.double().numpy() - before) / 64 / micros for k, p in net.named_parameters()})
            with torch.no_grad():
                for p in net.parameters():
                    p -= 0.1 * p.grad / 64
    return delivered


@shows("DDP", "how far its compressed gradient is from the pooled one: `CompressionError`")
@pytest.mark.parametrize(
    "shards, hook, micros, left",
    [
        ((12, 12), "", 1, False),
        ((17, 7), "", 1, True),
        ((17, 7), "fp16", 2, False),
        ((12, 12), "powerSGD", 1, False),
        ((13, 6, 4, 2), "powerSGD", 2, False),
    ],
)
def test_compression_error(
    ranks: Ranks, tmp_path: Path, shards: tuple[int, ...], hook: str, micros: int, left: bool
) -> None:
    reports = ranks.run(len(shards), train_compressed, str(tmp_path / "run"), shards, hook, micros, left)
    run, net = open_run(tmp_path / "run")["compression_error"].to_dataset().load(), cases.initialised("sigmoid")
    for step in range(4):
        x, y = cases.data("sigmoid", "mean", step, sum(shards))
        batch = oracle.batch(net, net.state_dict(), lambda z, y: (cases._nll(z, y)[0], 1), x, y)
        pooled, got, row = mean_gradient(batch), reports[0][step], run.isel(step=step)
        # What DDP takes without a hook: of each rank the mean over its micro-batches.
        means = []
        for part in batch.ranks(list(shards)):
            own = {k: [m.mean(0) for m in np.array_split(g[part], micros)] for k, g in batch.gradients.items()}
            means.append({k: np.mean(each, axis=0) for k, each in own.items()})
        plain = {k: np.mean([m[k] for m in means], axis=0) for k in pooled}

        def apart(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
            return float(np.linalg.norm(flat(a) - flat(b)) / np.linalg.norm(flat(b)))

        np.testing.assert_allclose(row["total"], apart(got, pooled), rtol=1e-2, atol=1e-6)
        np.testing.assert_allclose(row["hook_total"], apart(got, plain), rtol=1e-2, atol=1e-6)
        np.testing.assert_allclose(row["cosine"], oracle.cosine(flat(got), flat(pooled)), rtol=0, atol=1e-6)
        for name in pooled:
            one = [apart({"": got[name]}, {"": of[name]}) for of in (pooled, plain)]
            np.testing.assert_allclose(row["error"].sel(parameter=name), one[0], rtol=1e-2, atol=1e-6)
            np.testing.assert_allclose(row["hook_error"].sel(parameter=name), one[1], rtol=1e-2, atol=1e-6)
        compresses = hook == "fp16" or (hook == "powerSGD" and step * micros >= 2)
        assert (row["hook_total"] > 1e-5) == compresses
        assert (row["total"] > 1e-5) == (compresses or len(set(shards)) > 1)
        with torch.no_grad():
            for k, p in net.named_parameters():
                p -= 0.1 * micros * torch.from_numpy(got[k]).float() + (0.1 * 0.25 / 64 if left else 0)
