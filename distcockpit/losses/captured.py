"""What is kept of a tracked step: forward passes, losses given by the user, and micro-batches with their scales.

**Unscaling happens here, once.** Autograd delivers ``c`` times the gradient of the sum of this rank's terms. One
process with the whole batch has the mean of ``l_i = (N / W) T_i`` over N samples, with T_i the sum of sample i's terms.
So the output gradients of a micro-batch are multiplied by ``(N / W) / c``, and from then on every formula reads as in
its paper.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from distcockpit.gradients.known import of_samples
from distcockpit.gradients.uses import Axes, Materialized, MicroBatch, Use
from distcockpit.replay.snapshot import Snapshot
from distcockpit.replay.trees import memory_of, tensors
from distcockpit.world import Pending


@dataclass(eq=False)
class ForwardPass:
    """One call of the whole model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch_size: int
    before: Snapshot  # of the model
    writes_parameters: bool = False
    writes_inputs: bool = False
    uses: list[Use] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)  # number of calls by module
    folds: dict[int, set[tuple[int, int]]] = field(
        default_factory=dict
    )  # merged axes by length: what is around B and within B
    reductions: list[Any] = field(default_factory=list)  # calls that added up terms: `reductions.Reduction`
    output: Any = None
    axes: Axes = ()  # the batch axis of each tensor of the output
    output_gradients: dict[int, Tensor] = field(default_factory=dict)  # by position among the output's tensors
    is_open: bool = True  # until the model returns
    is_aside: bool = False  # whether its outputs were differentiated for something else, such as adversarial inputs

    @property
    def went_backward(self) -> bool:
        """True if any output gradient arrived."""
        return bool(self.output_gradients) or any(use.output_gradients for use in self.uses)


def scalar_output(output: Any) -> Tensor | None:
    """Return the loss that a model returns: its only scalar output, if there is exactly one."""
    scalars = [t for t in tensors(output) if t.dim() == 0 and t.requires_grad]
    return scalars[0] if len(scalars) == 1 else None


