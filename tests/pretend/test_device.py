"""The table on a device, and where a tracked step makes the host wait for it; in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import cases
import pytest

from pretend import programs
from pretend.building import missing

Call = Callable[..., Any]

MISSING = {"tokens"}
"""Models with a fused GRU cell, which the device does not have."""

DIVISOR = ("world.py:_arrived", "event.synchronize", 2)
"""How many targets count, and by what the loop divides: needed on the host, sent while the backward pass runs."""

DOUBTFUL = [("gradients/rounding.py:doubtful", what, 1) for what in ("aten::nonzero", "copy to the host")]
"""Layers on sequences: whether float32 sums suffice decides, on all ranks alike, if sums are exchanged once more."""

WAITS = {
    ("mlp", "economy"): [DIVISOR],
    ("cnn", "economy"): [DIVISOR],
    ("tied", "economy"): [DIVISOR],
    ("scaled", "economy"): [DIVISOR],
    ("attention", "economy"): sorted([*DOUBTFUL, DIVISOR]),
    ("mlp", "layers"): [DIVISOR],
    ("cnn", "layers"): [DIVISOR],
    ("attention", "layers"): [DIVISOR],
}
"""By model and preset: place, what for, how often, at a step that checks nothing."""


def available() -> None:
    """Skip the test if the device cannot be compiled, which must not happen in CI."""
    if why := missing():
        assert "DISTCOCKPIT_SKIPS_NOTHING" not in os.environ, why
        pytest.skip(why)


@pytest.fixture(scope="module")
def call() -> Iterator[Call]:
    """Calls a function in a process that has the device."""
    available()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=programs.start) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def test_it_is_like_an_accelerator(call: Call) -> None:
    call(programs.like_an_accelerator)


@pytest.mark.parametrize("model", [name for name in cases.MODELS if name not in MISSING])
def test_table(call: Call, tmp_path: Path, model: str) -> None:
    loss = "token_mean" if model == "tied" else "mean"
    call(programs.table, str(tmp_path / "run"), model, loss, model in ("mlp", "cnn", "sigmoid"))


def test_two_ranks(tmp_path: Path) -> None:
    """The group's backend takes tensors on the device alone; gloo takes what is on the host."""
    available()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), initializer=programs.start) as pool:
        both = [pool.submit(programs.rank, number, 2, str(tmp_path / "run"), port) for number in range(2)]
        for one in both:
            one.result()


@pytest.mark.parametrize("model, preset", list(WAITS))
def test_where_a_step_waits(call: Call, tmp_path: Path, model: str, preset: str) -> None:
    assert call(programs.waits, str(tmp_path / "run"), model, preset) == WAITS[model, preset]


def test_more_layers_wait_no_more(call: Call, tmp_path: Path) -> None:
    few, many = (call(programs.waits, str(tmp_path / f"{n}"), "mlp", "economy", n) for n in (1, 5))
    assert few == many == [DIVISOR]


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_autocast(call: Call, tmp_path: Path, kind: str) -> None:
    found = call(programs.autocast, str(tmp_path / "run"), kind)
    assert found["pretend"] == pytest.approx(found["cpu"], rel=0.02)
