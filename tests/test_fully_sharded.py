"""Models sharded with `fully_shard`: the table of quantities, training as without a cockpit, and what goes wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import ON_TOKENS
from checks import check, run
from ranks import Ranks
from train import SHARDINGS, Spec, train

from distcockpit import open_run

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


@pytest.mark.parametrize("how", ["leaves", "root"])
@pytest.mark.parametrize("sharding", ["even 2", "uneven 2", "uneven 4", "empty rank"])
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


@pytest.mark.parametrize(
    "how", ["hsdp", "checkpointed", "checkpointed, reentrant", "compiled", "grouped", "ignored", "in part", "offloaded"]
)
def test_transformer(ranks: Ranks, tmp_path: Path, how: str) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy

    fsdp = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if how == "offloaded" else {}
    rows = {"elements": 16} if how in ("hsdp", "grouped") else {}
    table(ranks, tmp_path, "transformer", how, "uneven 4", fsdp=fsdp, **rows)


def test_low_precision(ranks: Ranks, tmp_path: Path) -> None:
    """The network that computes in bfloat16, from parameters in float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    exact, rounded = (
        spec_of(tmp_path / name, "transformer", "blocks of it", "uneven 4", fsdp=options)
        for name, options in (("exact", {}), ("rounded", {"mp_policy": policy}))
    )
    here, there = (run(ranks, spec)[1].load() for spec in (rounded, exact))
    for name, field in (("loss", "loss"), ("grad_norm", "grad_norm"), ("norm_test", "norm_test"), ("alpha", "alpha")):
        a, b = here[name][field].values, there[name][field].values
        np.testing.assert_allclose(a, b, rtol=0.1, atol=0.02)
        assert (a != b).any()
    assert here["parameters"]["head.weight"].dtype == np.float32
    np.testing.assert_array_equal(here["parameters"]["head.weight"][0], there["parameters"]["head.weight"][0])


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
