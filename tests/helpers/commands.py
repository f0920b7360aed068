"""Commands as a user types them, and the stores that they read."""

from __future__ import annotations

import contextlib
import http.client
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from paths import ROOT
from waiting import HANG, run_program
from written import Written

from distcockpit import quantities as q
from distcockpit.cli import main


def ran(capfd: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> tuple[str, str]:
    with pytest.raises(SystemExit) as done:
        main([str(argument) for argument in arguments])
    out, err = capfd.readouterr()
    assert done.value.code == code, out + err
    return out, err


def small(folder: Path) -> Path:
    """A store that is drawn soon."""
    return Written(folder / "small.zarr", [q.Alpha(), q.Loss(), q.GradNorm()]).rows(20).close()


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


BIN = str(Path(sys.executable).parent)


def run(*command: str, allowed: str = "", **environment: str) -> str:
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", **environment}
    done = run_program(*command, cwd=ROOT, env=env)
    assert allowed or "Warning" not in done.stderr, done.stderr
    return done.stdout


@contextlib.contextmanager
def watching(*arguments: str) -> Generator[tuple[str, subprocess.Popen[str]], None, None]:
    command = [sys.executable, "-m", "distcockpit", "watch", *arguments, "--port", "0", "--refresh", "0.3"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
        assert found, process.communicate(timeout=HANG)
        yield found.group(), process
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(HANG)
        process.kill()
        process.wait()


def get(address: str, path: str = "/", host: str | None = None) -> tuple[int, str]:
    place = address.removeprefix("http://").rstrip("/")
    connection = http.client.HTTPConnection(place, timeout=HANG)
    connection.request("GET", path, headers={"Host": host or place})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()
