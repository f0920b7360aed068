"""Models sharded with `fully_shard`: the table of quantities, training as without a cockpit, and what goes wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import torch
import torch.distributed as dist
from allocator import _is_ours
from cases import ON_TOKENS
from checks import check, run
from loops import shows
from ranks import Ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from train import SHARDINGS, Spec, fully_sharded, make_optimizer, of_shards, train

from distcockpit import DistCockpit, every, open_run, presets
from distcockpit import quantities as q

SHARDED: dict[str, dict[str, Any]] = {
    "blocks": {"reshard_after_forward": False},
    "root": {"reshard_after_forward": True},
    "leaves, hsdp": {"reshard_after_forward": True},
    "leaves of 2": {"reshard_after_forward": 2},
}
"""Options of `fully_shard` that come with what it is applied to."""


def spec_of(folder: Path, model: str, how: str, sharding: str, **more: Any) -> Spec:
    loss = "token_mean" if model in ON_TOKENS else "sum" if sharding == "empty rank" else "mean"
    more = {"loss": loss, "optimizer": "sgd", "sharded": how, "fsdp": SHARDED.get(how, {}), **more}
    return Spec(str(folder / "run.zarr"), model, shards=tuple(SHARDINGS[sharding]), **more)


def table(ranks: Ranks, folder: Path, *args: str, **more: Any) -> None:
    spec = spec_of(folder, *args, **more)
    check(spec, *run(ranks, spec))


# -- the table --------------------------------------------------------------------------------------------------------


WRAPPED = "applied to layers, blocks or the root alone, over one axis of ranks or two (HSDP)"


@shows("`fully_shard` (FSDP2)", WRAPPED)
@pytest.mark.parametrize(
    "how, sharding",
    [
        ("leaves", "even 2"),
        ("leaves", "uneven 4"),
        ("leaves", "empty rank"),
        ("root", "uneven 2"),
        ("root", "empty rank"),
    ],
)
def test_panel(ranks: Ranks, tmp_path: Path, how: str, sharding: str) -> None:
    table(ranks, tmp_path, "sigmoid", how, sharding)


@pytest.mark.parametrize("how", ["blocks", "leaves, hsdp", "blocks, last axis", "leaves of 2"])
def test_wrapping(ranks: Ranks, tmp_path: Path, how: str) -> None:
    table(ranks, tmp_path, "mlp", how, "uneven 4", optimizer="adamw")


@pytest.mark.parametrize(
    "model, how",
    [
        ("cnn", "leaves"),
        ("tokens", "blocks"),
        ("tied", "root"),
        ("attention", "blocks"),
        ("scaled", "root"),
        ("reused", "root"),
        ("partly_frozen", ""),
        ("partly_frozen_recurrence", "blocks"),
    ],
)
def test_layers(ranks: Ranks, tmp_path: Path, model: str, how: str) -> None:
    table(ranks, tmp_path, model, how or "transformer", "uneven 4", optimizer="adamw")


@pytest.mark.parametrize(
    "loop",
    [{"accumulate": 2}, {"accumulate": 3, "no_sync": True}, {"backwards": 2}, {"elements": 20}, {"buckets": 3}],
    ids=lambda loop: "-".join(f"{k}={v}" for k, v in loop.items()),
)
def test_loops(ranks: Ranks, tmp_path: Path, loop: dict) -> None:
    table(ranks, tmp_path, "sigmoid", "leaves", "uneven 2", **loop)


@shows(
    "`fully_shard` (FSDP2)",
    "activation checkpointing, compiled blocks, CPU offload, `ignored_params`, several modules in one call, frozen "
    "parameters, accumulation with and without synchronisation, low precision",
)
@pytest.mark.parametrize(
    "how", ["hsdp, checkpointed", "compiled, grouped", "checkpointed, reentrant, ignored", "in part", "offloaded"]
)
def test_transformer(ranks: Ranks, tmp_path: Path, how: str) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy

    fsdp = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if how == "offloaded" else {}
    rows = {"elements": 16} if "hsdp" in how or "grouped" in how else {}
    table(ranks, tmp_path, "transformer", how, "uneven 4", fsdp=fsdp, **rows)


@pytest.mark.parametrize("model, last", [("transformer", "head.weight"), ("sigmoid", "4.weight")])
def test_low_precision(ranks: Ranks, tmp_path: Path, model: str, last: str) -> None:
    """The network that computes in bfloat16, from parameters in float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    exact, rounded = (
        spec_of(tmp_path / name, model, "blocks of it", "uneven 4", fsdp=options)
        for name, options in (("exact", {}), ("rounded", {"mp_policy": policy}))
    )
    here, there = (run(ranks, spec)[1].load() for spec in (rounded, exact))
    for name, field in (("loss", "loss"), ("grad_norm", "grad_norm"), ("norm_test", "norm_test"), ("alpha", "alpha")):
        a, b = here[name][field].values, there[name][field].values
        np.testing.assert_allclose(a, b, rtol=0.1, atol=0.02)
        assert (a != b).any()
    assert here["parameters"][last].dtype == np.float32
    np.testing.assert_array_equal(here["parameters"][last][0], there["parameters"][last][0])


