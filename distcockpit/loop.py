"""What the loop calls between the calls of the model: the functions that make the loss, and the backward pass."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from distcockpit.gradients.functions import ASKED, Mode, OnCall, transforms
from distcockpit.reduce import Pending

MULTIPLYING = (Tensor.mul, torch.mul)
SCALER = inspect.getsourcefile(torch.amp.GradScaler)
BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)


class LoopWatch(Mode):
    """Sees the calls of functions in the loop.

    It is off while the model runs, where DDP makes exchanges, and while the backward pass does: gloo's threads would
    keep the mode with an exchange, and wait for the interpreter where the program ends.

    Args:
        on_call: Told of each call.
        on_backward: Told of each that differentiates, before it does; what it returns is on meanwhile.
    """

    def __init__(self, on_call: OnCall, on_backward: Callable[[Any, Any, Any], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._on_call, self._on_backward = on_call, on_backward
        self.scale: Pending | None = None  # what `torch.amp.GradScaler.scale` multiplied by

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_muted or func in ASKED or transforms():
            return func(*args, **kwargs)
        if func in BACKWARD:
            with self._on_backward(func, args, kwargs):
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if func in MULTIPLYING and sys._getframe(1).f_code.co_filename == SCALER:
            self.scale = Pending(args[1].detach().double().reshape(1).clone())
        elif torch.is_grad_enabled() and (not isinstance(result, Tensor) or result.grad_fn is not None):
            self._on_call(func, args, kwargs, result)
        return result
