"""The store: what xarray opens, what is committed when, kills and concurrent reads."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import random
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import xarray as xr
import zarr
from paths import ROOT
from recorded_runs import AT, record, run_store
from torch import nn
from waiting import run_program, until

from distcockpit import DistCockpit, StoreOptions, every, open_run
from distcockpit.notices import Notices
from distcockpit.presets import full
from distcockpit.quantities import MeanGSNR
from distcockpit.run import verify
from distcockpit.store import run_store as writing
from distcockpit.store.keys import FolderKeys
from distcockpit.store.run_store import CLOSED, RunStore
from distcockpit.store.schema import Field, Group
from distcockpit.store.writer import Job, Writer


def test_arrays_grow_over_chunk_boundaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three parts, each committed at odd moments, and resumed in the last; plain Zarr reads what was appended."""
    monkeypatch.setattr(writing, "MAX_CHUNK_ROWS", 4)
    monkeypatch.setattr(writing, "STEP_CHUNK_ROWS", 8)
    values = np.random.default_rng(0).normal(size=(40, 9, 2))
    parts = [["b", "a"], ["c", "a", "d"], ["a"], ["f", "d", "e", "c", "g", "h", "i"]]

    def groups(names: list[str], ranks: int) -> dict[str, Group]:
        codes = ("none", *names)
        fields = {"v": Field(("name", "rank")), "at": Field(("rank",), dtype="int32", codes=codes)}
        own = {f"only {name}".replace(" ", "_"): Field() for name in names}
        return {"x": Group(fields | own, {"name": names, "rank": ranks})}

    def facts(names: list[str]) -> dict[str, Any]:
        return {"parameters": {name: [2] for name in names}}

    def append(run: Any, step: int, names: list[str], ranks: int) -> None:
        mine = [ord(name) - ord("a") for name in names]
        row = {"v": values[step][mine, :ranks], "at": [(step + rank) % (len(names) + 1) for rank in range(ranks)]}
        run.append(
            "x", step, row | {f"only_{name}": values[step, k, 0] for name, k in zip(names, mine, strict=True)}, AT
        )

    def check(rows: int, boundaries: list[int]) -> None:
        assert verify(tmp_path / "run") == []
        x = xr.open_datatree(tmp_path / "run", engine="zarr")["x"]
        assert list(x["step"].values) == list(range(rows))
        meanings = x["at"].attrs["flag_meanings"].split()
        for step in range(rows):
            names = parts[sum(step >= at for at in boundaries)]
            for name in x["name"].values:
                there = x["v"].sel(name=name)[step].values
                one = x.get(f"only_{name}")
                if name in names:
                    np.testing.assert_array_equal(there, values[step, ord(name) - ord("a")])
                    assert one[step] == values[step, ord(name) - ord("a"), 0]
                else:
                    assert np.isnan(there).all() and (one is None or np.isnan(one[step]))
            told = [meanings[code] for code in x["at"][step].values]
            assert told == [("none", *names)[(step + rank) % (len(names) + 1)] for rank in range(2)]

    run = run_store(tmp_path / "run", groups(parts[0], 2), facts(parts[0]))
    boundaries = [6, 13, 21]
    for step in range(26):
        if step in boundaries:
            names = parts[boundaries.index(step) + 1]
            run.change(step, groups(names, 2), facts(names))
        append(run, step, parts[sum(step >= at for at in boundaries)], 2)
        if step % 5 == 2:
            run.commit()
            check(step + 1, boundaries)
    run.commit(CLOSED)
    run.release()
    resumed = run_store(tmp_path / "run", groups(parts[1], 2), facts(parts[1]), mode="a")
    resumed.begin(15, {})
    check(15, boundaries)
    for step in range(15, 23):
        append(resumed, step, parts[1], 2)
    resumed.commit()
    parts[2:] = [parts[2], parts[1]]
    check(23, [6, 13, 15])
    resumed.release()
    shapes = [list(part["parameters"]) for part in open_run(tmp_path / "run").attrs["segments"]]
    assert shapes == [["b", "a"], ["c", "a", "d"], ["a"], ["f", "d", "e", "c", "g", "h", "i"], ["c", "a", "d"]]
    with pytest.raises(ValueError, match="cannot resume a different run"):
        run_store(tmp_path / "run", groups(["a", "z"], 2), facts(["a", "z"]), mode="a")


