"""Diagonal curvature from BackPACK's second-order extensions, in a replay of the step.

The replay uses the unscaled loss, because ``diag_h`` mixes a term that carries a factor on the loss with one that does
not, and it leaves the user's own forward and backward pass alone. The extensions are added for the replay and removed
afterwards.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from backpack import backpack, extend, extensions
from backpack.context import CTX
from backpack.custom_module.graph_utils import convert_module_to_backpack
from torch import Tensor, nn
from torch.fx import GraphModule

from distcockpit.capture.wrapped import has_children
from distcockpit.curvature.chain import Chain, NoChainError
from distcockpit.curvature.hutchinson import gauss_newton_product
from distcockpit.curvature.lanczos import twice_differentiable_loss
from distcockpit.curvature.weights import CONVOLUTIONS, weight_diagonal, weight_trace
from distcockpit.losses.captured import CapturedMicroBatch
from distcockpit.losses.rerun import replayed_loss
from distcockpit.replay.rng import set_seed

KINDS = ("diag_h", "diag_ggn_exact", "diag_ggn_mc")
WAY_OUT = (
    "For traces of any model, use curvature='hutchinson' or 'hutchinson_ggn' (HessTrace, TICTrace). Leave quantities "
    "with curvature out otherwise."
)


@dataclass(frozen=True)
class Curvature:
    """Which diagonal: that of the Hessian, of the GGN, or of a Monte-Carlo estimate of the GGN.

    Args:
        kind: One of ``KINDS``.
        mc_samples: Draws per sample for ``diag_ggn_mc``.
        seed: Base seed of these draws; actual seeds differ per step, rank and micro-batch.
        summed: Whether the sum over each parameter is enough, which takes less.
    """

    kind: str = "diag_h"
    mc_samples: int = 1
    seed: int = 0
    summed: bool = False

    def extension(self) -> extensions.backprop_extension.BackpropExtension:
        """BackPACK's extension; the weights of some layers get their diagonal, or its sum, from us."""
        if self.kind == "diag_h":
            extension = extensions.DiagHessian()
        elif self.kind == "diag_ggn_exact":
            extension = extensions.DiagGGNExact()
        else:
            extension = extensions.DiagGGNMC(mc_samples=self.mc_samples)
        weight = weight_trace if self.summed else weight_diagonal
        for kind in (*CONVOLUTIONS, nn.Linear) if self.summed else CONVOLUTIONS:
            extension._BackpropExtension__module_extensions[kind].weight = weight
        return extension


class Diagonals:
    """Diagonal curvature of one model and loss.

    A model that is not a chain of modules known to BackPACK is converted by BackPACK's converter, with sums, scalings
    and permutations as modules. The converted form is used for the GGN if every operation in it is a module, and once
    it was seen to give the correct diagonal.

    Args:
        model: The bare module.
        loss_fn: The loss module.
    """

    def __init__(self, model: nn.Module, loss_fn: nn.Module | None) -> None:
        self._model, self._loss_fn = model, loss_fn
        self._form: nn.Module | None = None  # the converted model, if it is needed and was seen to be correct
        self._problems: dict[Curvature, str] = {}  # of the model; one that changes begins a new part of the run

    def check_support(self, quantity: str, curvature: Curvature) -> None:
        """Reject early what BackPACK does not support.

        Raises:
            ValueError: If it is not supported; the message names the loss or the layer, and a way out.
        """
        what = f"quantity '{quantity}' (curvature={curvature.kind!r})"
        problem = _problem_of_loss(curvature, self._loss_fn) or _problem_of_model(curvature, self._model)
        if problem and not _problem_of_loss(curvature, self._loss_fn) and _converted(curvature, self._model):
            return
        if problem:
            raise ValueError(f"{what} {problem} {WAY_OUT}")

    def of(
        self, curvature: Curvature, captured: Sequence[CapturedMicroBatch], seeds: Sequence[int]
    ) -> dict[str, Tensor]:
        """Sum the diagonal curvature of ``sum_i l_i`` (the loss times its divisor) over micro-batches.

        Args:
            curvature: Which diagonal.
            captured: The micro-batches.
            seeds: One seed per micro-batch.

        Returns:
            float64 tensors by name, of the parameters' shapes or, if summed, numbers; parameters that the loss does not
            depend on are zero.

        Raises:
            RuntimeError: If BackPACK does not support the model.
        """
        trainable = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        shapes = {name: () if curvature.summed else p.shape for name, p in trainable.items()}
        total: dict[str, Tensor] = {}
        for micro, seed in zip(captured, seeds, strict=True):
            if not micro.weight:
                continue
            try:
                diagonal = self._of(curvature, micro, seed, trainable)
            except Exception as error:
                if not micro.is_broken:
                    raise RuntimeError(
                        f"curvature={curvature.kind!r} could not be computed for {type(self._model).__name__}: {error} "
                        f"BackPACK needs a model that is a chain of modules it supports. {WAY_OUT}"
                    ) from error
                # e.g. draws from NaN probabilities
                nan = torch.full((), math.nan, dtype=torch.float64, device=next(iter(trainable.values())).device)
                diagonal = {name: nan.expand(shape) for name, shape in shapes.items()}
            for name, result in diagonal.items():
                own = result.sum(dtype=torch.float64) if curvature.summed else result.double()
                own = own * micro.scale.divisor
                total[name] = total[name].add_(own) if name in total else own
        return {
            name: total[name] if name in total else p.new_zeros(shapes[name], dtype=torch.float64)
            for name, p in trainable.items()
        }

    def _of(
        self, curvature: Curvature, micro: CapturedMicroBatch, seed: int, parameters: Mapping[str, nn.Parameter]
    ) -> dict[str, Tensor]:
        assert self._loss_fn is not None  # checked at construction
        problem = "" if self._form is None or curvature.kind == "diag_h" else "it is not a chain of modules."
        if not problem:
            if curvature not in self._problems:
                self._problems[curvature] = _problem_of_model(curvature, self._model) or ""
            problem = self._problems[curvature]
        if not problem:
            try:
                return differentiate(curvature.extension(), self._model, self._loss_fn, micro, seed, parameters)
            except NoChainError as error:
                problem = str(error)
            except RuntimeError as error:
                if "BackwardHookFunction" not in str(error):
                    raise
                problem = str(error)  # the output of a module is written to in place, as in ``out += identity``
        form = self._form or _converted(curvature, self._model)
        if form is None or curvature.kind == "diag_h":
            raise RuntimeError(problem)
        modes = {path: module.training for path, module in self._model.named_modules()}
        for path, module in form.named_modules():
            module.training = modes.get(path, self._model.training)
        if self._form is None:
            exact = differentiate(extensions.DiagGGNExact(), form, self._loss_fn, micro, seed, parameters)
            _check_elements(exact, self._model, self._loss_fn, micro, parameters)
            self._form = form
        return differentiate(curvature.extension(), form, self._loss_fn, micro, seed, parameters)


