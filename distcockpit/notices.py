"""Notices of a run: each is logged once, and kept in the store."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("distcockpit")


class Notices:
    """One rank's notices.

    Args:
        keep: Stores all notices so far, each with its step, topic and text; on rank 0.
    """

    def __init__(self, keep: Callable[[list[dict[str, Any]]], None] | None = None) -> None:
        self._keep = keep
        self._kept: list[dict[str, Any]] = []
        self._said: set[str] = set()
        self._states: dict[str, str] = {}

    def once(self, topic: str, text: str, step: int) -> None:
        """Log a warning the first time its topic comes up, and keep it."""
        if topic not in self._said:
            self._said.add(topic)
            logger.warning("distcockpit: %s", text)
            self._kept.append({"step": step, "topic": topic, "text": text})
            if self._keep is not None:
                self._keep(list(self._kept))

    def when_new(self, topic: str, text: str | None, state: str | None = None) -> None:
        """Log a warning about an ongoing condition when it starts or changes; callable from any thread.

        Args:
            topic: What it is about.
            text: The warning; ``None`` once the condition is over.
            state: What distinguishes one warning from the next; the text by default.
        """
        if text is None:
            self._states.pop(topic, None)
            return
        state = text if state is None else state
        if self._states.get(topic) != state:
            logger.warning("distcockpit: %s", text)
        self._states[topic] = state
