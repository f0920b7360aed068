"""Hooks on the live model: the only file that touches it while it trains.

Inside a tracked step every layer of interest hands over its inputs and the gradients at its outputs (tensor hooks
on the outputs, which survive in-place activations). Nothing is computed until the step ends, because a module that
is called twice, a parameter that is shared and a loss in several backward calls all make a sum over individual
gradients wrong when it is taken at arrival.

**Unscaling happens here, once.** Autograd delivers ``c / w`` times the gradient of ``sum_i l_i``: ``w`` is what the
loss divided by, ``c`` the gradient that reached the loss (1, an AMP scale, 1 / accumulation steps). The output
gradients of a micro-batch are multiplied by ``(N / W) w / c``, and from then on every formula reads like its paper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from distcockpit.gradients.uses import Layer, MicroBatch, Use
from distcockpit.losses import Decomposition, decompose, is_decomposable
from distcockpit.rng import RandomState


@dataclass
class ForwardPass:
    """One call of the whole model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch_size: int
    random_state: RandomState | None
    uses: list[Use] = field(default_factory=list)
    output: Any = None
    factor: Tensor | None = None  # gradient that reached the scalar output, if there is one

    @property
    def went_backward(self) -> bool:
        """Whether any output gradient arrived."""
        return any(use.output_gradients for use in self.uses)