def test_plain_xarray_opens_it_without_a_warning(tmp_path: Path) -> None:
    record(tmp_path / "run")
    tree = xr.open_datatree(tmp_path / "run", engine="zarr")  # warnings are errors in these tests
    assert list(tree.children) == [*(q.name for q in full()), "log"]
    assert tree["grad_hist_2d"]["counts"].dims == ("step", "grad_bin", "param_bin")
    assert tree["grad_hist_1d"]["edges"].dims == ("step", "edge")
    assert list(tree["hess_trace"]["parameter"].values) == [n for n, _ in cases.initialised("mlp").named_parameters()]
    assert tree["alpha"]["status"].attrs["flag_meanings"].startswith("minimum concave no_step")
    for name, node in tree.children.items():
        dataset = node.to_dataset()
        assert {"wall_time", "epoch"} <= set(dataset.coords)
        assert ("batch_size" in dataset.coords) == (name != "log")
        assert np.issubdtype(dataset["wall_time"].dtype, np.datetime64)
        assert dataset["step"].dtype == np.int64
        if name != "log":
            assert dataset.attrs["source"] and dataset.attrs["description"]
            assert set(dataset["batch_size"].values) == {cases.N}
        for array in dataset.data_vars.values():
            assert array.dims[0] == "step" and array.attrs["long_name"] and array.attrs["units"]
        alone = xr.open_zarr(tmp_path / "run", group=name)
        assert alone.equals(dataset)
    assert tree["grad_hist_1d"]["counts"].dtype == np.int64
    np.testing.assert_array_equal(tree["log"]["accuracy"], [0, 0.1, 0.2, 0.3])
    np.testing.assert_array_equal(tree["log"]["step"], range(4))
    attributes = tree.attrs
    assert attributes["format"] == "distcockpit" and attributes["state"] == "closed"
    assert attributes["world_size"] == 1 and attributes["committed_step"] == 3
    assert attributes["parameters"]["0.weight"] == [16, 12]
    assert attributes["config"]["quantities"][0]["type"] == "Alpha"
    zarr.open_group(tmp_path / "run", mode="r")["alpha/alpha"]


def test_chunks_are_powers_of_two_of_about_256_kb(tmp_path: Path) -> None:
    record(tmp_path / "run", 1)
    root = zarr.open_group(tmp_path / "run", mode="r")
    chunks = {path: root[path].chunks for path in ("alpha/alpha", "alpha/step", "grad_hist_1d/counts")}
    assert chunks == {"alpha/alpha": (32768,), "alpha/step": (65536,), "grad_hist_1d/counts": (256, 100)}
    assert root["grad_hist_2d/counts"].chunks == (16, 40, 50)


def test_values_survive_chunk_boundaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "MAX_CHUNK_ROWS", 4)
    monkeypatch.setattr(writing, "STEP_CHUNK_ROWS", 8)
    groups = {"a": Group({"x": Field(), "v": Field(("bin",), dtype="int64")}, {"bin": 3})}
    run = run_store(tmp_path / "run", groups, {})
    expected = np.random.default_rng(0).integers(0, 99, (30, 3))
    for step in range(30):
        due = run.append("a", step, {"x": step / 7, "v": expected[step]}, AT)
        assert due == ((step + 1) % 4 == 0)
        if step % 7 == 0 or step == 29:
            run.commit()
            a = xr.open_datatree(tmp_path / "run", engine="zarr")["a"]
            np.testing.assert_array_equal(a["v"], expected[: step + 1])
            np.testing.assert_array_equal(a["x"], np.arange(step + 1) / 7)
            np.testing.assert_array_equal(a["step"], np.arange(step + 1))
    assert sorted(os.listdir(tmp_path / "run" / "a" / "x" / "c")) == sorted(map(str, range(8)))


