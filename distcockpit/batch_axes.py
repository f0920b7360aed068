"""Which axis of each module's outputs is the batch, found by calling the model with one sample more.

Shapes alone do not tell: positions ``[T, C]`` look like samples where there are as many of both. An axis that grows
from B to B + 1 with the batch is the batch axis; an output that stays as it is has none.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from distcockpit.captured import ForwardPass
from distcockpit.gradients.functions import CALLS, Functions, Watch, watched
from distcockpit.gradients.uses import Axes, Shapes
from distcockpit.layers import training_batchnorms
from distcockpit.module_state import ModuleStates
from distcockpit.replay import replayed
from distcockpit.trees import map_tensors, tensors

logger = logging.getLogger(__name__)


class BatchAxes:
    """What is known of a model's batch axes. It is learned in the first step that has samples.

    Args:
        batch_dim: The batch axis of the model's inputs; that of outputs where the model cannot be called with one
            sample more.
    """

    def __init__(self, batch_dim: int = 0) -> None:
        self.batch_dim = batch_dim
        self.failed = False  # whether the model could not be called with one sample more
        self.is_settled = False  # whether another look would teach nothing
        self._known: dict[str, list[Axes]] = {}  # by module, one entry per call
        self._met_unknown = True

    def batch_size(self, tree: Any) -> int | None:
        """The length of the batch axis of the first tensor that has one."""
        return next((t.shape[self.batch_dim] for t in tensors(tree) if t.dim() > self.batch_dim), None)

    def settle(self, model: nn.Module, passes: Sequence[ForwardPass], functions: Functions | None = None) -> None:
        """A step has ended: if it met a module that was not known, look, and correct what was guessed of it.

        Args:
            model: The bare module.
            passes: The forward passes of the step.
            functions: Whose calls are uses beside those of modules.
        """
        first = next((forward for forward in passes if forward.batch_size), None)
        if self._met_unknown and first is not None and not self.failed and not self.is_settled:
            self._look(model, first, passes, functions)
        for forward in passes:
            known = next(iter(self._known.get("", [])), ())
            forward.is_prediction = 0 <= forward.loss_position < len(known) and known[forward.loss_position] is not None

    def _look(
        self, model: nn.Module, first: ForwardPass, passes: Sequence[ForwardPass], functions: Functions | None
    ) -> None:
        if first.writes_parameters:
            self._give_up("its forward writes to its parameters")
            return
        grown = self._call_with_one_more(model, first, functions)
        if grown is None:
            return
        self._met_unknown, before = False, sum(map(len, self._known.values()))
        for use in first.uses:
            self._learn(use.layer.path, use.call, use.shapes, grown, first.batch_size)
        self._learn("", 0, shapes_of(first.output), grown, first.batch_size)
        self.is_settled = sum(map(len, self._known.values())) == before  # what is still unknown cannot be learned so
        for forward in passes:
            for use in forward.uses:
                use.settle(self.of(use.layer.path, use.call, use.shapes, forward.batch_size))
            forward.axes = self.of("", 0, shapes_of(forward.output), forward.batch_size)

    def _call_with_one_more(
        self, model: nn.Module, forward: ForwardPass, functions: Functions | None
    ) -> dict[str, list[Shapes]] | None:
        """The shapes of all outputs when the last sample is there twice; ``None`` if that is not possible."""
        shapes: dict[str, list[Shapes]] = defaultdict(list)
        handles = [
            module.register_forward_hook(
                lambda _module, _args, output, path=path: shapes[path].append(shapes_of(output))
            )
            for path, module in model.named_modules()
        ]
        problem = ""
        device, called = next(model.parameters()).device, functions.called if functions is not None else {}
        watch = Watch(
            called,
            forward.batch_size + 1,
            device,
            lambda _recording, _given, output, _drawn: shapes[CALLS].append(shapes_of(output)),
        )
        try:
            statistics = {path: _any_statistics(module) for path, module in training_batchnorms(model)}
            best: dict[str, list[Shapes]] | None = None
            most = 0
            for only_first in (True, False):  # others may have the batch's length by chance
                shapes.clear()
                try:
                    more = self._with_one_more(forward, only_first)
                    see = watched(model, watch, self.batch_dim, forward.batch_size + 1) if called else nullcontext()
                    with torch.no_grad(), see, replayed(model, more, statistics, ModuleStates.take(model)):
                        grew, may_grow = _outputs_that_grew(forward, shapes)
                        if grew and grew >= may_grow:
                            return dict(shapes)
                    if grew > most or (best is None and _anything_grew(forward, shapes)):
                        best, most = dict(shapes), grew
                    problem = problem or "nothing that it computes grew"
                except Exception as error:  # the user's model: anything
                    text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no text'}"
                    problem = problem or text
        finally:
            for handle in handles:
                handle.remove()
        if best is None:
            self._give_up(problem)
        return best

    def _give_up(self, why: str) -> None:
        self.failed = True
        logger.warning(
            "distcockpit: the model could not be called with one sample more (%s). Which axes are the batch is taken "
            "from their lengths.",
            why,
        )

    def _with_one_more(self, forward: ForwardPass, only_first: bool) -> ForwardPass:
        """The pass with its last sample repeated.

        Args:
            forward: The pass.
            only_first: Whether only the first tensor grows, and not all of the batch's length.

        Raises:
            ValueError: If nothing has the batch's length.
        """
        axis, n, count = self.batch_dim, forward.batch_size, 0

        def grow(tensor: Tensor) -> Tensor:
            nonlocal count
            if tensor.dim() > axis and tensor.shape[axis] == n and not (only_first and count):
                count += 1
                return torch.cat([tensor.detach(), tensor.detach().narrow(axis, n - 1, 1)], axis)
            return tensor.detach().clone()

        args, kwargs = map_tensors(grow, (forward.args, forward.kwargs))
        if not count:
            raise ValueError(f"no tensor argument has {n} samples on axis {axis}")
        return replace(forward, args=args, kwargs=kwargs, uses=[], calls=Counter())

    def of(self, path: str, call: int, shapes: Shapes, batch_size: int) -> Axes:
        """The batch axes of an output, known or guessed.

        Args:
            path: Name of the module.
            call: How often it was called before in this pass.
            shapes: Of the tensors that it returned.
            batch_size: Number of samples of the pass.
        """
        known = self._known.get(path, [])
        if call < len(known) and len(known[call]) == len(shapes):
            return tuple(
                axis if axis is not None and len(s) > axis and s[axis] == batch_size else None
                for axis, s in zip(known[call], shapes, strict=True)
            )
        self._met_unknown = True
        return tuple(self._guess(shape, batch_size) for shape in shapes)

    def _learn(self, path: str, call: int, shapes: Shapes, grown: Mapping[str, list[Shapes]], batch_size: int) -> None:
        """Remember the batch axes of an output that was seen growing."""
        more, calls = grown.get(path, []), self._known.get(path, [])
        if call < len(more) and len(more[call]) == len(shapes) and len(calls) == call:
            axes = tuple(_grown_axis(s, g, batch_size) for s, g in zip(shapes, more[call], strict=True))
            self._known[path] = [*calls, axes]

    def is_known(self, path: str, call: int) -> bool:
        """Whether the axes of this output are known, or the best that can be had."""
        return self.failed or self.is_settled or call < len(self._known.get(path, []))

    def _guess(self, shape: torch.Size, batch_size: int) -> int | None:
        return next((k for k in (self.batch_dim, 0) if len(shape) > k and shape[k] == batch_size), None)


def _any_statistics(norm: Any) -> tuple[Tensor, Tensor]:
    """Shapes do not depend on them."""
    like = next((t for t in (norm.running_mean, norm.weight) if t is not None), torch.zeros(()))
    return like.new_zeros(norm.num_features), like.new_ones(norm.num_features)


def _outputs_that_grew(forward: ForwardPass, more: Mapping[str, list[Shapes]]) -> tuple[int, int]:
    """How many tensors that the model returns have other shapes than in the pass, and how many have the batch's length.

    Packed sequences may lose a sample. Where one of two inputs grew, one of two outputs may: that of an encoder.
    """
    before = shapes_of(forward.output)
    counts = [sum(a != b for a, b in zip(before, after, strict=False)) for after in more.get("", ())]
    return max(counts, default=0), sum(forward.batch_size in shape for shape in before)


def _anything_grew(forward: ForwardPass, more: Mapping[str, list[Shapes]]) -> bool:
    """Whether any output of the model, or of a module in it, has other shapes than in the pass."""
    seen = [("", 0, shapes_of(forward.output)), *((use.layer.path, use.call, use.shapes) for use in forward.uses)]
    return any(call < len(more.get(path, ())) and more[path][call] != shapes for path, call, shapes in seen)


def shapes_of(output: Any) -> Shapes:
    """The shapes of the tensors of an output."""
    return [torch.Size() if tensor.is_nested else tensor.shape for tensor in tensors(output)]


def _grown_axis(shape: torch.Size, grown: torch.Size, batch_size: int) -> int | None:
    """The one axis that grew from B to B + 1; that of a single sample may have been squeezed away."""
    if len(shape) != len(grown):
        return 0 if batch_size == 1 and not shape and tuple(grown) == (2,) else None
    changed = [k for k, (before, after) in enumerate(zip(shape, grown, strict=True)) if before != after]
    if len(changed) != 1 or (shape[changed[0]], grown[changed[0]]) != (batch_size, batch_size + 1):
        return None
    return changed[0]
