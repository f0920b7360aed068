"""Any other module: run it again, batched, and pull back output gradients masked to single samples.

To pull back the gradient of one sample takes as long as the batch that the module was run on. So it is run on a few
samples at a time, with their part of the random numbers of the whole batch, where that gives what the whole batch gave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode

from distcockpit.gradients.factors import Factors
from distcockpit.gradients.uses import Blocks, Use
from distcockpit.rng import unchanged
from distcockpit.trees import map_tensors, tensors

FEW = 8  # samples that a module is run on together: fewer leave less to do for nothing, more have less overhead

Outputs = dict[int, Tensor]
"""By position among the tensors of an output, with the batch axis in front."""


class GenericRule:
    """Exact for every module that treats the samples of a batch independently of each other."""

    description = "generic blocks"

    def __init__(self) -> None:
        self._cuts: WeakKeyDictionary[Module, dict[object, _Cut]] = WeakKeyDictionary()

    def factors(self, use: Use) -> dict[str, Factors]:
        """None."""
        return {}

    def along(self, use: Use, direction: Mapping[str, Tensor]) -> None:
        """By way of blocks."""
        return None

    def blocks(self, use: Use, names: Sequence[str], values: Mapping[str, Tensor]) -> Blocks:
        """One batched backward per few samples; every forward has the random state of the original call."""
        again = _Again(use, names, values)
        cut = self._how_to_cut(use, again)
        drawn = _Drawn(_size(use)) if cut.draws else None
        whole = {} if cut.works and not drawn else again(use.args, use.kwargs, drawn)

        def pulled_back(outputs: Outputs, among: slice, rows: Tensor) -> Sequence[Tensor]:
            reached = {p: z for p, z in outputs.items() if z.requires_grad}
            masked = [_one_sample_each(use.output_gradients[p][among].to(z.dtype), rows) for p, z in reached.items()]
            with _as_it_was(use):  # hooks of the user's on tensors write to modules
                found = again.pull_back(list(reached.values()), masked) if reached else [None] * len(names)
            return [
                leaf.new_zeros(len(rows), *leaf.shape) if gradient is None else gradient
                for leaf, gradient in zip(again.leaves, found, strict=True)
            ]

        def block(samples: slice) -> dict[str, Tensor]:
            nonlocal cut, whole
            rows = torch.arange(samples.start, samples.stop, device=again.device)
            if cut.works:
                try:
                    parts = [
                        pulled_back(again.on(few, drawn), few, rows[: few.stop - few.start] - samples.start)
                        for few in _pieces(samples)
                    ]
                    return {name: torch.cat(found) for name, *found in zip(names, *parts, strict=True)}
                except Exception:  # this call is unlike the one that was tried
                    cut, whole = _Cut(works=False), again(use.args, use.kwargs)
            return dict(zip(names, pulled_back(whole, slice(None), rows), strict=True))

        return block

    def _how_to_cut(self, use: Use, again: _Again) -> _Cut:
        """Whether the module gives for a part of the batch what it gives for the whole; asked once for a way to cut."""
        if _size(use) <= FEW:
            return _Cut(works=False)
        axes = tuple(_batch_axis(use, tensor) for tensor in tensors((use.args, use.kwargs)))
        call = (axes, tuple(use.training.values()), use.autocast)
        known = self._cuts.setdefault(use.layer.module, {})
        if call not in known:
            known[call] = _tried(use, again)
        return known[call]

    def rows(self, use: Use, samples: slice) -> None:
        """Not of few rows."""
        return None

    def elements_per_sample(self, use: Use) -> int:
        """The masked output gradients: as large as the whole output, for each sample."""
        return sum(delta.numel() for delta in use.output_gradients.values())


class _Again:
    """A module, run again with leaves of its own for some of its parameters.

    Args:
        use: The call.
        names: Local names of the parameters.
        values: What the parameters of the model were in that call, by full name.
    """

    def __init__(self, use: Use, names: Sequence[str], values: Mapping[str, Tensor]) -> None:
        layer, module = use.layer, use.layer.module
        leaves = {layer.parameters[name]: _plain(values[layer.parameters[name]]).clone() for name in names}
        tensor_of = {full: leaves[full] if full in leaves else _plain(values[full]) for full in layer.names.values()}
        self.leaves = [leaf.requires_grad_() for leaf in leaves.values()]
        self.device, self.pull_back = self.leaves[0].device, _PullBack(self.leaves)
        self._use, self._module = use, module
        self._state = {
            slot: tensor_of[layer.names[slot]] for slot in slots(module, "_parameters") if slot in layer.names
        }
        buffers = {name: id(buffer) for name, buffer in module.named_buffers() if name in use.buffers}
        names_of = {address: name for name, address in buffers.items()}
        places = slots(module, "_buffers")
        self._buffers = {slot: names_of[id(buffer)] for slot, buffer in places.items() if id(buffer) in names_of}

    def on(self, few: slice, drawn: _Drawn | None) -> Outputs:
        """The same on some samples, with their part of what was drawn for all."""
        return self(*_cut(self._use, few), drawn and drawn.for_part(few))

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], drawn: _Drawn | None = None) -> Outputs:
        """The outputs that gradients reached in the call."""
        use, module = self._use, self._module
        copies = {name: buffer.clone() for name, buffer in use.buffers.items()}
        state = self._state | {slot: copies[name] for slot, name in self._buffers.items()}
        args, kwargs = map_tensors(_plain, (args, kwargs))
        training = {m: m.training for m in module.modules()}
        sparse = [m for m in module.modules() if getattr(m, "sparse", False) is True]
        _set_training(use.training)
        device = self.device
        precision = torch.autocast(device.type, use.autocast, enabled=use.autocast is not None, cache_enabled=False)
        try:
            with _as_it_was(use), unchanged(device, use.random_state), torch.enable_grad(), precision:
                for m in sparse:
                    m.sparse = False  # type: ignore[assignment]
                with drawn or nullcontext():
                    output = tensors(functional_call(module, state, args, kwargs, tie_weights=False))
                return {p: output[p].movedim(use.axes[p] or 0, 0) for p in use.output_gradients}
        finally:
            _set_training(training)
            for m in sparse:
                m.sparse = True  # type: ignore[assignment]


def _cut(use: Use, samples: slice) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs of some samples."""

    def cut(tensor: Tensor) -> Tensor:
        axis = _batch_axis(use, tensor)
        return tensor if axis is None else tensor.movedim(axis, 0)[samples].movedim(0, axis)

    return map_tensors(cut, (use.args, use.kwargs))


