"""Hooks on modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Hook:
    """A module hook that is not copied with the module or saved to files: `deepcopy` and pickle skip it.

    Args:
        call: The function to call.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        """Call the hook."""
        return self._call(*args)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return no_hook

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_hook, ()


def no_hook(*args: Any) -> None:
    """Do nothing."""


def _no_hook() -> Callable[..., None]:
    return no_hook
