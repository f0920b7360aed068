"""Whether a variance may be taken from sums that were rounded to float32: autograd's G, and norms from Gram matrices.

``V = S2 - N |G|^2`` is a difference. Sums in float64 over the very gradients that were squared lose nothing in it, and
cost as much as the products of the backward pass once more. Where V is not small against S2, what autograd has summed
up in float32 does as well. How much rounding may be in it is bounded as in Higham and Mary 2019, "A new approach to
probabilistic rounding error analysis", SIAM J. Sci. Comput. 41, for errors that are independent: a sum of K products is
wrong by ``u sqrt(K)`` times the root of the sum of their squares, with u the unit roundoff. The squares of all products
of a linear layer on sequences add up to ``D = sum_it |delta_it|^2 |x_it|^2``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distcockpit import kernels
from distcockpit.gradients.uses import MicroBatch, Use

TOLERANCE = 1e-4
"""The largest part of V that may be rounding, by the bound. Measured errors are some hundred times below the bound."""


@dataclass(frozen=True)
class Rounding:
    """What bounds the rounding of the sums over one rank's individual gradients of a parameter.

    Args:
        spread: D.
        underflow: A bound on what Gram matrices in float32 lose where their elements are too small for it.
        terms: K, of how many products autograd's sums are.
        length: The longest sum within an individual gradient, or between two rows of a factor.
        unit: u.
    """

    spread: Tensor
    underflow: Tensor
    terms: int
    length: int
    unit: float

    def pooled(self, squares: Tensor) -> Tensor:
        """What ranks add up: S2, a bound on its error, and the square of one on that of ``N |G|``; float64 ``[3]``."""
        error = 3 * self.unit * self.length**0.5 * (self.spread + squares) + self.underflow
        return torch.stack([squares, error, self.unit**2 * self.terms * self.spread])


def roundings(batches: Sequence[MicroBatch], names: Sequence[str]) -> dict[str, Rounding]:
    """Of the parameters whose individual gradients are sums over sequences, and nothing else; by name."""
    uses: dict[str, list[tuple[Use, str]]] = defaultdict(list)
    for batch in batches:
        for use in batch.uses:
            for local, name in use.layer.parameters.items():
                uses[name].append((use, local))
    found = {}
    for name in names:
        factors = [use.rule.factors(use).get(local) for use, local in uses[name]]
        if len(factors) != 1 or factors[0] is None or factors[0].sizes[0] == 1:
            continue
        delta, x = (factor.flatten(0, 1) for factor in factors[0].of(slice(0, None)))
        t, o, i = factors[0].sizes
        squares_of_delta, squares_of_x = kernels.inner_rows(delta, delta), kernels.inner_rows(x, x)
        kind = torch.finfo(delta.dtype)
        underflow = kind.tiny * t * (o * squares_of_x.sum() + i * squares_of_delta.sum())
        found[name] = Rounding(squares_of_delta @ squares_of_x, underflow, len(delta), max(t, o, i), kind.eps / 2)
    return found


def doubtful(names: Sequence[str], pooled: Tensor, mean_squared: Tensor, n: int) -> list[str]:
    """The parameters of which V may hold more rounding than is tolerated; on all ranks the same.

    Args:
        names: Of the parameters.
        pooled: What `Rounding.pooled` gave, added over ranks, float64 ``[parameters, 3]``; zero where sums are exact.
        mean_squared: ``|G|^2``, float64 ``[parameters]``.
        n: N.
    """
    squares, error, of_sum = pooled.unbind(1)
    bound = error + 2 * (mean_squared * of_sum).sqrt()
    # What is not finite may have overflowed in float32 only.
    is_certain = (bound <= TOLERANCE * (squares - n * mean_squared)) & bound.isfinite()
    is_rounded = (error != 0) | (of_sum != 0)
    return [names[k] for k in (is_rounded & ~is_certain).nonzero().flatten().tolist()]
