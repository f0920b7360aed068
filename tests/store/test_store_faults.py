"""Stores that fail: full disks, lost permissions, slow and absent servers."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Generator
from dataclasses import fields
from pathlib import Path
from typing import Any

import cases
import pytest
from paths import ROOT
from stores import S3, Place
from torch import nn
from waiting import HANG, run_program, until

from distcockpit import DistCockpit, StoreOptions, every, open_run
from distcockpit.notices import Notices
from distcockpit.quantities import GradHist2d, Loss
from distcockpit.run import verify
from distcockpit.store import run_store as store_module
from distcockpit.store.keys import FolderKeys
from distcockpit.store.run_store import RunStore
from distcockpit.store.schema import Field, Group
from distcockpit.store.writer import Job, Writer

CE = nn.CrossEntropyLoss


QUICK = {"quantities": [Loss()], "schedule": every(1)}


QUICKLY = {"store_seconds": HANG, "flush_seconds": 0.2}


SOON = 5.0  # seconds after which a store that hangs is given up


class Loop:
    """A training loop that a test drives step by step."""

    def __init__(self, where: Place, **options: Any) -> None:
        self.net, self.loss_fn, self.step = cases.initialised("mlp"), CE(), 0
        names = {each.name for each in fields(StoreOptions)}
        of_store = StoreOptions(**{**QUICKLY, **{name: options.pop(name) for name in names & options.keys()}})
        given = {**QUICK, **options, "store_options": of_store}
        self.place = str(where.store)
        self.cockpit = DistCockpit(self.net, self.loss_fn, **where.for_cockpit, **given)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            x, y = cases.data("mlp", "mean", self.step)
            with self.cockpit.track(self.step):
                self.loss_fn(self.net(x), y).backward()
            self.step += 1

    def wait_for_fault(self, caplog: pytest.LogCaptureFixture) -> None:
        """Wait until it is logged; the thread of an earlier test may still log its own."""
        until(lambda: re.search(re.escape(self.place) + " (could not be written|was removed while)", caplog.text))


def rows(where: Place) -> list[int]:
    return list(open_run(where.store, where.options)["loss"]["step"].values)


# -- networks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["500", "hang", "gone"])
def test_an_object_store_that_fails_for_a_while(s3: S3, caplog: pytest.LogCaptureFixture, mode: str) -> None:
    where = s3.place(SOON if mode == "hang" else HANG)
    loop = Loop(where)
    loop.train(3)
    until(lambda: (loop.cockpit.flush(), rows(where))[1] == [0, 1, 2])
    s3.proxy.mode = mode
    loop.train(5)
    loop.wait_for_fault(caplog)
    assert s3.proxy.refused and "could not be written; its rows are kept" in caplog.text
    loop.train(2)
    s3.proxy.mode = "ok"
    loop.train(1)
    loop.cockpit.close()
    assert rows(where) == list(range(11)) and open_run(where.store, where.options).attrs["dropped_rows"] == 0
    assert verify(where.store, where.options) == [] and "did not reach" not in caplog.text


def test_an_object_store_that_stays_away(s3: S3, caplog: pytest.LogCaptureFixture) -> None:
    where = s3.place(SOON)
    loop = Loop(where, store_seconds=SOON)
    loop.train(2)
    until(lambda: (loop.cockpit.flush(), rows(where))[1] == [0, 1])
    s3.proxy.mode = "hang"
    loop.train(4)
    loop.cockpit.close()  # which gives up after store_seconds=
    assert "4 rows did not reach s3://" in caplog.text
    behind = {**where.options, "endpoint_url": f"http://127.0.0.1:{s3.proxy.behind}"}
    assert rows(Place(where.store, behind)) == [0, 1]


def test_raising(s3: S3, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(s3.place(), on_error="raise")
    loop.train(1)
    s3.proxy.mode = "500"
    loop.wait_for_fault(caplog)
    with pytest.raises(RuntimeError, match="could not be written"):
        loop.train(1)
    with pytest.raises(RuntimeError, match="could not be written"):
        loop.cockpit.close()


# -- disks -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Generator[Path, None, None]:
    """A file system of one megabyte."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a file system here")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def test_a_full_disk(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    where = Place(small_disk / "run")
    loop = Loop(where)
    loop.train(3)
    loop.cockpit.flush()
    filler = small_disk / "filler"
    handle = os.open(filler, os.O_CREAT | os.O_WRONLY)
    with contextlib.suppress(OSError):
        while True:
            os.write(handle, b"x" * 4096)
    os.close(handle)
    loop.train(4)
    loop.wait_for_fault(caplog)
    assert "No space left" in caplog.text and rows(where) == [0, 1, 2]  # the old rows are still there
    filler.unlink()
    loop.cockpit.close()
    assert rows(where) == list(range(7)) and verify(where.store) == []
    assert not list(small_disk.rglob("*.partial"))


def test_permission_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    where = Place(tmp_path / "run")
    loop = Loop(where)
    loop.train(1)
    loop.cockpit.flush()
    if os.getuid() == 0:  # who may everything is stopped by an attribute of the file system
        take = ["chattr", "-R", "+i", tmp_path / "run"]
        if shutil.which("chattr") is None or subprocess.run(take, capture_output=True).returncode:
            pytest.skip("cannot take permissions away from this user here")
        give_back = ["chattr", "-R", "-i", tmp_path / "run"]
    else:
        subprocess.run(["chmod", "-R", "a-w", tmp_path / "run"], check=True)
        give_back = ["chmod", "-R", "u+w", tmp_path / "run"]
    try:
        loop.train(3)
        loop.wait_for_fault(caplog)
        assert "PermissionError" in caplog.text
    finally:
        subprocess.run(give_back, check=True)
    loop.cockpit.close()
    assert rows(where) == list(range(4))


@pytest.mark.parametrize("comes_back", [True, False])
def test_the_folder_is_taken_away(tmp_path: Path, caplog: pytest.LogCaptureFixture, comes_back: bool) -> None:
    """As by an unmounted network disk, or `rm -r`. A store without its first rows would look whole: none is made."""
    path = tmp_path / "run"
    loop = Loop(Place(path), flush_seconds=1000)  # no commit while the folder goes
    loop.train(3)
    loop.cockpit.flush()
    path.rename(tmp_path / "away") if comes_back else shutil.rmtree(path)
    loop.train(3)
    loop.cockpit.flush()
    loop.wait_for_fault(caplog)
    assert "was removed while it was being written" in caplog.text
    assert not (path / "zarr.json").exists()
    if comes_back:
        shutil.rmtree(path, ignore_errors=True)
        (tmp_path / "away").rename(path)
    loop.cockpit.close()
    if comes_back:
        assert rows(Place(path)) == list(range(6)) and verify(path) == []
    else:
        assert "3 rows did not reach" in caplog.text and not (path / "zarr.json").exists()


# -- more rows than the store takes ------------------------------------------------------------------------------------


class Slow(FolderKeys):
    """A folder whose writes wait for a signal."""

    gate: threading.Event
    waits: threading.Event

    def put(self, items: Any) -> None:
        self.waits.set()
        assert self.gate.wait(HANG)
        super().put(items)


def test_a_full_queue(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step waits once; then rows are dropped and counted, until the thread has caught up."""
    keys = Slow(tmp_path / "run")
    keys.gate, keys.waits = threading.Event(), threading.Event()
    keys.gate.set()
    store = RunStore(keys, "w-", {"a": Group({"x": Field()})}, {"parameters": {}, "config": {}})
    writer = Writer(store, StoreOptions(flush_seconds=1e-3, queue_steps=4, wait_seconds=0.5), Notices())
    at = {"wall_time": 0.0, "epoch": 0.0, "batch_size": 1}

    def submit(step: int) -> None:
        writer.submit(Job(lambda s: s.append("a", step, {"x": step}, at), rows=1))

    keys.gate.clear()
    keys.waits.clear()
    submit(0)
    assert keys.waits.wait(HANG)  # the thread is committing, and waits for the disk
    waits: list[bool] = []
    put = queue.Queue.put

    def counted(jobs: queue.Queue, job: object, block: bool, seconds: float) -> None:
        waits.append(block)
        put(jobs, job, block, seconds)

    monkeypatch.setattr(queue.Queue, "put", counted)
    for step in range(1, 40):
        submit(step)
    assert waits == [True] * 5 + [False] * 34  # four find room, one waits
    monkeypatch.undo()
    assert sum("accepts rows too slowly" in record.message for record in caplog.records) == 1
    keys.gate.set()
    assert writer.flush()
    submit(40)
    writer.close()
    run = open_run(tmp_path / "run")
    steps = list(run["a"]["step"].values)
    assert steps == [0, 1, 2, 3, 4, 40]
    assert run.attrs["dropped_rows"] == 41 - len(steps)
    assert f"{41 - len(steps)} rows were lost on the way" in caplog.text


def test_sums_that_do_not_come_hold_back_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A rank stalls, or an accelerator is broken: what was finished before is committed, and what follows goes on."""
    store = RunStore(FolderKeys(tmp_path / "run"), "w-", {"a": Group({"x": Field()})}, {"parameters": {}, "config": {}})
    writer = Writer(store, StoreOptions(flush_seconds=0.3), Notices())
    at, stalls, broken = {"wall_time": 0.0, "epoch": 0.0, "batch_size": 1}, threading.Event(), threading.Event()
    appended: list[int] = []

    def ready() -> bool:
        if broken.is_set():
            raise RuntimeError("device-side assert triggered")
        return not stalls.is_set()

    def submit(step: int) -> None:
        def append(to: RunStore) -> bool:
            appended.append(step)
            return to.append("a", step, {"x": step}, at)

        writer.submit(Job(append, rows=1, is_ready=ready))

    submit(0)
    assert writer.flush()
    submit(1)
    until(lambda: appended == [0, 1])
    stalls.set()
    submit(2)
    until(lambda: list(open_run(tmp_path / "run")["a"]["step"].values) == [0, 1])
    broken.set()
    until(lambda: "device-side assert" in caplog.text)
    broken.clear()
    stalls.clear()
    submit(3)
    writer.close()
    run = open_run(tmp_path / "run")
    assert list(run["a"]["step"].values) == [0, 1, 3] and run.attrs["dropped_rows"] == 1


def test_memory_for_unwritten_rows_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "CHUNK_BYTES", 1 << 16)
    path = tmp_path / "run"
    options = {"quantities": [GradHist2d(bins=(40, 50)), Loss()], "unwritten_budget": "4KiB"}
    loop = Loop(Place(path), **options)
    path.rename(tmp_path / "away")
    loop.train(60)
    loop.cockpit.flush()
    path.mkdir(exist_ok=True)
    shutil.rmtree(path)
    (tmp_path / "away").rename(path)
    loop.train(2)
    loop.cockpit.flush()
    loop.train(3)
    loop.cockpit.close()
    run = open_run(path)
    kept = list(run["grad_hist_2d"]["step"].values)
    assert 0 < run.attrs["dropped_rows"] and len(kept) < 60 and kept[-3:] == [62, 63, 64]
    lost = sum(65 - run[name].sizes["step"] for name in ("grad_hist_2d", "loss"))
    assert run.attrs["dropped_rows"] == lost and verify(path) == []


def test_rows_are_committed_by_their_number(tmp_path: Path) -> None:
    loop = Loop(Place(tmp_path / "run"), flush_seconds=1000, flush_rows=5)
    loop.train(9)
    until(lambda: len(rows(Place(tmp_path / "run"))) >= 5)
    loop.cockpit.close()


def test_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file, and every folder that names it."""
    flushed, fsync = [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda handle: (flushed.append(os.readlink(f"/proc/self/fd/{handle}")), fsync(handle))
    )
    loop = Loop(Place(tmp_path / "run"), fsync=True)
    loop.train(1)
    loop.cockpit.close()
    assert (
        any(name.endswith(".partial") and "/zarr.json" in name for name in flushed) and str(tmp_path / "run") in flushed
    )
    Loop(Place(tmp_path / "other")).cockpit.close()
    assert not any("other" in name for name in flushed)


def test_on_a_store_of_another_kind_nothing_is_lost_at_exit(s3: S3) -> None:
    """The program ends without closing, when pools of threads are about to be shut down."""
    where = s3.place()
    script = f"""
import sys; sys.path.insert(0, {str(ROOT / "tests/helpers")!r})
import cases
from torch import nn
from distcockpit import DistCockpit, StoreOptions, every
from distcockpit.quantities import Loss
net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
cockpit = DistCockpit(net, loss_fn, store={where.store!r}, storage_options={where.options!r}, schedule=every(1),
                      quantities=[Loss()], store_options=StoreOptions(flush_seconds=1000))
for step in range(3):
    x, y = cases.data("mlp", "mean", step)
    with cockpit.track(step):
        loss_fn(net(x), y).backward()
"""
    run_program(sys.executable, "-c", script)
    assert rows(where) == [0, 1, 2]
