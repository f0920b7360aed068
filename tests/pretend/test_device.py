"""The table on a device, and where a tracked step makes the host wait for it; in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import architectures
import cases
import objectives
import pytest

from pretend import alike, programs
from pretend.building import missing

Call = Callable[..., Any]

Wait = tuple[str, str, int]

DIVISOR: Wait = ("world.py:_arrived", "event.synchronize", 1)
"""How many targets count, and by what the loop divides: needed on the host, sent while the backward pass runs."""

DOUBTFUL: Wait = ("gradients/rounding.py:verdict", "copy to the host", 1)
"""Layers on sequences: whether float32 sums suffice decides, on all ranks alike, if sums are exchanged once more."""

CHECKS: list[Wait] = [
    ("capture/capture.py:_fingerprint", "copy to the host", 2),
    ("capture/signature.py:squared_norms", "copy to the host", 3),
    ("losses/interpretation.py:_compare", "item", 2),
    ("losses/interpretation.py:_rest", "item", 1),
    ("replay/silence.py:on_host", "copy to the host", 2),
]
"""A step that checks itself reads its verdicts."""

DIAGONALS: list[Wait] = [("curvature/diagonals.py:_check_targets", "item", 1), ("elsewhere", "item", 1)]
"""Targets of a curvature that BackPACK computes, which looks at them, too."""


def lanczos(products: int) -> list[Wait]:
    """Each product with the Hessian starts from the host and ends there; the step is rerun once to confirm."""
    three = [("__call__", "copy to the device"), ("__call__", "copy to the host"), ("_answer", "item")]
    found: list[Wait] = [(f"curvature/lanczos.py:{place}", what, products) for place, what in three]
    return [*found, ("tracking/exchanges.py:_confirm", "item", 1)]


BY_BACKPACK = ("mlp", "sigmoid", "deep", "cnn")
PLAIN = (*BY_BACKPACK, "tokens", "tied", "scaled", "eval_batchnorm")

UNSETTLED: Wait = ("capture/signature.py:squared_norms", "copy to the host", 1)
"""A parameter whose gradient is zero but for rounding stays to be checked."""

WAITS: dict[tuple[str, str], list[Wait]] = {
    **{(model, preset): [DIVISOR] for model in PLAIN for preset in ("economy", "layers", "business")},
    **{(model, "business"): [*DIAGONALS, DIVISOR] for model in BY_BACKPACK},
    ("reused", "economy"): [UNSETTLED, DOUBTFUL, DIVISOR],
    ("reused", "layers"): [UNSETTLED, DIVISOR],
    ("attention", "economy"): [DOUBTFUL, DIVISOR],
    ("attention", "layers"): [DIVISOR],
    ("attention", "business"): [DOUBTFUL, DIVISOR],
    ("sigmoid", "full"): [*DIAGONALS, *lanczos(22), DIVISOR],
    ("tokens", "full"): [*lanczos(22), DIVISOR],
    ("attention", "full"): [*lanczos(32), DOUBTFUL, DIVISOR],
}
"""By model and preset: place, what for, how often, at a step that checks nothing."""


def available() -> None:
    """Skip the test if the device cannot be compiled, which must not happen in CI."""
    if why := missing():
        assert "DISTCOCKPIT_SKIPS_NOTHING" not in os.environ, why
        pytest.skip(why)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def call() -> Iterator[Call]:
    """Calls a function in a process that has the device."""
    available()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=programs.start) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def test_it_is_like_an_accelerator(call: Call) -> None:
    call(programs.like_an_accelerator)


@pytest.mark.parametrize("model", cases.MODELS)
def test_table(call: Call, tmp_path: Path, model: str) -> None:
    loss = "token_mean" if model in cases.ON_TOKENS else "mean"
    call(programs.table, str(tmp_path / "run"), model, loss, model in ("mlp", "cnn", "sigmoid"))


@pytest.mark.parametrize("way", alike.WAYS)
def test_ways_to_train(call: Call, tmp_path: Path, way: str) -> None:
    call(alike.same_way, str(tmp_path / "run"), way)


@pytest.mark.parametrize("name", [name for name in architectures.CASES if name not in alike.MISSING])
def test_architectures(call: Call, tmp_path: Path, name: str) -> None:
    call(alike.same_architecture, str(tmp_path / "run"), name)


@pytest.mark.parametrize("name", [name for name in objectives.OBJECTIVES if "pos_weight" not in name])
def test_losses(call: Call, tmp_path: Path, name: str) -> None:
    """But for one that has a constant on the CPU."""
    call(alike.same_loss, str(tmp_path / "run"), name)


@pytest.mark.parametrize("size, backend", [(2, "pretend_ccl"), (4, "cpu:gloo,pretend:pretend_ccl")])
def test_ranks(tmp_path: Path, size: int, backend: str) -> None:
    """Tensors on the device go to groups that take them, as NCCL's do, and what is on the host goes to gloo."""
    available()
    port = free_port()
    with ProcessPoolExecutor(size, multiprocessing.get_context("spawn")) as pool:
        store = str(tmp_path / "run")
        all_of_them = [pool.submit(programs.rank, number, size, store, port, backend) for number in range(size)]
        for one in all_of_them:
            one.result()


