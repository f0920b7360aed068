"""Ranks that die, hang, are killed or restarted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from waiting import HANG, run_program, until

from distcockpit import open_run
from distcockpit.run import verify

WORKER = ROOT / "tests/faults/worker.py"


class Worker:
    """One rank in a process of its own."""

    def __init__(self, tmp_path: Path, rank: int, size: int, **options: Any) -> None:
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "OMP_NUM_THREADS": "1",
            "RENDEZVOUS": str(tmp_path / "rendezvous"),
            "PYTHONPATH": str(WORKER.parents[2]),
        }
        self.output = tmp_path / f"output{rank}"
        self._file = self.output.open("w")
        command = [sys.executable, str(WORKER), str(tmp_path / "run"), json.dumps(options)]
        self.process = subprocess.Popen(command, stdout=self._file, stderr=subprocess.STDOUT, env=environment)

    @property
    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, text: str) -> None:
        until(lambda: text in self.text or self.process.poll() is not None, lambda: self.text)
        assert text in self.text

    def waits(self) -> bool:
        """True if the main thread sleeps, and has been asleep for two seconds: it is in an exchange."""
        stat = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/stat")
        seen = set()
        for _ in range(40):
            state, *rest = stat.read_text().rpartition(")")[2].split()
            seen.add((state, *rest[10:12]))  # with the time that it has used
            time.sleep(0.05)
        return len(seen) == 1 and seen.pop()[0] == "S"

    def ends(self) -> int:
        try:
            return self.process.wait(HANG)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"hangs: {self.text}") from None

    def error(self) -> str:
        return next((line for line in self.text.splitlines() if line.startswith("error")), self.text)


@contextmanager
def job(tmp_path: Path, size: int, **options: Any) -> Generator[list[Worker], None, None]:
    workers = [Worker(tmp_path, rank, size, **options) for rank in range(size)]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.wait()


def rows(tmp_path: Path, name: str = "loss") -> list[int]:
    return list(open_run(tmp_path / "run")[name]["step"].values)


SHORT = {"timeout_seconds": 45, "store_options": {"flush_seconds": 1000}}


LONG = {"timeout_seconds": 10**6, "store_options": {"flush_seconds": 1000}}


@pytest.mark.parametrize(
    "fault, words",
    [
        (
            "stall",
            [
                "could not finish a tracked step",
                "Missing: rank 1 (last seen in tracked step 2). Waiting: rank 0 (in tracked step 3).",
                "timeout_seconds=45",
            ],
        ),
        ("skip", ["ranks are at different steps: rank 0 tracks step 3, rank 1 tracks step 4"]),
        ("leave", ["Missing: rank 1 (last seen closed after step 2).", "Join([ddp, cockpit])"]),
    ],
)
def test_a_rank_that_does_not_come(tmp_path: Path, fault: str, words: list[str]) -> None:
    """Without DDP, which would wait by itself: the error says who, and where he is; nothing is aborted or hangs."""
    settings = SHORT if fault == "stall" else LONG
    with job(tmp_path, 2, steps=9, ddp=False, cockpit=settings, faults={"1": [fault, 3]}) as (first, second):
        assert first.ends() == 3
        assert all(word in first.error() for word in words), first.error()
        if fault == "skip":
            second.ends()
            assert words[0] in second.error()
    assert rows(tmp_path) == [0, 1, 2]


def test_ddp_waits_and_the_error_says_for_whom(tmp_path: Path) -> None:
    """Killed in the middle: DDP's own exchange fails, and its error gets a note of the last steps."""
    with job(tmp_path, 2, steps=9, cockpit=LONG, faults={"1": ["kill", 3]}) as (first, second):
        assert first.ends() == 3 and second.ends() == -signal.SIGKILL
        assert "Missing: rank 1 (last seen in tracked step 2). Waiting: rank 0 (in tracked step 3)." in first.error()
    left = rows(tmp_path)  # the sums of the latest steps may have died with the rank, on their way
    assert left and left == [0, 1, 2][: len(left)]


@pytest.mark.parametrize("exchange", ["forward", "header", "sums"])
def test_a_sharded_model_loses_a_rank(tmp_path: Path, exchange: str) -> None:
    """Killed before the forward pass, where FSDP's own exchange fails, and in the cockpit's: the error says who."""
    pause = {} if exchange == "forward" else {"pause": [exchange, 3], "go": str(tmp_path / "go")}
    faults = {"1": ["kill", 3]} if exchange == "forward" else {}
    with job(tmp_path, 2, steps=9, ddp=False, sharded=True, cockpit=LONG, faults=faults, **pause) as (first, second):
        if pause:
            for worker in (first, second):
                worker.wait_for("pauses")
            second.process.kill()
            (tmp_path / "go").touch()
        assert first.ends() == 3 and second.ends() == -signal.SIGKILL
        assert "Missing: rank 1 (last seen in tracked step" in first.error()
    left = rows(tmp_path)
    assert left and left == [0, 1, 2][: len(left)]
    verify(tmp_path / "run")