@dataclass
class LossCall:
    """One call of the loss module, or of ``record_losses``."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Tensor
    said: Said | None = None  # what the user gave, if the loss was recorded
    of: ForwardPass | None = None  # the pass before it
    factor: Tensor | None = None  # gradient that reached the loss: a number, or one per recorded loss
    _arrived: list[Pending] = field(default_factory=list)

    def receive(self, gradient: Tensor) -> None:
        """Add a gradient that reached the loss."""
        gradient = gradient.detach().double()
        self.factor = gradient if self.factor is None else self.factor + gradient
        self._arrived.append(Pending(gradient.sum().reshape(1)))

    @property
    def arrived(self) -> float:
        """The sum of these gradients; waits for the device."""
        return sum(float(each.result()[0]) for each in self._arrived)

    @property
    def recorded(self) -> bool:
        """True if the user recorded these losses."""
        return self.said is not None


@dataclass(frozen=True)
class Said:
    """Losses given by the user: their mean is the sum over the divisor."""

    total: Tensor  # float64
    individual: Tensor | None  # float64 [B]
    divisor: float
    weight: float  # the number of terms


@dataclass(eq=False)
class RecordedMicroBatch:
    """Forward passes and the losses computed from them: one micro-batch, as seen by the hooks."""

    passes: list[ForwardPass] = field(default_factory=list)
    losses: list[LossCall] = field(default_factory=list)
    is_one_batch: bool = (
        False  # whether a pass was given what an earlier one returned, so that their samples are the same
    )


@dataclass(frozen=True)
class Scale:
    """How one loss weights its samples."""

    weight: float  # this micro-batch's share of W
    divisor: float  # w: the divisor of its first loss
    unscale: float  # 1 / c
    individual: Tensor | None  # float64 [B]: losses with mean sum_i / divisor
    total: Tensor | None  # float64: their sum, which may be known even if they are not
    of_sum: float = 0.0  # its share of W if the sum over samples is divided by nothing, on any rank


@dataclass
class CapturedMicroBatch:
    """A micro-batch with everything needed to unscale it, before the other ranks' batches are known."""

    batch_size: int
    scale: Scale
    uses: list[Use]
    passes: list[ForwardPass]
    losses: list[LossCall]
    observed: list[tuple[str, dict[str, Tensor]]]  # leaf module, and what was kept of its output; in forward order
    materialized: Materialized = field(default_factory=dict)  # individual gradients that a walk kept
    beside: Beside = field(default_factory=lambda: Beside())
    terms: Sequence[Any] = ()  # for the parts of its loss: `interpretation.Terms`
    _unknown: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def has_gradients(self) -> bool:
        """True if its samples have gradients of their own; if not, they are NaN."""
        return not self._unknown

    def without_gradients(self, parameters: Mapping[str, Tensor], *, has_losses: bool = False) -> None:
        """Mark its samples as having no gradients of their own, nor, perhaps, losses. No call is run again for them.

        Args:
            parameters: The tracked parameters, whose individual gradients are NaN.
            has_losses: Whether the samples have losses.
        """
        self.scale, self._unknown = replace(self.scale, unscale=math.nan), parameters
        self.uses = [use.serving({}) for use in self.uses]
        if not has_losses:
            self.scale = replace(self.scale, individual=None, total=None)

    @property
    def weight(self) -> float:
        """This micro-batch's share of W; zero without samples."""
        return self.scale.weight if self.batch_size else 0.0

    def as_sum(self) -> None:
        """Report the sum over samples as their mean, because it is divided by nothing on any rank."""
        self.scale = replace(self.scale, weight=self.scale.of_sum)
        self.beside = replace(self.beside, is_sum=True)

    @property
    def is_broken(self) -> bool:
        """True if its loss is not finite; waits for the device."""
        values: list[Any] = [call.value for call in self.losses] or [self.scale.total]
        return any(value is not None and not math.isfinite(float(value.sum())) for value in values)

    def with_others(self, other: CapturedMicroBatch, names: Collection[str]) -> CapturedMicroBatch:
        """Return a copy with the uses of a second pass for the parameters ``names``, and its own uses for all else."""
        mine = [use.serving({k: v for k, v in use.layer.parameters.items() if v not in names}) for use in self.uses]
        theirs = [use.serving({k: v for k, v in use.layer.parameters.items() if v in names}) for use in other.uses]
        theirs = [use for use in theirs if use.layer.parameters]
        served = {use.layer.scope for use in theirs}  # whose output gradients are included
        mine = [use for use in mine if use.layer.parameters or (use.is_separable and use.layer.path not in served)]
        return replace(self, uses=[*mine, *theirs])

    def individual_losses(self, samples_per_weight: float, n: int, device: torch.device) -> Tensor:
        """Return the per-sample losses l_i in their pooled meaning, float64 ``[B]``; zero if they have no weight."""
        if self.scale.individual is None or not self.weight:
            return torch.zeros(self.batch_size, dtype=torch.float64, device=device)
        return self.scale.individual * samples_per_weight + self.beside.loss * self.beside.part(n)

    @property
    def tells_losses(self) -> bool:
        """True if per-sample losses are known; without weight they are zero."""
        return self.scale.individual is not None or not self.weight

    def total_loss(self, samples_per_weight: float, n: int) -> Tensor | float | None:
        """Return the sum of l_i in their pooled meaning; ``None`` if it is unknown."""
        if not self.weight:
            return 0.0
        if self.scale.total is None:
            return None
        return self.scale.total * samples_per_weight + self.batch_size * self.beside.loss * self.beside.part(n)

    def scaled(self, samples_per_weight: float, n: int) -> MicroBatch:
        """Multiply the output gradients by (N/W) / c, once; a part without weight is exactly zero."""
        factor = self.scale.unscale * samples_per_weight if self.weight else 0.0
        done: dict[tuple[Any, ...], Tensor] = {}  # a function and the module that called it may share theirs
        for use in self.uses:
            for position, gradient in use.output_gradients.items():
                key = (memory_of(gradient), gradient.storage_offset(), gradient.shape, gradient.stride())
                if key not in done:  # never in place: it may be somebody else's
                    done[key] = gradient * factor if factor else torch.zeros_like(gradient)
                use.output_gradients[position] = done[key]
            use.found.pop("sequences", None)  # views of what they were before
            if use.extremes is not None:
                use.extremes = use.extremes * factor if factor else torch.zeros_like(use.extremes)
        if self.weight and self.batch_size:
            part = self.beside.unscale * self.beside.part(n)
            for name, gradient in self.beside.gradients.items():
                same = (gradient * part).expand(self.batch_size, *gradient.shape)
                self.uses = [*self.uses, of_samples(name, same)]
        for name, parameter in self._unknown.items():
            nothing = torch.full((), math.nan, dtype=torch.float64, device=parameter.device)
            self.uses = [*self.uses, of_samples(name, nothing.expand(self.batch_size, *parameter.shape))]
        return self.batch

    @property
    def batch(self) -> MicroBatch:
        """What walks iterate over; the output gradients only have their final meaning once they are scaled."""
        return MicroBatch(self.batch_size, self.uses, self.materialized)


