"""Losses whose parts have divisors that differ between ranks in different ways, such as tokens and samples.

One process with the whole batch divides each part by its own number: ``l_i = N sum_k T_ik / W_k``, with ``T_ik`` the
sum of sample i's terms in part k, and ``W_k`` the sum of ``1 / (K c_k)`` over ranks and their K micro-batches. Autograd
adds up the parts with the divisors of one rank. So each part is differentiated separately, back to the outputs of calls
with parameters, and the ranks exchange the divisors of each part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from distcockpit.gradients.uses import Use
from distcockpit.losses.captured import CapturedMicroBatch
from distcockpit.losses.interpretation import Terms
from distcockpit.losses.objective import Root
from distcockpit.world import World


class OutputsOfCalls:
    """Where calls with parameters end in the autograd graph, until it is differentiated."""

    def __init__(self) -> None:
        self._kept: list[tuple[GradientEdge, Callable[[Tensor], None], Use]] = []

    def keep(self, output: Tensor, receive: Callable[[Tensor], None], use: Use) -> None:
        """Keep the output of a call; ``receive`` passes its gradients to the use."""
        self._kept.append((get_gradient_edge(output), receive, use))

    def differentiate(self, root: Root) -> None:
        """Pass the gradients of each part of a loss to the calls, one part at a time."""
        edges = [edge for edge, _, _ in self._kept]
        try:
            for part in root.parts:
                at = GradientEdge(*cast(Any, part.edge))
                found = torch.autograd.grad(cast(Any, at), cast(Any, edges), None, True, allow_unused=True)
                for (_, receive, use), gradient in zip(self._kept, found, strict=True):
                    if gradient is not None:
                        use.receive_of_part(part, gradient, receive)
        except RuntimeError:  # e.g. checkpointing with use_reentrant=True: the parts stay unknown
            for _, _, use in self._kept:
                use.by_part.clear()

    def clear(self) -> None:
        """Release the graph."""
        self._kept.clear()


def unmix(captured: Sequence[CapturedMicroBatch], times: int, weight: float, world: World) -> bool:
    """Give each part of the loss the divisor that one process would use; all ranks call it.

    Args:
        captured: The micro-batches of this rank.
        times: The factor by which the summed losses of this rank are too large.
        weight: W.
        world: The ranks.

    Returns:
        Whether that is possible on all ranks.
    """
    k = len(captured) if times == 1 else 1
    present = [micro for micro in captured if micro.weight]
    known = all(map(_is_known, present))
    told = world.all_gather_object(
        [[(t.name, 1 / (k * t.coefficient)) for t in m.terms] for m in present] if known else None
    )
    parts = [each for mine in told for each in mine or ()]
    names = {tuple(name for name, _ in each) for each in parts}
    if any(mine is None for mine in told) or len(names) != 1:
        return False
    divisors = [sum(of_part) for of_part in zip(*([w for _, w in each] for each in parts), strict=True)]
    for micro in present:
        _divide(micro, [weight / divisor for divisor in divisors])
    return True


def _is_known(micro: CapturedMicroBatch) -> bool:
    """True if the gradients of each part are known separately, for all calls."""
    terms: Sequence[Terms] = micro.terms
    if not terms or any(t.part is None or t.individual is None or not math.isfinite(1 / t.coefficient) for t in terms):
        return False
    reached = {t.part for t in terms}
    return all(use.by_part and use.by_part.keys() <= reached for use in micro.uses)


def _divide(micro: CapturedMicroBatch, ratios: Sequence[float]) -> None:
    """Add up the parts again, with new divisors."""
    for use in micro.uses:
        gradients: dict[int, Tensor] = {}
        for terms, ratio in zip(micro.terms, ratios, strict=True):
            for position, gradient in use.by_part.get(terms.part, {}).items():
                part = gradient * (terms.factor * ratio / micro.scale.unscale)
                gradients[position] = gradients[position] + part if position in gradients else part
        use.have(gradients)
    individual = sum(terms.individual * ratio for terms, ratio in zip(micro.terms, ratios, strict=True))
    micro.scale = replace(micro.scale, individual=individual, total=individual.sum())
