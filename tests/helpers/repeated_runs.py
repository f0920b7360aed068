"""Sizes of what is repeated."""

from __future__ import annotations

SAMPLES, WIDTH, CLASSES = 6, 6, 5
