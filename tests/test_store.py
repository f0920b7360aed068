"""The store: its schema, what a plain xarray sees, commits, and reading while it is written."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import random
import signal
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import torch
import xarray as xr
import zarr
from steps import run_steps
from torch import nn
from waiting import run_program, until

from distcockpit import DistCockpit, StoreOptions, every, open_run
from distcockpit.notices import Notices
from distcockpit.presets import full
from distcockpit.quantities import Alpha, GradHist2d, MeanGSNR
from distcockpit.store import run_store as writing
from distcockpit.store.keys import FolderKeys
from distcockpit.store.run_store import RunStore
from distcockpit.store.schema import Field, Group
from distcockpit.store.writer import Job, Writer

AT = {"wall_time": 0.0, "epoch": 0.0, "batch_size": 1}
NOTHING = {"parameters": {}, "config": {}}


def run_store(path: Path | str, groups: dict[str, Group], attributes: dict[str, Any], **options: Any) -> RunStore:
    return RunStore(FolderKeys(Path(path)), options.pop("mode", "w-"), groups, NOTHING | attributes, **options)


def record(path: Path, steps: int = 4, **options: Any) -> None:
    run_steps(
        path,
        cases.initialised("mlp"),
        partial(cases.data, "mlp", "mean"),
        steps,
        loss_fn=nn.CrossEntropyLoss(),
        track=lambda step: {"epoch": step // 2},
        then=lambda step, cockpit: cockpit.log(step, accuracy=step / 10),
        **{"quantities": full(), **options},
    )


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


def test_latest_and_flush(tmp_path: Path) -> None:
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    with DistCockpit(
        net, loss_fn, store=tmp_path / "run", quantities=[MeanGSNR(), Alpha()], schedule=every(1)
    ) as cockpit:
        assert cockpit.latest() == {}
        for step in range(2):
            x, y = cases.data("mlp", "mean", step)
            with cockpit.track(step):
                loss_fn(net(x), y).backward()
            cockpit.log(step, loss=torch.tensor(2.0))
        cockpit.flush()
        latest = cockpit.latest()
        run = open_run(tmp_path / "run")
        assert latest["mean_gsnr"]["step"] == 1 and latest["alpha"]["step"] == 0
        assert latest["mean_gsnr"]["mean_gsnr"] == run["mean_gsnr"]["mean_gsnr"].values[1]
        assert run.attrs["state"] == "running" and list(run["log"]["loss"].values) == [2.0, 2.0]


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
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
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


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    record(tmp_path / "run", 1, quantities=[MeanGSNR()])
    root = tmp_path / "run" / "zarr.json"
    document = json.loads(root.read_text())
    document["attributes"]["format_version"] = 99
    root.write_text(json.dumps(document))
    with pytest.raises(ValueError, match="format version 99.*newer distcockpit"):
        open_run(tmp_path / "run")


def test_individual_histograms_have_parameter_names(tmp_path: Path) -> None:
    record(tmp_path / "run", 1, quantities=[GradHist2d(keep_individual=True)])
    counts = open_run(tmp_path / "run")["grad_hist_2d"]["counts_per_parameter"]
    assert counts.dims == ("step", "parameter", "grad_bin", "param_bin")
    sizes = {n: p.numel() * cases.N for n, p in cases.initialised("mlp").named_parameters()}
    for name, size in sizes.items():
        assert counts.sel(parameter=name).sum() == size
