"""The command line, as somebody new to it would use it."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import cases
import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from numcodecs import Blosc
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from train import first_order
from waiting import HANG, run_program
from written import Written, model

from distcockpit import DistCockpit, every, open_run
from distcockpit import quantities as q
from distcockpit.cli import main
from distcockpit.run import to_dataframe
from distcockpit.view.export import export_csv
from distcockpit.view.terminal import view

COMMANDS = ["info", "plot", "report", "watch", "export", "verify"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "real.zarr"
    net, loss_fn = cases.initialised("mlp"), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    chosen = first_order()
    with DistCockpit(net, loss_fn, optimizer, store=path, quantities=chosen, schedule=every(2)) as cockpit:
        for step in range(24):
            x, y = cases.data("mlp", "mean", step)
            optimizer.zero_grad()
            with cockpit.track(step, epoch=step // 8):
                loss = loss_fn(net(x), y)
                loss.backward()
            optimizer.step()
            cockpit.log(step, train_loss=loss)
    return path


def ran(capfd: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> tuple[str, str]:
    with pytest.raises(SystemExit) as done:
        main([str(argument) for argument in arguments])
    out, err = capfd.readouterr()
    assert done.value.code == code, out + err
    return out, err


def with_output(command: str, tmp_path: Path) -> list[str]:
    output = {"plot": "run.png", "report": "run.html", "export": "events"}.get(command)
    return ["-o", str(tmp_path / output)] if output else []


def test_info_prints_a_table(store: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, err = ran(capfd, "info", store)
    for name, node in open_run(store).children.items():
        (row,) = [line for line in out.splitlines() if line.startswith(f"│ {name} ")]
        assert f" {node.sizes['step']} " in row and node.attrs.get("quantity", "") in row
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


def small(folder: Path) -> Path:
    """A store that is drawn soon."""
    return Written(folder / "small.zarr", [q.Alpha(), q.Loss(), q.GradNorm()]).rows(20).close()


@pytest.mark.parametrize("suffix, begin", [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_plot(store: Path, tmp_path: Path, suffix: str, begin: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new" / f"run.{suffix}"
    out, _ = ran(capfd, "plot", store if suffix == "png" else small(tmp_path), "-o", target, "--dpi", 30)
    assert out.strip() == str(target) and target.read_bytes().startswith(begin)


def test_plot_to_something_that_is_no_picture(store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _, err = ran(capfd, "plot", store, "-o", tmp_path / "run.doc", code=2)
    assert err.count("\n") == 1 and "run.doc': must end in ." in err


def test_comparison_into_a_picture(store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    other = Written(tmp_path / "other.zarr", [q.Alpha(), q.Loss()]).rows(20).close()
    ran(capfd, "compare", store, other, "-o", tmp_path / "both.png", "--dpi", 30)
    assert (tmp_path / "both.png").stat().st_size > 20_000
    assert "takes two runs or more, not 1" in ran(capfd, "compare", store, code=2)[1]
    assert "is given twice" in ran(capfd, "compare", store, store, code=2)[1]


def test_export_to_csv_and_parquet(store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = open_run(store)
    for kind, read in (("csv", pd.read_csv), ("parquet", pd.read_parquet)):
        out, _ = ran(capfd, "export", store, "-o", tmp_path / kind, "--format", kind)
        assert f"{len(run.children)} files" in out
        for name, node in run.children.items():
            expected = to_dataframe(node)
            found = read(tmp_path / kind / f"{name}.{kind}")
            found = found.set_index("step") if kind == "csv" else found
            assert list(found.index) == list(expected.index) and list(found.columns) == list(expected.columns)
            numbers = [c for c in expected if c != "wall_time"]
            np.testing.assert_allclose(found[numbers], expected[numbers], rtol=1e-6)


def test_export_to_tensorboard(store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ran(capfd, "export", store, "-o", tmp_path / "events")
    events = EventAccumulator(str(tmp_path / "events"), size_guidance={"scalars": 0, "histograms": 0})
    events.Reload()
    run = open_run(store)
    loss = events.Scalars("loss/loss")
    assert [e.step for e in loss] == list(run["loss"]["step"].values)
    np.testing.assert_allclose([e.value for e in loss], run["loss"]["loss"], rtol=1e-6)
    seconds = run["loss"]["wall_time"].values.astype("datetime64[ns]").astype(np.int64) / 1e9
    np.testing.assert_allclose([e.wall_time for e in loss], seconds, atol=1e-3)
    norm = events.Scalars("grad_norm/grad_norm/0.weight")
    np.testing.assert_allclose(
        [e.value for e in norm], run["grad_norm"]["grad_norm"].sel(parameter="0.weight"), rtol=1e-6
    )
    histogram = events.Histograms("grad_hist_1d/counts")[-1].histogram_value
    np.testing.assert_array_equal(histogram.bucket, run["grad_hist_1d"]["counts"][-1])
    np.testing.assert_allclose(histogram.bucket_limit, run["grad_hist_1d"]["edges"][-1, 1:])


def test_exporting_twice_to_tensorboard_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    small = Written(tmp_path / "run", [q.Loss()]).rows(3).close()
    ran(capfd, "export", small, "-o", tmp_path / "events")
    assert "already holds event files" in ran(capfd, "export", small, "-o", tmp_path / "events", code=2)[1]


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


def test_export_of_some(store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ran(capfd, "export", store, "-o", tmp_path / "some", "--format", "csv", "--quantity", "alpha", "--quantity", "loss")
    assert sorted(p.name for p in (tmp_path / "some").iterdir()) == ["alpha.csv", "loss.csv"]
    _, err = ran(capfd, "export", store, "-o", tmp_path / "some", "--quantity", "beta", code=2)
    assert "--quantity 'beta': is not in the run, which has ['" in err


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


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "watch"])
def test_a_run_without_rows(command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    empty = Written(tmp_path / "empty", [q.Alpha(), q.GradNorm()]).close()
    code = 2 if command == "plot" else 0
    out, err = ran(capfd, command, empty, *with_output(command, tmp_path), code=code)
    assert "Traceback" not in out + err
    if command == "plot":
        assert "nothing to draw yet" in err


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "kind, words",
    [
        ("nothing", "there is no run here"),
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
    elif kind != "nothing":
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
        (["plot", "x"], "Missing option '-o' / '--output'"),
        (["info", "x", "--jason"], "No such option '--jason'"),
        (["export", "x", "-o", "y", "--format", "xls"], "'xls' is not one of"),
        (["info", "s3://x", "--storage-options", "anon"], "'anon' is not a JSON object"),
        (["watch", "x", "--refresh", "0"], "0.2<=x<=3600"),
        (["info", "ftq://x/y"], "ftq"),
    ],
)
def test_what_is_typed_wrong_is_one_line(arguments: list[str], words: str, capfd: pytest.CaptureFixture[str]) -> None:
    _, err = ran(capfd, *arguments, code=2)
    assert err.count("\n") == 1 and words in err


def test_nothing_typed_shows_the_commands(capfd: pytest.CaptureFixture[str]) -> None:
    out, _ = ran(capfd, code=2)
    assert all(f"  {command} " in out for command in [*COMMANDS, "compare"])
    for command in [*COMMANDS, "compare", "completion"]:
        assert "Usage: distcockpit" in ran(capfd, command, "--help")[0]


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


HOSTILE = ["\x1b[31mred\x1b]0;title\x07", "[bold red]b[/]", ":smile:", "a\rb\nc", "\u202etxt", "=cmd|' /C calc'!A0"]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_names_in_a_terminal_and_in_tables(
    text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    facts = model(lambda name: f"{text}{name}")
    written = Written(tmp_path / "run", [q.GradNorm(), q.RankHealth(), q.Loss()], facts, versions={"torch": text})
    bad = np.zeros((20, 4), dtype=int)
    bad[:, 1] = 1
    zero = np.ones((20, 6))
    zero[:, 0] = 0
    rows = {"rank_health": {"nonfinite_losses": bad, "first_nonfinite_output": bad}, "grad_norm": {"grad_norm": zero}}
    path = written.rows(20, **rows).close()
    written.say("loss", quantity=text)
    written.say("loss/loss", long_name=text, units=text)
    for arguments in (["info", path], ["verify", path]):
        out, err = ran(capfd, *arguments)
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", out + err)
    out, _ = ran(capfd, "info", path)
    clean = "".join(c if c.isprintable() else "\ufffd" for c in text)
    assert "never get a gradient" in out and clean in re.sub("[│\n] *", "", out)
    ran(capfd, "export", path, "-o", tmp_path / "csv", "--format", "csv")
    header = (tmp_path / "csv/grad_norm.csv").read_text().splitlines()[0]
    assert not re.search("[\x00-\x1f\u202e]", header) and not re.search(r"(^|,)[\"]?[=+@-]", header)
    assert json.loads(ran(capfd, "info", path, "--json")[0])["versions"]["torch"] == text  # as it is, for a script


def test_texts_in_tables_are_no_formulas(tmp_path: Path) -> None:
    texts = np.array(["=cmd|' /C calc'!A0", "+1", "-1", "@x", "plain", "a\x1b[31m"])
    data = xr.Dataset({"text": ("step", texts), "value": ("step", np.arange(6.0) - 3)}, {"step": np.arange(6)})
    export_csv(xr.DataTree.from_dict({"group": data}), tmp_path, lambda name: None)
    table = pd.read_csv(tmp_path / "group.csv")
    assert list(table["text"]) == ["'=cmd|' /C calc'!A0", "'+1", "'-1", "'@x", "plain", "a\ufffd[31m"]
    assert list(table["value"]) == [-3, -2, -1, 0, 1, 2]  # numbers are numbers


def test_each_quantity_has_a_line_in_the_terminal(store: Path) -> None:
    console = Console(width=160, file=io.StringIO(), record=True)
    console.print(view(open_run(store), {}, "run", height=200))
    shown = console.export_text()
    for name in ("alpha", "distance/total", "grad_norm/total", "update_size/total", "loss", "log/train_loss"):
        assert f" {name} " in shown


def terminal(command: list[str], *script: tuple[str, Callable[[], object] | None]) -> tuple[str, int]:
    """Run in a terminal of its own, and act when a text has been shown; then interrupt, if there was a script.

    Args:
        command: What to run.
        script: A text to wait for, and what is done then, one after the other.

    Returns:
        What it showed, and its exit code.
    """
    pid, here = pty.fork()
    if pid == 0:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "50"}
        os.execv(command[0], command)
    seen, end, waiting, since = "", time.monotonic() + HANG, list(script), 0
    again = 0.0
    while time.monotonic() < end:
        ready, _, _ = select.select([here], [], [], 0.2)
        if ready:
            try:
                part = os.read(here, 65536)
            except OSError:
                break
            if not part:
                break
            seen += part.decode(errors="replace")
        if waiting and re.search(waiting[0][0], seen[since:]):
            since, act = len(seen), waiting.pop(0)[1]
            if act is not None:
                act()
        if script and not waiting and time.monotonic() > again:  # a signal within a finalizer is lost
            os.kill(pid, signal.SIGINT)
            again = time.monotonic() + 10
    else:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(here)
    # zarr joins its thread for a fifth of a second at the end of the interpreter, and complains if that was too short.
    return seen.partition("Exception ignored in atexit callback")[0], os.waitstatus_to_exitcode(status)


def test_the_terminal_view_follows_a_run(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", [q.Alpha(), q.Loss(), q.GradNorm(), q.ReplicaDrift()])
    written.rows(12, loss={"loss": 7.25}, alpha={"alpha": 0})
    program = [sys.executable, "-m", "distcockpit", "watch", "--terminal", str(written.path), "--refresh", "0.2"]

    def grow() -> None:
        written.rows(12, loss={"loss": 4.125}, alpha={"alpha": 0}, replica_drift={"replica_drift": 1})

    seen, code = terminal(program, (r"7\.25", grow), (r"4\.125", None))
    assert code == 130 and "Traceback" not in seen and "nothing looks wrong" in seen
    assert "wrong: ranks hold different parameters from step 12" in seen
    assert re.search("[▁▂▃▄▅▆▇█]{10}", seen) and "ranks 4" in seen


def test_the_terminal_view_of_a_run_without_rows(tmp_path: Path) -> None:
    path = Written(tmp_path / "run", [q.Alpha(), q.Loss()]).close()
    seen, code = terminal([sys.executable, "-m", "distcockpit", "watch", "--terminal", str(path)], ("ranks 4", None))
    assert code == 130 and "Traceback" not in seen


def test_the_terminal_view_waits_for_a_run_that_is_away(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", [q.Loss()]).rows(12)
    program = [sys.executable, "-m", "distcockpit", "watch", "--terminal", str(written.path), "--refresh", "0.2"]
    away = tmp_path / "away"
    seen, code = terminal(
        program,
        ("loss", lambda: written.path.rename(away)),
        ("waiting: .*there is no run here", lambda: away.rename(written.path)),
        ("nothing looks wrong", None),
    )
    assert code == 130 and "Traceback" not in seen


def test_long_work_shows_a_bar_on_a_terminal(tmp_path: Path) -> None:
    store = small(tmp_path)
    program = [sys.executable, "-m", "distcockpit", "plot", str(store), "-o", str(tmp_path / "p.png"), "--dpi", "30"]
    seen, code = terminal(program)
    assert code == 0 and re.search(r"plot \w+.*\d+/\d+", seen) and (tmp_path / "p.png").exists()


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