def _size(use: Use) -> int:
    return len(next(iter(use.output_gradients.values())))


def _batch_axis(use: Use, tensor: Tensor) -> int | None:
    """Which axis of an input is as long as the batch: first that which is the batch in the output."""
    first = next((axis for axis in use.axes if axis is not None), 0)
    return next((k for k in (first, 0) if tensor.dim() > k and tensor.shape[k] == _size(use)), None)


@dataclass(frozen=True)
class _Cut:
    """Whether a module can be run on parts of the batch, and whether these must be given random numbers."""

    works: bool
    draws: bool = False


def _tried(use: Use, again: _Again) -> _Cut:
    """Whether the module, run on each few samples, gives what it gives for the whole batch."""
    drawn = _Drawn(_size(use))
    whole = again(use.args, use.kwargs, drawn)
    low = use.autocast is not None or any(z.dtype in (torch.float16, torch.bfloat16) for z in whole.values())

    def agrees(few: slice, draws: bool) -> bool:
        part = again.on(few, drawn if draws else None)
        return all(_is_close(part[p], z[few], 3e-2 if low else 1e-3) for p, z in whole.items())

    for draws in (False, True) if drawn.kept else (False,):  # attention counts as drawing even where nothing is dropped
        try:
            if all(agrees(few, draws) for few in _pieces(slice(0, _size(use)))):
                return _Cut(works=True, draws=draws)
        except Exception:  # it cannot be run on a part, whatever it says
            break
    return _Cut(works=False)


