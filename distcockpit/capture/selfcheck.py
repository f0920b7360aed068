"""Tracked steps check themselves: what the hooks saw must explain the loss and the gradient of every parameter.

A parameter that is used without calling its module, or a layer that does not compute what its type promises, would
otherwise go unnoticed. A parameter is done once its gradient was explained at a step where it was not zero, until
everything is checked again: at the second, fourth, eighth, ... tracked step, because loops change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from distcockpit.capture.signature import COUNT, norm_of, signature, squared_norms
from distcockpit.gradients.factors import WHOLE, rows_of
from distcockpit.gradients.statistics import GradientSum, SquaredNorms
from distcockpit.gradients.uses import MicroBatch
from distcockpit.gradients.walk import walk
from distcockpit.losses.captured import CapturedMicroBatch
from distcockpit.replay.memory import is_out_of_memory

# Relative errors that rounding may cause, by dtype; dtypes of lower precision get LOW_PRECISION.
GRADIENT_TOLERANCE = {torch.float64: 1e-2, torch.float32: 1e-2}
LOW, LOW_PRECISION = (torch.bfloat16, torch.float16), 0.1
CANCELLATION = 1e-4  # relative to the norm of a parameter's individual gradients: what may remain where they cancel
NOISE = 1e-6  # relative to the norm of the whole gradient: what may remain of a gradient that is zero up to rounding
LOW_PRECISION_NOISE = 3e3  # factor for models of low or mixed precision


def check_outputs_tell_all(
    captured: Sequence[CapturedMicroBatch], again: Mapping[str, Tensor], seen: Mapping[str, Tensor], model: nn.Module
) -> None:
    """Check whether rerunning the step from the gradients at the model's outputs reproduces the parameters' gradients.

    Args:
        captured: The micro-batches.
        again: The signatures of the gradients of the second pass.
        seen: Those of what arrived at the parameters in the first pass.
        model: The bare module.

    Raises:
        RuntimeError: If not; names a parameter and a way out.
    """
    whole = norm_of(seen)
    low = any(use.before.autocast in LOW for c in captured for use in c.uses)
    pairs = [[arrived - again.get(name, torch.zeros_like(arrived)), arrived] for name, arrived in seen.items()]
    for name, found in zip(seen, squared_norms(pairs), strict=True):
        error, size = map(math.sqrt, found)
        dtype = model.get_parameter(name).dtype
        tolerance = LOW_PRECISION if low else GRADIENT_TOLERANCE.get(dtype, LOW_PRECISION)
        noise = NOISE * (LOW_PRECISION_NOISE if tolerance == LOW_PRECISION else 1) * whole
        if error > tolerance * size + noise:
            raise RuntimeError(
                f"Parameter '{name}' of the model ({type(model).__name__}) received a gradient that does not come from "
                "the model's outputs alone, so track_batchnorm=True cannot run the step again. Return everything that "
                "the loss needs from the model's forward pass."
            )


@dataclass
class SelfCheck:
    """Which parameters still need to be checked.

    With one sample there is nothing to separate: what was checked then is checked again once there are more.
    """

    tracked: Mapping[str, Tensor]
    unchecked: set[str] = field(init=False)
    last_checked: int = -1  # the last step at which everything was fine
    _checked_alone: set[str] = field(default_factory=set)
    closed: set[str] = field(default_factory=set)  # whose calls all had closed forms at the last such step
    broken: dict[str, int] = field(default_factory=dict)  # what is no longer correct, and since which step
    _quiet: set[str] = field(default_factory=set)  # whose gradients were nothing but rounding at that step
    _served: set[str] = field(default_factory=set)
    _count: int = 0  # tracked steps
    _pause: int = 1  # tracked steps to wait before what is broken is checked again
    _look_again: int = 0

    def __post_init__(self) -> None:
        self.unchecked = set(self.tracked)

    def adopt(self, tracked: Mapping[str, Tensor]) -> None:
        """Continue with other tensors of the same names."""
        self.tracked = tracked

    def begin(self) -> dict[str, Tensor]:
        """Begin a tracked step. Everything is checked again at the second, fourth, eighth, ... one.

        Returns:
            The parameters whose gradients to watch, by name.
        """
        self._count += 1
        if self.is_thorough:
            self.unchecked = set(self.tracked)
            self._quiet = set()
        elif self._count == self._look_again:
            self.unchecked |= self.broken.keys()
        watched = self.unchecked | self._checked_alone
        return {name: p for name, p in self.tracked.items() if name in watched}

    @property
    def is_thorough(self) -> bool:
        """True if this step checks everything."""
        return self._count & (self._count - 1) == 0

    def due(self, captured: Sequence[CapturedMicroBatch]) -> list[str]:
        """Return the parameters to examine in this step: those not checked yet, and those that behave differently."""
        with_weight = [c for c in captured if c.weight]
        if not with_weight:
            return []
        if any(c.batch_size > 1 for c in with_weight):
            self.unchecked |= self._checked_alone
            self._checked_alone = set()
        odd = [use for c in with_weight for use in c.uses if not use.is_separable]
        differ = {name for use in odd for name in use.layer.parameters.values()}
        return [name for name in self.tracked if name in self.unchecked | differ]

    @property
    def not_checked(self) -> set[str]:
        """The parameters whose gradients are not explained yet, or no longer."""
        return self.unchecked | self._quiet | self.broken.keys()

    def passed(self, found: Examination, captured: Sequence[CapturedMicroBatch], step: int) -> None:
        """Record that nothing is wrong."""
        explained = found.explained
        self.unchecked -= {*explained, *found.quiet}
        self._quiet |= set(found.quiet)
        self.broken = {name: since for name, since in self.broken.items() if name not in explained}
        if not self.broken:
            self._pause = 1
        self._served |= set(explained)
        uses = [(name, use) for c in captured for use in c.uses for name in use.layer.parameters.values()]
        again = {name for name, use in uses if use.closed is None}
        self.closed = (self.closed - again) | {name for name, _ in uses if name not in again}
        self.last_checked = step
        if all(c.batch_size < 2 for c in captured):
            self._checked_alone |= set(explained)

    def failed(self, names: Iterable[str]) -> None:
        """Mark parameters that take another route now, which must be checked."""
        self.unchecked |= set(names)

    def was_all_right(self, names: Iterable[str]) -> bool:
        """True if some of these passed at an earlier step, so that the run has relied on them."""
        return not self._served.isdisjoint(names)

    def give_up(self, names: Iterable[str], step: int) -> None:
        """Mark parameters that are no longer correct. The longer that lasts, the less often they are checked again."""
        self.unchecked -= set(names)
        self._look_again, self._pause = self._count + self._pause, 2 * self._pause
        self.broken = {**dict.fromkeys(names, step), **self.broken}


@dataclass(frozen=True)
class Examination:
    """What the hooks saw, compared with what autograd gave the parameters."""

    explained: list[str]  # parameters whose gradient was finite, nonzero and explained
    quiet: list[str]  # those whose gradient was nothing but rounding
    unserved: dict[str, tuple[str, list[str]]]  # by parameter: why, and the modules whose calls do not serve it


def examine(
    captured: Sequence[CapturedMicroBatch],
    seen: Mapping[str, Tensor],
    values: Mapping[str, Tensor],
    scopes: Mapping[str, Sequence[str]],
    unchecked: Iterable[str],
    whole: float,
    block_elements: int,
    buckets: Sequence[Mapping[str, slice]],
) -> Examination:
    """Check that individual gradients can be separated, and add up to what autograd gave the parameters.

    Args:
        captured: The micro-batches, not scaled yet.
        seen: The signatures of what arrived at the parameters, summed over backward calls.
        values: All parameters of the model.
        scopes: The modules whose calls serve each parameter.
        unchecked: The parameters to examine.
        whole: Norm of the whole gradient, or 0 where `seen` holds all of it.
        block_elements: See `walk`.
        buckets: The parameters in pieces, each with its rows, which are summed one after the other.

    Raises:
        OutOfMemoryError: If there is not enough memory to run a module again.
    """
    unserved = {}
    for name in unchecked:
        uses = [use for micro in captured for use in micro.uses if name in use.layer.parameters.values()]
        together = [use for use in uses if not use.is_separable]
        changed = [use for use in uses if use.inputs_changed]
        if together:
            shapes = [str(tuple(g.shape)) for g in together[0].output_gradients.values()]
            why = f"the output of {together[0].layer}, of shape {', '.join(shapes)}, has no batch axis"
            unserved[name] = why, [use.layer.scope for use in together]
        elif changed:
            why = f"the input of {changed[0].layer} was overwritten"
            unserved[name] = why, [use.layer.scope for use in changed]
    rest = [name for name in unchecked if name not in unserved]
    batches = [MicroBatch(micro.batch_size, micro.uses) for micro in captured]
    sums = {name: values[name].new_zeros(COUNT, dtype=torch.float64) for name in rest}
    norms = SquaredNorms({name: values[name] for name in rest})

    def add_up(rows: Mapping[str, slice]) -> None:
        parts = {name: rows_of(values[name], part) for name, part in rows.items()}
        some = {name: part for name, part in rows.items() if part != WHOLE}
        first = {name: part.start for name, part in some.items()}
        adding, squares = GradientSum(parts, first), SquaredNorms(parts)
        walk(batches, values, list(rows), [adding, squares], block_elements, rows=some)
        norms.add(squares)
        for name, total in adding.sums.items():
            sums[name] += signature(total, first.get(name, 0) * math.prod(values[name].shape[1:]))

    for bucket in buckets:
        rows = {name: part for name, part in bucket.items() if name in rest}
        try:
            add_up(rows)
        except Exception as failure:  # a module cannot be run again: which one?
            if is_out_of_memory(failure):
                raise
            for name, part in rows.items():
                try:
                    add_up({name: part})
                except Exception as problem:
                    if is_out_of_memory(problem):
                        raise
                    rest.remove(name)
                    text = f"its use could not be run again ({type(problem).__name__}: {problem})"
                    unserved[name] = text, list(scopes[name])
    n = sum(c.batch_size for c in captured)
    explained, quiet = [], []
    mixed = {n for c in captured for use in c.uses if use.before.autocast in LOW for n in use.layer.parameters.values()}
    low = {name for name in rest if name in mixed or values[name].dtype not in GRADIENT_TOLERANCE}
    noise = NOISE * (LOW_PRECISION_NOISE if low else 1) * max(whole, norm_of(seen))
    triples = []
    for name in rest:
        arrived = seen.get(name, torch.zeros_like(sums[name]))
        triples.append([sums[name] - arrived, arrived, (n * norms.values[name]).sqrt().expand(COUNT)])
    for name, found in zip(rest, squared_norms(triples), strict=True):
        error, size, everything = map(math.sqrt, found)
        if not all(map(math.isfinite, (error, size, everything))):
            continue
        tolerance = LOW_PRECISION if name in low else GRADIENT_TOLERANCE.get(values[name].dtype, LOW_PRECISION)
        if error > tolerance * size + CANCELLATION * everything + noise:
            why = f"it received a gradient of norm {size:.3g}, but the calls that were seen leave {error:.3g} of it "
            why += "unexplained, so it is used elsewhere too, or something else is differentiated inside `track` (a "
            unserved[name] = f"{why}penalty on parameters or gradients, torch.autograd.grad)", list(scopes[name])
        elif size > 0 and error <= tolerance * size + CANCELLATION * everything:
            explained.append(name)
        elif size > 0:
            quiet.append(name)
    return Examination(explained, quiet, unserved)
