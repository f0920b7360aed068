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
        clock.leave(is_tracked=True)
    assert times.elapsed == 1 + 2 + 4 + 8 + 16 + 1 + 2 + 4 + 8
    assert times.step == 8 + 16 + 1 + 2 + 4 and times.outside == 1
    assert (times.track, times.forward, times.wait) == (4, 3, 5)
    assert times.cockpit == 2 + 8 - 5


@pytest.mark.parametrize("tracked, share", [((True, False, False, True), 20 / 46), ((True, True), 14 / 26)])
def test_share_of_tracking(monkeypatch: pytest.MonkeyPatch, tracked: tuple[bool, ...], share: float) -> None:
    """What tracked steps take more than the others; their own work, which hooks add to, where there are no others."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = Clock()
    assert clock.share != clock.share  # nothing has happened
    for is_tracked in tracked:
        clock.enter()
        clock.begin()
        now[0] += 6 if is_tracked else 3  # forward and backward
        clock.end()
        now[0] += 7 if is_tracked else 0
        clock.leave(is_tracked=is_tracked)
        now[0] += 0 if len(tracked) == 2 else 14 / 3
    assert clock.n_steps == {True: 2, False: len(tracked) - 2}
    assert clock.duration == pytest.approx(46 if len(tracked) == 4 else 26) and clock.share == pytest.approx(share)


def test_a_step_that_fails_has_no_share() -> None:
    clock = Clock()
    clock.enter()
    clock.begin()
    clock.end()
    clock.leave(is_tracked=False)
    clock.enter()
    clock.leave(is_tracked=True)
    assert clock.n_steps == {True: 0, False: 1}
