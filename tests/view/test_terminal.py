"""The live view in a terminal."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import ran, small, terminal
from rich.console import Console
from written import Written, model

from distcockpit import open_run
from distcockpit import quantities as q
from distcockpit.view.terminal import view

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


def test_each_quantity_has_a_line_in_the_terminal(store: Path) -> None:
    console = Console(width=160, file=io.StringIO(), record=True)
    console.print(view(open_run(store), {}, "run", height=200))
    shown = console.export_text()
    for name in ("alpha", "distance/total", "grad_norm/total", "update_size/total", "loss", "log/train_loss"):
        assert f" {name} " in shown


def test_the_terminal_compares_ranks_and_shows_the_noise_scale_as_a_ratio(tmp_path: Path) -> None:
    rows = {
        "rank_disagreement": {"loss": np.tile([1.0, 9.0, 1.5, 1.0], (12, 1)), "grad_norm": 1.0},
        "gradient_noise_scale": {"noise": 600.0, "signal": 2.0},
    }
    chosen = [q.RankDisagreement(), q.GradientNoiseScale(), q.Loss()]
    run = open_run(Written(tmp_path / "run", chosen).rows(12, **rows).close())
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(view(run, {}, "run", height=60))
    shown = console.export_text()
    assert "loss of the ranks: 1 (rank 0) to 9 (rank 1)" in shown
    ratio = 300 / float(run["loss"]["batch_size"].values[-1])
    assert re.search(rf"gradient_noise_scale/batch +11 +{ratio:.4g} +x batch size", shown)
    assert shown.index(" loss ") < shown.index("gradient_noise_scale")  # the loss comes first


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


@pytest.mark.smoke
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


@pytest.mark.parametrize("watched", ["runs/run", "runs"])
def test_the_terminal_view_waits_for_a_run_to_start(tmp_path: Path, watched: str) -> None:
    """Also where only the folder of runs is known, as with a store that is named by time."""
    path = tmp_path / "runs" / "run"
    program = [sys.executable, "-m", "distcockpit", "watch", "--terminal", str(tmp_path / watched), "--refresh", "0.2"]
    start = ("waiting for a run to start here", lambda: Written(path, [q.Loss()]).rows(12, loss={"loss": 7.25}))
    seen, code = terminal(program, start, (r"7\.25", None))
    assert code == 130 and "Traceback" not in seen


def test_long_work_shows_a_bar_on_a_terminal(tmp_path: Path) -> None:
    store = small(tmp_path)
    program = [sys.executable, "-m", "distcockpit", "plot", str(store), "-o", str(tmp_path / "p.png"), "--dpi", "30"]
    seen, code = terminal(program)
    assert code == 0 and re.search(r"plot \w+.*\d+/\d+", seen) and (tmp_path / "p.png").exists()
