"""Numbers of fewer bits: autocast, steps that a scaler skips, gradients that DDP compresses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import loops
import numpy as np
import oracle
import pytest
import torch
from loops import shows
from ranks import Ranks
from test_table import close, mean_gradient
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from train import SHARDINGS, parameter_groups

from distcockpit import DistCockpit, every, open_run
from distcockpit.quantities import Alpha, CompressionError, GradNorm, InnerTest, Loss, MeanGSNR, UpdateSize


def flat(arrays: dict[str, Any]) -> np.ndarray:
    return np.concatenate([np.asarray(a, dtype=float).ravel() for a in arrays.values()])


# -- mixed precision ---------------------------------------------------------------------------------------------------


def autocast_gradients(net: nn.Sequential, x: Tensor, y: Tensor, scale: float, dtype: torch.dtype) -> Any:
    """Individual losses and gradients of linear layers: outer products, in float64, of what the rounded passes hold."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor], z: Tensor) -> None:
            inputs[name], outputs[name] = args[0].detach().to(dtype).double(), z

        return hook

    layers = {name: m for name, m in net.named_children() if isinstance(m, nn.Linear)}
    handles = [m.register_forward_hook(keep(name)) for name, m in layers.items()]
    with torch.autocast("cpu", dtype):
        losses = F.cross_entropy(net(x), y, reduction="none")
    for handle in handles:
        handle.remove()
    rows: dict[str, list[np.ndarray]] = {f"{name}.{k}": [] for name in layers for k in ("weight", "bias")}
    for i, loss in enumerate(losses):
        at_outputs = torch.autograd.grad(loss * scale / len(y), list(outputs.values()), retain_graph=True)
        for name, delta in zip(outputs, at_outputs, strict=True):
            d = delta[i].double() * len(y) / scale
            rows[f"{name}.weight"].append(torch.outer(d, inputs[name][i]).numpy())
            rows[f"{name}.bias"].append(d.numpy())
    return losses.detach().double().numpy(), {k: np.stack(g) for k, g in rows.items()}


def train_autocast(rank: int, size: int, group: Any, store: str, shards: tuple[int, ...], dtype: torch.dtype) -> Any:
    net = cases.initialised("sigmoid")
    model, loss_fn = DistributedDataParallel(net, process_group=group), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(parameter_groups("sgd", net))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=dtype == torch.float16)
    found = []
    chosen = [MeanGSNR(), InnerTest(), GradNorm(), Loss(), Alpha()]
    options = {"quantities": chosen, "schedule": every(1), "grad_scaler": scaler}
    with DistCockpit(model, loss_fn, optimizer, store=store, **options) as cockpit:
        for step in range(3):
            x, y = cases.data("sigmoid", "mean", step, sum(shards))
            mine = slice(sum(shards[:rank]), sum(shards[: rank + 1]))
            x, y = x[mine], y[mine]
            before = {k: p.detach().numpy().copy() for k, p in net.named_parameters()}
            found.append((*autocast_gradients(net, x, y, scaler.get_scale(), dtype), before))
            optimizer.zero_grad()
            with cockpit.track(step):
                with torch.autocast("cpu", dtype):
                    loss = loss_fn(cockpit(x), y)
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return found


@shows("Mixed precision", "autocast in bfloat16, and in float16 with `GradScaler`")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sharding", ["uneven 2", "uneven 4"])
def test_autocast(ranks: Ranks, tmp_path: Path, sharding: str, dtype: torch.dtype) -> None:
    """Exact for the network that was trained: with its rounded activations and output gradients."""
    shards = tuple(SHARDINGS[sharding])
    reports = ranks.run(len(shards), train_autocast, str(tmp_path / "run"), shards, dtype)
    pooled = []
    for step in range(3):
        parts = [report[step] for report in reports]
        gradients = {k: np.concatenate([g[k] for _, g, _ in parts]) for k in parts[0][1]}
        pooled.append(oracle.Batch(np.concatenate([losses for losses, _, _ in parts]), gradients, {}, parts[0][2]))
    run = open_run(tmp_path / "run")
    rtol = 2e-3 if dtype == torch.bfloat16 else 2e-4  # a mean over one rounds some elements otherwise than over many
    for step, batch in enumerate(pooled):
        rows = {name: run[name].sel(step=step) for name in ("loss", "mean_gsnr", "inner_test", "grad_norm")}
        close(rows["loss"]["loss"], batch.losses.mean())
        close(rows["mean_gsnr"]["mean_gsnr"], oracle.mean_gsnr(batch), rtol)
        close(rows["inner_test"]["inner_test"], oracle.inner_test(batch), rtol)
        close(rows["grad_norm"]["total"], np.linalg.norm(batch.flat.mean(0)), rtol)
    for step in range(2):
        row, expected = run["alpha"].isel(step=step), oracle.alpha(*pooled[step : step + 2])
        for name in ("alpha", "slope_start", "slope_end", "f_end", "update_norm"):
            np.testing.assert_allclose(row[name], expected[name], rtol=10 * rtol)


@shows("Mixed precision", "steps that `GradScaler` skips: α is NaN, with the status `step_skipped`")
@pytest.mark.parametrize("together", [True, False], ids=["one optimizer", "two"])
def test_skipped_steps(tmp_path: Path, together: bool) -> None:
    """With two optimizers, only the one whose gradients overflow is skipped."""
    net, loss_fn = cases.initialised("sigmoid"), nn.CrossEntropyLoss()
    halves = [list(net.parameters())] if together else [list(net[0].parameters()), list(net[2:].parameters())]
    optimizers = [torch.optim.SGD(half, lr=0.5) for half in halves]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, backoff_factor=0.5)
    options = {"quantities": [Alpha(), UpdateSize(), GradNorm()], "schedule": every(1), "grad_scaler": scaler}
    with DistCockpit(net, loss_fn, optimizers, store=tmp_path / "run", **options) as cockpit:
        for step in range(4):
            x, y = cases.data("sigmoid", "mean", step)
            for optimizer in optimizers:
                optimizer.zero_grad()
            with cockpit.track(step):
                scaler.scale(loss_fn(cockpit(x), y)).backward()
            if step == 1:
                net[4].weight.grad[0, 0] = torch.inf
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
    run = open_run(tmp_path / "run")

    def statuses(name: str) -> list[str]:
        status = run[name]["status"]
        return [status.attrs["flag_meanings"].split()[int(k)] for k in status.values]

    last = "alpha" if together else "alpha_1"
    assert statuses(last)[1] == "step_skipped" and "step_skipped" not in statuses(last)[::2]
    assert np.isnan(run[last]["alpha"].values[1]) and np.isfinite(run[last]["alpha"].values[[0, 2]]).all()
    assert (run["update_size"]["total"].values[[0, 2]] > 0).all() and np.isfinite(run["grad_norm"]["total"]).all()
    if together:
        assert run["update_size"]["total"].values[1] == 0
    else:
        assert "step_skipped" not in statuses("alpha") + statuses("alpha_0")


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
