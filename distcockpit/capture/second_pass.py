"""Run the step once more: with other layers hooked, or with batch statistics as constants."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from distcockpit.capture.batch_axes import BatchAxes
from distcockpit.capture.batch_norm import batch_statistics
from distcockpit.capture.capture import Capture
from distcockpit.capture.signature import signature
from distcockpit.gradients.embedding import EmbeddingRule
from distcockpit.gradients.uses import Axis, Layer, Use, from_front, to_front
from distcockpit.losses.captured import CapturedMicroBatch, ForwardPass, KnownLoss
from distcockpit.losses.rerun import replayed
from distcockpit.replay.silence import on_host, parts_of, reaches
from distcockpit.replay.trees import map_tensors, tensors


def mixed_up_rows(
    captured: Sequence[CapturedMicroBatch],
    model: nn.Module,
    layers: Sequence[Layer],
    axes: BatchAxes,
    say: Callable[[str, str], None],
    *,
    constant_statistics: bool,
) -> set[tuple[str, str]]:
    """Return the modules or function calls whose output rows are not samples, with the parameters they serve.

    A gradient that is zero for some samples at the outputs of the model must be zero for the same rows everywhere.
    Nothing is found if the model returns only its loss, or cannot be run again.

    Args:
        captured: The micro-batches.
        model: The bare module.
        layers: The layers to look at.
        axes: Where the batch is.
        say: Reports something once per topic.
        constant_statistics: Whether batch norms in training mode hold the statistics of the batch as constants.

    Raises:
        ValueError: If the model mixes the samples of a batch.
    """
    found: set[tuple[str, str]] = set()
    for micro in captured:
        for forward in micro.passes:
            if micro.batch_size < 2 or not forward.output_gradients or forward.writes_parameters:
                continue
            problem = ""
            for inputs_ask in (True, False):  # inputs require gradients, which some models do not support
                try:
                    served, mixed = _mixed_up(forward, model, layers, axes, constant_statistics, inputs_ask)
                    break
                except Exception as error:  # raised by the user's model, so it can be anything
                    problem = f"{type(error).__name__}: {error}"
            else:
                say("rows", f"could not check that rows of outputs are samples: {problem}")
                continue
            if mixed:
                raise ValueError(
                    f"The model ({type(model).__name__}) mixes the samples of a batch: outputs of some samples depend "
                    "on the inputs of others, so per-sample gradients are not defined. Remove what mixes them "
                    "(statistics, sorting or capacities over the batch). If the batch is not the first axis of the "
                    "model's first tensor argument, pass batch_dim=... or track(step, batch_size=...)."
                )
            found |= served
    return found


def _mixed_up(
    forward: ForwardPass,
    model: nn.Module,
    layers: Sequence[Layer],
    axes: BatchAxes,
    constant_statistics: bool,
    inputs_ask: bool,
) -> tuple[set[tuple[str, str]], bool]:
    """Return the layers with mixed-up rows in one pass, their parameters, and whether the model's input has any."""
    n = forward.batch_size
    made: list[Tensor] = []
    given = tensors((forward.args, forward.kwargs))
    if inputs_ask:
        args, kwargs = map_tensors(partial(_with_gradient, made), (forward.args, forward.kwargs))
        forward = replace(forward, args=args, kwargs=kwargs)
    inputs = [t for t in made if t.dim() > axes.batch_dim and t.shape[axes.batch_dim] == n][:1]
    found: set[tuple[str, str]] = set()
    silent = torch.zeros(0)
    looked: list[Use | None] = []  # calls, or None for the inputs
    flags: list[Tensor] = []  # whether the gradient reached rows that should be zero

    def look(use: Use, position: int, gradient: Tensor) -> None:
        axis = use.axes[position]
        if axis is not None and silent.numel():
            looked.append(use)
            flags.append(reaches(silent.to(gradient.device), to_front(gradient, axis)))

    with _recaptured(model, forward, layers, axes, constant_statistics, look) as (again, outputs):
        arrived = {k: g.to(outputs[k].dtype) for k, g in forward.output_gradients.items()}
        rows = [k for k, z in enumerate(outputs) if forward.axes[k] is not None and z.requires_grad]
        starts = [outputs[k] for k in rows]
        if not starts:
            return found, False
        total = torch.autograd.grad(
            [outputs[k] for k in arrived], starts, list(arrived.values()), retain_graph=True, materialize_grads=True
        )
        ends: Any = [*inputs, *_last(again.edges, inputs)]  # few, as autograd holds the gradients of all at once
        for loud in parts_of(n, starts[0].device):
            silent = ~loud
            masked = [_without(silent, g, forward.axes[k]) for k, g in zip(rows, total, strict=True)]
            arrived_at = torch.autograd.grad(starts, ends, masked, allow_unused=True, retain_graph=True)
            for gradient in arrived_at[: len(inputs)]:
                if gradient is not None:
                    looked.append(None)
                    flags.append(reaches(silent.to(gradient.device), gradient.movedim(axes.batch_dim, 0)))
        astray = [use for use, is_reached in zip(looked, on_host(flags), strict=True) if is_reached]
        mixed = None in astray
        for use in dict.fromkeys(use for use in astray if use is not None):
            found |= {(use.layer.scope, name) for name in use.layer.parameters.values()}
            index = tensors((use.args, use.kwargs)) if isinstance(use.form, EmbeddingRule) else []
            mixed |= any(i.data_ptr() == t.data_ptr() for i in index for t in given)
    return found, mixed