def test_all_ranks_are_killed(tmp_path: Path) -> None:
    """As when a job is killed with its nodes; the same command resumes it, here from no checkpoint at all."""
    options: dict[str, Any] = {"cockpit": {"mode": "a", "store_options": {"flush_seconds": 0.1}}, "rest": 0.05}
    with job(tmp_path, 2, steps=10**6, **options) as workers:
        workers[0].wait_for("step 20")
        for worker in workers:
            worker.process.kill()
    before = rows(tmp_path)
    assert before == list(range(len(before))) and verify(tmp_path / "run") == []
    assert open_run(tmp_path / "run").attrs["state"] == "killed"
    (tmp_path / "rendezvous").unlink()
    with job(tmp_path, 2, steps=5, **options) as workers:
        assert [worker.ends() for worker in workers] == [0, 0], workers[0].text
    run = open_run(tmp_path / "run")
    assert rows(tmp_path) == list(range(5)) and len(run.attrs["segments"]) == 2 and verify(tmp_path / "run") == []


def test_exit_waits_for_no_rank(tmp_path: Path) -> None:
    """Rank 1 hangs, rank 0 ends without having closed: it ends all the same, and its rows are there."""
    with job(tmp_path, 2, steps=3, hang_at_end=1, forget=0, cockpit=LONG) as (first, second):
        second.wait_for("step 2")
        assert first.ends() == 0
        assert second.process.poll() is None
    attributes = open_run(tmp_path / "run").attrs
    assert rows(tmp_path) == [0, 1, 2]
    assert (attributes["state"], attributes["reason"]) == ("ended", "the program ended without close()")


@pytest.mark.parametrize("stuck", [False, True])
def test_sigterm(tmp_path: Path, stuck: bool) -> None:
    """What was tracked is written; also by a rank that is stuck in an exchange, where no handler of Python can run."""
    size = 2 if stuck else 1
    options: dict[str, Any] = {"faults": {"1": ["stall", 3]}} if stuck else {"rest": 0.05}
    with job(tmp_path, size, steps=10**6, cockpit=LONG, **options) as workers:
        workers[0].wait_for("step 2")
        if stuck:
            until(workers[0].waits)
        workers[0].process.send_signal(signal.SIGTERM)
        if stuck:
            until(lambda: rows(tmp_path) == [0, 1, 2], lambda: rows(tmp_path))
            assert workers[0].process.poll() is None  # still waits for the other rank, as it would without us
        else:
            assert workers[0].ends() == -signal.SIGTERM
    told = [int(line.split()[1]) for line in workers[0].text.splitlines() if line.startswith("step")]
    assert rows(tmp_path)[: len(told)] == told and len(told) > 2


def test_a_handler_of_the_user_still_runs(tmp_path: Path) -> None:
    with job(
        tmp_path, 1, steps=10**6, rest=0.05, user_handler=True, cockpit={"store_options": {"flush_seconds": 1000}}
    ) as (worker,):
        worker.wait_for("step 2")
        worker.process.send_signal(signal.SIGTERM)
        assert worker.ends() == 7
    assert len(rows(tmp_path)) > 2


def test_elastic_restart_resumes_the_store(tmp_path: Path) -> None:
    """torchrun restarts all ranks when one is killed; the run goes on from its checkpoint, in the same store."""
    options = {
        "steps": 12,
        "every_checkpoint": 4,
        "faults": {"1": ["kill", 7]},
        "cockpit": {"mode": "a", "store_options": {"flush_seconds": 0.1}},
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1"]
    command += [str(WORKER), str(tmp_path / "run"), json.dumps(options)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(WORKER.parents[2])}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # or gloo finds addresses of the ranks that died
    run_program(*command, env=environment)
    run = open_run(tmp_path / "run").load()
    for name in ("loss", "mean_gsnr", "grad_hist_1d", "update_size", "log"):
        assert list(run[name]["step"].values) == list(range(12)), name
    first, second = run.attrs["segments"]
    assert (first["first_step"], first["last_step"], second["first_step"], second["last_step"]) == (0, 4, 5, 11)
    assert run.attrs["state"] == "closed"
