"""Hooks on modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Hook:
    """A hook on a module that copies of the module, and files with it, do not have: `deepcopy` and pickle leave it out.

    Args:
        call: What it does.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        """What it does."""
        return self._call(*args)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return no_hook

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_hook, ()


def no_hook(*args: Any) -> None:
    """Does nothing."""


def _no_hook() -> Callable[..., None]:
    return no_hook
