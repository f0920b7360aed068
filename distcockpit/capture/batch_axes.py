"""Which axis of each module's outputs is the batch, found by calling the model with one more sample.

Shapes alone are ambiguous: positions ``[T, C]`` look like samples if there are as many of them. An axis that grows from
B to B + 1 with the batch is the batch axis; an output that does not grow has none. An axis that grows from B T to
(B + 1) T merges the batch with another axis; what the input is a view of tells which one is inside the other.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from distcockpit.gradients.functions import Functions, Watch, called_with, watched
from distcockpit.gradients.uses import Axes, Axis, Folded, Shapes
from distcockpit.losses.captured import ForwardPass
from distcockpit.losses.reductions import terms_inside
from distcockpit.losses.rerun import replayed
from distcockpit.replay.batch_norms import training_batchnorms
from distcockpit.replay.memory import is_out_of_memory
from distcockpit.replay.snapshot import Attributes
from distcockpit.replay.trees import map_tensors, tensors
from distcockpit.shards import stood_in


@dataclass(frozen=True)
class Merged:
    """An axis that merges the batch with other axes.

    Args:
        axis: The axis of the output.
        source: Index of the input tensor that has this axis too, and is a view of one with a batch axis; ``None``: the
            axis is as long as that of another call, which tells how it was merged.
        whole: The batch axis of what that input is a view of.
    """

    axis: int
    source: int | None = None
    whole: int = 0


@dataclass(frozen=True)
class Seen:
    """The shapes of a call's output tensors, and of its input tensors with what they are views of."""

    outputs: Shapes
    inputs: Sequence[tuple[torch.Size, torch.Size]]