class _Drawn(TorchDispatchMode):
    """What a call draws for the whole batch; then each part of the batch is given its own.

    Args:
        size: Of the batch.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.kept: list[list[Tensor]] = []
        self._size, self._part, self._next = size, slice(0, size), -1

    def for_part(self, part: slice) -> Self:
        """From now on, hand out what was kept."""
        self._part, self._next = part, 0
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return result
        if self._next < 0:
            self.kept.append([tensor.clone() for tensor in tensors(result)])
            return result
        for tensor, whole in zip(tensors(result), self.kept[self._next], strict=True):
            tensor.copy_(self._of_part(whole, tensor.shape))
        self._next += 1
        return result

    def _of_part(self, whole: Tensor, shape: torch.Size) -> Tensor:
        """The samples of the part, which may have several rows each (heads of attention)."""
        if whole.shape == shape:
            return whole
        n = self._part.stop - self._part.start
        axis = next(k for k, length in enumerate(whole.shape) if length * n == shape[k] * self._size)
        each = shape[axis] // n
        return whole.narrow(axis, self._part.start * each, n * each)


def _pieces(samples: slice) -> list[slice]:
    return [slice(k, min(k + FEW, samples.stop)) for k in range(samples.start, samples.stop, FEW)]


def _is_close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    if found.shape != expected.shape:
        return False
    found, expected = found.detach().double(), expected.detach().double()
    size = float(expected.abs().nan_to_num(posinf=0.0).max()) if expected.numel() else 0.0
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance * size, equal_nan=True)


def _as_it_was(use: Use) -> AbstractContextManager[None]:
    """The attributes of the modules before the call; whatever is written to them inside is forgotten."""
    return nullcontext() if use.states is None else use.states.installed()


def slots(module: Module, kind: str) -> dict[str, Tensor]:
    """Where a module and those below it hold parameters or buffers: each place once, also if it has several names."""
    return {
        f"{path}.{name}" if path else name: tensor
        for path, owner in module.named_modules()
        for name, tensor in getattr(owner, kind).items()
        if tensor is not None
    }


def _set_training(modes: Mapping[Module, bool]) -> None:
    for module, training in modes.items():
        module.training = training


def _plain(tensor: Tensor) -> Tensor:
    """Detached, and not channels-last.

    torch 2.13 crashes in the backward of a group norm whose input is, and vectorises no backward of such.
    """
    tensor = tensor.detach()
    channels_last = tensor.dim() in (4, 5) and not tensor.is_contiguous()
    return tensor.contiguous() if channels_last else tensor


class _PullBack:
    """Vector-Jacobian products of many vectors, at once where every operation can, else one after the other."""

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self._leaves = leaves
        self._at_once = True

    def __call__(self, outputs: Sequence[Tensor], vectors: Sequence[Tensor]) -> Sequence[Tensor | None]:
        if self._at_once:
            try:
                return self._grad(outputs, vectors, is_grads_batched=True)
            except RuntimeError:  # a backward of the user's own, mostly
                self._at_once = False
        rows = [self._grad(outputs, [v[k] for v in vectors]) for k in range(len(vectors[0]))]
        return [
            None if row[0] is None else torch.stack([g for g in row if g is not None])
            for row in zip(*rows, strict=True)
        ]

    def _grad(
        self, outputs: Sequence[Tensor], vectors: Sequence[Tensor], is_grads_batched: bool = False
    ) -> Sequence[Tensor | None]:
        return torch.autograd.grad(
            outputs,
            self._leaves,
            vectors,
            is_grads_batched=is_grads_batched,
            retain_graph=True,
            allow_unused=True,
        )


def _one_sample_each(delta: Tensor, rows: Tensor) -> Tensor:
    """Shape ``[n, *delta.shape]``: copy k of ``delta`` with everything but sample ``rows[k]`` set to zero."""
    masked = delta.new_zeros(len(rows), *delta.shape)
    masked[torch.arange(len(rows), device=rows.device), rows] = delta[rows]
    return masked
