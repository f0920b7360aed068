"""What an error holds is freed, and what must be there is asked for twice."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch

from distcockpit.replay.memory import insist, is_out_of_memory, release


class Big:
    """Something that takes memory."""


def fail(kind: Callable[[], BaseException]) -> weakref.ref:
    """Hold something big, and raise an error with a reference to it."""
    big = Big()
    error = kind()
    error.args = (weakref.ref(big),)
    raise error


def caught(kind: Callable[[], BaseException]) -> BaseException:
    try:
        fail(kind)
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def test_what_an_error_and_its_cause_hold_is_freed() -> None:
    cause = caught(MemoryError)
    error = caught(RuntimeError)
    error.__cause__ = cause
    assert cause.args[0]() is not None and error.args[0]() is not None
    release(error)
    assert cause.args[0]() is None and error.args[0]() is None


def test_an_error_that_the_user_is_handling_keeps_what_it_holds() -> None:
    of_the_user = caught(ValueError)
    error = caught(MemoryError)
    error.__context__ = of_the_user
    release(error)
    assert error.args[0]() is None and of_the_user.args[0]() is not None


def test_what_is_out_of_memory() -> None:
    host = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes.")
    wrapped = RuntimeError("curvature failed")
    wrapped.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    assert all(map(is_out_of_memory, [MemoryError(), torch.OutOfMemoryError("x"), host, wrapped]))
    assert not any(map(is_out_of_memory, [None, RuntimeError("shapes"), KeyError("memory")]))
    with pytest.raises(RuntimeError) as real:
        torch.empty(1 << 60)
    assert is_out_of_memory(real.value)


@pytest.mark.parametrize("errors, calls", [([], 1), ([MemoryError()], 2), ([MemoryError(), MemoryError()], 2)])
def test_insist_asks_twice(errors: list[BaseException], calls: int) -> None:
    left, made = list(errors), []

    def make() -> str:
        made.append(1)
        if left:
            raise left.pop()
        return "made"

    if len(errors) < 2:
        assert insist(make) == "made"
    else:
        with pytest.raises(MemoryError):
            insist(make)
    assert len(made) == calls


def test_insist_asks_once_for_what_is_wrong_otherwise() -> None:
    made = []

    def make() -> None:
        made.append(1)
        raise KeyError("wrong")

    with pytest.raises(KeyError):
        insist(make)
    assert made == [1]
