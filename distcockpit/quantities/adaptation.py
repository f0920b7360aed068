"""Adaptive bin ranges: symmetric, up to the largest absolute value seen on any rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

from distcockpit.schedules import Schedule


@dataclass(frozen=True, kw_only=True)
class _SymmetricRange:
    schedule: Schedule | None = None
    padding: float = 0.0
    min_size: float = 1e-6

    def __post_init__(self) -> None:
        if self.schedule is not None and not callable(self.schedule):
            raise TypeError(
                f"{type(self).__name__}(schedule={self.schedule!r}): must be a callable step -> bool, such as "
                "every(10)."
            )
        if not self.padding >= 0:
            raise ValueError(f"{type(self).__name__}(padding={self.padding!r}): must be at least 0.")
        if not self.min_size > 0:
            raise ValueError(f"{type(self).__name__}(min_size={self.min_size!r}): must be positive.")

    def range(self, largest: float) -> tuple[float, float]:
        """The bin range for a largest absolute value; non-finite values are ignored."""
        largest = largest if math.isfinite(largest) else 0.0
        end = (1.0 + self.padding) * max(self.min_size / 2, largest)
        return -end, end


@dataclass(frozen=True, kw_only=True)
class GradAbsMax(_SymmetricRange):
    """Adapt a range to the largest absolute element m of the individual gradients.

    The range becomes ``(-e, e)`` with ``e = (1 + padding) max(m, min_size / 2)``, effective at the next histogram.
    NaN and infinite elements are ignored.

    Args:
        schedule: Steps at which to measure; by default those of the histogram.
        padding: Fraction by which the range exceeds the largest value, at least 0.
        min_size: Smallest width of the range before padding, positive.
    """


@dataclass(frozen=True, kw_only=True)
class ParamAbsMax(_SymmetricRange):
    """Adapt a range to the largest absolute element m of the tracked parameters; otherwise like `GradAbsMax`.

    Args:
        schedule: Steps at which to measure; by default those of the histogram.
        padding: Fraction by which the range exceeds the largest value, at least 0.
        min_size: Smallest width of the range before padding, positive.
    """
