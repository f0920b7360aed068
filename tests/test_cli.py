"""The commands of the terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import cases
import numpy as np
import pytest
from commands import ran, small
from numcodecs import Blosc
from torch import nn
from waiting import HANG, run_program
from written import Written

from distcockpit import DistCockpit, every, open_run
from distcockpit import quantities as q

COMMANDS = ["info", "plot", "report", "watch", "export", "verify"]


def with_output(command: str, tmp_path: Path) -> list[str]:
    output = {"plot": "run.png", "report": "run.html", "export": "events"}.get(command)
    return ["-o", str(tmp_path / output)] if output else []


def test_info_prints_a_table(store: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out, err = ran(capfd, "info", store)
    for name, node in open_run(store).children.items():
        (row,) = [line for line in out.splitlines() if line.startswith(f"{name} ")]
        assert f" {node.sizes['step']} " in row and len(row) <= 80
    assert out.index("Nothing looks wrong") < out.index("newest values")
    assert "0 to 22" in out and "state closed" in out and "ranks 1" in out and "size " in out and err == ""


def test_info_as_json(store: Path, capfd: pytest.CaptureFixture[str]) -> None:
    told, run = json.loads(ran(capfd, "info", store, "--json")[0]), open_run(store)
    assert told["world_size"] == 1 and told["state"] == "closed" and len(told["segments"]) == 1
    assert told["bytes"] == sum(p.stat().st_size for p in store.rglob("*") if p.is_file())
    loss = told["quantities"]["loss"]
    assert loss == {
        "class": "Loss",
        "rows": 12,
        "first_step": 0,
        "last_step": 22,
        "newest": {"loss": float(run["loss"]["loss"][-1])},
    }
    assert set(told["quantities"]) == set(run.children) and told["findings"] == []


@pytest.mark.smoke
@pytest.mark.parametrize("suffix, begin", [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_plot(store: Path, tmp_path: Path, suffix: str, begin: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new" / f"run.{suffix}"
    out, _ = ran(capfd, "plot", store if suffix == "png" else small(tmp_path), "-o", target, "--dpi", 30)
    assert out.strip() == str(target) and target.read_bytes().startswith(begin)


def test_plot_to_something_that_is_no_picture(store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _, err = ran(capfd, "plot", store, "-o", tmp_path / "run.doc", code=2)
    assert err.count("\n") == 1 and "run.doc': must end in ." in err


@pytest.mark.smoke
def test_comparison_into_a_picture(store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    other = Written(tmp_path / "other.zarr", [q.Alpha(), q.Loss()]).rows(20).close()
    ran(capfd, "compare", store, other, "-o", tmp_path / "both.png", "--dpi", 30)
    assert (tmp_path / "both.png").stat().st_size > 10_000
    assert "takes two runs or more, not 1" in ran(capfd, "compare", store, code=2)[1]
    assert "is given twice" in ran(capfd, "compare", store, store, code=2)[1]


def test_nothing_is_written_into_a_run(store: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = {p: p.stat().st_mtime_ns for p in store.rglob("*")}
    for command, output in (("report", "r.html"), ("plot", "p.png"), ("export", "out")):
        assert "is inside the run" in ran(capfd, command, store, "-o", store / output, code=2)[1]
    for arguments in (["info"], ["verify"], ["info", "--json"]):
        ran(capfd, arguments[0], store, *arguments[1:])
    assert {p: p.stat().st_mtime_ns for p in store.rglob("*")} == before


def test_names_of_runs(
    store: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(store)
    monkeypatch.setenv("HOME", str(store.parent))
    ran(capfd, "report", ".", "-o", tmp_path / "r.html")
    assert "<title>real · distcockpit</title>" in (tmp_path / "r.html").read_text()
    for columns in ("", "abc", "0", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        assert "state closed" in ran(capfd, "info", "~/real.zarr")[0]


@pytest.mark.parametrize(
    "changed", [{"versions": 5}, {"segments": 5}, {"segments": [5]}, {"parameters": [1]}, {"parameters": {"a": "x"}}]
)
def test_a_root_that_is_not_ours(changed: dict[str, object], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = Written(tmp_path / "run", [q.GradNorm(), q.HessTrace()]).rows(12).close()
    root = json.loads((path / "zarr.json").read_text())
    root["attributes"] |= changed
    (path / "zarr.json").write_text(json.dumps(root))
    for command in ("info", "report", "plot"):
        assert "is not a valid distcockpit run" in ran(capfd, command, path, *with_output(command, tmp_path), code=2)[1]


@pytest.mark.parametrize(
    "path, changed",
    [
        ("hess_trace", {"attributes": {"quantity": ["HessTrace"]}}),
        ("hess_trace", {"attributes": {"options": "x"}}),
        ("hess_trace/trace", {"attributes": {"scale_factor": "x"}}),
        ("hess_trace/trace", {"attributes": {"units": 5}}),
        ("hess_trace/trace", {"dimension_names": None}),
        ("hess_trace/trace", {"dimension_names": ["rank", "parameter"]}),
        ("hess_trace/total", {"dimension_names": ["parameter"]}),
        ("hess_trace/step", None),
    ],
)
def test_groups_that_are_not_ours(
    path: str, changed: dict[str, object] | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Written(tmp_path / "run", [q.GradNorm(), q.HessTrace()]).rows(12).close()
    root = json.loads((run / "zarr.json").read_text())
    metadata = root["consolidated_metadata"]["metadata"]
    if changed is None:
        del metadata[path]
    else:
        metadata[path] |= changed
    (run / "zarr.json").write_text(json.dumps(root))
    for command in ("info", "report"):
        assert "is not a valid distcockpit run" in ran(capfd, command, run, *with_output(command, tmp_path), code=2)[1]


def test_chunks_that_are_missing_spoil_only_their_picture(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = Written(tmp_path / "run", [q.GradHist2d(bins=(4, 5)), q.Loss(), q.Alpha()]).rows(12).close()
    (run / "grad_hist_2d/grad_edges/c/0/0").unlink()
    (run / "alpha/wall_time/c/0").unlink()
    for command in ("info", "report", "plot"):
        ran(capfd, command, run, *with_output(command, tmp_path))
    assert "2 problems" in ran(capfd, "verify", run, code=1)[0]


def test_verify(store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "all committed rows can be read" in ran(capfd, "verify", store)[0]
    assert json.loads(ran(capfd, "verify", store, "--json")[0])["problems"] == []
    damaged = Written(tmp_path / "damaged", [q.Alpha()]).rows(20).close()
    chunk = damaged / "alpha/alpha/c/0"
    chunk.write_bytes(chunk.read_bytes()[:40])
    (damaged / "alpha/status/c/0").unlink()
    out, _ = ran(capfd, "verify", damaged, code=1)
    assert "alpha/alpha/c/0 is damaged: a chunk claims" in out and "alpha/status/c/0 is missing" in out
    assert "2 problems" in out
    assert len(json.loads(ran(capfd, "verify", damaged, "--json", code=1)[0])["problems"]) == 2


def test_verify_looks_at_the_rows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Steps that no writer of ours leaves: one that was never written, one out of order."""
    written = Written(tmp_path / "run", [q.Loss()]).rows(20)
    path = written.close()
    chunk = path / "loss/step/c/0"
    steps = np.frombuffer(Blosc().decode(chunk.read_bytes()), "<i8").copy()
    steps[7], steps[12] = -1, 3
    chunk.write_bytes(Blosc(cname="lz4", shuffle=1).encode(steps))
    out, _ = ran(capfd, "verify", path, code=1)
    assert "loss/step: row 7 has step -1 after step 6" in out and "loss/step: row 12 has step 3 after step 11" in out


