"""Calls of torch functions with parameters.

A mode sees each call inside the model's forward pass, and one in the loop what is made there for it, as arguments of
`torch.func.functional_call`. Tensors made from parameters and constants alone
(``wpe(arange(T))``, ``-A.exp()``, ``p.expand(B, -1, -1)``) are remembered through the calls that made them. A call that
combines such a tensor, or a parameter, with something of the batch is a use: it can be run again on its own, starting
from the parameters, which is exact whatever the function is. What belongs to the batch is what was computed from the
model's batched inputs; anything else counts as a constant, which is exact too, because the samples are separated at the
output of the use.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils.weak import WeakTensorKeyDictionary

from distcockpit.gradients.forms import FUNCTIONS
from distcockpit.gradients.recording import Call, Given, Leaf, Made, ParameterPart, Recording, writes
from distcockpit.gradients.uses import CALLS, Layer
from distcockpit.replay.rng import RandomState
from distcockpit.replay.trees import map_tensors, tensors


def called_with(names: Iterable[str]) -> str:
    """Return the key that counts calls of functions with these parameters, and identifies their axes."""
    return f"{CALLS} with {', '.join(sorted(names))}"


def transforms() -> bool:
    """True inside `torch.func.vmap`, `grad` and the like, whose tensors cannot be kept."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class Functions(nn.Module):
    """Stands for the functions that are called with these parameters.

    Args:
        model: The bare module.
        owners: The names of the parameters, with those of the modules that own them.
    """

    def __init__(self, model: nn.Module, owners: Mapping[str, str]) -> None:
        super().__init__()
        self._model, self._owners = (model,), owners  # a tuple, so that it is not registered as a submodule
        self._layers: dict[tuple[int, frozenset[tuple[str, str]]], Layer] = {}

    @property
    def owners(self) -> set[str]:
        """The modules that own the parameters."""
        return set(self._owners.values())

    @property
    def called(self) -> dict[str, nn.Parameter]:
        """The parameters by name."""
        every = dict(self._model[0].named_parameters())
        return {name: every[name] for name in self._owners}

    def serves(self, name: str) -> bool:
        """True if this is one of the parameters."""
        return name in self._owners

    def layer(
        self, number: int, names: Mapping[str, str], function: Any, parameters: Mapping[str, nn.Parameter]
    ) -> Layer:
        """Return what stands for a call in a forward pass, the same at every step.

        Args:
            number: How often functions were called with these parameters before.
            names: The parameters, by local name.
            function: What was called.
            parameters: By name; inside the forward pass the model may hold other tensors in their places.
        """
        key = number, frozenset(names.items())
        if key not in self._layers:
            site, said = Call(names, parameters), getattr(function, "__name__", str(function))
            owner = self._owners[min(names.values())]
            self._layers[key] = Layer(owner, site, names, names, is_leaf=True, function=said)
        return self._layers[key]


OnUse = Callable[[Recording, list[Tensor], Any, RandomState | None], None]
"""Called for each use, with the call, the batch tensors in it, what it returned, and the random state before it, if it
drew random numbers."""


class Mode(TorchFunctionMode):
    """A mode that can be removed where it would interfere."""

    def __init__(self) -> None:
        super().__init__()
        self._suspended, self._is_on, self._thread = 0, False, threading.get_ident()
        self.is_muted = False  # while another mode watches

    @property
    def is_here(self) -> bool:
        """True on the thread it was created on."""
        return self._thread == threading.get_ident()

    def mark(self, batch: Iterable[Tensor]) -> None:
        """Mark tensors that were made while the mode was away."""

    def enter(self) -> None:
        """Start watching."""
        self._is_on = True
        self.__enter__()

    def leave(self) -> None:
        """Stop watching; modes pushed on top of this one stay."""
        if not self._is_on or self not in _get_current_function_mode_stack():
            return
        self._is_on = False
        above = []
        while (mode := _pop_mode()) is not self:
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)

    def begin(self) -> None:
        """Start watching, except in modules that compute differently if a mode is active."""
        if not _present:
            for kind in ASKING:
                kind.forward = _without_modes(kind.forward)  # type: ignore[method-assign]
        _present.append(self)
        self.enter()

    def end(self) -> None:
        """Stop watching for good."""
        self.leave()
        if self in _present:
            _present.remove(self)
            if not _present:
                for kind in ASKING:
                    kind.forward = vars(kind)["forward"].__wrapped__  # type: ignore[method-assign]

    def suspend(self) -> None:
        """Step aside for a module whose code checks for active modes."""
        if not self._suspended:
            self._was_on = self._is_on
            self.leave()
        self._suspended += 1

    def resume(self) -> None:
        """Come back after `suspend`."""
        self._suspended -= 1
        if self._was_on and not self._suspended:
            self.enter()