def _problem_of_loss(curvature: Curvature, loss_fn: nn.Module | None) -> str | None:
    """Return why BackPACK has no second derivative of the loss, if it has none."""
    supported = curvature.extension()._BackpropExtension__module_extensions
    if type(loss_fn) not in supported:
        losses = [kind.__name__ for kind in supported if issubclass(kind, nn.modules.loss._Loss)]
        return f"needs loss_fn to be one of {losses}, not {'None' if loss_fn is None else type(loss_fn).__name__}."
    for option in ("weight", "pos_weight"):
        if getattr(loss_fn, option, None) is not None:
            return (
                f"does not support {type(loss_fn).__name__}({option}=...): BackPACK has no second derivative for it. "
                f"Use a loss without {option}."
            )
    ignored = getattr(loss_fn, "ignore_index", -100)
    if ignored != -100:
        return (
            f"does not support {type(loss_fn).__name__}(ignore_index={ignored}): BackPACK has no second derivative "
            "for it."
        )
    return None


def _problem_of_model(curvature: Curvature, model: nn.Module) -> str | None:
    """Return which layer BackPACK does not support, if there is one."""
    supported = curvature.extension()._BackpropExtension__module_extensions
    owner: dict[nn.Parameter, str] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            shared = parameter in owner
            if parameter.requires_grad and (shared or has_children(module)):
                why = f"is shared with layer '{owner[parameter]}'" if shared else "belongs to a module with children"
                return (
                    f"does not support parameter '{path}.{name}': it {why}, but BackPACK needs each parameter to be in "
                    "exactly one leaf module."
                )
            owner[parameter] = path
    for path, module in _leaves(model):
        if getattr(module, "padding_mode", "zeros") != "zeros" or isinstance(getattr(module, "padding", 0), str):
            return (
                f"does not support layer '{path}' ({type(module).__name__}) with padding={module.padding!r}, "
                f"padding_mode={getattr(module, 'padding_mode', None)!r}: BackPACK only supports zero padding given as "
                "numbers. Use such a padding."
            )
        if type(module) not in supported:
            return f"does not support layer '{path}' ({type(module).__name__}). Use another curvature or another layer."
    return None


def _converted(curvature: Curvature, model: nn.Module) -> nn.Module | None:
    """Return the model as converted by BackPACK, with the same parameters; ``None`` if it cannot be converted.

    The converter modifies what it converts, so it is given a copy of the modules.
    """
    if curvature.kind == "diag_h":  # its sums and scalings have no second-order extension for the Hessian
        return None
    memo: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a leftover operation only gives a warning
            form = convert_module_to_backpack(copy.deepcopy(model, memo), debug=False)
    except Exception:  # control flow, or operations unknown to the converter
        return None
    mine = {id(p) for p in model.parameters() if p.requires_grad}
    same = mine == {id(p) for p in form.parameters() if p.requires_grad}
    return form if same and _problem_of_model(curvature, form) is None else None


