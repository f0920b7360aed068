"""The same run on disk, in memory and on S3."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import xarray as xr
import zarr
from construction import CE, construct
from small_batches import data
from stored_runs import train_at
from stores import Place
from torch import nn
from waiting import run_program
from zarr.storage import LocalStore, MemoryStore, ZipStore

from distcockpit import DistCockpit, every, open_run
from distcockpit.quantities import MeanGSNR
from distcockpit.run import verify
from distcockpit.store import run_store as store_module
from distcockpit.store.keys import Keys, keys_of
from distcockpit.store.lock import KEY as LOCK
from distcockpit.store.run_store import CLOSED, RunStore
from distcockpit.store.schema import Field, Group


def test_an_existing_store_is_refused(tmp_path: Path) -> None:
    construct(tmp_path).close()
    with pytest.raises(FileExistsError, match=re.escape("mode='w'")):
        construct(tmp_path)
    construct(tmp_path, mode="w").close()


@pytest.mark.parametrize("mode", ["w-", "w"])
@pytest.mark.parametrize("content", ["note.txt", "zarr.json"])
def test_a_foreign_folder_is_never_deleted(tmp_path: Path, content: str, mode: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / content).write_text('{"attributes": {"format": "another"}}')
    with pytest.raises(FileExistsError, match="not a distcockpit run"):
        construct(tmp_path, mode=mode)
    assert (tmp_path / "run" / content).exists()
    (tmp_path / "empty").mkdir()
    DistCockpit(cases.initialised("mlp"), CE(), store=tmp_path / "empty", mode=mode).close()


AT = {"wall_time": 0.0, "epoch": 0.0, "batch_size": 1}


GROUPS = {
    "a": Group({"x": Field(), "v": Field(("rank",), dtype="int64")}, {"rank": 3}),
    "b": Group({"y": Field(("name",))}, {"name": ["one", "two"]}),
}


NOTHING: dict[str, Any] = {"parameters": {}, "config": {}}


def keys(where: Place) -> Keys:
    return keys_of(where.store, where.options)


def read(where: Place) -> xr.DataTree:
    return open_run(where.store, where.options).load()


def test_a_run(where: Place) -> None:
    train_at(where, range(5))
    run = read(where)
    assert list(run["mean_gsnr"]["step"].values) == list(range(5)) and run.attrs["state"] == "closed"
    np.testing.assert_array_equal(run["log"]["value"], np.arange(5) / 2)
    assert run["grad_hist_1d"]["counts"].sum() == 5 * cases.N * sum(
        p.numel() for p in cases.initialised("mlp").parameters()
    )
    assert verify(where.store, where.options) == []
    assert keys(where).get_one(LOCK) is None
    train_at(where, range(3, 7), mode="a")
    again = read(where)
    assert list(again["mean_gsnr"]["step"].values) == list(range(7)) and again.attrs["generation"] == 1
    np.testing.assert_array_equal(again["mean_gsnr"]["mean_gsnr"][:5], run["mean_gsnr"]["mean_gsnr"])
    with pytest.raises(FileExistsError, match="already holds a run.*mode='a'"):
        train_at(where, range(1))
    train_at(where, range(2), mode="w")
    assert list(read(where)["mean_gsnr"]["step"].values) == [0, 1]


def test_plain_xarray_reads_it(where: Place) -> None:
    train_at(where, range(2))
    opened = where.store if not where.options else str(where.store)
    options = {"storage_options": where.options} if where.options else {}
    tree = xr.open_datatree(opened, engine="zarr", **options)
    assert list(tree["mean_gsnr"]["step"].values) == [0, 1] and "writer" not in tree.children
    if not where.options:  # the documents of arrays, for readers that look at no other
        root = zarr.open_group(where.store, mode="r", use_consolidated=False)
        assert root["mean_gsnr/mean_gsnr"].shape == (2,) and root["grad_hist_1d/counts"].shape == (2, 9)


def test_rows_are_cut_and_grow_again(where: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every place of a chunk, with more and fewer ranks; nothing old comes back, nothing is left over."""
    monkeypatch.setattr(store_module, "MAX_CHUNK_ROWS", 4)
    monkeypatch.setattr(store_module, "STEP_CHUNK_ROWS", 8)
    expected: list[int] = []
    kept: list[list[int]] = []
    generation = 0
    for life, (cut, ranks) in enumerate([(0, 3), (3, 2), (4, 5), (8, 5), (8, 1), (1, 4), (0, 7)]):
        groups = {"a": Group(GROUPS["a"].fields, {"rank": ranks}), "b": GROUPS["b"]}
        run = RunStore(keys(where), "a" if life else "w-", groups, NOTHING)
        run.begin(cut, {"b": max(0, cut - 1)})
        generation += cut < len(expected)
        del expected[cut:], kept[cut:]
        assert [list(row) for row in read(where)["a"]["v"].values[:, :1]] == [row[:1] for row in kept]
        for step in range(cut, cut + 3 + life):
            value = 100 * life + step
            run.append("a", step, {"x": float(value), "v": np.arange(ranks) + value}, AT)
            if step:
                run.append("b", step - 1, {"y": [value, -value]}, AT)
            run.append("log", step, {"z": value}, AT)
            expected.append(value)
            kept.append([*(np.arange(ranks) + value)])
        run.commit(CLOSED)
        run.release()
        a = read(where)["a"]
        np.testing.assert_array_equal(a["x"], expected)
        np.testing.assert_array_equal(a["step"], range(len(expected)))
        for row, values in zip(a["v"].values, kept, strict=True):
            assert list(row) == values + [0] * (len(row) - len(values))
        assert read(where)["b"]["step"].values[-1] == len(expected) - 2
        assert verify(where.store, where.options) == [] or life > 0  # ranks that came later have no chunks before
    assert read(where).attrs["generation"] == generation and len(read(where).attrs["segments"]) == 7
    left = [int(key.split("/")[3]) for key in keys(where).list() if key.startswith("a/x/c/")]
    assert sorted(left) == list(range(-(-len(expected) // 4)))


@contextmanager
def giving_signs_of_life(run: RunStore) -> Generator[None, None, None]:
    """As a run's writer does: whenever one is due, until the end."""
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(0.05):
            run.renew()

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_one_writer(where: Place) -> None:
    run = RunStore(keys(where), "w-", GROUPS, NOTHING, lock_seconds=1.5)
    with giving_signs_of_life(run):  # "a" waits for one, and sees it
        for mode in ("w", "a"):
            with pytest.raises(FileExistsError, match="is being written by process"):
                RunStore(keys(where), mode, GROUPS, NOTHING, lock_seconds=200)
    run.append("a", 0, {"x": 1.0, "v": np.ones(3)}, AT)
    run.commit()
    second = RunStore(keys(where), "a", GROUPS, NOTHING, lock_seconds=1.5)  # the first one gives no sign any more
    second.begin(1, {})
    second.append("a", 1, {"x": 2.0, "v": np.ones(3)}, AT)
    second.commit()
    run.append("a", 1, {"x": 3.0, "v": np.ones(3)}, AT)
    with pytest.raises(FileExistsError, match="is now being written by another process"):
        run.commit()
    assert list(read(where)["a"]["x"].values) == [1.0, 2.0]
    run.release()  # not his any more
    assert keys(where).get_one(LOCK) is not None
    second.release()


def test_the_lock_of_a_dead_process_holds_nobody(tmp_path: Path) -> None:
    script = f"""
import os
from distcockpit.store.keys import FolderKeys
from distcockpit.store.run_store import CLOSED, RunStore
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
RunStore(FolderKeys(Path({str(tmp_path / "run")!r})), "w-", {{}}, {{"parameters": {{}}, "config": {{}}}})
os._exit(0)
"""
    run_program(sys.executable, "-c", script)
    with pytest.raises(FileExistsError, match="already holds"):
        RunStore(keys_of(tmp_path / "run"), "w-", {}, NOTHING)
    RunStore(keys_of(tmp_path / "run"), "a", {}, NOTHING, lock_seconds=10**6).release()  # it does not wait


def test_a_run_that_was_killed_before_its_first_commit(where: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its root names no group yet; the same command begins it."""
    with monkeypatch.context() as killed:
        killed.setattr(RunStore, "commit", lambda *_: None)
        RunStore(keys(where), "a", GROUPS, NOTHING).release()
    run = RunStore(keys(where), "a", GROUPS, NOTHING)
    run.begin(0, {})
    run.append("a", 0, {"x": 1.0, "v": np.ones(3)}, AT)
    run.commit(CLOSED)
    run.release()
    assert list(read(where)["a"]["x"].values) == [1.0]


def test_a_foreign_place_is_left_alone(where: Place) -> None:
    keys(where).put({"precious": b"data"})
    for mode in ("w-", "w", "a"):
        with pytest.raises(FileExistsError, match="not a distcockpit run"):
            train_at(where, range(1), mode=mode)
    assert keys(where).list() == ["precious"]


def test_what_a_writer_left_before_its_first_key_is_no_obstacle(where: Place) -> None:
    keys(where).put({LOCK: b"{}"})
    train_at(where, range(1))
    assert read(where).attrs["state"] == "closed"


@pytest.mark.parametrize("kind", ["path", "text", "file url", "local store"])
def test_names_of_a_folder(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run"
    names = {"path": path, "text": str(path), "file url": f"file://{path}", "local store": LocalStore(path)}
    train_at(Place(names[kind]), range(1))
    assert open_run(path).attrs["state"] == open_run(names[kind]).attrs["state"] == "closed"


def test_wrong_stores(tmp_path: Path) -> None:
    for store, kind, words in (
        (3, TypeError, "must be a path, a URL"),
        ("", ValueError, "must be a path"),
        ("nosuch://place/run", ValueError, "nosuch"),
    ):
        with pytest.raises(kind, match=words):
            train_at(Place(store), range(1))
    with pytest.raises(ValueError, match="storage_options.*only apply to a URL"):
        DistCockpit(nn.Linear(2, 2), store=tmp_path / "run", storage_options={"key": "k"})
    with pytest.raises(OSError, match="could not be written"):
        train_at(Place(ZipStore(tmp_path / "zip", mode="w")), range(1))
    with pytest.raises(FileNotFoundError, match="there is no run here"):
        open_run(MemoryStore())
    nowhere = {"endpoint_url": "http://127.0.0.1:9", "key": "k", "secret": "s"}
    with pytest.raises(OSError, match="store='s3://bucket/run' could not be read: EndpointConnectionError"):
        open_run("s3://bucket/run", {**nowhere, "config_kwargs": {"retries": {"max_attempts": 1}}})


def test_relative_path_and_changed_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x, y = data()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    loss_fn = nn.CrossEntropyLoss()
    with DistCockpit(net, loss_fn, store="run", quantities=[MeanGSNR()], schedule=every(1)) as cockpit:
        os.chdir("elsewhere")
        with cockpit.track(0):
            loss_fn(net(x), y).backward()
    assert open_run(tmp_path / "run")["mean_gsnr"].sizes["step"] == 1
    assert not list((tmp_path / "elsewhere").iterdir())
