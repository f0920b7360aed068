"""Where a rank's time goes, by a clock that the test turns."""

from __future__ import annotations

import time

import pytest

from distcockpit.tracking.clock import Clock
from distcockpit.world import Traffic


def test_times_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def after(seconds: float) -> None:
        now[0] += seconds

    clock = Clock()
    for wait in (0.0, 5.0):  # two steps
        after(1)  # data, and what came before
        clock.enter()
        after(2)  # hooks go on
        clock.begin()
        after(4)  # forward and backward
        clock.end()
        after(8 - wait)  # own work, and the wait for others
        with clock.waiting():
            after(wait)
        times = clock.times(3.0, Traffic())
        after(16)  # sums, which are told of no more
        clock.leave()
    assert times.elapsed == 1 + 2 + 4 + 8 + 16 + 1 + 2 + 4 + 8
    assert times.step == 8 + 16 + 1 + 2 + 4 and times.outside == 1
    assert (times.track, times.forward, times.wait) == (4, 3, 5)
    assert times.cockpit == 2 + 8 - 5