@dataclass
class LossCall:
    """One call of the loss module, or of ``record_losses``."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    decomposition: Decomposition
    value: Tensor
    factor: Tensor | None = None  # gradient that reached the loss: a number, or one per recorded loss


@dataclass
class Micro:
    """Forward passes and the losses computed from them: one micro-batch."""

    passes: list[ForwardPass] = field(default_factory=list)
    losses: list[LossCall] = field(default_factory=list)


@dataclass
class Captured:
    """A micro-batch with everything needed to unscale it, before it is known what the other ranks hold."""

    batch_size: int
    weight: float  # this micro-batch's part of W
    divisor: float  # w: what the loss divided by
    unscale: Tensor | float  # w / c
    uses: list[Use]
    individual_losses: Tensor | None  # float64 [B], such that the loss is sum_i / divisor
    passes: list[ForwardPass]
    losses: list[LossCall]

    def scaled(self, samples_per_weight: float) -> MicroBatch:
        """Multiply the output gradients by (N/W) w/c, once; a part without weight is exactly zero."""
        for use in self.uses:
            for position, gradient in use.output_gradients.items():
                if gradient.dtype in (torch.float16, torch.bfloat16):
                    gradient = gradient.float()
                use.output_gradients[position] = (
                    gradient * (self.unscale * samples_per_weight) if self.weight else torch.zeros_like(gradient)
                )
        return MicroBatch(self.batch_size, self.uses)


class Capture:
    """Collects the micro-batches of one tracked step.

    Args:
        model: The bare module.
        layers: Layers whose calls are kept.
        loss_fn: The loss module, or ``None``.
        replay: Whether passes will be run again, so that inputs and random state are kept.
        batch_size: The user's word on the batch size, overriding the first axis of the first tensor.
        weight: The user's word on w.
        scale: Factor on the loss where none can be measured.
        watch_parameters: Parameters whose accumulated gradient is to be seen, for :meth:`unexplained`.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        loss_fn: nn.Module | None,
        *,
        replay: bool = False,
        batch_size: int | None = None,
        weight: float | None = None,
        scale: float = 1.0,
        watch_parameters: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._model, self._layers, self._loss_fn = model, layers, loss_fn
        self._replay, self._batch_size, self._weight, self._scale = replay, batch_size, weight, scale
        self._device = next(model.parameters()).device
        self._micros: list[Micro] = []
        self._pass: ForwardPass | None = None
        self._handles: list[Any] = []
        self._random_states: dict[int, RandomState] = {}
        self._open = False
        self.parameter_gradients: dict[str, Tensor] = {}
        self._watch = watch_parameters or {}

    # -- hooks -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Put the hooks on. They run before the user's own, so that they see what the layers computed."""
        self._open = True
        keep = self._handles.append
        keep(self._model.register_forward_pre_hook(self._enter_model, with_kwargs=True, prepend=True))
        for layer in self._layers:
            if _draws_random_numbers(layer):
                keep(layer.module.register_forward_pre_hook(self._remember_random_state(layer), prepend=True))
            keep(layer.module.register_forward_hook(self._leave_layer(layer), with_kwargs=True, prepend=True))
        keep(self._model.register_forward_hook(self._leave_model, prepend=False))
        if self._loss_fn is not None and is_decomposable(self._loss_fn):
            keep(self._loss_fn.register_forward_hook(self._leave_loss, with_kwargs=True, prepend=True))
        for name, parameter in self._watch.items():
            keep(parameter.register_hook(self._add_parameter_gradient(name)))

    def stop(self) -> None:
        """Take every hook off, those on tensors included."""
        self._open = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter_model(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            self._pass = None
            return
        random_state = RandomState.take(self._device) if self._replay else None
        micro = self._micros[-1] if self._micros else None
        if micro is None or micro.losses or any(p.went_backward for p in micro.passes):
            micro = Micro()
            self._micros.append(micro)
        self._pass = ForwardPass(args, kwargs, self._infer_batch_size(args, kwargs), random_state)
        micro.passes.append(self._pass)

    def _infer_batch_size(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        if self._batch_size is not None:
            return self._batch_size
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.dim():
                return leaf.shape[0]
        raise ValueError(
            "The model was called without a tensor argument that has a batch axis, so the batch size is unknown. "
            "Pass it: track(step, batch_size=...)."
        )

    def _leave_model(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not torch.is_grad_enabled() or self._pass is None:
            return
        forward = self._pass
        forward.output = output
        scalars = [t for t in _tensors(output) if t.dim() == 0 and t.requires_grad]
        if self._loss_fn is None and len(scalars) == 1:
            self._on_gradient(scalars[0], lambda g: _accumulate(forward, g))

    def _remember_random_state(self, layer: Layer) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if torch.is_grad_enabled():
                self._random_states[id(module)] = RandomState.take(self._device)

        return hook

    def _leave_layer(self, layer: Layer) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if not torch.is_grad_enabled() or self._pass is None:
                return
            kept = (args, kwargs) if layer.parameters else ((), {})
            use = Use(
                layer,
                *kept,
                versions=[(t, t._version) for t in _tensors(kept)],
                training=module.training,
                buffers=dict(module.named_buffers()) if layer.parameters else {},
                random_state=self._random_states.pop(id(module), None) if _draws_random_numbers(layer) else None,
            )
            self._pass.uses.append(use)
            for position, leaf in enumerate(tree_leaves(output)):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    self._on_gradient(leaf, _collector(use, position))

        return hook

    def _leave_loss(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        if not torch.is_grad_enabled() or not output.requires_grad:
            return
        micro = self._current_micro(f"{type(module).__name__} was called")
        call = LossCall(args, kwargs, decompose(module, args, kwargs, micro.passes[-1].batch_size), output.detach())
        micro.losses.append(call)
        self._on_gradient(output, lambda g: _accumulate(call, g))

    def record_losses(self, losses: Tensor) -> None:
        """Individual losses ``[B]`` of the latest forward pass, in the user's own graph."""
        micro = self._current_micro("record_losses was called")
        expected = micro.passes[-1].batch_size
        if losses.shape != (expected,):
            raise ValueError(
                f"record_losses(losses): losses has shape {tuple(losses.shape)}, but must hold one loss for each of "
                f"the {expected} samples, shape ({expected},)."
            )
        call = LossCall((), {}, Decomposition(losses.detach().double(), float(expected), False), losses.detach())
        micro.losses.append(call)
        if losses.requires_grad:
            self._on_gradient(losses, lambda g: _accumulate(call, g))

    def _current_micro(self, event: str) -> Micro:
        if not self._micros:
            raise RuntimeError(
                f"{event} inside `track` before the model was. Call the model through the cockpit, `cockpit(x)`, or "
                "call the very module that was given to DistCockpit, inside `with cockpit.track(step)`."
            )
        return self._micros[-1]

    def _on_gradient(self, tensor: Tensor, receive: Callable[[Tensor], None]) -> None:
        def hook(gradient: Tensor) -> None:
            if self._open:
                receive(gradient.detach())

        self._handles.append(tensor.register_hook(hook))

    def _add_parameter_gradient(self, name: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            dense = gradient.detach().to_dense().double()
            self.parameter_gradients[name] = self.parameter_gradients.get(name, 0) + dense

        return hook

    # -- what was collected ------------------------------------------------------------------------------------

    def finish(self) -> list[Captured]:
        """The micro-batches of the step.

        Raises:
            RuntimeError: If the model was not called, or a forward pass had no backward, or the loss cannot be
                understood; the text says what to do.
        """
        if not self._micros:
            raise RuntimeError(
                "The tracked step ended without a forward pass of the model (gradients enabled). Call the model "
                "inside `with cockpit.track(step):`, as `cockpit(x)` or as the module given to DistCockpit."
            )
        split = [
            part
            for micro in self._micros
            for part in ([micro] if micro.losses else [Micro([forward]) for forward in micro.passes])
        ]
        for micro in split:
            for forward in micro.passes:
                if forward.batch_size and not forward.went_backward:
                    raise RuntimeError(
                        "A forward pass of the tracked step had no backward before `track` ended. Move "
                        "loss.backward() inside `with cockpit.track(step):`, and run passes that only predict "
                        "under torch.no_grad()."
                    )
        for option, value in (("weight", self._weight), ("batch_size", self._batch_size)):
            if value is not None and len(split) > 1:
                raise RuntimeError(
                    f"track({option}={value!r}) describes one batch, but this step ran {len(split)} micro-batches. "
                    "Leave it out and give the loss as a module (loss_fn=...) or by cockpit.record_losses(losses)."
                )
        return [self._captured(micro, len(split)) for micro in split]

    def _captured(self, micro: Micro, n_micros: int) -> Captured:
        sizes = {forward.batch_size for forward in micro.passes}
        if len(sizes) > 1 or (len(micro.passes) > 1 and len(micro.losses) > 1):
            raise RuntimeError(
                f"{len(micro.passes)} forward passes (batch sizes {sorted(sizes)}) were followed by "
                f"{len(micro.losses)} calls of the loss, so samples cannot be paired. Call the loss of a "
                "micro-batch before the next forward pass."
            )
        (batch_size,) = sizes
        if micro.losses and micro.losses[0].args:
            divisor, unscale, weight = self._scale_from_loss_module(micro, batch_size)
        elif micro.losses:
            divisor, unscale, weight = self._scale_from_recorded(micro, batch_size)
        else:
            divisor, unscale, weight = self._scale_without_loss(micro.passes[0], n_micros)
        uses = [use for forward in micro.passes for use in forward.uses if use.output_gradients]
        for use in uses:
            self._check_batch_axis(use, batch_size)
        losses = sum(call.decomposition.individual for call in micro.losses) if micro.losses else None
        if batch_size == 0:
            uses, weight = [], 0.0
        return Captured(batch_size, weight, divisor, unscale, uses, losses, micro.passes, micro.losses)

    def _scale_from_loss_module(self, micro: Micro, batch_size: int) -> tuple[float, Tensor | float, float]:
        calls = [call for call in micro.losses if call.factor is not None]
        if not calls:
            if batch_size == 0:
                return 0.0, 0.0, 0.0
            raise RuntimeError(
                f"The output of {type(self._loss_fn).__name__} took no part in the backward pass of the tracked step. "
                "Give DistCockpit the loss that is differentiated, or loss_fn=None and record_losses(losses)."
            )
        micro.losses = calls
        divisor = float(calls[0].decomposition.divisor)
        ratios = [call.factor / call.decomposition.divisor for call in calls]
        if len(ratios) > 1 and not torch.allclose(torch.stack(ratios), ratios[0].expand(len(ratios)), rtol=1e-4):
            raise RuntimeError(
                f"{type(self._loss_fn).__name__} was called {len(calls)} times on one batch, with different factors "
                f"{[float(call.factor) for call in calls]}. The individual loss of a sample is then not defined by "
                "the module: pass loss_fn=None and call record_losses(losses) with the weighted sum per sample."
            )
        is_sum = calls[0].decomposition.is_sum
        if self._weight is not None and not is_sum:
            raise RuntimeError(
                f"track(weight={self._weight!r}) was given with loss_fn={type(self._loss_fn).__name__} of reduction "
                f"'mean', whose own weight is {divisor:g}. Leave weight out."
            )
        weight = (self._weight if self._weight is not None else float(batch_size)) if is_sum else divisor
        return divisor, divisor / calls[0].factor, weight

    def _scale_from_recorded(self, micro: Micro, batch_size: int) -> tuple[float, Tensor | float, float]:
        (call,) = micro.losses[-1:]
        micro.losses = [call]
        weight = self._weight if self._weight is not None else float(batch_size)
        if call.factor is None:
            return weight, weight / self._scale, weight
        # With gradient r_i at loss i the objective is sum_i r_i l_i; as a mean over samples it is B r_i l_i / sum r.
        total = call.factor.double().sum()
        individual = call.decomposition.individual * call.factor.double() * (batch_size / total)
        if batch_size:
            call.decomposition = Decomposition(individual, float(batch_size), False)
        return float(batch_size), batch_size / total, weight

    def _scale_without_loss(self, forward: ForwardPass, n_micros: int) -> tuple[float, Tensor | float, float]:
        weight = self._weight if self._weight is not None else float(forward.batch_size)
        if forward.factor is not None:
            return weight, weight / forward.factor, weight
        if self._loss_fn is not None and forward.batch_size:
            name, reduction = type(self._loss_fn).__name__, getattr(self._loss_fn, "reduction", None)
            rule = (
                f"loss_fn={name} was not called"
                if is_decomposable(self._loss_fn)
                else f"loss_fn={name} has reduction={reduction!r}, which is neither 'mean' nor 'sum'"
            )
            raise RuntimeError(
                f"The tracked step has no individual losses: {rule}. Call the loss module given to DistCockpit, or "
                "cockpit.record_losses(losses) with one loss per sample, inside `track`."
            )
        if n_micros > 1:
            raise RuntimeError(
                f"The step ran {n_micros} micro-batches and loss_fn=None, so the factor on each loss is unknown. "
                "Give the loss as a module (loss_fn=...), return the loss from the model, or call "
                "cockpit.record_losses(losses) for each micro-batch."
            )
        return weight, weight / self._scale, weight

    @staticmethod
    def _check_batch_axis(use: Use, batch_size: int) -> None:
        for gradient in use.output_gradients.values():
            if gradient.dim() == 0 or gradient.shape[0] != batch_size:
                raise ValueError(
                    f"Layer '{use.layer.path}' ({type(use.layer.module).__name__}) has an output of shape "
                    f"{tuple(gradient.shape)} in a batch of {batch_size}: its first axis is not the batch, so the "
                    "gradients of its samples cannot be told apart. Put the batch first (batch_first=True), or "
                    f"leave the layer out: exclude=['{use.layer.path}']."
                )


def _draws_random_numbers(layer: Layer) -> bool:
    """Whether a rerun of the layer could need the random state of its call."""
    return bool(layer.parameters) and layer.rule.description == "generic blocks"


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _collector(use: Use, position: int) -> Callable[[Tensor], None]:
    def receive(gradient: Tensor) -> None:
        before = use.output_gradients.get(position)
        use.output_gradients[position] = gradient if before is None else before + gradient

    return receive


def _accumulate(target: ForwardPass | LossCall, gradient: Tensor) -> None:
    target.factor = gradient if target.factor is None else target.factor + gradient