def test_what_fsdp_delivers(ranks: Ranks, tmp_path: Path) -> None:
    """`CompressionError` is that of DDP: means of uneven ranks are not G; and reducing in bfloat16 is an error."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    rounds = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}
    found = {}
    for name, how, more in (
        ("ddp", "", {}),
        ("blocks of it", "blocks of it", {"elements": 16}),
        ("hsdp", "hsdp", {"accumulate": 1}),
        ("rounded", "blocks of it", {"fsdp": rounds}),
    ):
        options = {"quantities": [q.CompressionError()]}
        spec = spec_of(tmp_path / name, "transformer", how, "uneven 4", options=options, **more)
        ranks.run(4, train, spec)
        found[name] = open_run(spec.store).load()["compression_error"]
    ddp, rounded = found["ddp"], found["rounded"]
    assert (ddp["total"] > 0.05).all() and (ddp["hook_total"] < 1e-6).all()
    for name in ("blocks of it", "hsdp"):
        for field in ("error", "total", "cosine"):
            np.testing.assert_allclose(found[name][field], ddp[field], rtol=1e-3, atol=1e-6, err_msg=f"{name} {field}")
        assert (found[name]["hook_total"] < 1e-5).all()
    assert (rounded["hook_total"] > 1e-4).all() and (rounded["hook_total"] < 0.02).all()


def drift(rank: int, size: int, group: Any, store: str) -> None:
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    model, optimizer = fully_sharded(net, "leaves, hsdp", group), make_optimizer("adamw", net)
    options = {"quantities": [q.ReplicaDrift()], "schedule": every(1), "process_group": group}
    with DistCockpit(model, loss_fn, optimizer, store=store, **options) as cockpit:
        for step in range(3):
            if step == 2 and rank == 3:
                with torch.no_grad():
                    net[2].weight.to_local()[0, 0] += 1
            x, y = cases.data("mlp", "mean", step)
            optimizer.zero_grad()
            with cockpit.track(step):
                loss_fn(cockpit(x[6 * rank : 6 * rank + 6]), y[6 * rank : 6 * rank + 6]).backward()
            optimizer.step()


def test_drift_between_replicas(ranks: Ranks, tmp_path: Path) -> None:
    """Ranks 1 and 3 hold the same shards, ranks 0 and 2 others."""
    ranks.run(4, drift, str(tmp_path / "run"))
    rows = open_run(tmp_path / "run").load()["replica_drift"]
    assert list(rows["replica_drift"].values) == [0, 0, 1]
    assert np.argwhere(rows["differs"].values).tolist() == [[2, 2, 3]]


# -- the run is as without a cockpit -----------------------------------------------------------------------------------

OURS = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "gather_object", "new_group")
FSDPS = ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor")
COLLECTIVES = [name for name in (*OURS, *FSDPS) if hasattr(dist, name)]


def counted(rank: int, size: int, group: Any, spec: Spec) -> tuple[list[dict[str, torch.Tensor]], list[str]]:
    """Train; return the states, and every collective, FSDP's included, in order."""
    calls: list[str] = []
    real = {name: getattr(dist, name) for name in COLLECTIVES}

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
            calls.append(f"{name} {[tuple(t.shape) for t in given]} {[str(t.dtype) for t in given]}")
            return real[name](*args, **kwargs)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, counting(name))
    try:
        return train(rank, size, group, spec), calls
    finally:
        for name, function in real.items():
            setattr(dist, name, function)


