"""What the hooks collected in a tracked step, and what it means: micro-batches with their weights and scales.

**Unscaling happens here, once.** Autograd delivers ``c / w`` times the gradient of ``sum_i l_i``: ``w`` is what the
loss divided by, ``c`` the gradient that reached the loss (1, an AMP scale, 1 / accumulation steps). The output
gradients of a micro-batch are multiplied by ``(N / W) w / c``, and from then on every formula reads like its paper.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from distcockpit.gradients.uses import Axes, Formed, MicroBatch, Use
from distcockpit.losses import Decomposition, is_decomposable
from distcockpit.module_state import ModuleStates
from distcockpit.rng import RandomState
from distcockpit.trees import memory_of, tensors


@dataclass(eq=False)
class ForwardPass:
    """One call of the whole model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch_size: int
    random_state: RandomState | None
    buffers: dict[str, Tensor] | None  # of the model before the pass, for a replay
    autocast: torch.dtype | None = None  # the type of mixed precision, if any
    states: ModuleStates | None = None  # the attributes of modules before the pass
    writes_parameters: bool = False
    writes_inputs: bool = False
    uses: list[Use] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)  # of each module
    folds: dict[int, set[tuple[int, int]]] = field(default_factory=dict)  # merged axes by length: around and within B
    output: Any = None
    axes: Axes = ()  # where the batch is in each tensor of the output
    is_prediction: bool = False  # whether the scalar output has a batch axis when there are more samples
    output_gradients: dict[int, Tensor] = field(default_factory=dict)  # by position among the output's tensors
    loss: Tensor | None = None  # the scalar output, if there is one
    loss_position: int = -1
    is_open: bool = True  # until the model returns

    @property
    def factor(self) -> Tensor | None:
        """The gradient that reached the loss, if the model returned it.

        A scalar output is the loss if nothing else is differentiated from outside, and it stays a scalar when the batch
        grows.
        """
        if set(self.output_gradients) != {self.loss_position}:
            return None
        if self.is_prediction:
            return None
        return self.output_gradients[self.loss_position].double()

    @property
    def went_backward(self) -> bool:
        """Whether any output gradient arrived."""
        return bool(self.output_gradients) or any(use.output_gradients for use in self.uses)


def returned_any(forward: ForwardPass, given: Any) -> bool:
    """Whether one of the given tensors is what the pass returned, or a view of that."""
    ours = {memory_of(t) for t in tensors(forward.output) if t.requires_grad}
    return any(t.requires_grad and memory_of(t) in ours for t in tensors(given))


def comes_from(given: Any, passes: Sequence[ForwardPass]) -> bool:
    """Whether what a pass is given was computed from what an earlier one returned."""
    ours = {t.grad_fn for forward in passes for t in tensors(forward.output)} - {None}
    nodes = [t.grad_fn for t in tensors(given) if t.grad_fn is not None]
    seen = set(nodes)
    while ours and nodes:
        node = nodes.pop()
        if node in ours:
            return True
        new = {upstream for upstream, _ in node.next_functions if upstream is not None} - seen
        seen |= new
        nodes += new
    return False


def scalar_output(output: Any) -> Tensor | None:
    """The loss that a model returns: its one output without axes, if there is one."""
    scalars = [t for t in tensors(output) if t.dim() == 0 and t.requires_grad]
    return scalars[0] if len(scalars) == 1 else None


