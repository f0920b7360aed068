"""What autograd gives the parameters: by the chain rule, the sum of the individual gradients of this rank's samples.

It is captured by hooks on the parameters, before DDP averages it over ranks, and without what was in ``.grad`` before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

ROUNDING = 1e-15
"""Relative error of a quotient of float64 numbers."""


class ParameterGradients:
    """The gradients that reach some parameters in a step, accumulated over backward calls.

    Args:
        parameters: By name, in the order of ``flat``.
        keep_left: Whether to keep what is in ``.grad`` before.
    """

    def __init__(self, parameters: Mapping[str, Tensor], keep_left: bool = False) -> None:
        self._parameters = parameters
        self.paused = False
        self.left: dict[str, Tensor | None] = {}  # what was in .grad before the first gradient arrived
        if keep_left:
            self.left = {name: _copied(p.grad) for name, p in parameters.items()}
            self._held = {name: p.grad for name, p in parameters.items()}
            self._versions = {name: 0 if p.grad is None else p.grad._version for name, p in parameters.items()}
        self.gradients: dict[str, Tensor] = {}  # of the parameters that any gradient has reached, at least float32

    def times(self, factor: float | Tensor, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the gradients of these parameters times a factor, by name; zero if none arrived.

        A factor of zero gives exact zeros, even for elements that are not finite.
        """
        known = None if isinstance(factor, Tensor) else float(factor)

        def scaled(name: str, parameter: Tensor) -> Tensor:
            if name not in self.gradients or known == 0:
                return torch.zeros_like(parameter)
            gradient = self.gradients[name]
            is_one = known is not None and abs(known - 1) < ROUNDING
            return gradient if is_one else gradient * factor  # allocating memory costs more than the product

        return {name: scaled(name, self._parameters[name]) for name in names}

    def added(self, name: str) -> Tensor:
        """Return what the step added to ``.grad``, float64, in the shape of the parameter.

        If no gradient arrived, ``.grad`` may have been zeroed, or another rank's gradient added; NaN if it may be
        either.
        """
        p, before = self._parameters[name], self.left[name]
        if p.grad is None:
            return torch.zeros_like(p, dtype=torch.float64)
        now = p.grad.detach().to_dense().double()
        if before is None:
            return now
        if name in self.gradients:
            return now - before.double()
        if p.grad is not self._held[name]:
            return now
        if p.grad._version == self._versions[name]:
            return now - before.double()
        return now.where(before == 0, torch.nan)

    @property
    def is_rounded(self) -> bool:
        """True if autograd computes these gradients in less than float32 precision."""
        if any(p.dtype not in (torch.float32, torch.float64) for p in self._parameters.values()):
            return True
        device = next(iter(self._parameters.values())).device.type
        try:
            convolutions = device == "cuda" and torch.backends.cudnn.allow_tf32
            return torch.get_float32_matmul_precision() != "highest" or convolutions
        except RuntimeError:  # set separately for each backend, which these do not report
            return True

    def watch(self) -> list[Any]:
        """Register hooks on the parameters, which see a gradient before the user's own hooks change it.

        Returns:
            The handles to remove them with.
        """
        handles = []
        for name, parameter in self._parameters.items():
            handles.append(parameter.register_hook(self._add(name)))
            others: Any = parameter._backward_hooks  # ordered
            if len(others) > 1:
                for key in [key for key in others if key != handles[-1].id]:
                    others[key] = others.pop(key)
        return handles

    def _add(self, name: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor | None) -> None:
            if gradient is None or self.paused:
                return
            dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
            kind, before = torch.promote_types(dense.dtype, torch.float32), self.gradients.get(name)
            if before is None and self.left:
                self.left[name] = _copied(self._parameters[name].grad)
            # A copy, because DDP averages the gradient in place.
            self.gradients[name] = dense.to(kind, copy=True) if before is None else before + dense

        hook.__torch_unserializable__ = True  # type: ignore[attr-defined]  # torch.save need not warn of it
        return hook


def _copied(gradient: Tensor | None) -> Tensor | None:
    """Return a dense copy."""
    return None if gradient is None else gradient.detach().to_dense().clone()
