"""Any other module: run it again, batched, and pull back output gradients masked to single samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import Module
from torch.utils._pytree import tree_leaves, tree_map

from distcockpit.gradients.uses import Blocks, Use
from distcockpit.rng import unchanged


class GenericRule:
    """Exact for every module that treats the samples of a batch independently of each other."""

    description = "generic blocks"

    def outer(self, use: Use) -> None:
        """No outer products."""
        return None

    def blocks(self, use: Use, names: Sequence[str], values: Mapping[str, Tensor]) -> Blocks:
        """One batched backward per block; the forward runs once, with the random state of the original call."""
        layer, module = use.layer, use.layer.module
        leaves = {name: values[layer.parameters[name]].detach().clone().requires_grad_() for name in names}
        state = {name: values[full].detach() for name, full in layer.names.items()}
        buffers = {name: buffer.clone() for name, buffer in use.buffers.items()}
        args, kwargs = tree_map(_detached, (use.args, use.kwargs))
        training = {m: m.training for m in module.modules()}
        device = next(iter(leaves.values())).device
        _set_training(use.training)
        precision = torch.autocast(device.type, use.autocast, enabled=use.autocast is not None, cache_enabled=False)
        try:
            with unchanged(device, use.random_state), torch.enable_grad(), precision:
                output = functional_call(module, {**state, **buffers, **leaves}, args, kwargs)
        finally:
            _set_training(training)
        outputs = tree_leaves(output)
        positions = [p for p in use.output_gradients if outputs[p].requires_grad]

        def block(samples: slice) -> dict[str, Tensor]:
            rows = torch.arange(samples.start, samples.stop, device=device)
            if not positions:  # the parameters take no part in the output
                return {name: leaf.new_zeros(len(rows), *leaf.shape) for name, leaf in leaves.items()}
            masked = [_one_sample_each(use.output_gradients[p].to(outputs[p].dtype), rows) for p in positions]
            gradients = torch.autograd.grad(
                [outputs[p] for p in positions],
                list(leaves.values()),
                masked,
                is_grads_batched=True,
                retain_graph=True,
                allow_unused=True,
            )
            return {
                name: leaf.new_zeros(len(rows), *leaf.shape) if gradient is None else gradient
                for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True)
            }

        return block

    def elements_per_sample(self, use: Use) -> int:
        """The masked output gradients: as large as the whole output, for each sample."""
        return sum(delta.numel() for delta in use.output_gradients.values())


def _set_training(modes: Mapping[Module, bool]) -> None:
    for module, training in modes.items():
        module.training = training


def _detached(leaf: object) -> object:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _one_sample_each(delta: Tensor, rows: Tensor) -> Tensor:
    """Shape ``[n, *delta.shape]``: copy k of ``delta`` with everything but sample ``rows[k]`` set to zero."""
    masked = delta.new_zeros(len(rows), *delta.shape)
    masked[torch.arange(len(rows), device=rows.device), rows] = delta[rows]
    return masked
