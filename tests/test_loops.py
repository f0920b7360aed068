"""Any loop: each trains on real ranks with the whole first-order panel, and every row is compared with the oracle."""

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
import torch.nn.functional as F
import xarray as xr
from loops import LOOPS, shows
from ranks import Ranks
from test_table import Case, check, close, mean_gradient
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from train import SHARDINGS, Spec, parameter_groups

from distcockpit import DistCockpit, every, open_run
from distcockpit.quantities import Alpha, CompressionError, GradNorm, HessTrace, InnerTest, Loss, MeanGSNR, UpdateSize


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

        np.testing.assert_allclose(row["total"], apart(got, pooled), rtol=1e-2, atol=2e-7)
        np.testing.assert_allclose(row["hook_total"], apart(got, plain), rtol=1e-2, atol=2e-7)
        np.testing.assert_allclose(row["cosine"], oracle.cosine(flat(got), flat(pooled)), atol=1e-9)
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


# -- the loss of a micro-batch, told by the loop -----------------------------------------------------------------------


@shows(
    "Losses", "the loss of each micro-batch by a function: `record_losses(loss)`, `record_losses(loss, weight=tokens)`"
)
@pytest.mark.parametrize("how", ["mean of each", "sum over all tokens"])
def test_losses_of_micro_batches(tmp_path: Path, how: str) -> None:
    """Factors on the loss follow from the gradient that reaches it."""
    net, (x, y) = cases.initialised("tokens"), cases.data("tokens", "token_mean", 0)
    batch = oracle.batch(net, net.state_dict(), cases._nll, x, y)
    total = int((y != -100).sum())
    quantities = [MeanGSNR(), Loss(), GradNorm()]
    with DistCockpit(net, None, store=tmp_path / "run", quantities=quantities, schedule=every(1)) as cockpit:
        with cockpit.track(0):
            for part, target in zip(x.split([15, 9]), y.split([15, 9]), strict=True):
                z, tokens = cockpit(part), (target != -100).sum()
                if how == "mean of each":
                    loss = F.cross_entropy(z, target)
                    cockpit.record_losses(loss, weight=tokens)
                    (loss / 2 * 1024).backward()
                else:
                    loss = F.cross_entropy(z, target, reduction="sum") / total
                    cockpit.record_losses(loss, weight=tokens, divisor=total)
                    (loss * 1024).backward()
    run = open_run(tmp_path / "run")
    close(run["mean_gsnr"]["mean_gsnr"], [oracle.mean_gsnr(batch)], 1e-4)
    close(run["loss"]["loss"], [batch.losses.mean()])
    close(run["grad_norm"]["total"], [np.linalg.norm(batch.flat.mean(0))], 1e-4)


@pytest.mark.parametrize(
    "arguments, kind, words",
    [
        ({"weight": -1}, ValueError, r"record_losses\(weight=-1\): must be at least 0"),
        ({"weight": "ten"}, TypeError, r"record_losses\(weight='ten'\): must be a number"),
        (
            {"divisor": 3.0},
            ValueError,
            r"record_losses\(divisor=3.0\): what individual losses are divided by is measured",
        ),
    ],
)
def test_what_record_losses_refuses(tmp_path: Path, arguments: dict, kind: type[Exception], words: str) -> None:
    net, (x, y) = cases.initialised("sigmoid"), cases.data("sigmoid", "mean", 0)
    with DistCockpit(net, None, store=tmp_path / "run", quantities=[Loss()], schedule=every(1)) as cockpit:
        with pytest.raises(kind, match=words), cockpit.track(0):
            cockpit.record_losses(F.cross_entropy(net(x), y, reduction="none"), **arguments)


# -- compiled code -----------------------------------------------------------------------------------------------------


def compiled_graphs(tmp_path: Path, tracked: bool, kind: str) -> tuple[int, int, np.ndarray]:
    """How many graphs a run compiles, how often they run, and its losses; every third step is tracked."""
    torch.compiler.reset()
    calls: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append("compiled")

        def run(*args: Any) -> Any:
            calls.append("ran")
            return graph.forward(*args)

        return run

    net, loss_fn = cases.initialised("deep"), nn.CrossEntropyLoss()
    model, compute = net, lambda x, y: loss_fn(model(x), y)
    if kind == "step":
        compute = torch.compile(compute, backend=backend)
    else:
        model = torch.compile(net, backend=backend)
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.3), []
    quantities = [MeanGSNR(), Alpha()]
    with DistCockpit(
        model,
        loss_fn,
        optimizer,
        store=tmp_path / str(tracked),
        quantities=quantities,
        schedule=every(3, 1),
        enabled=tracked,
    ) as cockpit:
        for step in range(9):
            x, y = cases.data("deep", "mean", step)
            optimizer.zero_grad()
            with cockpit.track(step):
                loss = compute(x, y)
                loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return calls.count("compiled"), calls.count("ran"), np.array(losses)


