"""Diagonal curvature from BackPACK's second-order extensions, in a replay of the step.

The replay uses the unscaled loss, since ``diag_h`` mixes a term that carries a factor on the loss with one that does
not, and leaves the user's own forward and backward pass as they are. The extensions are put on for the replay and
taken off again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from backpack import backpack, extend, extensions
from backpack.context import CTX
from torch import Tensor, nn

from distcockpit.captured import Captured
from distcockpit.replay import replayed_loss
from distcockpit.rng import set_seed

KINDS = ("diag_h", "diag_ggn_exact", "diag_ggn_mc")


@dataclass(frozen=True)
class Curvature:
    """Which diagonal: of the Hessian, of the GGN, or of a Monte-Carlo estimate of the GGN.

    Args:
        kind: One of ``KINDS``.
        mc_samples: Draws per sample for ``diag_ggn_mc``.
        seed: Base of the seeds of these draws, which differ per step, rank and micro-batch.
    """

    kind: str = "diag_h"
    mc_samples: int = 1
    seed: int = 0

    def extension(self) -> extensions.backprop_extension.BackpropExtension:
        """BackPACK's extension."""
        if self.kind == "diag_h":
            return extensions.DiagHessian()
        if self.kind == "diag_ggn_exact":
            return extensions.DiagGGNExact()
        return extensions.DiagGGNMC(mc_samples=self.mc_samples)


def check_support(quantity: str, curvature: Curvature, model: nn.Module, loss_fn: nn.Module | None) -> None:
    """Refuse early what BackPACK cannot serve.

    Raises:
        ValueError: Names the loss or the layer, and what to do.
    """
    supported = curvature.extension()._BackpropExtension__module_extensions
    what, way_out = f"quantity '{quantity}' (curvature={curvature.kind!r})", "Leave quantities with curvature out."
    if type(loss_fn) not in supported:
        losses = [kind.__name__ for kind in supported if issubclass(kind, nn.modules.loss._Loss)]
        raise ValueError(
            f"{what} needs loss_fn to be one of {losses}, not "
            f"{'None' if loss_fn is None else type(loss_fn).__name__}. {way_out}"
        )
    for option in ("weight", "pos_weight"):
        if getattr(loss_fn, option, None) is not None:
            raise ValueError(
                f"{what} does not support {type(loss_fn).__name__}({option}=...): BackPACK "
                f"has no second derivative for it. Use a loss without {option}. {way_out}"
            )
    ignored = getattr(loss_fn, "ignore_index", -100)
    if ignored != -100:
        raise ValueError(
            f"{what} does not support {type(loss_fn).__name__}(ignore_index="
            f"{ignored}): BackPACK has no second derivative for it. {way_out}"
        )
    owner: dict[nn.Parameter, str] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            shared = parameter in owner
            if parameter.requires_grad and (shared or any(module.children())):
                why = f"is shared with layer '{owner[parameter]}'" if shared else "belongs to a module with children"
                raise ValueError(
                    f"{what} does not support parameter '{path}.{name}': it {why}, and BackPACK "
                    f"needs each parameter in one leaf module. {way_out}"
                )
            owner[parameter] = path
    for path, module in _leaves(model):
        if getattr(module, "padding_mode", "zeros") != "zeros" or isinstance(getattr(module, "padding", 0), str):
            raise ValueError(
                f"{what} does not support layer '{path}' ({type(module).__name__}) with padding={module.padding!r}, "
                f"padding_mode={getattr(module, 'padding_mode', None)!r}: BackPACK pads with zeros, by numbers. Use "
                f"such a padding. {way_out}"
            )
        if type(module) not in supported:
            raise ValueError(
                f"{what} does not support layer '{path}' ({type(module).__name__}). Use "
                f"another curvature of {list(KINDS)}, or another layer. {way_out}"
            )


