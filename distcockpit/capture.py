"""Hooks on the live model: the only file that touches it while it trains.

Inside a tracked step every layer of interest hands over its inputs and the gradients at its outputs (tensor hooks
on the outputs, which survive in-place activations). Nothing is computed until the step ends, because a module that
is called twice, a parameter that is shared and a loss in several backward calls all make a sum over individual
gradients wrong when it is taken at arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from distcockpit.captured import Captured, ForwardPass, Loss, LossCall, Micro, interpret
from distcockpit.gradients.uses import Layer, Use
from distcockpit.losses import Decomposition, decompose, is_decomposable
from distcockpit.rng import RandomState


class Capture:
    """Collects the micro-batches of one tracked step.

    Args:
        model: The bare module.
        layers: Layers whose calls are kept.
        loss: What is known of the loss from outside.
        replay: Whether passes will be run again, so that inputs and random state are kept.
        batch_size: The user's word on the batch size, overriding the first axis of the first tensor.
        watch: Parameters of which ``parameter_gradients`` shall hold what autograd gave them.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        loss: Loss,
        *,
        replay: bool = False,
        batch_size: int | None = None,
        watch: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._model, self._layers, self._loss = model, layers, loss
        self._replay, self._batch_size, self._watch = replay, batch_size, watch or {}
        self._device = next(model.parameters()).device
        self._micros: list[Micro] = []
        self._pass: ForwardPass | None = None
        self._handles: list[Any] = []
        self._random_states: dict[int, RandomState] = {}
        self._open = False
        self.parameter_gradients: dict[str, Tensor] = {}

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
        if self._loss.module is not None and is_decomposable(self._loss.module):
            keep(self._loss.module.register_forward_hook(self._leave_loss, with_kwargs=True, prepend=True))
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
        if self._loss.module is None and len(scalars) == 1:
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
        """Individual losses ``[B]`` of the latest forward pass, in the user's own graph.

        Raises:
            ValueError: If the shape is another.
        """
        micro = self._current_micro("record_losses was called")
        expected = micro.passes[-1].batch_size
        if losses.shape != (expected,):
            raise ValueError(
                f"record_losses(losses): losses has shape {tuple(losses.shape)}, but must hold one loss for each of "
                f"the {expected} samples, shape ({expected},)."
            )
        parts = Decomposition(losses.detach().double(), float(expected), is_sum=False)
        call = LossCall((), {}, parts, losses.detach(), recorded=True)
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
            before = self.parameter_gradients.get(name)
            self.parameter_gradients[name] = dense if before is None else before + dense

        return hook

    def finish(self) -> list[Captured]:
        """The micro-batches of the step; raises as :func:`distcockpit.captured.interpret` does."""
        return interpret(self._micros, self._loss, self._batch_size)


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