class BatchAxes:
    """What is known about a model's batch axes, learned in the first step that has samples.

    Args:
        batch_dim: The batch axis of the model's inputs; also that of outputs if the model cannot be called with one
            more sample.
        say: Reports something once per topic.
    """

    def __init__(self, batch_dim: int, say: Callable[[str, str], None]) -> None:
        self.batch_dim, self._say = batch_dim, say
        self.failed = False  # whether the model could not be called with one more sample
        self.is_settled = False  # whether looking again would teach nothing
        self._known: dict[str, list[tuple[int | Merged | None, ...]]] = {}  # by module, one entry per call
        self.of_terms: dict[tuple[Any, ...], Axis] = {}  # the batch axis of the terms of losses in the loop
        self._met_unknown = True

    def batch_size(self, tree: Any) -> int | None:
        """Return the length of the batch axis of the first tensor that has one."""
        return next((t.shape[self.batch_dim] for t in tensors(tree) if t.dim() > self.batch_dim), None)

    def settle(self, model: nn.Module, passes: Sequence[ForwardPass], functions: Functions | None = None) -> None:
        """End a step: if it involved an unknown module, look at the model, and correct what was guessed.

        Args:
            model: The bare module.
            passes: The forward passes of the step.
            functions: The functions whose calls are uses, in addition to those of modules.
        """
        first = next((forward for forward in passes if forward.batch_size), None)
        if self._met_unknown and first is not None and not self.failed and not self.is_settled:
            self._look(model, first, passes, functions)

    def _look(
        self, model: nn.Module, first: ForwardPass, passes: Sequence[ForwardPass], functions: Functions | None
    ) -> None:
        if first.writes_parameters:
            self._give_up("its forward writes to its parameters")
            return
        with stood_in(model):
            seen = self._call_with_one_more(model, first, functions)
        if seen is None:
            return
        self._met_unknown, before = False, sum(map(len, self._known.values()))
        for key, calls in seen.items():
            self._learn(key, calls, first.batch_size)
        self.is_settled = (
            sum(map(len, self._known.values())) == before
        )  # what is still unknown cannot be learned this way
        for forward in passes:
            self._settle_uses(forward)
            self.resolve(forward)
            forward.axes = self.of("", 0, shapes_of(forward.output), forward.batch_size)

    def resolve(self, forward: ForwardPass) -> None:
        """Resolve merged axes once all calls of a pass are known; later calls may determine or contradict them."""
        if forward.folds:
            self._settle_uses(forward)

    def _settle_uses(self, forward: ForwardPass) -> None:
        for use in forward.uses:
            use.settle(self.of(use.key, use.call, use.shapes, forward.batch_size, use.given, forward.folds))
        for each in forward.reductions:
            shapes = [each.terms.shape]
            (each.axis,) = self.of(each.key, each.call, shapes, forward.batch_size, each.given, forward.folds)

    def _call_with_one_more(
        self, model: nn.Module, forward: ForwardPass, functions: Functions | None
    ) -> dict[str, list[tuple[Seen, Seen]]] | None:
        """Return all calls as they are and with the last sample duplicated; ``None`` if that is not possible."""
        best: dict[str, list[Seen]] | None = None
        most, problem = 0, ""
        try:
            # In new containers: a forward pass may empty the ones it is given.
            args, kwargs = map_tensors(lambda t: t.detach().clone(), (forward.args, forward.kwargs))
            as_it_was = replace(forward, args=args, kwargs=kwargs, uses=[], calls=Counter())
            usual = self._calls(model, as_it_was, functions, forward.batch_size)
        except Exception as error:  # raised by the user's model, so it can be anything
            if is_out_of_memory(error):
                raise
            self._give_up(_in_short(error))
            return None
        for only_first in (True, False):  # other tensors may have the batch's length by chance
            try:
                more = self._with_one_more(forward, only_first)
                calls = self._calls(model, more, functions, forward.batch_size + 1)
            except Exception as error:  # also if there is memory for the batch, but not for one sample more
                problem = problem or _in_short(error)
                continue
            grew, may_grow = _outputs_that_grew(forward, calls.get("", ()))
            if grew and grew >= may_grow:
                best = calls
                break
            if grew > most or (best is None and _anything_grew(usual, calls)):
                best, most = calls, grew
            problem = problem or "none of its outputs grew"
        if best is None:
            self._give_up(problem)
            return None
        return {key: list(zip(usual[key], best[key], strict=False)) for key in usual.keys() & best.keys()}

    def _calls(
        self, model: nn.Module, forward: ForwardPass, functions: Functions | None, batch_size: int
    ) -> dict[str, list[Seen]]:
        """Return what is seen when the model is called, by module and by the parameters of functions."""
        seen: dict[str, list[Seen]] = defaultdict(list)
        batch = tensors((forward.args, forward.kwargs))

        def note(key: str, output: Any, inputs: Any) -> None:
            seen[key].append(Seen(shapes_of(output), given_shapes(inputs, batch, watch)))

        def hook(path: str) -> Any:
            return lambda _module, args, kwargs, output: note(path, output, (args, kwargs))

        def sums(function: Any, args: Any, kwargs: Any, result: Any) -> None:
            found = terms_inside(function, args, kwargs, result, batch_size)
            if found is not None:
                note(*found[:3])

        handles = [m.register_forward_hook(hook(path), with_kwargs=True) for path, m in model.named_modules()]
        called = functions.called if functions is not None else {}
        watch = Watch(
            called,
            batch_size,
            next(model.parameters()).device,
            lambda call, given, output, _: note(called_with(call.parameters), output, given),
            sums,
            with_gradients=False,
        )
        see = watched(model, watch, self.batch_dim, batch_size) if called else nullcontext()
        try:
            statistics = {path: _any_statistics(module) for path, module in training_batchnorms(model)}
            now = replace(forward.before, attributes=Attributes.take(model.modules()))
            forward = replace(forward, before=now)
            with torch.no_grad(), see, replayed(model, forward, statistics):
                return dict(seen)
        finally:
            for handle in handles:
                handle.remove()
            batch.clear()  # which the reference cycle of `note` and the watch would keep alive

    def _give_up(self, why: str) -> None:
        self.failed = True
        self._say(
            "axes",
            f"the model could not be called with one more sample ({why}). Batch axes are inferred from axis lengths "
            "instead.",
        )

    def _with_one_more(self, forward: ForwardPass, only_first: bool) -> ForwardPass:
        """Return the pass with its last sample repeated.

        Args:
            forward: The pass.
            only_first: Whether only the first tensor grows, rather than all that have the batch's length.

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
            raise ValueError(f"no tensor argument has {n} samples along axis {axis}")
        return replace(forward, args=args, kwargs=kwargs, uses=[], calls=Counter())

    def of(
        self,
        key: str,
        call: int,
        shapes: Shapes,
        batch_size: int,
        given: Sequence[tuple[torch.Size, torch.Size]] = (),
        folds: dict[int, set[tuple[int, int]]] | None = None,
    ) -> Axes:
        """Return the batch axes of an output, known or guessed.

        Args:
            key: Name of the module, or the key that stands for functions.
            call: How often it was called before in this pass.
            shapes: The shapes of the tensors that it returned.
            batch_size: Number of samples of the pass.
            given: See `given_shapes`.
            folds: How axes were merged in the pass, by length; updated.
        """
        known = self._known.get(key, [])
        if call < len(known) and len(known[call]) == len(shapes):
            pairs = zip(known[call], shapes, strict=True)
            return tuple(_present(axis, s, batch_size, given, {} if folds is None else folds) for axis, s in pairs)
        self._met_unknown = True
        return tuple(self._guess(shape, batch_size) for shape in shapes)

    def _learn(self, key: str, calls: Sequence[tuple[Seen, Seen]], batch_size: int) -> None:
        """Remember the batch axes of outputs that were seen to grow."""
        known = self._known.get(key, [])
        for before, after in calls[len(known) :]:
            if len(before.outputs) != len(after.outputs):
                break
            pairs = zip(before.outputs, after.outputs, strict=True)
            axes = tuple(
                _grown_axis(s, g, batch_size) if len(s) != len(g) else _grown(s, g, before, after, batch_size)
                for s, g in pairs
            )
            known = [*known, axes]
        self._known[key] = known

    def is_known(self, path: str, call: int) -> bool:
        """True if the axes of this output are known, or cannot become better known."""
        return self.failed or self.is_settled or call < len(self._known.get(path, []))

    def _guess(self, shape: torch.Size, batch_size: int) -> int | None:
        return next((k for k in (self.batch_dim, 0) if len(shape) > k and shape[k] == batch_size), None)


def _any_statistics(norm: Any) -> tuple[Tensor, Tensor]:
    """Return arbitrary statistics, since shapes do not depend on them."""
    like = next((t for t in (norm.running_mean, norm.weight) if t is not None), torch.zeros((), device="cpu"))
    return like.new_zeros(norm.num_features), like.new_ones(norm.num_features)


def _outputs_that_grew(forward: ForwardPass, more: Sequence[Seen]) -> tuple[int, int]:
    """Count the tensors the model returns that changed shape since the pass, and those with the batch's length.

    Packed sequences may lose a sample. If one of two inputs grew, one of two outputs may grow: that of an encoder.
    """
    before = shapes_of(forward.output)
    counts = [sum(a != b for a, b in zip(before, after.outputs, strict=False)) for after in more]
    return max(counts, default=0), sum(forward.batch_size in shape for shape in before)


def _anything_grew(usual: Mapping[str, list[Seen]], more: Mapping[str, list[Seen]]) -> bool:
    """True if any output of the model, or of a module in it, has a different shape than usual."""
    pairs = (pair for key in usual.keys() & more.keys() for pair in zip(usual[key], more[key], strict=False))
    return any(before.outputs != after.outputs for before, after in pairs)


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"


def shapes_of(output: Any) -> Shapes:
    """Return the shapes of the tensors of an output."""
    return [torch.Size() if tensor.is_nested else tensor.shape for tensor in tensors(output)]


def _grown_axis(shape: torch.Size, grown: torch.Size, batch_size: int) -> int | None:
    """Return the one axis that grew from B to B + 1; for a single sample it may have been squeezed away."""
    if len(shape) != len(grown):
        return 0 if batch_size == 1 and not shape and tuple(grown) == (2,) else None
    changed = [k for k, (before, after) in enumerate(zip(shape, grown, strict=True)) if before != after]
    if len(changed) != 1 or (shape[changed[0]], grown[changed[0]]) != (batch_size, batch_size + 1):
        return None
    return changed[0]


def _grown(shape: torch.Size, grown: torch.Size, before: Seen, after: Seen, batch_size: int) -> int | Merged | None:
    """Return the axis that grew from B to B + 1, or that merges the batch with others and grew by the same factor."""
    axis = _grown_axis(shape, grown, batch_size)
    changed = [k for k, (a, b) in enumerate(zip(shape, grown, strict=True)) if a != b]
    if axis is not None or len(changed) != 1:
        return axis
    (k,) = changed
    if shape[k] % batch_size or grown[k] * batch_size != shape[k] * (batch_size + 1):
        return None
    pairs = zip(before.inputs, after.inputs, strict=False)
    for source, ((x, whole), (_, grown_whole)) in enumerate(pairs):
        at = _grown_axis(whole, grown_whole, batch_size)
        if at is not None and len(x) > k and x[k] == shape[k] and _folded(x, k, whole, at) is not None:
            return Merged(k, source, at)
    return Merged(k)


def _present(
    axis: int | Merged | None,
    shape: torch.Size,
    batch_size: int,
    given: Sequence[tuple[torch.Size, torch.Size]],
    folds: dict[int, set[tuple[int, int]]],
) -> Axis:
    """Return the axis in a call, if it is present."""
    if not isinstance(axis, Merged):
        return axis if axis is not None and len(shape) > axis and shape[axis] == batch_size else None
    if len(shape) <= axis.axis:
        return None
    if axis.source is None:
        told = folds.get(shape[axis.axis], set())
        return Folded(axis.axis, *next(iter(told))) if len(told) == 1 else None
    if len(given) <= axis.source:
        return None
    x, whole = given[axis.source]
    if len(x) <= axis.axis or x[axis.axis] != shape[axis.axis]:
        return None
    if len(whole) <= axis.whole or whole[axis.whole] != batch_size:
        return None
    found = _folded(x, axis.axis, whole, axis.whole)
    if found is not None:
        folds.setdefault(shape[axis.axis], set()).add((found.outer, found.inner))
    return found


def given_shapes(
    inputs: Any, batch: Sequence[Tensor], watch: Watch | None = None
) -> list[tuple[torch.Size, torch.Size]]:
    """Return the shapes of input tensors, and of what they are views of: tensors of the batch, or others.

    Args:
        inputs: The inputs of a call.
        batch: The inputs of the model.
        watch: The mode that saw tensors being copied into another shape.
    """
    given = [t for t in tensors(inputs) if not t.is_nested]
    before = {} if watch is None else watch.reshaped
    return [(t.shape, before.get(t) or _whole(t, batch).shape) for t in given]


def _whole(tensor: Tensor, batch: Sequence[Tensor]) -> Tensor:
    """Return what a tensor is a view of, if that holds the same elements in the same order; else the tensor itself."""
    base = tensor._base
    if base is None or base.layout != torch.strided or not tensor.is_contiguous():
        return tensor
    for whole in (base, *(given for given in batch if given._base is base)):  # a batch may be part of a larger one
        same_place = whole.numel() == tensor.numel() and whole.storage_offset() == tensor.storage_offset()
        if same_place and whole.is_contiguous():
            return whole
    return tensor


def _folded(shape: torch.Size, axis: int, whole: torch.Size, at: int) -> Folded | None:
    """Return the axis of a shape as merged axes of another shape, one of which is the batch."""
    before = math.prod(shape[:axis])
    for first in range(at + 1):
        for last in range(at + 1, len(whole) + 1):
            if math.prod(whole[:first]) == before and math.prod(whole[first:last]) == shape[axis]:
                return Folded(axis, math.prod(whole[first:at]), math.prod(whole[at + 1 : last]))
    return None