def test_rows_exist_when_the_root_document_says_so(tmp_path: Path) -> None:
    run = run_store(tmp_path / "run", {"a": Group({"x": Field()})}, {})
    root = tmp_path / "run" / "zarr.json"
    before = root.read_bytes()
    for step in range(5):
        run.append("a", step, {"x": 1.0}, AT)
    run.commit()
    after = root.read_bytes()
    root.write_bytes(before)  # as if the process had died just before its last write
    assert open_run(tmp_path / "run")["a"].sizes["step"] == 0
    root.write_bytes(after)
    assert open_run(tmp_path / "run")["a"].sizes["step"] == 5
    assert json.loads(after)["attributes"]["commit"] == json.loads(before)["attributes"]["commit"] + 1


def test_names_that_appear_late_are_nan_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "MAX_CHUNK_ROWS", 4)
    run = run_store(tmp_path / "run", {}, {})
    for step in range(11):
        run.append("log", step, {"early": 1.0, **({"late": 2.0} if step >= 9 else {})}, AT)
    run.append("log", 11, {"late": 3.0}, AT)
    run.commit()
    log = open_run(tmp_path / "run")["log"]
    np.testing.assert_array_equal(log["late"], [np.nan] * 9 + [2, 2, 3])
    np.testing.assert_array_equal(log["early"], [1.0] * 11 + [np.nan])
    assert (tmp_path / "run/log/late/c/0").exists()