def _check_elements(
    diagonal: Mapping[str, Tensor],
    model: nn.Module,
    loss_fn: nn.Module,
    micro: CapturedMicroBatch,
    parameters: Mapping[str, nn.Parameter],
) -> None:
    """Compare the largest element of each parameter's diagonal with a product of the matrix and a unit vector.

    Raises:
        RuntimeError: If one differs.
    """
    leaves = list(parameters.values())
    with twice_differentiable_loss(model, loss_fn, micro) as (loss, outputs):
        product = gauss_newton_product(loss, outputs, leaves)
        for k, name in enumerate(parameters):
            d = int(diagonal[name].abs().argmax()) if name in diagonal else 0
            unit = [torch.zeros_like(p) for p in leaves]
            unit[k].view(-1)[d] = 1
            expected = float(product(unit)[k].reshape(-1)[d])
            found = float(diagonal[name].reshape(-1)[d]) if name in diagonal else 0.0
            if abs(found - expected) > 1e-2 * abs(expected) + 1e-7:
                raise RuntimeError(
                    f"Its diagonal at '{name}' would be {found:.4g}, but the GGN has {expected:.4g}: the model as "
                    "converted by BackPACK is not equivalent to the model."
                )


def _take(savefield: str, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return what BackPACK left on the parameters, and remove it."""
    return {name: p.__dict__.pop(savefield) for name, p in parameters.items() if savefield in p.__dict__}


def differentiate(
    extension: extensions.backprop_extension.BackpropExtension,
    form: nn.Module,
    loss_fn: nn.Module,
    micro: CapturedMicroBatch,
    seed: int,
    parameters: Mapping[str, nn.Parameter],
) -> dict[str, Tensor]:
    """Compute the diagonal in a replay of a micro-batch under an extension.

    Args:
        extension: BackPACK's extension.
        form: The model, as a chain of modules or as a graph of them.
        loss_fn: The loss module.
        micro: The micro-batch.
        seed: Seed of the random draws.
        parameters: The parameters, on which BackPACK leaves its results.

    Raises:
        RuntimeError: If the graph does not compute the loss that the model had.
    """
    _check_targets(loss_fn, micro)
    try:
        with _extended(form, loss_fn) as chain, replayed_loss(form, loss_fn, micro) as (loss, _):
            if not isinstance(form, GraphModule):
                chain.check()
            elif not torch.allclose(loss.double(), micro.losses[0].value.double(), rtol=1e-3):
                raise RuntimeError("The model as converted by BackPACK no longer computes the model's loss.")
            set_seed(loss.device, seed)
            with backpack(extension), warnings.catch_warnings():
                # The first layer's input needs no gradient, nor does BackPACK's hook there.
                warnings.filterwarnings("ignore", message="Full backward hook is firing", category=UserWarning)
                torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    finally:
        taken = _take(extension.savefield, parameters)
    return taken


def _check_targets(loss_fn: nn.Module, micro: CapturedMicroBatch) -> None:
    """Check the targets, since BackPACK's cross-entropy Hessian counts every target, with probabilities that sum to 1.

    Raises:
        RuntimeError: If the targets are different.
    """
    if not isinstance(loss_fn, nn.CrossEntropyLoss):
        return
    for call in micro.losses:
        target = call.args[1] if len(call.args) > 1 else call.kwargs["target"]
        if not target.is_floating_point() and bool((target == loss_fn.ignore_index).any()):
            raise RuntimeError(
                f"Targets contain ignore_index={loss_fn.ignore_index}, which BackPACK handles incorrectly."
            )
        if target.is_floating_point() and not torch.allclose(target.sum(1), target.new_ones(()), atol=1e-3):
            raise RuntimeError("Target probabilities do not add up to 1, which BackPACK handles incorrectly.")


@contextmanager
def _extended(model: nn.Module, loss_fn: nn.Module) -> Generator[Chain, None, None]:
    """Add BackPACK's hooks, and ours that check the chain, to the leaf modules and the loss; remove them at the end."""
    chain, leaves, before = Chain(), list(_leaves(model)), len(CTX.hook_handles)
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


def _before(chain: Chain, path: str, which: slice) -> Callable[..., None]:
    return lambda module, args: chain.before(path, args[which])


def _after(chain: Chain, path: str) -> Callable[..., None]:
    return lambda module, args, output: chain.after(path, output)


def _leaves(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((path, module) for path, module in model.named_modules() if not has_children(module))
