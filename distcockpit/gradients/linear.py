"""Linear layers: individual gradients are sums of outer products of output gradients and inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from distcockpit.gradients import kernels
from distcockpit.gradients.factors import Factors
from distcockpit.gradients.uses import Blocks, Use, UseRule


class LinearRule(UseRule):
    """``y = x W^T + b``, on ``[N, in]`` or with further axes, ``[N, *, in]``, which are summed over.

    Args:
        transposed: Whether the layer is ``y = x W + b``, as in `torch.addmm` and `torch.matmul`.
    """

    def __init__(self, *, transposed: bool = False) -> None:
        self._transposed = transposed

    def factors(self, use: Use) -> dict[str, Factors]:
        """``sum_t delta_it x_it^T``."""
        delta, x = self._sequences(use)
        if self._transposed:
            delta, x = x, delta
        return {"weight": Factors(delta, lambda samples: x[samples], x.shape[2])}

    def blocks(self, use: Use, names: Sequence[str], values: Mapping[str, Tensor]) -> Blocks:
        """``sum_t delta_it x_it^T`` and ``sum_t delta_it``."""
        delta, _ = self._sequences(use)
        weight = self.factors(use)["weight"] if "weight" in names else None

        def block(samples: slice) -> dict[str, Tensor]:
            d = delta[samples]
            found = {} if weight is None else {"weight": weight.products(samples)}
            return found | ({"bias": d[:, 0] if d.shape[1] == 1 else d.sum(1)} if "bias" in names else {})

        return block

    def jvp(self, use: Use, direction: Mapping[str, Tensor]) -> Tensor:
        """``sum_t <delta_it, V x_it + v>``; with one ``t``, in the precision of the direction."""
        delta, x = self._sequences(use)
        one = delta.shape[1] == 1
        kind = torch.promote_types(next(iter(direction.values())).dtype, delta.dtype) if one else delta.dtype
        delta, x = delta.to(kind), x.to(kind).flatten(0, 1)
        v = {name: tensor.to(kind) for name, tensor in direction.items()}
        if "weight" not in v:
            output = v["bias"].expand_as(delta)
        else:
            weight = v["weight"] if self._transposed else v["weight"].T
            output = torch.addmm(v["bias"], x, weight) if "bias" in v else x @ weight
        return kernels.inner_rows(output.reshape(len(delta), -1), delta.flatten(1))

    def _sequences(self, use: Use) -> tuple[Tensor, Tensor]:
        if "sequences" in use.found:
            return use.found["sequences"]
        delta, x = use.delta, use.input
        if delta.dim() > 2 or x.dtype != delta.dtype:  # these may be copies, which should not be kept
            delta, x = (t if t.dim() > 2 else t.unsqueeze(1) for t in (delta, x.to(delta.dtype)))
            return delta.flatten(1, -2), x.flatten(1, -2)
        use.found["sequences"] = delta.unsqueeze(1), x.unsqueeze(1)
        return use.found["sequences"]