def test_a_failed_commit_is_tried_again_with_all_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file stands where a chunk must go, then the way is free."""
    run = run_store(tmp_path / "run", {"a": Group({"x": Field()})}, {})
    writer = Writer(run, StoreOptions(flush_seconds=1000), Notices())
    obstacle = tmp_path / "run/a/x/c"
    obstacle.write_text("in the way")
    for step in range(3):
        writer.submit(Job(lambda s, step=step: s.append("a", step, {"x": step}, AT)))
    writer.flush()
    assert isinstance(writer.error, OSError) and "could not be written" in caplog.text
    assert open_run(tmp_path / "run")["a"].sizes["step"] == 0
    obstacle.unlink()
    writer.submit(Job(lambda s: s.append("a", 3, {"x": 3}, AT)))
    writer.close()
    np.testing.assert_array_equal(open_run(tmp_path / "run")["a"]["x"], range(4))
    assert not list((tmp_path / "run").rglob("*.partial"))


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_faults_of_the_disk_obey_on_error(tmp_path: Path, on_error: str) -> None:
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    cockpit = DistCockpit(
        net, loss_fn, store=tmp_path / "run", quantities=[MeanGSNR()], schedule=every(1), on_error=on_error
    )
    obstacle = tmp_path / "run/mean_gsnr/mean_gsnr/c"
    obstacle.write_text("in the way")

    def step(k: int) -> None:
        x, y = cases.data("mlp", "mean", k)
        with cockpit.track(k):
            loss_fn(net(x), y).backward()

    step(0)
    with pytest.raises(RuntimeError, match="could not be written") if on_error == "raise" else nullcontext():
        cockpit.flush()
    if on_error == "raise":
        with pytest.raises(RuntimeError, match="could not be written"):
            step(1)
    else:
        step(1)
    obstacle.unlink()
    cockpit.close()
    assert open_run(tmp_path / "run")["mean_gsnr"].sizes["step"] == (1 if on_error == "raise" else 2)


def test_rows_arrive_without_a_flush(tmp_path: Path) -> None:
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    options = {"quantities": [MeanGSNR()], "schedule": every(1), "store_options": StoreOptions(flush_seconds=0.2)}
    with DistCockpit(net, loss_fn, store=tmp_path / "run", **options) as cockpit:
        x, y = cases.data("mlp", "mean", 0)
        with cockpit.track(0):
            loss_fn(net(x), y).backward()
        until(lambda: open_run(tmp_path / "run")["mean_gsnr"].sizes["step"])


def write_forever(path: str) -> None:
    writing.MAX_CHUNK_ROWS = 8  # many chunks
    fields = {"x": Field(), "v": Field(("bin",), dtype="int64")}
    run = run_store(path, {"a": Group(fields, {"bin": 5}), "b": Group({"y": Field()})}, {})
    step = 0
    while True:
        for _ in range(random.randint(1, 9)):
            run.append("a", step, {"x": step / 3, "v": np.full(5, step)}, AT)
            run.append("log", step, {"z": step}, AT)
            if step % 3 == 0:
                run.append("b", step, {"y": -step}, AT)
            step += 1
        run.commit()


def expect_whole(path: Path) -> int:
    """Every committed row is right; their number."""
    tree = xr.open_datatree(path, engine="zarr").load()
    n = tree["a"].sizes["step"]
    np.testing.assert_array_equal(tree["a"]["step"], np.arange(n))
    np.testing.assert_array_equal(tree["a"]["x"], np.arange(n) / 3)
    np.testing.assert_array_equal(tree["a"]["v"], np.repeat(np.arange(n), 5).reshape(n, 5))
    np.testing.assert_array_equal(tree["b"]["y"], -np.arange(0, n, 3))
    assert tree["log"].sizes["step"] == n and tree.attrs["committed_step"] == n - 1
    return n


def test_kills_and_concurrent_reads(tmp_path: Path) -> None:
    """SIGKILL at random moments, with a reader all the while: nothing committed is torn or lost."""
    context = mp.get_context("fork")
    for round in range(2):
        path = tmp_path / f"run{round}"
        process = context.Process(target=write_forever, args=(str(path),))
        process.start()
        until(lambda path=path: (path / "zarr.json").exists() and open_run(path).attrs["commit"])
        seen, enough = 0, random.randint(20, 200)
        while seen < enough:
            n = expect_whole(path)
            assert n >= seen
            seen = n
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert expect_whole(path) >= seen


def test_a_process_that_forgets_to_close_loses_nothing(tmp_path: Path) -> None:
    script = f"""
import sys; sys.path.insert(0, {str(ROOT / "tests/helpers")!r})
import cases
from torch import nn
from distcockpit import DistCockpit, every
net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
cockpit = DistCockpit(net, loss_fn, store={str(tmp_path / "run")!r}, schedule=every(1))
for step in range(3):
    x, y = cases.data("mlp", "mean", step)
    with cockpit.track(step):
        loss_fn(net(x), y).backward()
    cockpit.log(step, value=1.0)
"""
    run_program(sys.executable, "-c", script)
    run = open_run(tmp_path / "run")
    assert run["grad_hist_1d"].sizes["step"] == 3 and run["log"].sizes["step"] >= 2


def test_a_row_that_does_not_fit_leaves_no_trace(tmp_path: Path) -> None:
    groups = {"a": Group({"x": Field(), "v": Field(("bin",))}, {"bin": 3})}
    store, at = (
        RunStore(FolderKeys(tmp_path / "run"), "w-", groups, {"parameters": {}, "config": {}}),
        {"wall_time": 0.0, "epoch": 0.0, "batch_size": 1},
    )
    store.append("a", 0, {"x": 1.0, "v": np.ones(3)}, at)
    with pytest.raises(ValueError):
        store.append("a", 1, {"x": 1.0, "v": np.ones(4)}, at)
    store.append("a", 2, {"x": 2.0, "v": np.ones(3)}, at)
    store.commit()
    assert list(open_run(tmp_path / "run")["a"].load()["step"].values) == [0, 2]