@pytest.mark.smoke
@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "watch"])
def test_a_run_without_rows(command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    empty = Written(tmp_path / "empty", [q.Alpha(), q.GradNorm()]).close()
    code = 2 if command == "plot" else 0
    out, err = ran(capfd, command, empty, *with_output(command, tmp_path), code=code)
    assert "Traceback" not in out + err
    if command == "plot":
        assert "nothing to draw yet" in err


def test_a_folder_of_runs_is_the_newest(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for k, name in enumerate(["b", "a", "c"]):
        written = Written(tmp_path / f"{name}.zarr", [q.Loss()]).rows(3).close()
        os.utime(written / "zarr.json", (0, [100, 300, 200][k]))
    assert "a.zarr" in ran(capfd, "info", tmp_path)[0]


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "watch"])  # which waits for it
def test_no_run_is_one_line(command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "nothing"
    out, err = ran(capfd, command, path, *with_output(command, tmp_path), code=2)
    assert out == "" and err.count("\n") == 1 and "there is no run here" in err and str(path) in err


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "kind, words",
    [
        ("folder", "is not a distcockpit run"),
        ("file", "is not a distcockpit run"),
        ("zarr", "is not a distcockpit run"),
        (
            "newer",
            "has format version 99, but this distcockpit only reads versions up to 1. Install a newer distcockpit.",
        ),
        ("damaged", "is not a distcockpit run"),
    ],
)
def test_what_is_no_run_is_one_line(
    command: str, kind: str, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / kind
    if kind == "folder":
        path.mkdir()
        (path / "notes.txt").write_text("mine")
    elif kind == "file":
        path.write_text("mine")
    elif kind == "zarr":
        path.mkdir()
        (path / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    else:
        Written(path, [q.Alpha()]).rows(3).close()
        root = json.loads((path / "zarr.json").read_text())
        root["attributes"]["format_version"] = 99 if kind == "newer" else "x"
        (path / "zarr.json").write_text(json.dumps(root))
    out, err = ran(capfd, command, path, *with_output(command, tmp_path), code=2)
    assert out == "" and err.count("\n") == 1 and words in err and str(path) in err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["plot"], "Missing argument 'RUN'. Try: distcockpit plot --help"),
        (["show", "x"], "No such command 'show'"),
        (["export", "x"], "Missing option '-o' / '--output'"),
        (["info", "x", "--jason"], "--jason"),
        (["export", "x", "-o", "y", "--format", "xls"], "'xls' is not one of"),
        (["info", "s3://x", "--storage-options", "anon"], "'anon' is not a JSON object"),
        (["watch", "x", "--refresh", "0"], "0.2<=x<=3600"),
        (["info", "ftq://x/y"], "ftq"),
    ],
)
def test_what_is_typed_wrong_is_one_line(arguments: list[str], words: str, capfd: pytest.CaptureFixture[str]) -> None:
    _, err = ran(capfd, *arguments, code=2)
    assert err.count("\n") == 1 and words in err