@dataclass
class LossCall:
    """One call of the loss module, or of ``record_losses``."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    decomposition: Decomposition
    value: Tensor
    weight: float | None = None  # the user's word, if the loss was recorded
    of: ForwardPass | None = None  # the pass whose output the loss module was given
    factor: Tensor | None = None  # gradient that reached the loss: a number, or one per recorded loss
    at_outputs: dict[int, Tensor] = field(default_factory=dict)  # its gradient at the outputs of the pass, if looked at

    def receive(self, gradient: Tensor) -> None:
        """A gradient reached the loss."""
        gradient = gradient.detach()
        self.factor = gradient if self.factor is None else self.factor + gradient

    @property
    def recorded(self) -> bool:
        """Whether the user told these losses."""
        return self.weight is not None


@dataclass(eq=False)
class Micro:
    """Forward passes and the losses computed from them: one micro-batch, as the hooks saw it."""

    passes: list[ForwardPass] = field(default_factory=list)
    losses: list[LossCall] = field(default_factory=list)
    is_one_batch: bool = False  # whether a pass was given what an earlier one returned: their samples are the same


@dataclass(frozen=True)
class Scale:
    """How one loss weighs its samples."""

    weight: float  # this micro-batch's part of W
    divisor: float  # w: what the loss divided by
    unscale: Tensor | float  # w / c
    individual: Tensor | None  # float64 [B]: losses with mean sum_i / divisor
    total: Tensor | None  # float64: their sum, which may be known where they are not


@dataclass
class Captured:
    """A micro-batch with everything needed to unscale it, before it is known what the other ranks hold."""

    batch_size: int
    scale: Scale
    uses: list[Use]
    passes: list[ForwardPass]
    losses: list[LossCall]
    observed: list[tuple[str, dict[str, Tensor]]]  # leaf module, what was kept of its output; in forward order
    formed: Formed = field(default_factory=dict)  # individual gradients that a walk kept

    @property
    def weight(self) -> float:
        """This micro-batch's part of W; without samples it has none."""
        return self.scale.weight if self.batch_size else 0.0

    @property
    def is_broken(self) -> bool:
        """Whether its loss is not finite; waits for the device."""
        values: list[Any] = [call.value for call in self.losses] or [self.scale.total]
        return any(value is not None and not math.isfinite(float(value)) for value in values)

    def with_others(self, other: Captured, names: Collection[str]) -> Captured:
        """The same, with the uses of a second pass for the parameters ``names``, and its own for all else."""
        mine = [use.serving({k: v for k, v in use.layer.parameters.items() if v not in names}) for use in self.uses]
        theirs = [use.serving({k: v for k, v in use.layer.parameters.items() if v in names}) for use in other.uses]
        theirs = [use for use in theirs if use.layer.parameters]
        served = {use.layer.scope for use in theirs}  # whose output gradients are among these, too
        mine = [use for use in mine if use.layer.parameters or (use.is_separable and use.layer.path not in served)]
        return replace(self, uses=[*mine, *theirs])

    def individual_losses(self, samples_per_weight: float, device: torch.device) -> Tensor:
        """Losses l_i of the samples in the pooled meaning, float64 ``[B]``; zero where they have no weight."""
        if self.scale.individual is None or not self.weight:
            return torch.zeros(self.batch_size, dtype=torch.float64, device=device)
        return self.scale.individual * samples_per_weight

    @property
    def tells_losses(self) -> bool:
        """Whether individual losses are known; without weight they are zero."""
        return self.scale.individual is not None or not self.weight

    def total_loss(self, samples_per_weight: float) -> Tensor | float | None:
        """The sum of l_i in the pooled meaning; ``None`` where it is not known."""
        if not self.weight:
            return 0.0
        return None if self.scale.total is None else self.scale.total * samples_per_weight

    def scaled(self, samples_per_weight: float) -> MicroBatch:
        """Multiply the output gradients by (N/W) w/c, once; a part without weight is exactly zero."""
        factor = self.scale.unscale * samples_per_weight if self.weight else 0.0
        done: set[int] = set()  # a function and the module that called it may share theirs
        for gradient in (g for use in self.uses for g in use.output_gradients.values()):
            if memory_of(gradient) in done:
                continue
            done.add(memory_of(gradient))
            if isinstance(factor, float) and not factor:
                gradient.zero_()  # exactly, whatever it is
            else:
                gradient.mul_(factor)
        return self.batch

    @property
    def batch(self) -> MicroBatch:
        """What walks go over; the output gradients mean what they should once they are scaled."""
        return MicroBatch(self.batch_size, self.uses, self.formed)


@dataclass(frozen=True)
class Loss:
    """What is known of the loss from outside: the module, and the user's word.

    Args:
        module: The loss module, or ``None``.
        weight: The user's word on w.
        factor: Factor on the loss where none can be measured (the scale of mixed precision).
    """

    module: nn.Module | None
    weight: float | None = None
    factor: float = 1.0