def _last(edges: Sequence[GradientEdge], leaves: Sequence[Tensor]) -> list[GradientEdge]:
    """Return the edges that a backward pass must be asked for to pass through all of them and reach the leaves."""
    ends = {edge.node for edge in edges} | {get_gradient_edge(leaf).node for leaf in leaves}
    passes: dict[Any, bool] = {}  # whether there is an end below a node
    for edge in edges:
        path = [edge.node]
        while path:
            below = [node for node, _ in path[-1].next_functions if node is not None]
            unknown = [node for node in below if node not in passes]
            if not unknown:
                passes[path.pop()] = any(node in ends or passes[node] for node in below)
            path += unknown
    return [edge for edge in edges if not passes[edge.node]]


def _with_gradient(made: list[Tensor], tensor: Tensor) -> Tensor:
    """Return a detached copy that requires a gradient if it can, and add it to ``made``."""
    if not tensor.is_floating_point():
        return tensor
    made.append(tensor.detach().requires_grad_())
    return made[-1]


@contextmanager
def _recaptured(
    model: nn.Module,
    forward: ForwardPass,
    layers: Sequence[Layer],
    axes: BatchAxes,
    constant_statistics: bool,
    look: Callable[[Use, int, Tensor], None] | None = None,
) -> Generator[tuple[Capture, list[Tensor]], None, None]:
    """Call the model again with other layers hooked, and yield the tensors it returns."""
    again = Capture(model, layers, KnownLoss(None), axes, batch_size=forward.batch_size, copies=False, look=look)
    statistics = batch_statistics(forward, model) if constant_statistics else None
    try:
        again.start()
        with torch.enable_grad(), replayed(model, forward, statistics) as output:
            yield again, tensors(output)
    finally:
        again.stop()
        again.let_go()


def _without(silent: Tensor, gradient: Tensor, axis: Axis) -> Tensor:
    rows = to_front(gradient.clone(), axis)
    rows[silent.to(gradient.device)] = 0  # where it is already, but for models on several devices
    return from_front(rows, axis)


def second_pass(
    captured: CapturedMicroBatch,
    model: nn.Module,
    layers: Sequence[Layer],
    axes: BatchAxes,
    parameters: Mapping[str, nn.Parameter],
    *,
    constant_statistics: bool,
) -> tuple[CapturedMicroBatch, dict[str, Tensor]]:
    """Return a micro-batch with the uses of a second pass.

    The model is run again, and its outputs are given the gradients they received from the loss, whatever that was.

    Args:
        captured: The micro-batch as it was trained on.
        model: The bare module.
        layers: The layers whose calls are kept.
        axes: The batch axes.
        parameters: The tracked parameters.
        constant_statistics: Whether batch norms in training mode treat batch statistics as constants.

    Returns:
        The micro-batch with the uses of the second pass, and the signatures of what the pass gave the parameters.
    """
    uses: list[Use] = []
    seen: dict[str, Tensor] = {}
    for forward in captured.passes:
        if not forward.output_gradients or not captured.batch_size:
            continue
        with _recaptured(model, forward, layers, axes, constant_statistics) as (again, outputs):
            gradients = torch.autograd.grad(
                [outputs[position] for position in forward.output_gradients],
                list(parameters.values()),
                [g.to(outputs[position].dtype) for position, g in forward.output_gradients.items()],
                allow_unused=True,
            )
            uses += again.uses()
        for name, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                sums = signature(gradient.to_dense())
                seen[name] = seen[name] + sums if name in seen else sums
    return replace(captured, uses=uses), seen