def test_a_picture_needs_no_name(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for command, written in (("plot", "plot.png"), ("report", "report.html")):
        ran(capfd, command, store)
        assert (tmp_path / written).stat().st_size > 10_000


def test_nothing_typed_shows_the_commands(capfd: pytest.CaptureFixture[str]) -> None:
    out, _ = ran(capfd, code=2)
    assert all(f"  {command} " in out for command in [*COMMANDS, "compare"])
    for command in [*COMMANDS, "compare", "completion"]:
        assert "Usage: distcockpit" in ran(capfd, command, "--help")[0]


@pytest.mark.smoke
def test_no_torch_is_needed(store: Path, tmp_path: Path) -> None:
    commands = [["info", str(store)], ["verify", str(store)], ["report", str(store), "-o", str(tmp_path / "r.html")]]
    script = f"""
import sys
sys.modules["torch"] = None
from distcockpit.cli import main
for command in {commands!r}:
    try:
        main(command)
    except SystemExit as end:
        assert not end.code, (command, end.code)
"""
    run_program(sys.executable, "-c", script)
    assert (tmp_path / "r.html").exists()


@pytest.mark.parametrize(
    "missing, command, extra",
    [("matplotlib", "plot", "view"), ("plotly", "report", "view"), ("tensorboardX", "export", "export")],
)
def test_a_missing_extra_is_named(missing: str, command: str, extra: str, store: Path, tmp_path: Path) -> None:
    arguments = [command, str(store), *with_output(command, tmp_path)]
    script = f"import sys; sys.modules[{missing!r}] = None; from distcockpit.cli import main; main({arguments!r})"
    done = subprocess.run([sys.executable, "-c", script], timeout=HANG, capture_output=True, text=True)
    assert (
        done.returncode == 2 and f"pip install 'distcockpit[{extra}]'" in done.stderr and done.stderr.count("\n") == 1
    )


def test_completion_of_a_shell(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    program = Path(sys.executable).parent / "distcockpit"
    env = {
        **os.environ,
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "COMP_WORDS": "distcockpit ex",
        "COMP_CWORD": "1",
    }
    done = subprocess.run(
        ["bash", "-c", 'eval "$(distcockpit completion bash)" && complete -p distcockpit'],
        env=env,
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert "_distcockpit_completion" in done.stdout, done.stderr
    done = subprocess.run(
        [program], env={**env, "_DISTCOCKPIT_COMPLETE": "bash_complete"}, capture_output=True, text=True, timeout=HANG
    )
    assert done.stdout.strip() == "plain,export"


def test_runs_on_object_stores_are_read(s3: object, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from stores import place

    where = place("s3", tmp_path, s3)
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    with DistCockpit(net, loss_fn, quantities=[q.Loss()], schedule=every(1), **where.for_cockpit) as cockpit:
        for step in range(3):
            x, y = cases.data("mlp", "mean", step)
            with cockpit.track(step):
                loss_fn(net(x), y).backward()
    options = ["--storage-options", json.dumps(where.options)]
    assert "0 to 2" in ran(capfd, "info", where.store, *options)[0]
    assert "all committed rows can be read" in ran(capfd, "verify", where.store, *options)[0]
