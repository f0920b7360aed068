"""Two hosts, each a network namespace; the link between them is cut, or loses all packets, in a tracked step."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from waiting import until

from distcockpit import open_run
from distcockpit.run import verify

WORKER = ROOT / "tests/faults/worker.py"
TIMEOUT = 6.0


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def missing() -> str:
    """Why there can be no namespaces here; empty if there can."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("unshare")):
        return "network namespaces need root, ip and unshare"
    probe = subprocess.run(["ip", "netns", "add", "distcockpit-probe"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", "distcockpit-probe"], capture_output=True)
    return "" if probe.returncode == 0 else probe.stderr


class Hosts:
    """Two hosts named "left" and "right", with a link between them."""

    def __init__(self) -> None:
        self.spaces = [f"dc{os.getpid()}{side}" for side in "lr"]
        self.links = [f"d{os.getpid() % 10**7}{side}" for side in "lr"]
        for space in self.spaces:
            ip("netns", "add", space)
        ip("link", "add", self.links[0], "type", "veth", "peer", "name", self.links[1])
        for k, (space, link) in enumerate(zip(self.spaces, self.links, strict=True)):
            ip("link", "set", link, "netns", space)
            ip("-n", space, "addr", "add", f"10.77.0.{k + 1}/24", "dev", link)
            for name in (link, "lo"):
                ip("-n", space, "link", "set", name, "up")

    def cut(self, how: str) -> None:
        """Take the link down, or let every packet go to an address that is nobody's."""
        if how == "down":
            ip("-n", self.spaces[0], "link", "set", self.links[0], "down")
            return
        for k, (space, link) in enumerate(zip(self.spaces, self.links, strict=True)):
            neighbour = ("replace", f"10.77.0.{2 - k}", "lladdr", "02:00:00:00:00:99", "dev", link, "nud", "permanent")
            ip("-n", space, "neigh", *neighbour)

    def start(self, host: int, rank: int, output: Path, *arguments: str) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            **{"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500"},
            **{"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": self.links[host]},
        }
        name = ("left", "right")[host]
        command = ["ip", "netns", "exec", self.spaces[host], "unshare", "--uts", "sh", "-c"]
        command += [f'hostname {name} && exec "$@"', "sh", sys.executable, str(WORKER), *arguments]
        with output.open("w") as file:
            return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)

    def close(self) -> None:
        for space in self.spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if why := missing():
        pytest.skip(why)
    made = Hosts()
    yield made
    made.close()


@pytest.mark.parametrize("how", ["down", "drop"])
@pytest.mark.parametrize("exchange", ["header", "sums"])
def test_each_rank_ends_and_says_who_is_missing(hosts: Hosts, tmp_path: Path, how: str, exchange: str) -> None:
    go = tmp_path / "go"
    options: dict[str, Any] = {"steps": 9, "ddp": False, "pause": [exchange, 3], "go": str(go)}
    options["cockpit"] = {"timeout_seconds": TIMEOUT, "store_options": {"flush_seconds": 0.1}}
    outputs = [tmp_path / f"output{rank}" for rank in range(4)]
    arguments = (str(tmp_path / "run"), json.dumps(options))
    ranks = [hosts.start(rank // 2, rank, outputs[rank], *arguments) for rank in range(4)]
    try:
        for output in outputs:
            until(lambda output=output: "pauses" in output.read_text(), lambda output=output: output.read_text())
        hosts.cut(how)
        go.touch()
        until(lambda: all(rank.poll() is not None for rank in ranks), lambda: [o.read_text() for o in outputs])
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for k, output in enumerate(outputs):
        error = next((line for line in output.read_text().splitlines() if line.startswith("error")), output.read_text())
        if k < 2:  # where the store is that says where ranks were
            assert "Missing: ranks 2, 3 on right (last seen in tracked step 3)." in error
        else:  # whose question the store does not answer: nobody waits for it
            assert "does not answer" in error and "Missing: ranks 0, 1 on left" in error
        assert f"timeout_seconds={TIMEOUT:g}" in error
    assert list(open_run(tmp_path / "run")["loss"]["step"].values)[:3] == [0, 1, 2]
    assert verify(tmp_path / "run") == []
