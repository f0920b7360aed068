"""What the loop calls between calls of the model: the functions that compute the loss, and the backward pass."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from distcockpit.gradients.functions import ASKED, Mode, OnCall, Watch, transforms
from distcockpit.replay.trees import tensors
from distcockpit.world import Pending

MULTIPLYING = (Tensor.mul, torch.mul)
SCALER = inspect.getsourcefile(torch.amp.GradScaler)
ROOTS: dict[Callable[..., Any], tuple[str, str]] = {
    Tensor.backward: ("self", "gradient"),
    torch.autograd.backward: ("tensors", "grad_tensors"),
    torch.autograd.grad: ("outputs", "grad_outputs"),
}
"""What differentiates: the argument names for the tensors it starts from, and for their gradients."""
SIGNATURES = {function: inspect.signature(function) for function in ROOTS}


@dataclass(frozen=True)
class Differentiated:
    """What a call in the loop differentiates."""

    roots: Sequence[tuple[Tensor, Tensor | None]]  # each with its gradient; `None`: 1
    inputs: Sequence[Any]  # with respect to these only, if the call says so
    creates_graph: bool


def differentiated(function: Callable[..., Any], args: Any, kwargs: Any) -> Differentiated:
    """Parse the arguments of a function of ``ROOTS``."""
    bound = SIGNATURES[function].bind(*args, **kwargs)
    bound.apply_defaults()
    roots, gradients = (_listed(bound.arguments[name]) for name in ROOTS[function])
    pairs = list(zip_longest(roots, gradients))
    return Differentiated(pairs, _listed(bound.arguments["inputs"]), bound.arguments["create_graph"])


def _listed(tensors: Any) -> list[Any]:
    """Return one or several tensors as a list."""
    return [] if tensors is None else [tensors] if isinstance(tensors, Tensor) else list(tensors)


class LoopWatch(Mode):
    """Sees the function calls of the loop.

    It is off while the model runs, where DDP communicates, and during the backward pass: gloo's threads would keep the
    mode along with a collective, and wait for the interpreter when the program ends.

    Args:
        on_call: Called for each function call.
        on_backward: Called before each call that differentiates; the returned context is active during the call.
        parts: Remembers what the loop makes from parameters; never active itself.
    """

    def __init__(
        self,
        on_call: OnCall,
        on_backward: Callable[[Any, Any, Any], AbstractContextManager[None]],
        parts: Watch | None = None,
    ) -> None:
        super().__init__()
        self._on_call, self._on_backward, self._parts = on_call, on_backward, parts
        self.scale: Pending | None = None  # the factor of `torch.amp.GradScaler.scale`
        self._of_samples: Any = WeakTensorKeyDictionary()  # derived from outputs of the model, detached or not

    def follow(self, outputs: Iterable[Tensor]) -> None:
        """Mark tensors that the model returned, or that they are made of."""
        for tensor in outputs:
            if tensor.dim():
                self._of_samples[tensor] = True

    def is_of_samples(self, given: Iterable[Tensor], batch_size: int) -> bool:
        """True if one of these tensors, of the batch's length, was derived from what the model returned."""
        return any(batch_size in tensor.shape and tensor in self._of_samples for tensor in given)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_muted or func in ASKED or transforms():
            return func(*args, **kwargs)
        if func in ROOTS:
            with self._on_backward(func, args, kwargs):
                return func(*args, **kwargs)
        # In a step of the optimizer gradients are disabled, and nothing is to be remembered.
        parts, given = self._parts if torch.is_grad_enabled() else None, tensors((args, kwargs))
        result = func(*args, **kwargs) if parts is None else parts.call_and_remember(func, args, kwargs, given)
        if self._of_samples and any(tensor in self._of_samples for tensor in given):
            self.follow(tensors(result))
        if func in MULTIPLYING and sys._getframe(1).f_code.co_filename == SCALER:
            self.scale = Pending(args[1].detach().double().reshape(1).clone())
        elif torch.is_grad_enabled() and (not isinstance(result, Tensor) or result.grad_fn is not None):
            self._on_call(func, args, kwargs, result)
        return result