def interpret(
    micros: Sequence[Micro], loss: Loss, batch_size: int | None, *, strict: bool = True, skips: bool = False
) -> list[Captured]:
    """The micro-batches of a step.

    Args:
        micros: As the hooks saw them.
        loss: What is known of the loss.
        batch_size: The user's word on the batch size, which describes one batch only.
        strict: Whether to look at the signs of weights, which waits for the device.
        skips: Whether passes without a backward are left out, as where a loop skips a loss that is not finite.

    Raises:
        RuntimeError: If the model was not called, or a forward pass had no backward, or the loss cannot be
            understood; the text says what to do.
    """
    if not micros and not skips:
        raise RuntimeError(
            "The tracked step ended without a forward pass of the model (gradients enabled). Call the model inside "
            "`with cockpit.track(step):`, as `cockpit(x)` or as the module given to DistCockpit."
        )
    split = [part for m in micros for part in paired(m)]
    if skips:
        split = [micro for micro in split if any(f.went_backward or not f.batch_size for f in micro.passes)]
    for micro in split:
        for forward in micro.passes:
            if forward.batch_size and not forward.went_backward:
                raise RuntimeError(
                    "A forward pass of the tracked step had no backward before `track` ended. Move loss.backward() "
                    "inside `with cockpit.track(step):`, and run passes that only predict under torch.no_grad()."
                )
    for option, value in (("weight", loss.weight), ("batch_size", batch_size)):
        if value is not None and len(split) > 1:
            raise RuntimeError(
                f"track({option}={value!r}) describes one batch, but this step ran {len(split)} micro-batches. "
                "Leave it out and give the loss as a module (loss_fn=...) or by cockpit.record_losses(losses)."
            )
    return [_captured(micro, loss, len(split), strict) for micro in split]


def check_factors(captured: Sequence[Captured]) -> None:
    """Whether all samples have one factor, so that the gradient is that of a mean over them.

    Micro-batches that are averaged have the same factor on their means, or, where each is divided by the terms of all,
    on their sums.

    Raises:
        RuntimeError: If not.
    """
    scales = [(c.scale.weight, c.scale.divisor, float(c.scale.unscale)) for c in captured if c.weight]
    scales = [(weight, divisor, unscale) for weight, divisor, unscale in scales if math.isfinite(unscale) and unscale]
    for ratios in ([unscale / weight for weight, _, unscale in scales], [unscale for _, _, unscale in scales]):
        if all(math.isclose(ratio, ratios[0], rel_tol=1e-2) for ratio in ratios):
            return
    factors = [divisor / unscale for _, divisor, unscale in scales]
    raise RuntimeError(
        "The losses of the micro-batches (or forward passes) of this step were multiplied by "
        f"{factors}: its gradient is not that of one mean over their samples. Where that is meant, "
        "pass loss_fn=None and call cockpit.record_losses(weight * losses): individual losses then hold the weights."
    )


def paired(micro: Micro) -> list[Micro]:
    """Passes that share no loss, apart: without a loss module, or where each call of it was given the output of one."""
    if not micro.losses:
        return [Micro([forward]) for forward in micro.passes]
    of = [call.of for call in micro.losses]
    if micro.is_one_batch or len(micro.passes) < 2 or None in of or any(forward not in of for forward in micro.passes):
        return [micro]
    return [Micro([forward], [call for call in micro.losses if call.of is forward]) for forward in micro.passes]