@pytest.mark.parametrize("kind", ["model", "step"])
def test_nothing_is_compiled_because_of_us(tmp_path: Path, kind: str) -> None:
    """Steps 1, 4, 7 are tracked, and 2, 5, 8 end an update: they run eagerly, the others as compiled before."""
    graphs, runs, losses = compiled_graphs(tmp_path, False, kind)
    assert runs == 9
    ours, ran, same = compiled_graphs(tmp_path, True, kind)
    assert (ours, ran) == (graphs, 3) and graphs >= 1
    np.testing.assert_allclose(same, losses, rtol=1e-6)
    run, net = open_run(tmp_path / "True"), cases.initialised("deep")
    assert list(run.attrs["parameters"]) == [name for name, _ in net.named_parameters()]
    assert list(run["mean_gsnr"]["step"].values) == list(run["alpha"]["step"].values) == [1, 4, 7]


# -- refused -----------------------------------------------------------------------------------------------------------


@shows("Refused with an error", "an optimizer that steps during the backward pass")
def test_an_optimizer_in_the_backward_pass(tmp_path: Path) -> None:
    net, (x, y), loss_fn = cases.initialised("sigmoid"), cases.data("sigmoid", "mean", 0), nn.CrossEntropyLoss()
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(lambda p: torch.optim.SGD([p], lr=0.1).step())
    with DistCockpit(net, loss_fn, store=tmp_path / "run", quantities=[MeanGSNR()], schedule=every(1)) as cockpit:
        with pytest.raises(RuntimeError, match="changed inside `track`.*during the backward pass.*not supported"):
            with cockpit.track(0):
                loss_fn(net(x), y).backward()


def test_where_lbfgs_is_tracked(tmp_path: Path) -> None:
    """Around the step is an error that says where; once inside, later calls at the same step are not tracked."""
    net, (x, y), loss_fn = cases.initialised("sigmoid"), cases.data("sigmoid", "mean", 0), nn.CrossEntropyLoss()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
    options = {"quantities": [MeanGSNR()], "schedule": every(1)}
    with DistCockpit(net, loss_fn, optimizer, store=tmp_path / "run", **options) as cockpit:

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_fn(net(x), y)
            loss.backward()
            return loss

        with pytest.raises(RuntimeError, match="put the `with` block inside the closure"), cockpit.track(0):
            optimizer.step(closure)
        for step in (1, 1, 2):
            with cockpit.track(step):
                closure()
        with pytest.raises(ValueError, match="steps must grow"), cockpit.track(1):
            closure()
    assert list(open_run(tmp_path / "run")["mean_gsnr"]["step"].values) == [1, 2]


def wrap_in_fsdp(rank: int, size: int, group: Any, store: str) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    said = []
    for part in (False, True):
        net = cases.initialised("deep")
        mesh = init_device_mesh("cpu", (size,))
        fully_shard(net.middle if part else net, mesh=mesh)
        try:
            DistCockpit(net, nn.CrossEntropyLoss(), store=store, quantities=[MeanGSNR()])
        except TypeError as error:
            said.append(str(error))
    net = cases.initialised("deep")
    net.last.weight = nn.Parameter(distribute_tensor(net.last.weight, mesh, [Shard(1)]))
    try:
        DistCockpit(net, nn.CrossEntropyLoss(), store=store, quantities=[MeanGSNR()])
    except TypeError as error:
        said.append(str(error))
    return said


@shows("Refused with an error", "FSDP2 (`fully_shard`), whole or in part, and tensor parallelism")
def test_fsdp2(ranks: Ranks, tmp_path: Path) -> None:
    for whole, part, tensor in ranks.run(4, wrap_in_fsdp, str(tmp_path / "run")):
        assert (
            whole.startswith("model=FSDPDeep was given to fully_shard (FSDP2)") and "DistributedDataParallel" in whole
        )
        assert part.startswith("Module 'middle' of the model was given to fully_shard (FSDP2)")
        assert tensor.startswith("Parameter 'last.weight' is a DTensor")


@pytest.mark.parametrize(
    "optimizer, kind, words",
    [
        (lambda net: [torch.optim.SGD(net.parameters()), 3], TypeError, "optimizer=3: must be a torch.optim.Optimizer"),
        (lambda net: {"a/b": torch.optim.SGD(net.parameters()), "c": None}, ValueError, "optimizer={'a/b': ...}"),
        (
            lambda net: {"a": torch.optim.SGD(net.parameters()), "b": torch.optim.SGD(net[0].parameters())},
            ValueError,
            "'a' and 'b' both hold parameter '0.weight'",
        ),
        (
            lambda net: [torch.optim.SGD(net.parameters()), torch.optim.SGD(nn.Linear(2, 2).parameters())],
            ValueError,
            "holds none of the model's parameters",
        ),
    ],
)
def test_optimizers_that_are_refused(tmp_path: Path, optimizer: Any, kind: type[Exception], words: str) -> None:
    net = cases.initialised("sigmoid")
    with pytest.raises(kind, match=words):
        DistCockpit(net, None, optimizer(net), store=tmp_path / "run", quantities=[MeanGSNR()])


def test_alpha_of_an_optimizer_that_is_not_there(tmp_path: Path) -> None:
    net = cases.initialised("sigmoid")
    optimizer = torch.optim.SGD(net.parameters())
    with pytest.raises(ValueError, match=r"Alpha\(optimizer='muon'\): no optimizer of this name"):
        DistCockpit(net, None, optimizer, store=tmp_path / "run", quantities=[Alpha(optimizer="muon")])


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


def test_the_readme_says_which_loops_work() -> None:
    """Made by `python tests/loops.py`."""
    assert loops.table() in (Path(__file__).parents[1] / "README.md").read_text()