@pytest.mark.parametrize("model, preset", list(WAITS))
def test_where_a_step_waits(call: Call, tmp_path: Path, model: str, preset: str) -> None:
    expected = sorted(WAITS[model, preset])
    with_old_scipy = [(place, what, n - ("lanczos" in place)) for place, what, n in expected]  # a product fewer
    assert call(programs.waits, str(tmp_path / "run"), model, preset) in (expected, with_old_scipy)


@pytest.mark.parametrize("model", ["mlp", "cnn", "tokens", "attention"])
def test_where_a_step_that_checks_itself_waits(call: Call, tmp_path: Path, model: str) -> None:
    also = [DOUBTFUL] if model == "attention" else []
    assert call(programs.waits, str(tmp_path / "run"), model, "economy", 0, 1) == sorted([*CHECKS, DIVISOR, *also])


@pytest.mark.parametrize("steps", [1, 5])
def test_more_layers_wait_no_more(call: Call, tmp_path: Path, steps: int) -> None:
    few, many = (call(programs.waits, str(tmp_path / f"{n}"), "mlp", "economy", n, steps) for n in (1, 5))
    assert few == many == sorted([DIVISOR, *(CHECKS if steps == 1 else [])])


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_autocast(call: Call, tmp_path: Path, kind: str) -> None:
    call(programs.autocast_alike, str(tmp_path / "run"), kind)


def test_rounded_convolutions(call: Call, tmp_path: Path) -> None:
    """Where cuDNN rounds, gradients of kernels are added up from individual ones; elsewhere, autograd's are taken."""
    call(alike.rounded, str(tmp_path / "known"), True)
    with pytest.raises(AssertionError):
        call(alike.rounded, str(tmp_path / "unknown"), False)


def test_the_default_group(tmp_path: Path) -> None:
    available()
    port = free_port()
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        for one in [pool.submit(programs.default_group, k, port, str(tmp_path)) for k in range(2)]:
            one.result()


@pytest.mark.parametrize("how", ["exits", "hangs"])
def test_a_rank_that_is_gone(tmp_path: Path, how: str) -> None:
    """The sums never arrive: the host does not wait beyond `timeout_seconds`, and says who is missing."""
    available()
    context, port = multiprocessing.get_context("spawn"), free_port()
    ranks = [context.Process(target=programs.dead_peer, args=(k, port, str(tmp_path), how)) for k in range(2)]
    for rank in ranks:
        rank.start()
    ranks[0].join()
    ranks[1].kill()
    told = (tmp_path / "told0").read_text()
    assert "Missing: rank 1 (last seen in tracked step 2). Waiting: rank 0 (in tracked step" in told
    assert "timeout_seconds=6" in told


def test_several_devices(call: Call) -> None:
    call(programs.several_devices)


def test_training_is_unchanged(call: Call, tmp_path: Path) -> None:
    call(programs.training_is_unchanged, str(tmp_path / "run"))
