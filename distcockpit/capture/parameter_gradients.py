"""What autograd gives the parameters: by the chain rule, the sum of the individual gradients of this rank's samples.

It is captured by hooks on the parameters, before DDP averages it over ranks, and without what was in ``.grad`` before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from distcockpit.capture.signature import signature
from distcockpit.gradients.factors import rows_of
from distcockpit.replay.devices import products_round
from distcockpit.shards import local

Hook = Callable[[Tensor], Tensor | None]

ROUNDING = 1e-15
"""Relative error of a quotient of float64 numbers."""


class ParameterGradients:
    """The gradients that reach some parameters in a step, added up over backward calls.

    Args:
        parameters: The parameters, by name.
        checked: Those whose signatures are wanted.
        summed: Those whose sums are wanted.
        in_grad: Whether ``.grad`` may serve as the sum, which needs no copy: nobody averages it.
        keep_left: Whether to keep what is in ``.grad`` before.
        held: The same parameters as the optimizer knows them, if those are sharded.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        *,
        checked: Collection[str] = (),
        summed: Collection[str] = (),
        in_grad: bool = False,
        keep_left: bool = False,
        held: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._parameters, self._checked, self._summed, self._in_grad = parameters, checked, summed, in_grad
        self.paused = False
        self._held = parameters if held is None else held  # where .grad is
        self.left: dict[str, Tensor | None] = {}  # what was in .grad before the first gradient arrived
        if keep_left:
            grads = {name: p.grad for name, p in self._held.items()}
            self.left = {name: _copied(gradient) for name, gradient in grads.items()}
            self._before = {name: (g, 0 if g is None else local(g)._version) for name, g in grads.items()}
        self.signatures: dict[str, Tensor] = {}  # of the parameters that any gradient has reached
        self._arrived: set[str] = set()
        self._attached: dict[str, Tensor] = {}  # leaves in place of sharded parameters
        self._sums: dict[str, Tensor] = {}  # at least float32
        self._grads: dict[str, tuple[Tensor, int] | None] = {}  # where .grad is the sum: it, and its version
        self._lost: set[str] = set()  # of those, the ones that something else wrote to
        self.were_written = False  # whether one was asked for that something else wrote to

    @property
    def copies(self) -> Iterable[Tensor]:
        """The copies of gradients that it holds."""
        return (*self._sums.values(), *(g for g in self.left.values() if g is not None))

    def times(self, factor: float | Tensor, name: str, rows: slice) -> Tensor | None:
        """Return the gradient of some rows of a parameter times a factor; zero if none arrived, ``None`` if not known.

        A factor of zero gives exact zeros, even for elements that are not finite.
        """
        known = None if isinstance(factor, Tensor) else float(factor)
        if known == 0 or name in self._summed and name not in self._arrived:
            return torch.zeros_like(rows_of(self._parameters[name].detach(), rows))
        whole = self._sums.get(name) if name not in self._grads else self._untouched(name)
        self.were_written |= name in self._grads and whole is None
        if whole is None:
            return None
        gradient = rows_of(whole.detach(), rows)
        is_one = known is not None and abs(known - 1) < ROUNDING
        return gradient if is_one else gradient * factor

    def _untouched(self, name: str) -> Tensor | None:
        """Return ``.grad``; ``None`` if anything else was written to it, or if it was exchanged."""
        kept = self._grads[name]
        if (
            name in self._lost
            or kept is None
            or self._parameters[name].grad is not kept[0]
            or kept[0]._version != kept[1]
        ):
            return None
        return kept[0]

    def forget(self) -> None:
        """Release everything; nothing is asked for any more."""
        for each in (self.left, self.signatures, self._sums, self._grads):
            each.clear()

    def release(self, name: str) -> None:
        """Release the sum of a parameter, which is not needed any more."""
        self._sums.pop(name, None)
        self._grads.pop(name, None)

    def added(self, name: str, rows: slice) -> Tensor:
        """Return what the step added to some rows of ``.grad``, float64; if parameters are sharded, to rows of a piece.

        If no gradient arrived, ``.grad`` may have been zeroed, or another rank's gradient added; NaN if it may be
        either.
        """
        p, before = self._held[name], self.left.get(name)
        if p.grad is None or not self.left:
            return torch.zeros_like(rows_of(local(p), rows), dtype=torch.float64)
        now = rows_of(_dense(p.grad), rows).double()
        if before is None:
            return now
        before = rows_of(before, rows)
        if name in self._arrived:
            return now - before.double()
        then, version = self._before[name]
        if p.grad is not then:
            return now
        if local(p.grad)._version == version:
            return now - before.double()
        return now.where(before == 0, torch.nan)

    @property
    def is_rounded(self) -> bool:
        """True if autograd computes all of these gradients in less than float32 precision."""
        leaves = (*self._parameters.values(), *self._attached.values())
        if any(p.dtype not in (torch.float32, torch.float64) for p in leaves):
            return True
        return products_round()

    def watch(self, guarded: Callable[[Hook], Hook] = lambda hook: hook) -> list[Any]:
        """Register hooks on the parameters, which see a gradient before the user's own hooks change it.

        Args:
            guarded: Makes a fault in a hook harmless.

        Returns:
            The handles to remove them with.
        """
        handles = []
        for name, parameter in self._parameters.items():
            if not parameter.requires_grad or (name not in self._checked and name not in self._summed):
                continue
            own: Any = parameter
            others = own._backward_hooks or own._post_accumulate_grad_hooks
            is_exact = parameter.dtype in (torch.float32, torch.float64)
            in_grad = self._in_grad and name in self._summed and is_exact and not others
            if in_grad:
                handles.append(parameter.register_post_accumulate_grad_hook(_unsaved(guarded(self._accumulated(name)))))
            handles.append(first_hook(parameter, guarded(self._add(name, in_grad))))
        return handles

    def attach(self, name: str, leaf: Tensor, guarded: Callable[[Hook], Hook]) -> list[Any]:
        """Watch the leaf that stands for a sharded parameter in the forward pass; arguments as for `watch`."""
        is_wanted = name in self._checked or name in self._summed or bool(self.left)
        if self._attached.get(name) is leaf or not is_wanted:
            return []
        self._attached[name] = leaf
        return [first_hook(leaf, guarded(self._add(name, False)))]

    def _add(self, name: str, in_grad: bool) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor | None) -> None:
            if gradient is None or self.paused:
                return
            parameter, is_first = self._parameters[name], name not in self._arrived
            self._arrived.add(name)
            dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
            if is_first and self.left:
                self.left[name] = _copied(self._held[name].grad)
            if name in self._checked:
                sums = signature(dense)
                self.signatures[name] = self.signatures[name] + sums if name in self.signatures else sums
            if name not in self._summed:
                return
            if is_first and in_grad and parameter.grad is None and not gradient.is_sparse:
                self._grads[name] = None  # until it is accumulated
                return
            if name in self._grads:
                if self._untouched(name) is None:
                    self._lost.add(name)
                return
            kind, before = torch.promote_types(dense.dtype, torch.float32), self._sums.get(name)
            # A copy, because DDP averages the gradient in place.
            self._sums[name] = dense.to(kind, copy=True) if before is None else before + dense

        return hook

    def _accumulated(self, name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if name in self._grads and not self.paused and parameter.grad is not None:
                self._grads[name] = parameter.grad, parameter.grad._version

        return hook


def first_hook(parameter: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """Register a hook on a parameter that runs before all others, and return its handle."""
    handle = parameter.register_hook(_unsaved(hook))
    others: Any = parameter._backward_hooks  # ordered
    for key in [key for key in others if key != handle.id]:
        others[key] = others.pop(key)
    return handle


def _unsaved(hook: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Return the hook, marked so that torch.save need not warn of it."""

    def unsaved(tensor: Tensor) -> Any:
        return hook(tensor)

    unsaved.__torch_unserializable__ = True  # type: ignore[attr-defined]
    return unsaved


def _dense(gradient: Tensor) -> Tensor:
    """Return what this rank holds of a gradient, dense and detached."""
    return local(gradient).to_dense()


def _copied(gradient: Tensor | None) -> Tensor | None:
    """Return a dense copy."""
    return None if gradient is None else _dense(gradient).clone()