@dataclass(frozen=True)
class Beside:
    """What the objective holds besides the terms of samples: penalties and constants, which count for each sample.

    Args:
        loss: The value of the penalties and constants.
        gradients: Their gradients as autograd delivers them, by parameter, float64.
        unscale: What to multiply these by.
        is_sum: Whether the objective is a sum over samples, reported as their mean, so that penalties count only once.
    """

    loss: Tensor | float = 0.0
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    unscale: float = 1.0
    is_sum: bool = False

    def part(self, n: int) -> float:
        """Return the share that counts for one of n samples."""
        return 1 / n if self.is_sum else 1.0


@dataclass(frozen=True)
class KnownLoss:
    """What is known about the loss from outside: the module, and what the user gave.

    Args:
        module: The loss module, or ``None``.
        weight: The w given by the user.
        factor: The scale of mixed precision, if it is known.
        function: The function that the user passed in place of a module, if any.
    """

    module: nn.Module | None
    weight: float | None = None
    factor: float = 1.0
    function: object = None


def observed_in(forward: ForwardPass) -> list[tuple[str, dict[str, Tensor]]]:
    """Return what was kept of outputs, without calls in which checkpointing recomputes what was observed before."""
    seen = [use for use in forward.uses if use.observed]
    early = {use.layer.path for use in seen if not use.is_late}
    counted = [use for use in seen if not use.is_late or use.output_gradients or use.layer.path not in early]
    return [(use.layer.path, use.observed) for use in counted]


def received(forward: ForwardPass) -> list[Use]:
    """Return the uses of a pass that gradients reached; for modules without parameters, those that separate samples.

    For a module with children, outputs without a batch axis are dropped if there are outputs with one: e.g. a loss
    returned along with the scores it was computed from, whose gradients include what came through the loss.
    """
    for use in forward.uses:
        with_axis = {k: g for k, g in use.output_gradients.items() if use.axes[k] is not None}
        if not use.layer.is_leaf and with_axis:
            use.output_gradients = with_axis
    return [use for use in forward.uses if use.output_gradients and (use.layer.parameters or use.is_separable)]


def check_uses(captured: Sequence[CapturedMicroBatch]) -> None:
    """Check whether the layers left what their individual gradients are derived from.

    Raises:
        ValueError: If the output of one has no batch axis.
        RuntimeError: If the input of one was overwritten.
    """
    for micro in captured:
        for use in micro.uses:
            what = f"{str(use.layer)[0].upper()}{str(use.layer)[1:]}"
            way_out = f"exclude=['{use.layer.path}']"
            if use.layer.parameters and not use.is_separable:
                shapes = [tuple(gradient.shape) for gradient in use.output_gradients.values()]
                raise ValueError(
                    f"{what} has an output of shape {', '.join(map(str, shapes))} in a batch of {micro.batch_size}: "
                    "unlike before, none of its axes is the batch, so the gradients of its samples cannot be told "
                    f"apart. Construct DistCockpit again for a model that changes, or leave the layer out: {way_out}."
                )
            if use.layer.parameters and use.inputs_changed:
                raise RuntimeError(
                    f"{what}: the model overwrote its input, which its per-sample gradients need. Let the model work "
                    f"on a copy (x.clone()), or leave the layer out: {way_out}."
                )