OnCall = Callable[[Any, Any, Any, Any], None]
"""Called for each call, with the function, its arguments (args and kwargs), and its result."""


class Watch(Mode):
    """Sees the function calls of one forward pass.

    Args:
        parameters: The parameters to look for, by name.
        batch_size: The batch size of the pass.
        device: The device of the model.
        on_use: Called for each use.
        on_call: Called for each call whose result has no axis of the batch's length.
        with_gradients: Whether tensors made from parameters with gradients disabled are constants.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        batch_size: int,
        device: torch.device,
        on_use: OnUse,
        on_call: OnCall,
        *,
        with_gradients: bool = True,
    ) -> None:
        super().__init__()
        self._with_gradients, self._on_call = with_gradients, on_call
        self._batch_size = batch_size
        self._leaves = {id(p): Leaf(name, p.shape) for name, p in parameters.items()}
        self._known: Any = WeakTensorKeyDictionary()  # "batch", or the part that a tensor is
        self.reshaped: Any = WeakTensorKeyDictionary()  # original shapes of tensors whose bases do not tell them
        self._device, self._on_use = device, on_use

    def mark(self, batch: Iterable[Tensor]) -> None:
        """Mark tensors that belong to the batch."""
        for tensor in batch:
            if id(tensor) not in self._leaves:
                self._known[tensor] = "batch"

    def learn(self, other: Watch) -> None:
        """Know what another watch has seen being made from parameters."""
        for tensor, kind in other._known.items():
            if isinstance(kind, ParameterPart):
                self._known[tensor] = kind

    def forget(self) -> None:
        """Release what was made from parameters, and what it was made with."""
        self._known.clear()

    def know(self, name: str, parameter: nn.Parameter) -> None:
        """Look for another tensor that is this parameter, too."""
        self._leaves.setdefault(id(parameter), Leaf(name, parameter.shape))

    def follow(self, before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
        """Treat tensors like those that they were cast from while the mode was away."""
        for old, new in zip(before, after, strict=False):
            for those in (self._known, self.reshaped):
                if old in those:
                    those[new] = those[old]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_muted or func in ASKED or transforms():
            return func(*args, **kwargs)
        result = self.call_and_remember(func, args, kwargs, tensors((args, kwargs)))
        if not isinstance(result, Tensor) or not (result.is_nested or self._batch_size in result.shape):
            self._on_call(func, args, kwargs, result)
        return result

    def call_and_remember(self, func: Any, args: Any, kwargs: Any, given: Sequence[Tensor]) -> Any:
        """Call a function, and remember what it was if its result is made from parameters.

        Args:
            func: The function.
            args: Its arguments.
            kwargs: Likewise.
            given: The tensors among them.
        """
        if func in OPENED:
            with self:
                return OPENED[func](*args, **kwargs)
        kinds = [self._kind(t) for t in given]
        if not any(isinstance(kind, ParameterPart) for kind in kinds):
            result = func(*args, **kwargs)
            if "batch" in kinds:
                self.mark(tensors(result))
                if isinstance(result, Tensor) and (func in RESHAPING or func is Tensor.view and _is_turned(given[0])):
                    self.reshaped[result] = given[0].shape
                if writes(func):
                    self.mark(given[:1])
            return result
        has_batch = "batch" in kinds
        # Arguments that a call writes to are kept as they were before; constants are kept as they are.
        overwritten = writes(func) and not isinstance(kinds[0], ParameterPart)
        kept = [given[0].detach().clone(), *given[1:]] if overwritten else given
        before = (
            None if func in FUNCTIONS else RandomState.take(self._device)
        )  # functions with a closed form draw nothing
        recording, batch = self._record(func, args, kwargs, kinds, kept)  # first: a call may change its arguments
        result = func(*args, **kwargs)
        output = given[0] if result is None and writes(func) and given[0]._base is None else result
        made = tensors(output)
        drew = before is not None and bool(made) and before.torch_drew()
        if self._with_gradients and not (has_batch or torch.is_grad_enabled()):
            return result  # a constant, such as the vectors of spectral norm
        if not made or (drew and not has_batch):  # written to a view, or random: not known, so not explained
            self.mark([*made, *given[:1]] if writes(func) else made)
            return result
        if has_batch:
            self.mark(made)
            self._on_use(recording, batch, output, before if drew else None)
        else:
            for position, tensor in enumerate(made):
                if id(tensor) not in self._leaves:
                    self._known[tensor] = Made(recording, position)
        return result

    def _kind(self, tensor: Tensor) -> ParameterPart | str | None:
        """Return a parameter or a tensor made from some, "batch", or ``None`` for a constant."""
        kind = self._leaves.get(id(tensor)) or self._known.get(tensor)
        if kind is None and tensor.grad_fn is not None and self._batch_size in tensor.shape:
            return "batch"  # from a function that no mode sees, such as an autograd.Function
        return kind

    def _record(
        self, func: Any, args: Any, kwargs: Any, kinds: Sequence[Any], kept: Sequence[Tensor]
    ) -> tuple[Recording, list[Tensor]]:
        """Record the call and the batch tensors in it; constants of the batch's length are split like the batch."""
        batch: list[Tensor] = []
        constants: list[Tensor] = []
        parts: list[ParameterPart] = []
        turn = iter(zip(kinds, kept, strict=True))
        is_use = "batch" in kinds

        def exchange(_: Tensor) -> Any:
            kind, tensor = next(turn)
            if isinstance(kind, ParameterPart):
                parts.append(kind)
                return kind
            if not is_use:
                constants.append(tensor)
                return tensor
            batch.append(tensor)
            parts.append(Given(len(batch) - 1))
            return parts[-1]

        args, kwargs = map_tensors(exchange, (tuple(args), dict(kwargs)))
        return Recording(func, args, kwargs, parts, constants, [t.shape for t in batch]), batch


