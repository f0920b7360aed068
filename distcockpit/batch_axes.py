"""Which axis of each module's outputs is the batch, found by calling the model with one sample more.

Shapes alone do not tell: positions ``[T, C]`` look like samples where there are as many of both. An axis that grows
from B to B + 1 with the batch is the batch axis; an output that stays as it is has none.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from distcockpit.captured import ForwardPass
from distcockpit.gradients.uses import Axes
from distcockpit.layers import training_batchnorms
from distcockpit.replay import replayed
from distcockpit.trees import map_tensors, tensors

logger = logging.getLogger(__name__)

Shapes = Sequence[torch.Size]


class BatchAxes:
    """What is known of a model's batch axes. It is learned in the first pass that has samples.

    Args:
        batch_dim: The batch axis of the model's inputs; that of outputs where the model cannot be called with one
            sample more.
    """

    def __init__(self, batch_dim: int = 0) -> None:
        self.batch_dim = batch_dim
        self.failed = False  # whether the model could not be called with one sample more
        self._known: dict[str, list[Axes]] = {}  # by module, one entry per call
        self._grown: dict[str, list[Shapes]] = {}  # in the pass with one sample more
        self._met_unknown = True

    def batch_size(self, tree: Any) -> int | None:
        """The length of the batch axis of the first tensor that has one."""
        return next((t.shape[self.batch_dim] for t in tensors(tree) if t.dim() > self.batch_dim), None)

    def begin(self, model: nn.Module, forward: ForwardPass, batch_size: int) -> None:
        """A forward pass begins: call the model with one sample more, if the last pass met an unknown module.

        Args:
            model: The bare module.
            forward: The pass.
            batch_size: Its number of samples.
        """
        self._grown = {}
        if not self._met_unknown or not batch_size or self.failed:
            return
        self._met_unknown = False
        shapes: dict[str, list[Shapes]] = defaultdict(list)
        handles = [
            module.register_forward_hook(lambda _module, _args, output, path=path: shapes[path].append(_shapes(output)))
            for path, module in model.named_modules()
        ]
        try:
            statistics = {path: _any_statistics(module) for path, module in training_batchnorms(model)}
            with torch.no_grad(), replayed(model, self._with_one_more(forward, batch_size), statistics):
                self._grown = dict(shapes)
        except Exception as error:  # the user's model: anything
            self.failed = True
            logger.warning(
                "distcockpit: the model could not be called with one sample more (%s: %s). Which axes are the batch is "
                "taken from their lengths.",
                type(error).__name__,
                str(error).splitlines()[0] if str(error) else "no text",
            )
        finally:
            for handle in handles:
                handle.remove()

    def _with_one_more(self, forward: ForwardPass, batch_size: int) -> ForwardPass:
        """The pass with its last sample repeated."""
        axis = self.batch_dim

        def grow(tensor: Tensor) -> Tensor:
            if tensor.dim() > axis and tensor.shape[axis] == batch_size:
                return torch.cat([tensor.detach(), tensor.detach().narrow(axis, batch_size - 1, 1)], axis)
            return tensor.detach().clone()

        args, kwargs = map_tensors(grow, (forward.args, forward.kwargs))
        return replace(forward, args=args, kwargs=kwargs, versions=[], uses=[], calls=Counter())

    def of(self, path: str, call: int, output: Any, batch_size: int) -> Axes:
        """The batch axes of an output.

        Args:
            path: Name of the module.
            call: How often it was called before in this pass.
            output: What it returned.
            batch_size: Number of samples of the pass.
        """
        shapes = _shapes(output)
        grown = self._grown.get(path, [])
        if call < len(grown) and len(grown[call]) == len(shapes):
            axes = tuple(_grown_axis(s, g, batch_size) for s, g in zip(shapes, grown[call], strict=True))
            calls = self._known.setdefault(path, [])
            if len(calls) <= call:
                calls.append(axes)
            return axes
        known = self._known.get(path, [])
        if call >= len(known) and len(set(known)) == 1:  # unrolled over time, further than before
            known, call = known[:1], 0
        if call < len(known) and len(known[call]) == len(shapes):
            return tuple(
                axis if axis is not None and len(s) > axis and s[axis] == batch_size else None
                for axis, s in zip(known[call], shapes, strict=True)
            )
        self._met_unknown = True
        return tuple(self._guess(shape, batch_size) for shape in shapes)

    def _guess(self, shape: torch.Size, batch_size: int) -> int | None:
        return next((k for k in (self.batch_dim, 0) if len(shape) > k and shape[k] == batch_size), None)


def _any_statistics(norm: Any) -> tuple[Tensor, Tensor]:
    """Shapes do not depend on them."""
    device = next((t.device for t in (norm.weight, norm.running_mean) if t is not None), None)
    return torch.zeros(norm.num_features, device=device), torch.ones(norm.num_features, device=device)


def _shapes(output: Any) -> Shapes:
    return [tensor.shape for tensor in tensors(output)]


def _grown_axis(shape: torch.Size, grown: torch.Size, batch_size: int) -> int | None:
    """The one axis that grew from B to B + 1."""
    if len(shape) != len(grown):
        return None
    changed = [k for k, (before, after) in enumerate(zip(shape, grown, strict=True)) if before != after]
    if len(changed) != 1 or (shape[changed[0]], grown[changed[0]]) != (batch_size, batch_size + 1):
        return None
    return changed[0]