def _captured(micro: Micro, loss: Loss, n_micros: int, strict: bool) -> Captured:
    sizes = {forward.batch_size for forward in micro.passes}
    several = len(micro.passes) > 1 and not micro.is_one_batch and sizes != {0}
    # One loss of several passes makes pairs of their samples, if it has one term for each.
    unpaired = several and (len(micro.losses) > 1 or any(c.decomposition.individual is None for c in micro.losses))
    if len(sizes) > 1 or unpaired:
        raise RuntimeError(
            f"{len(micro.passes)} forward passes (batch sizes {sorted(sizes)}) were followed by {len(micro.losses)} "
            "calls of the loss, so samples cannot be paired. Call the loss of a micro-batch before the next forward "
            "pass, or cockpit.record_losses(losses) with one loss per pair of samples."
        )
    (batch_size,) = sizes
    observed = [seen for forward in micro.passes for seen in _observed(forward)]
    if batch_size == 0:
        return Captured(0, Scale(0.0, 0.0, 0.0, None, None), [], micro.passes, micro.losses, observed)
    if not micro.losses:
        scale = _scale_without_loss(micro.passes[0], loss, n_micros)
    elif micro.losses[-1].recorded:
        scale = _scale_from_recorded(micro, loss, n_micros, strict)
    else:
        micro.losses = [call for call in micro.losses if call.factor is not None]
        scale = _scale_from_module(micro.losses, loss, batch_size, micro.passes)
    uses = [use for forward in micro.passes for use in received(forward)]
    return Captured(batch_size, scale, uses, micro.passes, micro.losses, observed)


def _observed(forward: ForwardPass) -> list[tuple[str, dict[str, Tensor]]]:
    """What was kept of outputs, without the calls by which checkpointing computes again what was observed before."""
    seen = [use for use in forward.uses if use.observed]
    early = {use.layer.path for use in seen if not use.is_late}
    counted = [use for use in seen if not use.is_late or use.output_gradients or use.layer.path not in early]
    return [(use.layer.path, use.observed) for use in counted]


def received(forward: ForwardPass) -> list[Use]:
    """The uses of a pass that gradients reached; of modules without parameters those that tell samples apart.

    Of a module with others inside, outputs without a batch axis are left out where there are outputs with one: a loss
    that comes with the scores it was computed from, whose gradients hold what came through the loss.
    """
    for use in forward.uses:
        with_axis = {k: g for k, g in use.output_gradients.items() if use.axes[k] is not None}
        if not use.layer.is_leaf and with_axis:
            use.output_gradients = with_axis
    return [use for use in forward.uses if use.output_gradients and (use.layer.parameters or use.is_separable)]


def _are_pieces(calls: Sequence[LossCall], passes: Sequence[ForwardPass]) -> bool:
    """Whether each call was given a part of its own of what the passes returned."""
    given = [t for call in calls for t in tensors((call.args, call.kwargs))[:1]]
    if len(given) < 2:
        return False
    places = {(memory_of(t), t.storage_offset()) for t in given}
    whole = sum(t.numel() for forward in passes for t in tensors(forward.output) if memory_of(t) == memory_of(given[0]))
    return len(places) == len(calls) and sum(t.numel() for t in given) <= whole


def _scale_from_module(
    calls: Sequence[LossCall], loss: Loss, batch_size: int, passes: Sequence[ForwardPass] = ()
) -> Scale:
    name = type(loss.module).__name__
    factors = [call.factor for call in calls if call.factor is not None]
    if not factors:
        raise RuntimeError(
            f"The output of {name} took no part in the backward pass of the tracked step. Give DistCockpit the loss "
            "that is differentiated, or loss_fn=None and record_losses(losses)."
        )
    parts = [call.decomposition for call in calls]
    if len(factors) > 1:
        ratios = torch.stack([f.double() / p.divisor for f, p in zip(factors, parts, strict=True)])
        if not torch.allclose(ratios, ratios[0].expand_as(ratios), rtol=1e-4, equal_nan=True):
            raise RuntimeError(
                f"{name} was called {len(calls)} times on one batch, with different factors "
                f"{[f.item() for f in factors]}. The individual loss of a sample is then not defined by the module: "
                "pass loss_fn=None and call record_losses(losses) with the weighted sum per sample."
            )
    divisor = parts[0].divisor
    if loss.weight is not None and not parts[0].is_sum:
        raise RuntimeError(
            f"track(weight={loss.weight!r}) was given with loss_fn={name} of reduction 'mean', whose own weight is "
            f"{divisor:g}. Leave weight out."
        )
    pieces = _are_pieces(calls, passes)
    weight = sum(part.divisor for part in parts) if pieces else divisor
    if parts[0].is_sum:
        weight = float(batch_size) if loss.weight is None else loss.weight
    known = [] if pieces else [part.individual for part in parts if part.individual is not None]
    individual = sum(known[1:], known[0]) if len(known) == len(parts) else None
    total = sum((part.total for part in parts[1:]), parts[0].total)
    return Scale(weight, divisor, divisor / factors[0], individual, total)


