"""Which sample each term of a loss depends on, determined in the autograd graph."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distcockpit.gradients.uses import Axis, Folded, from_front, to_front
from distcockpit.losses.captured import ForwardPass
from distcockpit.losses.rerun import without_hooks
from distcockpit.replay.silence import on_host, parts_of, reaches
from distcockpit.replay.trees import tensors

SEPARATE = 1e-5  # relative to the largest gradient: what rounding may leave at the outputs of other samples


@dataclass(frozen=True)
class Owners:
    """Which samples the terms belong to.

    Args:
        of: By pass: the batch axis of the terms, or the sample of each flattened term, -1 for none of that pass;
            ``None`` if unknown.
    """

    of: Mapping[ForwardPass, Axis | Tensor]

    def sums(self, forward: ForwardPass, terms: Tensor) -> Tensor | None:
        """Sum the terms by sample, float64 ``[B]``; ``None`` if it is unknown which sample each belongs to."""
        owner = self.of[forward]
        if owner is None:
            return None
        if isinstance(owner, Tensor):
            owned = self._owned
            if owned is not None and bool((terms.reshape(-1)[~owned] != 0).any()):
                return None  # no gradient went through this term: which sample does it belong to?
            total = torch.zeros(forward.batch_size + 1, dtype=torch.float64, device=terms.device)
            return total.index_add_(0, owner % len(total), terms.reshape(-1).double())[:-1]
        return to_front(terms, owner).reshape(forward.batch_size, -1).sum(1, dtype=torch.float64)

    def share(self, forward: ForwardPass) -> float:
        """Return the share of the terms that belongs to a pass."""
        owner, owned = self.of[forward], self._owned
        if owned is None or not isinstance(owner, Tensor) or len(self.of) == 1:
            return 1.0
        return float((owner >= 0).double().sum() / owned.double().sum().clamp(min=1))

    @property
    def _owned(self) -> Tensor | None:
        """Which terms belong to any sample, if each term has an owner of its own."""
        maps = [owner >= 0 for owner in self.of.values() if isinstance(owner, Tensor)]
        return torch.stack(maps).any(0) if maps and len(maps) == len(self.of) else None


class CoupledError(Exception):
    """A term depends on several samples."""


def owners_of(terms: Tensor, passes: Sequence[ForwardPass], known: Axis = None) -> Owners:
    """Determine which samples the terms belong to; no pass if they depend on no output.

    Args:
        terms: Any shape, with their graph, which is not modified.
        passes: The passes whose outputs they may depend on.
        known: The batch axis of the terms, as found before.

    Raises:
        CoupledError: If a term depends on several samples.
    """
    outputs = [
        (forward, _axis(forward, k, t), t)
        for forward in passes
        for k, t in enumerate(tensors(forward.output))
        if t.requires_grad
    ]
    with without_hooks([t for _, _, t in outputs]):
        return _owners_of(terms, outputs, known)


def _owners_of(terms: Tensor, outputs: list[tuple[ForwardPass, Axis, Tensor]], known: Axis) -> Owners:
    reached = _gradients(terms, [t for _, _, t in outputs], torch.ones_like(terms))
    outputs = [each for each, gradient in zip(outputs, reached, strict=True) if gradient is not None]
    places = [(f, k) for f, _, t in outputs for k, each in enumerate(tensors(f.output)) if each is t]
    mine = list(dict.fromkeys(forward for forward, _, _ in outputs))
    sizes = {forward.batch_size for forward in mine}
    if sizes <= {0, 1}:
        of = torch.zeros(terms.numel(), dtype=torch.int64, device=terms.device)
        return Owners({forward: of if forward.batch_size else of - 1 for forward in mine})
    if any(axis is None for _, axis, _ in outputs):
        return Owners(dict.fromkeys(mine))
    try:
        return _told_apart(terms, outputs, mine, known)
    except CoupledError:
        if all(forward.axes[k] is not None for forward, k in places):
            raise
        return Owners(dict.fromkeys(mine))  # the batch axis of the outputs was only a guess


def _told_apart(
    terms: Tensor,
    outputs: Sequence[tuple[ForwardPass, Axis, Tensor]],
    mine: Sequence[ForwardPass],
    known: Axis,
) -> Owners:
    sizes = {forward.batch_size for forward in mine}
    if not mine:
        return Owners({})
    candidates: list[Axis] = []
    if len(sizes) == 1:
        candidates = [known] if known is not None and _fits(terms.shape, known, *sizes) else []
        candidates += [axis for axis in _candidates(terms.shape, *sizes) if axis != known]
    if len(mine) == 1:
        for axis in candidates:
            if _belong(terms, axis, outputs):
                return Owners(dict.fromkeys(mine, axis))
    found = _found(terms, outputs, mine)
    for axis in candidates:
        numbers = _numbers(terms, axis, *sizes)
        if all(torch.equal(of.where(of >= 0, numbers), numbers) and bool((of >= 0).any()) for of in found.values()):
            owners = torch.stack([of >= 0 for of in found.values()]).sum(0)
            if len(mine) == 1 or bool((owners != 1).all()):
                return Owners(dict.fromkeys(mine, axis))
    return Owners(found)


def _numbers(terms: Tensor, axis: Axis, n: int) -> Tensor:
    """Return the sample of each flattened term, if the batch is on this axis."""
    rows = to_front(torch.zeros(terms.shape, dtype=torch.int64, device=terms.device), axis).clone()
    rows += torch.arange(n, device=terms.device).view(-1, *[1] * (rows.dim() - 1))
    return from_front(rows, axis).reshape(-1)


def _axis(forward: ForwardPass, position: int, output: Tensor) -> Axis:
    """Return the batch axis of an output; at the first step it may be a guess."""
    axis, size = forward.axes[position], forward.batch_size
    return list(output.shape).index(size) if axis is None and list(output.shape).count(size) == 1 else axis


def _gradients(terms: Tensor, outputs: Sequence[Tensor], weights: Tensor, **options: bool) -> Sequence[Tensor | None]:
    if not outputs or not terms.requires_grad:
        return [None for _ in outputs]
    return torch.autograd.grad(terms, outputs, weights, retain_graph=True, allow_unused=True, **options)


def _candidates(shape: torch.Size, n: int) -> Iterator[Axis]:
    """Yield the axes that may hold the batch, alone or merged with others."""
    yield from (k for k, size in enumerate(shape) if size == n)
    for k, size in enumerate(shape):
        if size > n and size % n == 0:
            yield Folded(k, 1, size // n)
            yield Folded(k, size // n, 1)


def fits(terms: Tensor, axis: Axis, forward: ForwardPass) -> bool:
    """True if this axis of the terms may hold the batch of a pass."""
    return _fits(terms.shape, axis, forward.batch_size)


def _fits(shape: torch.Size, axis: Axis, n: int) -> bool:
    if isinstance(axis, Folded):
        return len(shape) > axis.axis and shape[axis.axis] == axis.outer * n * axis.inner
    return axis is not None and len(shape) > axis and shape[axis] == n


def _belong(terms: Tensor, axis: Axis, outputs: Sequence[tuple[ForwardPass, Axis, Tensor]]) -> bool:
    """True if the terms of some samples do not affect the outputs of the others."""
    looked = []
    for loud in parts_of(outputs[0][0].batch_size, terms.device):
        weights = to_front(torch.zeros_like(terms), axis).clone()
        weights[loud] = 1
        found = _gradients(terms, [t for _, _, t in outputs], from_front(weights, axis).reshape(terms.shape))
        for (_, at, _), gradient in zip(outputs, found, strict=True):
            if gradient is not None:
                looked.append(reaches(~loud.to(gradient.device), to_front(gradient.detach(), at)))
    return not any(on_host(looked))


def _found(
    terms: Tensor, outputs: Sequence[tuple[ForwardPass, Axis, Tensor]], passes: Sequence[ForwardPass]
) -> dict[ForwardPass, Tensor]:
    """Determine the sample of each term, by pass: digit by digit, from how a term changes when some samples change.

    Raises:
        CoupledError: If a term depends on several samples, or it cannot be determined.
    """
    generator = torch.Generator().manual_seed(len(passes))
    ones = torch.ones_like(terms).requires_grad_()
    try:
        with torch.enable_grad():
            found = _gradients(terms, [t for _, _, t in outputs], ones, create_graph=True)
            result = {forward: torch.zeros(terms.numel(), dtype=torch.int64, device="cpu") for forward in passes}
            for forward in passes:
                rows = torch.arange(forward.batch_size, device="cpu")
                moved = []
                for (of, axis, _), gradient in zip(outputs, found, strict=True):
                    if of is forward and gradient is not None:
                        at = to_front(gradient, axis)
                        moved.append(at * torch.rand(at.shape, generator=generator, device="cpu").add(0.5).to(at))
                reached = torch.zeros(terms.numel(), dtype=torch.bool, device="cpu")
                for digit in range(max(1, math.ceil(math.log2(forward.batch_size)))):
                    sides = []
                    for side in (0, 1):
                        chosen = rows[(rows >> digit) % 2 == side]
                        total = sum((at[chosen.to(at.device)].sum() for at in moved), terms.new_zeros(()))
                        (change,) = torch.autograd.grad(total, ones, retain_graph=True, materialize_grads=True)
                        sides.append(change.detach().reshape(-1).abs().nan_to_num(nan=0.0).cpu())
                    if bool((torch.minimum(*sides) > SEPARATE * torch.maximum(*sides)).any()):
                        raise CoupledError
                    result[forward] += (sides[1] > sides[0]).long() << digit
                    reached |= torch.maximum(*sides) > 0
                result[forward][~reached] = -1
                result[forward] = result[forward].to(terms.device)
    except RuntimeError as error:  # a function without a second derivative
        raise CoupledError from error
    return result