@pytest.mark.parametrize("how", ["blocks of it", "hsdp", "root"])
def test_training_is_as_without(ranks: Ranks, tmp_path: Path, how: str) -> None:
    """Bit for bit; and all ranks make the same collectives in the same order."""
    spec = spec_of(tmp_path, "transformer", how, "uneven 4", steps=5, elements=16)
    off = spec_of(tmp_path / "off", "transformer", how, "uneven 4", steps=5, options={"enabled": False})
    (states, calls), *others = ranks.run(4, counted, spec)
    for with_cockpit, without in zip((states, *(s for s, _ in others)), ranks.run(4, train, off), strict=True):
        for a, b in zip(with_cockpit, without, strict=True):
            assert all(torch.equal(a[name], b[name]) for name in b)
    assert all(theirs == calls for _, theirs in others)
    assert len(calls) > 100 and any("reduce_scatter" in call for call in calls)
    assert len(open_run(spec.store)["alpha"]["step"]) == 4


# -- memory ------------------------------------------------------------------------------------------------------------

BUDGET, WIDTH = 4 << 20, 1400


def _is_fsdps(frame: Any) -> bool:
    while frame is not None and "/torch/distributed/fsdp/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None


class Largest(TorchDispatchMode):
    """The largest tensors that the package makes, with the operations that make them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if _is_ours(sys._getframe(1)) and not _is_fsdps(sys._getframe(1)):
            given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
            for t in tree_leaves(result):
                if type(t) is torch.Tensor and t.untyped_storage()._cdata not in given:
                    frame = sys._getframe(1)
                    while "/distcockpit/" not in frame.f_code.co_filename and frame.f_back is not None:
                        frame = frame.f_back
                    place = f"{function} in {frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
                    self.found[place] = max(self.found.get(place, 0), t.untyped_storage().nbytes())
        return result


def watch_allocations(rank: int, size: int, group: Any, store: str, how: str) -> dict[str, int]:
    """Train a model whose matrices are larger than the budget; return the largest tensors that the package made."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(900, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 900))
    model = fully_sharded(net, how, group)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loss_fn, largest = nn.CrossEntropyLoss(), Largest()
    chosen = [each for each in of_shards() if not isinstance(each, q.Parameters)]  # which stores all of them
    options = {"quantities": chosen, "schedule": every(1), "memory_budget": BUDGET, "process_group": group}
    with DistCockpit(model, loss_fn, optimizer, store=store, **options) as cockpit:
        for step in range(4):
            x, y = torch.randint(900, (2, 3, 4), generator=torch.Generator().manual_seed(10 * step + rank))
            optimizer.zero_grad()
            with largest, cockpit.track(step):
                loss_fn(cockpit(x).flatten(0, 1), y.flatten()).backward()
            optimizer.step()
    return {place: size for place, size in largest.found.items() if size > BUDGET}


@pytest.mark.parametrize("how", ["leaves", "root"])
def test_no_tensor_is_larger_than_the_budget(ranks: Ranks, tmp_path: Path, how: str) -> None:
    assert BUDGET < 900 * WIDTH * 4
    assert ranks.run(2, watch_allocations, str(tmp_path / "run"), how) == [{}] * 2
    run = open_run(tmp_path / "run").load()
    assert np.isfinite(run["alpha"]["alpha"]).all() and np.isfinite(run["mean_gsnr"]["mean_gsnr"]).all()
    assert not run.attrs.get("notices")