def _scale_from_recorded(micro: Micro, loss: Loss, n_micros: int, strict: bool) -> Scale:
    call = micro.losses[-1]
    parts, weight = call.decomposition, call.weight
    individual = parts.individual
    assert weight is not None
    if call.factor is None:  # recorded beside the graph: they tell the losses, not the factor
        forward = micro.passes[-1]
        is_part = forward.loss_position in forward.output_gradients and len(forward.output_gradients) > 1
        if strict and is_part and forward.loss is not None:
            mean, returned = float(parts.total / parts.divisor), float(forward.loss)
            if math.isclose(mean, returned, rel_tol=1e-2):
                raise RuntimeError(
                    f"The recorded losses make the loss that the model returned, {returned:g}, but what was "
                    "differentiated is made of other outputs, too, so that the factor on the loss is unknown. Call "
                    "cockpit.record_losses(losses) with the whole loss of each sample."
                )
        scale = _scale_without_loss(forward, replace(loss, weight=parts.divisor, module=None), n_micros)
        return replace(scale, weight=weight, individual=individual, total=parts.total)
    if individual is None:
        return Scale(weight, parts.divisor, parts.divisor / call.factor.double(), None, parts.total)
    batch_size = len(individual)
    # With gradient r_i at loss i the objective is sum_i r_i l_i; as a mean over samples it is of B r_i l_i / sum r.
    gradient = call.factor.double()
    if strict and bool((gradient < 0).any()):
        raise RuntimeError(
            "The losses given to record_losses were multiplied by numbers of which some are negative, so that they "
            "have no mean. Multiply first, as in losses = advantages * losses, and give record_losses the product."
        )
    unscale = batch_size / gradient.sum()
    individual = individual * gradient * unscale
    return Scale(weight, float(batch_size), unscale, individual, individual.sum())


def _scale_without_loss(forward: ForwardPass, loss: Loss, n_micros: int) -> Scale:
    weight = float(forward.batch_size) if loss.weight is None else loss.weight
    if forward.factor is not None:
        total = None if forward.loss is None else forward.loss * weight
        return Scale(weight, weight, weight / forward.factor, None, total)
    if loss.module is not None:
        name, reduction = type(loss.module).__name__, getattr(loss.module, "reduction", None)
        rule = (
            f"loss_fn={name} was not called"
            if is_decomposable(loss.module)
            else f"loss_fn={name} has reduction={reduction!r}, which is neither 'mean' nor 'sum'"
        )
        raise RuntimeError(
            f"The tracked step has no individual losses: {rule}. Call the loss module given to DistCockpit, or "
            "cockpit.record_losses(losses) with one loss per sample, inside `track`."
        )
    if n_micros > 1:
        raise RuntimeError(
            f"The step ran {n_micros} micro-batches and loss_fn=None, so the factor on each loss is unknown. Give the "
            "loss as a module (loss_fn=...), return the loss from the model, or call cockpit.record_losses(losses) "
            "for each micro-batch."
        )
    return Scale(weight, weight, weight / loss.factor, None, None)


def check_uses(captured: Sequence[Captured]) -> None:
    """Whether the layers left what their individual gradients follow from.

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
                    "none of its axes is the batch, as it was before, so the gradients of its samples cannot be told "
                    f"apart. Construct DistCockpit anew for a model that changes, or leave the layer out: {way_out}."
                )
            if use.layer.parameters and use.inputs_changed:
                raise RuntimeError(
                    f"{what}: its input was overwritten by the model, but its individual gradients need it. "
                    f"Let it work on a copy (x.clone()), or leave the layer out: {way_out}."
                )