def diagonal(
    curvature: Curvature,
    model: nn.Module,
    loss_fn: nn.Module,
    captured: Sequence[Captured],
    seeds: Sequence[int],
) -> dict[str, Tensor]:
    """Sum over micro-batches of the diagonal curvature of ``sum_i l_i`` (the loss times what it divided by).

    Args:
        curvature: Which diagonal.
        model: The bare module.
        loss_fn: The loss module.
        captured: The micro-batches.
        seeds: One seed per micro-batch.

    Returns:
        float64 tensors of the parameters' shapes, by name; parameters that the loss does not depend on are zero.

    Raises:
        RuntimeError: If BackPACK cannot serve the model.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in trainable.items()}
    for micro, seed in zip(captured, seeds, strict=True):
        if not micro.weight:
            continue
        extension = curvature.extension()
        try:
            _differentiate(extension, model, loss_fn, micro, seed, list(trainable.values()))
        except Exception as error:
            _take(extension.savefield, trainable)
            raise RuntimeError(
                f"curvature={curvature.kind!r} could not be computed for {type(model).__name__}: {error} BackPACK "
                "needs a model that is a chain of modules it knows. Leave quantities with curvature out."
            ) from error
        for name, result in _take(extension.savefield, trainable).items():
            total[name] += result.double() * micro.scale.divisor
    return total


def _take(savefield: str, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """What BackPACK left on the parameters, taken off them."""
    return {name: p.__dict__.pop(savefield) for name, p in parameters.items() if savefield in p.__dict__}


def _differentiate(
    extension: extensions.backprop_extension.BackpropExtension,
    model: nn.Module,
    loss_fn: nn.Module,
    micro: Captured,
    seed: int,
    parameters: Sequence[nn.Parameter],
) -> None:
    """Replay a micro-batch under an extension, which leaves its result on the parameters."""
    _check_targets(loss_fn, micro)
    with _extended(model, loss_fn) as chain, replayed_loss(model, loss_fn, micro) as (loss, _):
        chain.check()
        set_seed(parameters[0].device, seed)
        with backpack(extension), warnings.catch_warnings():
            # The first layer's input needs no gradient, and BackPACK's hook there needs none of it.
            warnings.filterwarnings("ignore", message="Full backward hook is firing", category=UserWarning)
            torch.autograd.grad(loss, parameters, allow_unused=True)


def _check_targets(loss_fn: nn.Module, micro: Captured) -> None:
    """BackPACK's Hessian of the cross-entropy takes every target as one that counts, with probabilities of sum 1.

    Raises:
        RuntimeError: If the targets are others.
    """
    if not isinstance(loss_fn, nn.CrossEntropyLoss):
        return
    for call in micro.losses:
        target = call.args[1] if len(call.args) > 1 else call.kwargs["target"]
        if not target.is_floating_point() and bool((target == loss_fn.ignore_index).any()):
            raise RuntimeError(f"Targets hold ignore_index={loss_fn.ignore_index}, for which BackPACK is wrong.")
        if target.is_floating_point() and not torch.allclose(target.sum(1), target.new_ones(()), atol=1e-3):
            raise RuntimeError("Target probabilities do not add up to 1, for which BackPACK is wrong.")


class _Chain:
    """Sees that each leaf module takes exactly what the one before it returned.

    BackPACK finds the module that produced a tensor by the tensor's address. An operation in between that works in
    place or makes a view would be skipped silently; so shapes, strides and versions must agree as well.
    """

    def __init__(self) -> None:
        self._last: tuple[object, ...] | None = None
        self._last_path = "the model's input"
        self._broken: str | None = None
        self._called: set[str] = set()

    @staticmethod
    def _print(tensor: object) -> tuple[object, ...] | None:
        if not isinstance(tensor, Tensor):
            return None
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor._version

    def before(self, path: str, args: tuple[object, ...]) -> None:
        """A leaf module begins."""
        if path in self._called:
            self._broken = self._broken or f"in the second call of '{path}'"
        self._called.add(path)
        if self._last is not None and (len(args) != 1 or self._print(args[0]) != self._last):
            self._broken = self._broken or f"between '{self._last_path}' and '{path}'"

    def after(self, path: str, output: object) -> None:
        """A leaf module ends."""
        self._last, self._last_path = self._print(output), path

    def check(self) -> None:
        """Raise if the model is not a chain of its leaf modules.

        Raises:
            RuntimeError: Names the place.
        """
        if self._broken:
            raise RuntimeError(
                f"Something happens {self._broken}: a functional call (write it as a module: nn.ReLU, nn.Flatten), a "
                "branch, or a second use of a layer."
            )


@contextmanager
def _extended(model: nn.Module, loss_fn: nn.Module) -> Generator[_Chain, None, None]:
    """BackPACK's hooks, and ours that check the chain, on the leaf modules and the loss; off again at the end."""
    chain, leaves, before = _Chain(), list(_leaves(model)), len(CTX.hook_handles)
    handles = []
    flagged = [module for _, module in leaves if not hasattr(module, "_backpack_extend")]
    flagged += [] if hasattr(loss_fn, "_backpack_extend") else [loss_fn]
    try:
        for path, module in [*leaves, ("the loss", loss_fn)]:
            extend(module)
            first = slice(1) if module is loss_fn else slice(None)
            handles.append(module.register_forward_pre_hook(_before(chain, path, first)))
            handles.append(module.register_forward_hook(_after(chain, path)))
        yield chain
    finally:
        for handle in [*handles, *CTX.hook_handles[before:]]:
            handle.remove()
        del CTX.hook_handles[before:]
        for module in flagged:
            module.__dict__.pop("_backpack_extend", None)
            for name in [n for n in module.__dict__ if n == "output" or n[:5] == "input" and n[5:].isdigit()]:
                del module.__dict__[name]


def _before(chain: _Chain, path: str, which: slice) -> Callable[..., None]:
    return lambda module, args: chain.before(path, args[which])


def _after(chain: _Chain, path: str) -> Callable[..., None]:
    return lambda module, args, output: chain.after(path, output)


def _leaves(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((path, module) for path, module in model.named_modules() if not any(module.children()))