# -- what is not there, and what is refused ----------------------------------------------------------------------------


def train_presets(rank: int, size: int, group: Any, store: str) -> None:
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    model, optimizer = fully_sharded(net, "leaves", group), make_optimizer("adamw", net)
    options = {"quantities": ["full", "layers"], "schedule": every(1), "process_group": group}
    with DistCockpit(model, loss_fn, optimizer, store=store, **options) as cockpit:
        for step in range(3):
            x, y = cases.data("mlp", "mean", step)
            optimizer.zero_grad()
            with torch.no_grad():
                model(x)  # leaves the root whole
            with cockpit.track(step):
                loss_fn(cockpit(x[6 * rank : 6 * rank + 6]), y[6 * rank : 6 * rank + 6]).backward()
            optimizer.step()


def test_presets_leave_out_what_cannot_be_had(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(4, train_presets, str(tmp_path / "run"))
    run = open_run(tmp_path / "run").load()
    wanted = {each.name: each for each in (*presets.full(), *presets.layers())}
    left_out = {name for name, each in wanted.items() if each.needs.second_order} | {"parameter_condition"}
    assert set(run.children) == (wanted.keys() - left_out) | {"learning_rate", "log"}
    for name in run.children.keys() - {"log"}:
        values = {k: v for k, v in run[name].data_vars.items() if v.dtype.kind == "f" and "seconds" not in str(k)}
        assert all(np.isfinite(np.asarray(v)).any() for v in values.values()), name


def refusals(rank: int, size: int, group: Any, store: str) -> list[str]:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    said = []

    def construct(net: nn.Module, **options: Any) -> None:
        try:
            options = {"quantities": [q.Loss()], "process_group": group, **options}
            DistCockpit(net, nn.CrossEntropyLoss(), store=store, **options)
        except (TypeError, ValueError, RuntimeError) as error:
            said.append(str(error))

    net = cases.initialised("deep")
    mesh = DeviceMesh.from_group(group, "cpu")
    net.last.weight = nn.Parameter(distribute_tensor(net.last.weight, mesh, [Shard(1)]))
    construct(net)
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    net = cases.initialised("mlp")
    for layer in (net[0], net[2]):
        layer.weight = nn.Parameter(distribute_tensor(layer.weight, two["tensor"], [Shard(0)]))
    construct(fully_shard(net, mesh=two["data"]))
    construct(fully_shard(cases.initialised("mlp"), mesh=two["data"]))
    whole = fully_sharded(cases.initialised("mlp"), "root", group)
    construct(whole, track_batchnorm=True)
    for quantity in (q.ParameterCondition(), q.HessTrace(), q.HessMaxEV()):
        construct(whole, quantities=[quantity])
    net = cases.initialised("mlp")
    stepping = fully_sharded(net, "leaves", group)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with DistCockpit(
        stepping, nn.CrossEntropyLoss(), store=store, quantities=[q.NormTest()], process_group=group
    ) as ck:
        try:
            with ck.track(0):
                x, y = cases.data("mlp", "mean", 0)
                nn.functional.cross_entropy(ck(x), y).backward()
                optimizer.step()
        except RuntimeError as error:
            said.append(str(error))
    construct(FullyShardedDataParallel(cases.initialised("mlp"), process_group=group, device_id=torch.device("cpu")))
    return said


@shows("Refused with an error", "tensor, expert and context parallelism, FSDP1")
def test_refusals(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks.run(4, refusals, str(tmp_path / "run")):
        tensor, both, group, batch_norm, *quantities, stepped, fsdp1 = said
        assert tensor.startswith("Parameter 'last.weight' is sharded as (Shard(dim=1),), by more than fully_shard")
        assert "by more than fully_shard: tensor, expert and context parallelism are not supported" in both
        assert "over ranks [0, 2]" in group or "over ranks [1, 3]" in group
        assert "Pass process_group=" in group
        assert batch_norm.startswith("track_batchnorm=True: the model is sharded with fully_shard")
        names = ("parameter_condition", "hess_trace", "hess_max_ev")
        for name, text in zip(names, quantities, strict=True):
            assert text.startswith(f"quantity '{name}' needs whole parameters"), text
        assert "changed inside `track`" in stepped
        assert "FullyShardedDataParallel" in fsdp1 and "fully_shard" in fsdp1


# -- resuming ----------------------------------------------------------------------------------------------------------

STEPS, SAVED, DIED = 7, 3, 4


class Interrupted(Exception):
    pass


def train_and_resume(rank: int, size: int, group: Any, store: str, folder: str, how: str) -> str:
    """A run of STEPS steps: "whole"; one that "dies" after DIED; or that "resumes" after SAVED.

    In float64: a resumed run checks itself again, and sums in another order at these steps.
    """
    net, loss_fn = cases.initialised("transformer").double(), nn.CrossEntropyLoss()
    model, optimizer = fully_sharded(net, "blocks of it", group), make_optimizer("adamw", net)
    file, first = Path(folder, f"{rank}.pt"), 0
    options = {"quantities": of_shards(), "schedule": every(1), "mode": "a", "process_group": group}
    try:
        with DistCockpit(model, loss_fn, optimizer, store=store, **options) as cockpit:
            if how == "resumes":
                saved = torch.load(file, weights_only=False)  # the model's pieces are distributed tensors
                net.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
                cockpit.load_state_dict(saved["cockpit"])
                first = SAVED + 1
            for step in range(first, STEPS):
                x, y = cases.data("transformer", "token_mean", step)
                mine = slice(6 * rank, 6 * rank + 5 + rank % 2)
                optimizer.zero_grad()
                with cockpit.track(step):
                    loss_fn(cockpit(x[mine]), y[mine]).backward()
                optimizer.step()
                if step == SAVED and how != "resumes":
                    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save(state | {"cockpit": cockpit.state_dict()}, file)
                if step == DIED and how == "dies":
                    raise Interrupted
    except Interrupted:
        return "died"
    return "closed"


def load_other(rank: int, size: int, group: Any, store: str, folder: str) -> list[str]:
    """Load the state of another rank, and that of a sharded run into another kind of model."""
    said = []
    for net, at in ((fully_sharded(cases.initialised("transformer"), "root", group), 1 - rank), (None, rank)):
        state = torch.load(Path(folder, f"{at}.pt"), weights_only=False)["cockpit"]
        model = cases.initialised("transformer") if net is None else net
        options = {"quantities": of_shards(), "schedule": every(1), "process_group": group, "mode": "w"}
        cockpit = DistCockpit(model, None, make_optimizer("adamw", model), store=store, **options)
        try:
            cockpit.load_state_dict(state)
        except ValueError as error:
            said.append(str(error))
        cockpit.close()
    return said


def test_resuming(ranks: Ranks, tmp_path: Path) -> None:
    for name, how in (("whole", "whole"), ("run", "dies"), ("run", "resumes")):
        ranks.run(2, train_and_resume, str(tmp_path / name), str(tmp_path), how)
    whole, run = open_run(tmp_path / "whole").load(), open_run(tmp_path / "run").load()
    assert run.attrs["state"] == "closed" and not run.attrs.get("notices")
    for name in set(whole.children) - {"log", "time", "rank_health"}:
        for field, values in whole[name].data_vars.items():
            np.testing.assert_allclose(run[name][field], values, rtol=1e-12, atol=1e-12, err_msg=f"{name}/{field}")
    for other, unsharded in ranks.run(2, load_other, str(tmp_path / "other"), str(tmp_path)):
        assert "A sharded run keeps one state per rank" in other
        assert "of a model that was sharded, but this one is unsharded" in unsharded
