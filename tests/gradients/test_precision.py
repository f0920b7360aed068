"""Mixed precision, half precision and gradient scalers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import numpy as np
import oracle
import pytest
import torch
from changing_runs import assert_norms, go
from checks import close
from compared_runs import mean_terms
from loops import shows
from panel_runs import track_batches
from ranks import Ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from train import SHARDINGS, parameter_groups

from distcockpit import DistCockpit, every, open_run, presets
from distcockpit import quantities as q
from distcockpit.quantities import Alpha, GradNorm, InnerTest, Loss, MeanGSNR


def test_precision_set_for_each_backend(tmp_path: Path) -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert_norms(*go(tmp_path / "r", nn.Linear(5, 2), ((4, 5), (4, 2)), [q.GradNorm()], 1))
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_autocast_around_track_changes_nothing(tmp_path: Path) -> None:
    slopes = []
    for around in (False, True):
        torch.manual_seed(1)
        net, loss_fn = nn.Sequential(nn.Linear(9, 6), nn.Tanh(), nn.Linear(6, 3)), nn.MSELoss()
        optimizer, x, y = torch.optim.SGD(net.parameters(), lr=0.1), torch.randn(8, 9), torch.randn(8, 3)
        low = torch.autocast("cpu", torch.bfloat16)
        store = tmp_path / str(around)
        with DistCockpit(net, loss_fn, optimizer, store=store, quantities=[q.Alpha()], schedule=every(1)) as cockpit:
            for step in range(2):
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=around), cockpit.track(step), low:
                    loss_fn(cockpit(x).float(), y).backward()
                optimizer.step()
        slopes.append(float(open_run(store)["alpha"]["slope_start"][0]))
    assert slopes[0] == slopes[1]


# -- unusual models ----------------------------------------------------------------------------------------------------


def test_float64(tmp_path: Path) -> None:
    """Conversions to float64 are no copies there; the user's batch stays as it is."""
    net = cases.initialised("sigmoid").double()
    x, y = cases.data("sigmoid", "mean", 0)
    x = x.double()
    before, state = x.clone(), {k: v.clone() for k, v in net.state_dict().items()}
    chosen = [*presets.economy(), q.EarlyStopping(), q.MeanGSNR(), q.Parameters()]
    run = track_batches(tmp_path / "run", net, [(x, y)], chosen)
    assert torch.equal(x, before)
    batch = oracle.batch(net, state, mean_terms, x, y)
    for name in ("norm_test", "inner_test", "ortho_test", "early_stopping", "mean_gsnr"):
        np.testing.assert_allclose(run[name][name][0], getattr(oracle, name)(batch), rtol=1e-9, err_msg=name)
    np.testing.assert_allclose(run["gradient_noise_scale"]["noise"][0], oracle.noise_scale(batch)[0], rtol=1e-9)
    np.testing.assert_array_equal(run["parameters"]["0.weight"][0], state["0.weight"])
    assert run["parameters"]["0.weight"].dtype == np.float64


@pytest.mark.smoke
def test_settings_of_the_backend_do_not_matter(tmp_path: Path) -> None:
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    try:
        run = track_batches(tmp_path / "run", nn.Linear(12, 5), [cases.data("mlp", "mean", 0)], [q.HessMaxEV()])
    finally:
        torch.backends.cudnn.conv.fp32_precision = before
    assert run["hess_max_ev"]["status"][0] == 0 and torch.backends.cudnn.enabled


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
