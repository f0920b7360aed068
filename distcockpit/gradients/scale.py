"""Scaling and shifting, also after a normalisation: ``y = w n(x) + b``, with w and b broadcast."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from distcockpit.gradients.uses import Axis, Blocks, Use, UseRule, place


@dataclass(frozen=True)
class ScaleRule(UseRule):
    """``sum_t delta_it n(x)_it`` and ``sum_t delta_it``, over everything that w and b are broadcast over.

    Args:
        shape: Shape of w and b, on the last axes of the output.
        normalise: n, with samples on the first axis; ``None`` is the identity.
        sign: Sign of b.
        whole: Whether n needs the axes unchanged.
    """

    shape: tuple[int, ...]
    normalise: Callable[[Tensor], Tensor] | None = None
    sign: float = 1
    whole: bool = False

    def takes(self, axis: Axis, n_axes: int) -> bool:
        """True if the batch axis comes before those of the parameters."""
        if axis is None or (self.whole and axis != 0):
            return False
        return place(axis) + len(self.shape) < n_axes

    def blocks(self, use: Use, names: Sequence[str], values: Mapping[str, Tensor]) -> Blocks:
        """Sums over all axes that the parameters do not have."""
        delta, x = use.delta, use.input

        def weight(samples: slice) -> Tensor:
            d = delta[samples]
            scaled = x[samples].to(d.dtype)
            return self._summed(d * (scaled if self.normalise is None else self.normalise(scaled)))

        def bias(samples: slice) -> Tensor:
            summed = self._summed(delta[samples])
            return summed if self.sign == 1 else self.sign * summed

        formulas = {"weight": weight, "bias": bias}
        return lambda samples: {name: formulas[name](samples) for name in names}

    def elements_per_sample(self, use: Use) -> int:
        """The normalised input, and its product with the output gradient."""
        return 2 * use.delta[:1].numel()

    def _summed(self, values: Tensor) -> Tensor:
        between = values.dim() - 1 - len(self.shape)
        return values.sum_to_size(len(values), *[1] * between, *self.shape).reshape(len(values), *self.shape)