RESHAPING = {torch.reshape, Tensor.reshape, torch.flatten, Tensor.flatten}


def _is_turned(tensor: Tensor) -> bool:
    """True if a tensor is contiguous but its base is not, such as the output of attention with its axes permuted."""
    base = tensor._base
    return base is not None and base.layout is torch.strided and tensor.is_contiguous() and not base.is_contiguous()


PROPERTIES = ("_version", "device", "dtype", "is_cuda", "is_leaf", "is_nested", "is_sparse", "layout", "ndim")
METHODS = (
    "__deepcopy__",
    "__reduce_ex__",
    "dim",
    "is_contiguous",
    "is_floating_point",
    "is_inference",
    "numel",
    "size",
    "storage_offset",
    "stride",
)
ASKED = frozenset({
    *(getattr(Tensor, name).__get__ for name in (*PROPERTIES, "grad", "requires_grad", "shape")),
    *(getattr(Tensor, name) for name in METHODS),
})
"""Attributes of tensors that are read all the time and are not made of them, and methods that copy and save one."""


def _opened(function: Any) -> Callable[..., Any]:
    """Return the same Python function without its initial check for modes, so that they see what it calls."""
    names = vars(F) | dict.fromkeys(("has_torch_function", "has_torch_function_variadic"), lambda *_: False)
    opened = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


OPENED = {
    function: _opened(function)
    for name in ("multi_head_attention_forward", "linear_cross_entropy")
    if (function := getattr(F, name, None)) is not None
}
"""Python functions that contain several uses, or a use and the loss."""

ASKING = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
"""Modules whose results differ, by about 1e-6, if a mode is active and nothing is differentiated."""

_present: list[Mode] = []
"""The modes that are active in a step, innermost last."""


def _without_modes(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def away(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = tensors((args, kwargs))
        differentiates = torch.is_grad_enabled() and any(t.requires_grad for t in (*given, *module.parameters()))
        modes = [] if module.training or differentiates else [mode for mode in _present if mode.is_here]
        for mode in reversed(modes):
            mode.suspend()
        try:
            output = forward(module, *args, **kwargs)
        finally:
            for mode in modes:
                mode.resume()
        for mode in modes:
            mode.mark(tensors(output))
        return output

    return away


@contextmanager
def watched(model: nn.Module, watch: Watch, batch_dim: int, batch_size: int) -> Generator[None, None, None]:
    """Inside, the outermost calls of the model are watched, on this thread.

    A hook or the model itself may call the model once more, and another thread may do so meanwhile.

    Args:
        model: The bare module.
        watch: The mode that watches them.
        batch_dim: The batch axis of its inputs.
        batch_size: Their length along this axis.
    """
    depth = 0

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal depth
        if watch.is_here:
            depth += 1
            if depth == 1:
                watch.mark(batched((args, kwargs), batch_dim, batch_size))
                watch.enter()

    def leave(*_: Any) -> None:
        nonlocal depth
        if watch.is_here:
            depth -= 1
            if depth == 0:
                watch.leave()

    handles = [
        model.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
        model.register_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def batched(tree: Any, batch_dim: int, batch_size: int) -> list[Tensor]:
    """Return the tensors whose axis ``batch_dim`` has the batch's length."""
    return [t for t in tensors(tree) if t.dim() > batch_dim and t.shape[batch_dim] == batch_size]
