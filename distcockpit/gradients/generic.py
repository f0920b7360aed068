"""Any other module: run it again, batched, and pull back output gradients masked to single samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import Module

from distcockpit.gradients.factors import Factors
from distcockpit.gradients.uses import Blocks, Use
from distcockpit.rng import unchanged
from distcockpit.trees import map_tensors, tensors


class GenericRule:
    """Exact for every module that treats the samples of a batch independently of each other."""

    description = "generic blocks"

    def factors(self, use: Use) -> dict[str, Factors]:
        """None."""
        return {}

    def along(self, use: Use, direction: Mapping[str, Tensor]) -> None:
        """By way of blocks."""
        return None

    def blocks(self, use: Use, names: Sequence[str], values: Mapping[str, Tensor]) -> Blocks:
        """One batched backward per block; the forward runs once, with the random state of the original call."""
        layer, module = use.layer, use.layer.module
        fulls = [layer.parameters[name] for name in names]
        leaves = {full: _plain(values[full]).clone().requires_grad_() for full in fulls}
        tensor_of = {full: leaves[full] if full in leaves else _plain(values[full]) for full in layer.names.values()}
        state = {slot: tensor_of[layer.names[slot]] for slot in slots(module, "_parameters") if slot in layer.names}
        copies = {name: buffer.clone() for name, buffer in use.buffers.items()}
        same = {id(buffer): copies[name] for name, buffer in module.named_buffers() if name in copies}
        state |= {slot: same[id(b)] for slot, b in slots(module, "_buffers").items() if id(b) in same}
        args, kwargs = map_tensors(_plain, (use.args, use.kwargs))
        training = {m: m.training for m in module.modules()}
        sparse = [m for m in module.modules() if getattr(m, "sparse", False) is True]
        device = next(iter(leaves.values())).device
        _set_training(use.training)
        precision = torch.autocast(device.type, use.autocast, enabled=use.autocast is not None, cache_enabled=False)
        try:
            with _as_it_was(use), unchanged(device, use.random_state), torch.enable_grad(), precision:
                for m in sparse:
                    m.sparse = False  # type: ignore[assignment]
                output = tensors(functional_call(module, state, args, kwargs, tie_weights=False))
                reached = [p for p in use.output_gradients if output[p].requires_grad]
                outputs = {p: output[p].movedim(use.axes[p] or 0, 0) for p in reached}
        finally:
            _set_training(training)
            for m in sparse:
                m.sparse = True  # type: ignore[assignment]
        pull_back = _PullBack(list(outputs.values()), list(leaves.values()))

        def block(samples: slice) -> dict[str, Tensor]:
            rows = torch.arange(samples.start, samples.stop, device=device)
            if not outputs:  # the parameters take no part in the output
                return {
                    name: leaf.new_zeros(len(rows), *leaf.shape)
                    for name, leaf in zip(names, leaves.values(), strict=True)
                }
            masked = [_one_sample_each(use.output_gradients[p].to(z.dtype), rows) for p, z in outputs.items()]
            with _as_it_was(use):  # hooks of the user's on tensors write to modules
                gradients = pull_back(masked)
            return {
                name: leaf.new_zeros(len(rows), *leaf.shape) if gradient is None else gradient
                for name, leaf, gradient in zip(names, leaves.values(), gradients, strict=True)
            }

        return block

    def rows(self, use: Use, samples: slice) -> None:
        """Not of few rows."""
        return None

    def elements_per_sample(self, use: Use) -> int:
        """The masked output gradients: as large as the whole output, for each sample."""
        return sum(delta.numel() for delta in use.output_gradients.values())


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

    def __init__(self, outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
        self._outputs, self._leaves = outputs, leaves
        self._at_once = True

    def __call__(self, vectors: Sequence[Tensor]) -> Sequence[Tensor | None]:
        if self._at_once:
            try:
                return self._grad(vectors, is_grads_batched=True)
            except RuntimeError:  # a backward of the user's own, mostly
                self._at_once = False
        rows = [self._grad([v[k] for v in vectors]) for k in range(len(vectors[0]))]
        return [
            None if row[0] is None else torch.stack([g for g in row if g is not None])
            for row in zip(*rows, strict=True)
        ]

    def _grad(self, vectors: Sequence[Tensor], is_grads_batched: bool = False) -> Sequence[Tensor | None]:
        return torch.autograd.grad(
            self._outputs,
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
