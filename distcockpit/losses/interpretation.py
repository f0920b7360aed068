"""What the hooks collected in a tracked step, and what it means: micro-batches with their weights and scales.

The objective is what the optimizer gets: the sum of everything that is differentiated. On one rank, ``c`` is the
coefficient of its terms, with the scale of mixed precision divided out. One process with the whole batch would have
``1/W``, with W the sum of ``1 / (K c)`` over the ranks and their K micro-batches: means over samples or tokens have
``c = 1 / (K w)`` with w their number, and W is the number over all; if the divisor is a number that all ranks know, c
is the same everywhere, and W gives it back. A sum that is not divided by anything is reported as the mean over samples:
``W = N``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from distcockpit.gradients.known import of_samples
from distcockpit.gradients.uses import Use
from distcockpit.losses.captured import (
    Beside,
    CapturedMicroBatch,
    ForwardPass,
    KnownLoss,
    LossCall,
    RecordedMicroBatch,
    Scale,
    observed_in,
    received,
)
from distcockpit.losses.objective import LossPart, Objective
from distcockpit.world import Pending

NO_BACKWARD = (
    "A forward pass of the tracked step had no backward before `track` ended. Move loss.backward() inside `with "
    "cockpit.track(step):`, and run inference-only passes under torch.no_grad()."
)
TOO_MANY = (
    "track({option}={value!r}) describes one batch, but this step ran {count} micro-batches. Omit it: the losses and "
    "their divisors are seen as they are computed."
)
UNPAIRED = (
    "A loss combines {passes} forward passes with {sizes} samples, so their samples cannot be paired. Call the "
    "model on batches of equal size, or compute a separate loss for each."
)
COUPLED = (
    "the loss couples the samples of a batch ({}), as contrastive losses, Dice and batch statistics do: it is "
    "not a sum over samples, so they have no gradients of their own"
)
UNSEEN = (
    "the terms that {} adds up cannot be seen, so it counts as a mean over samples. If it is a mean over something "
    "else, pass the number of terms: track(step, weight=...)."
)
HAS_GRADIENTS = (
    "the loss contains gradients of the model (torch.autograd.grad(..., create_graph=True)), whose own per-sample "
    "gradients are not known"
)


@dataclass
class Interpretation:
    """What a step means."""

    captured: list[CapturedMicroBatch]
    notices: dict[str, str] = field(default_factory=dict)  # by topic
    coupled: str = ""  # why samples have no gradients of their own
    own: float = 0.0  # the factor of the mean in the objective
    coefficient: float = 0.0  # of each term
    mix: float = (
        0.0  # which parts the objective consists of; if it differs between ranks, they have no common objective
    )
    times: int = 1  # the factor by which the summed losses are too large
    is_sum: bool = False  # whether the sum over samples is divided by nothing


@dataclass
class Terms:
    """The terms of one part of the objective, for the samples of one micro-batch."""

    name: str  # the function that added them up
    coefficient: float  # of each term, without the scale of mixed precision; not negative
    divisor: float  # the divisor of the sum
    own: float  # the coefficient of the mean; NaN if the loop divided a sum by a number unknown to us
    total: Tensor | None
    individual: Tensor | None
    is_sum: bool  # whether it is divided by nothing
    pattern: float = (
        0.0  # of coefficients that vary along axes other than the batch; it must be the same for all samples
    )
    weight: float | None = None  # the number of terms given by the user
    part: LossPart | None = None  # in the graph, if it is one sum or mean
    factor: float = 1.0  # of its gradient, to get the gradient of the sum of its terms


def interpret(
    micros: Sequence[RecordedMicroBatch],
    objective: Objective,
    loss: KnownLoss,
    batch_size: int | None,
    *,
    skips: bool = False,
) -> Interpretation:
    """Determine the micro-batches of a step.

    Args:
        micros: As the hooks saw them.
        objective: What was differentiated.
        loss: What is known about the loss from outside.
        batch_size: The batch size given by the user, which describes a single batch only.
        skips: Whether passes without a backward are left out, e.g. if a loop skips a non-finite loss.

    Raises:
        RuntimeError: If the model was not called, a forward pass had no backward, or the loss cannot be understood; the
            message says what to do.
    """
    if not micros and not skips:
        raise RuntimeError(
            "The tracked step ended without a forward pass of the model (with gradients enabled). Call the model "
            "inside `with cockpit.track(step):`, as `cockpit(x)` or as the module passed to DistCockpit."
        )
    parts = list(dict.fromkeys(part for root in objective.roots for part in root.parts if part.gradient is not None))
    split = _grouped(micros, parts)
    if skips:
        split = [micro for micro in split if any(f.went_backward or not f.batch_size for f in micro.passes)]
    if any(f.batch_size and not f.went_backward for micro in split for f in micro.passes):
        raise RuntimeError(NO_BACKWARD)
    for option, value in (("weight", loss.weight), ("batch_size", batch_size)):
        if value is not None and len(split) > 1:
            raise RuntimeError(TOO_MANY.format(option=option, value=value, count=len(split)))
    result = Interpretation([])
    result.coupled = next((root.coupled for root in objective.roots if root.coupled), "")
    if result.coupled:
        result.coupled = COUPLED.format(result.coupled)
    elif objective.has_gradients:
        result.coupled = HAS_GRADIENTS
    scale = loss.factor
    terms = [_terms_of(micro, parts, scale, loss, result) for micro in split]
    everything = [each for mine in terms for each in mine]
    unknown = [each for each in everything if each.total is None]
    if len(unknown) == 1 and unknown[0].coefficient and objective.roots:
        unknown[0].total = _left(objective, everything, scale) / unknown[0].coefficient
    scales = _scales(split, terms, scale, loss, result, objective.n_roots or len(split))
    beside = _beside(objective, terms, scale, result)
    for micro, mine, of_micro in zip(split, terms, scales, strict=True):
        uses = [use for forward in micro.passes for use in received(forward)]
        uses += [use for part in parts if part.learned for use in _learned(part, micro)]
        observed = [seen for forward in micro.passes for seen in observed_in(forward)]
        size = micro.passes[0].batch_size
        captured = CapturedMicroBatch(
            size, of_micro, uses if size else [], micro.passes, micro.losses, observed, beside=beside
        )
        captured.terms = mine
        result.captured.append(captured)
    if objective.looks:
        _compare(result, loss, scale)
    return result


def _compare(result: Interpretation, loss: KnownLoss, scale: float) -> None:
    """Check whether the losses given by the user agree with what was seen."""
    for captured in result.captured:
        if captured.scale.total is None or len(captured.losses) != 1 or not captured.scale.unscale:
            continue
        (call,), k = captured.losses, len(result.captured) if result.times == 1 else 1
        said = float(call.value if call.said is None else call.said.total / call.said.divisor)
        seen = float(captured.scale.total * k / (captured.scale.unscale * scale) + captured.beside.loss)
        if math.isfinite(said) and not math.isclose(said, seen, rel_tol=2e-2, abs_tol=1e-6):
            who = "record_losses says" if call.recorded else f"loss_fn ({type(loss.module).__name__}) gave"
            result.notices["said"] = (
                f"{who} {said:.6g}, but what is differentiated is {seen:.6g}. The latter is stored, except for "
                "curvature, which is that of loss_fn alone."
            )


def _grouped(micros: Sequence[RecordedMicroBatch], parts: Sequence[LossPart]) -> list[RecordedMicroBatch]:
    """Group passes whose samples share losses; keep all others separate.

    Raises:
        RuntimeError: If samples of passes cannot be paired.
    """
    passes = [forward for micro in micros for forward in micro.passes]
    group = {forward: k for k, forward in enumerate(passes)}

    def join(together: Sequence[ForwardPass]) -> None:
        numbers = {group[forward] for forward in together}
        for forward in passes:
            if group[forward] in numbers:
                group[forward] = min(numbers)

    for micro in micros:
        if micro.is_one_batch or any(call.recorded for call in micro.losses):
            join(micro.passes)
    for part in parts:
        join(part.paired)
    result = []
    for number in dict.fromkeys(group.values()):
        mine = [forward for forward in passes if group[forward] == number]
        calls = [c for m in micros for c in m.losses if (c.of or m.passes[-1]) in mine]
        sizes = sorted({forward.batch_size for forward in mine})
        if len(sizes) > 1:
            raise RuntimeError(UNPAIRED.format(passes=len(mine), sizes=sizes))
        result.append(RecordedMicroBatch(mine, calls, len(mine) > 1))
    return result


def _terms_of(
    micro: RecordedMicroBatch, parts: Sequence[LossPart], scale: float, loss: KnownLoss, result: Interpretation
) -> list[Terms]:
    """Return what the objective consists of for the samples of a micro-batch."""
    forward = micro.passes[0]
    if not forward.batch_size:
        return []
    mine = [part for part in parts if any(each in part.passes for each in micro.passes)]
    found = [_terms(part, micro, scale, loss, result) for part in mine]
    told = next((call for call in micro.losses if call.recorded), None)
    if told is None and found:
        return found
    weight = float(forward.batch_size) if loss.weight is None else loss.weight
    if told is not None and (not found or any(each.individual is None for each in found)):
        return [_said(told, found, scale)]
    return found or [Terms("", 1 / weight, weight, 1.0, None, None, False)]


def _terms(part: LossPart, micro: RecordedMicroBatch, scale: float, loss: KnownLoss, result: Interpretation) -> Terms:
    assert part.gradient is not None
    reduction = part.reduction
    owner = next(forward for forward in micro.passes if forward in part.passes)
    gradient = part.coefficient  # what is waited for first was sent last: the rest has arrived by then
    values, divisor, pattern = reduction.terms.detach(), reduction.divisor, 0.0
    if not part.is_seen and loss.weight is not None:
        divisor = loss.weight
    if reduction.adds or part.at_terms is None:
        coefficient = gradient / divisor if divisor else math.inf
    else:
        coefficient, values, pattern, weights = _weighted(part, values)
        divisor = 1.0
    share = part.share(owner)
    is_sum = reduction.is_sum
    if reduction.weights is not None:
        factor, whole = reduction.weights.result().tolist()
        coefficient, values, is_sum = coefficient * factor, values / factor, not math.isclose(whole, 1.0, rel_tol=1e-5)
    elif reduction.is_product and part.at_terms is not None:
        is_sum = not math.isclose(weights, 1.0, rel_tol=1e-5)
    values = values.nan_to_num() if reduction.name.startswith("nan") else values
    sign = math.copysign(1.0, coefficient)
    coefficient = abs(coefficient) / scale
    own = math.nan if reduction.is_sum else coefficient * divisor * share if divisor else 0.0
    if not part.is_seen:
        result.notices["unseen"] = UNSEEN.format(reduction.name)
        return Terms(reduction.name, coefficient, divisor, own, None, None, False)
    individual = part.sums(owner, values)
    total = values.sum(dtype=torch.float64) if individual is None or share == 1.0 else individual.sum()
    total, individual = total * sign, None if individual is None else individual * sign
    terms = Terms(reduction.name, coefficient, divisor, own, total, individual, is_sum, pattern)
    if reduction.adds and coefficient:
        terms.part, terms.factor = part, part.coefficient / scale / coefficient
    return terms


def _learned(part: LossPart, micro: RecordedMicroBatch) -> list[Use]:
    """Return the individual gradients of parameters in the coefficient of a part."""
    owner = next((forward for forward in micro.passes if forward in part.passes), None)
    losses = None if owner is None else part.sums(owner, part.reduction.terms.detach())
    if losses is None:
        return []
    each = losses / part.reduction.divisor
    return [of_samples(name, torch.einsum("n,...->n...", each, v.double())) for name, v in part.learned.items()]


def _weighted(part: LossPart, values: Tensor) -> tuple[float, Tensor, float, float]:
    """Find one coefficient for terms that have different ones.

    Returns:
        The coefficient, the terms times what is left of theirs, its pattern, and the sum of the weights.
    """
    assert part.at_terms is not None and part.gradient is not None
    at_terms, flat = part.at_terms.double(), part.gradient.reshape(-1)
    size, places = at_terms.abs(), torch.arange(1, len(flat) + 1, device=flat.device)
    largest, some = size.max(), size > 0
    inside = [largest, size.where(some, largest).min(), size.sum() / some.sum(), at_terms.sum()]
    outside = [flat[0], flat.min(), flat.max(), (flat * places).sum() / flat.abs().sum()]
    told = Pending(torch.stack([*inside, *outside])).result().tolist()
    most, least, mean, whole, first, low, high, pattern = told
    if not most:
        return 1.0, values.double() * 0.0, 0.0, 0.0
    is_one = most - least <= 1e-6 * most
    if low == high and first and (part.reduction.is_product or not is_one):
        coefficient, pattern = first, 0.0
    else:
        coefficient, pattern = (math.copysign(most, whole), 0.0) if is_one else (mean, pattern)
    return coefficient, values.double() * at_terms / coefficient, pattern, whole / coefficient


def _said(call: LossCall, found: Sequence[Terms], scale: float) -> Terms:
    """Return the terms as given by the user, if they were not seen."""
    said = call.said
    assert said is not None
    if call.factor is not None and said.individual is not None:
        gradient = call.factor.double() / scale
        mean = call.arrived / len(gradient) / scale
        individual = said.individual * (gradient / mean)
        return Terms("record_losses", mean, 1.0, math.nan, individual.sum(), individual, True, weight=said.weight)
    own = found[0].own if found else 1.0
    if call.factor is not None:
        own = call.arrived / scale
    return Terms("record_losses", own / said.divisor, said.divisor, own, said.total, said.individual, False)


def _scales(
    split: Sequence[RecordedMicroBatch],
    terms: Sequence[Sequence[Terms]],
    scale: float,
    loss: KnownLoss,
    result: Interpretation,
    n_roots: int,
) -> list[Scale]:
    """Determine how each micro-batch weights its samples."""
    nothing = Scale(0.0, 0.0, 0.0, None, None)
    # A part without terms, e.g. if all tokens are ignored, makes its micro-batch one without weight.
    terms = [mine if all(each.divisor for each in mine) else [] for mine in terms]
    present = [(micro, mine) for micro, mine in zip(split, terms, strict=True) if mine]
    if result.coupled:
        sizes = [float(micro.passes[0].batch_size) for micro in split]
        return [Scale(size, 1.0, 1.0, None, None) if size else nothing for size in sizes]
    k = len(split)
    first = [max(mine, key=lambda each: each.coefficient) for _, mine in present]
    sums = bool(first) and all(each.is_sum for _, mine in present for each in mine)
    bare = sums and any(all(math.isclose(each.coefficient, one, rel_tol=1e-6) for each in first) for one in (1, 1 / k))
    is_one = alike([each.own for each in first]) or alike([each.coefficient for each in first])
    is_one &= len({tuple(each.name for each in mine) for _, mine in present}) < 2
    is_one &= n_roots >= k  # otherwise they are one objective
    undivided = k > 1 and not sums and is_one and all(math.isclose(each.own, 1.0, rel_tol=1e-3) for each in first)
    if undivided:
        result.notices["undivided"] = (
            f"the losses of {k} micro-batches were added up but not divided by {k}: the optimizer gets {k} times the "
            "gradient of the mean over samples, and the latter is what is stored."
        )
    base = next((each.coefficient for each in first if each.coefficient), 0.0)
    found, turn = [], iter(first)
    for micro, mine in zip(split, terms, strict=True):
        size = float(micro.passes[0].batch_size)
        if not mine:
            found.append(nothing)
            continue
        reference = next(turn)
        own = reference.coefficient if is_one else base
        if not own:
            zero = torch.zeros(int(size), dtype=torch.float64, device="cpu")
            found.append(Scale(size, 1.0, 0.0, zero, zero.sum()))
            continue
        weight = 1 / (own * (1 if undivided else k)) if math.isfinite(own) else size
        individual = _sum([(each.coefficient / own, each.individual) for each in mine])
        total = _sum([(each.coefficient / own, each.total) for each in mine])
        divisor = reference.divisor * reference.coefficient / own
        said = reference.weight if loss.weight is None else loss.weight
        of_sum = size if said is None else said
        found.append(Scale(weight, divisor, 1 / (own * scale), individual, total, of_sum))
    result.is_sum, result.times = bare, k if undivided else 1
    if first:
        result.own = first[0].own * (1 if undivided else k)
        result.coefficient = sum(each.coefficient for each in first) / k
        ratios = [_mix([each.coefficient for each in mine]) + sum(e.pattern for e in mine) for _, mine in present]
        result.mix = ratios[0] if alike(ratios) else math.inf
        if not is_one:
            result.mix += _mix([each.coefficient for each in first])
    return found


def _mix(coefficients: Sequence[float]) -> float:
    """Combine several ratios into one number."""
    base = next((each for each in coefficients if each), 1.0)
    return sum((k + 1) * each / base for k, each in enumerate(coefficients))


def alike(numbers: Sequence[float]) -> bool:
    """True if all numbers are equal up to rounding, ignoring NaN."""
    known = [each for each in numbers if not math.isnan(each)]
    return all(math.isclose(each, known[0], rel_tol=1e-3) for each in known)


def _sum(parts: Sequence[tuple[float, Tensor | None]]) -> Tensor | None:
    """Return the weighted sum, if all values are known."""
    known = [factor * each for factor, each in parts if each is not None]
    return sum(known[1:], known[0]) if len(known) == len(parts) else None


def _beside(objective: Objective, terms: Sequence[Sequence[Terms]], scale: float, result: Interpretation) -> Beside:
    """Return what the objective contains besides its terms: penalties and constants."""
    if not objective.roots or result.coupled:
        return Beside()
    penalties = [p for p in dict.fromkeys(p for root in objective.roots for p in root.penalties) if p.gradients]
    gradients: dict[str, Tensor] = {}
    for penalty in penalties:
        if penalty.coefficient is not None:
            for name, gradient in penalty.gradients.items():
                part = gradient.to_dense().double() * penalty.coefficient.double().mean()
                gradients[name] = gradients[name] + part if name in gradients else part
    if gradients:
        result.notices["penalty"] = (
            f"a part of the loss depends on no sample ({', '.join(sorted({p.name for p in penalties}))}): it counts in "
            "the gradient and the loss of every sample, with the same value."
        )
    return Beside(_rest(objective, terms, scale, bool(gradients)) / result.times, gradients, 1 / (scale * result.times))


def _left(objective: Objective, known: Sequence[Terms], scale: float) -> Tensor:
    """Return what is left of the objective without these terms."""
    roots = [root for root in objective.roots if root.parts or any(each.gradients for each in root.penalties)]
    nothing = objective.roots[0].value.new_zeros(())
    whole = torch.stack([nothing, *(root.value for root in roots)]).sum() / scale  # others belong to other models
    return whole - sum(each.coefficient * each.total for each in known if each.total is not None)


def _rest(objective: Objective, terms: Sequence[Sequence[Terms]], scale: float, is_penalized: bool) -> Tensor | float:
    everything = [each for mine in terms for each in mine]
    if any(each.total is None or not each.divisor for each in everything):
        return 0.0
    rest = _left(objective, everything, scale)
    if objective.looks:
        low = any(root.is_low for root in objective.roots)
        size = sum(root.value.abs() for root in objective.roots) / scale
        objective.has_constants = bool(rest.abs() > (2e-2 if low else 1e-4) * size)
    return rest if is_penalized or objective.has_constants else 0.0
