"""Real gloo processes: started once per test run, they run functions of the tests and return their results."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from waiting import HANG

SIZE = 4
# Each cockpit on some of the ranks keeps its groups, whose threads wake a hundred times a second.
MOST_JOBS = 24
IMPORTED = ["torch._dynamo", "torch.nn.parallel", "scipy.sparse.linalg", "numba", "xarray", "distcockpit.cockpit"]


class RankError(AssertionError):
    """A rank raised; the text holds the tracebacks of all that did."""


def _serve(rank: int, rendezvous: str, pipe: Connection) -> None:
    import warnings

    import torch
    import torch.distributed as dist

    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=SIZE, timeout=timedelta(seconds=HANG)
    )
    groups = {SIZE: dist.group.WORLD, 2: dist.new_group([0, 1])}
    while (job := pipe.recv_bytes()) != b"stop":
        function, size, args = pickle.loads(job)
        try:
            answer = ("ok", function(rank, size, groups[size], *args) if rank < size else None)
        except BaseException:
            answer = ("error", traceback.format_exc())
        try:
            pipe.send(answer)
        except Exception:
            pipe.send(("error", traceback.format_exc()))
    dist.destroy_process_group()


class Ranks:
    """Four gloo processes; after a hang they are killed and started anew, and so they are after some jobs."""

    def __init__(self) -> None:
        self._workers: list[tuple[Any, Connection]] = []
        self._jobs = 0

    def _start(self) -> None:
        rendezvous = os.path.join(tempfile.mkdtemp(), "rendezvous")
        os.environ["OMP_NUM_THREADS"] = "1"
        context = mp.get_context("forkserver")  # one process imports, and the ranks are copies of it
        context.set_forkserver_preload(IMPORTED)
        for rank in range(SIZE):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, rendezvous, there), daemon=True)
            process.start()
            there.close()
            self._workers.append((process, here))

    def run(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(rank, size, group, *args)`` on ``size`` ranks; their results, or their tracebacks."""
        self._jobs += size < SIZE
        if self._jobs > MOST_JOBS:
            self.stop()
            self._jobs = 0
        if not self._workers:
            self._start()
        job = pickle.dumps((function, size, args))
        for _, pipe in self._workers:
            pipe.send_bytes(job)
        answers, deadline = [], time.monotonic() + HANG
        for rank, (process, pipe) in enumerate(self._workers):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                answers.append(("error", f"rank {rank} did not answer in {HANG:g} s"))
                continue
            try:
                answers.append(pipe.recv())
            except EOFError:
                process.join(HANG)
                answers.append(("error", f"rank {rank} died with exit code {process.exitcode}"))
        errors = [f"--- rank {rank}\n{text}" for rank, (kind, text) in enumerate(answers) if kind == "error"]
        if any("did not answer" in e or "died" in e for e in errors):
            self.stop(kill=True)
        if errors:
            raise RankError("\n".join(errors))
        return [result for _, result in answers[:size]]

    def stop(self, kill: bool = False) -> None:
        for process, pipe in self._workers:
            if kill:
                process.kill()
            else:
                pipe.send_bytes(b"stop")
        for process, pipe in self._workers:
            process.join(HANG)
            pipe.close()
        self._workers = []
