"""Run a captured pass again: same inputs, same random numbers, bare module, and nothing of it left behind."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from distcockpit.captured import Captured
from distcockpit.layers import training_batchnorms
from distcockpit.rng import unchanged


@contextmanager
def replayed(
    model: nn.Module,
    loss_fn: nn.Module,
    captured: Captured,
    batch_statistics: Mapping[str, tuple[Tensor, Tensor]] | None = None,
) -> Generator[Tensor, None, None]:
    """The unscaled loss of a micro-batch, in a fresh graph.

    Inside, buffers are copies, hooks on parameters and in-place activations are off, and batch norms named in
    ``batch_statistics`` hold these (mean, biased variance) as constants. The global random state stays as it was.

    Args:
        model: The bare module.
        loss_fn: The loss module.
        captured: A micro-batch with one forward pass and one call of the loss.
        batch_statistics: Mean and variance by name of the batch norm.

    Raises:
        RuntimeError: If the loss was not computed directly from the model's output.
    """
    if len(captured.passes) != 1 or len(captured.losses) != 1 or not captured.losses[0].args:
        raise RuntimeError(
            "Curvature and track_batchnorm=True run the step again and need one call of the model and one call of "
            f"the loss module per micro-batch, but found {len(captured.passes)} and {len(captured.losses)}. "
            "Give DistCockpit the loss module (loss_fn=...), and call it once as loss_fn(model(x), y)."
        )
    (forward,), (call,) = captured.passes, captured.losses
    frozen = dict(training_batchnorms(model)) if batch_statistics else {}
    training = {path: module.training for path, module in frozen.items()}
    inplace = [module for module in model.modules() if getattr(module, "inplace", False) is True]
    if any(tensor._version != version for tensor, version in forward.versions):
        raise RuntimeError(
            "The model's input was overwritten, by the model itself or before `track` ended, so the step cannot be run "
            "again, which curvature and track_batchnorm=True need. Work on a copy of it (x.clone())."
        )
    with (
        _private_buffers(model, forward.buffers or {}),
        _without_hooks(list(model.parameters())),
        unchanged(next(model.parameters()).device, forward.random_state),
    ):
        for path, module in frozen.items():
            module.running_mean, module.running_var = (batch_statistics or {})[path]
            module.training = False
        for module in inplace:
            module.inplace = False  # type: ignore[assignment]
        try:
            with torch.enable_grad():
                output = model(*forward.args, **forward.kwargs)
                args = _with_new_output(call.args, forward.output, output)
                yield loss_fn(*args, **call.kwargs)
        finally:
            for path, module in frozen.items():
                module.training = training[path]
            for module in inplace:
                module.inplace = True  # type: ignore[assignment]


@contextmanager
def _without_hooks(parameters: Sequence[nn.Parameter]) -> Generator[None, None, None]:
    """Take the user's hooks off the parameters: they would see, and change, gradients that are not the run's."""
    hooks = [(p, p._backward_hooks) for p in parameters if p._backward_hooks]
    try:
        for p, _ in hooks:
            p._backward_hooks = None
        yield
    finally:
        for p, before in hooks:
            p._backward_hooks = before


@contextmanager
def _private_buffers(model: nn.Module, values: Mapping[str, Tensor]) -> Generator[None, None, None]:
    """Let the modules work on copies of their buffers, with the values they had before the pass."""
    originals = [(path, module, dict(module._buffers)) for path, module in model.named_modules() if module._buffers]
    try:
        for path, module, buffers in originals:
            prefix = f"{path}." if path else ""
            module._buffers = {
                name: None if b is None else values.get(f"{prefix}{name}", b).clone() for name, b in buffers.items()
            }
        yield
    finally:
        for _, module, buffers in originals:
            module._buffers = buffers


def _with_new_output(args: tuple[Any, ...], old: Any, new: Any) -> tuple[Any, ...]:
    """The arguments of the loss with the model's output exchanged.

    The wrapper around the model may hand on an alias of its output, so it is recognised by memory and shape.

    Raises:
        RuntimeError: If the output is not among the arguments.
    """
    found = 0

    def exchange(leaf: Any) -> Any:
        nonlocal found
        if isinstance(leaf, Tensor) and isinstance(old, Tensor) and leaf.requires_grad:
            if leaf.data_ptr() == old.data_ptr() and leaf.shape == old.shape and leaf.stride() == old.stride():
                found += 1
                return new
        return leaf

    exchanged = tree_map(exchange, args)
    if found != 1:
        raise RuntimeError(
            "Curvature and track_batchnorm=True run the step again and need the loss to be computed directly from "
            "the model's output, loss_fn(model(x), y). Move what stands between them into the model as a module."
        )
    return exchanged
