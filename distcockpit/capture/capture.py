"""Hooks on the live model while it trains.

Inside a tracked step, every layer of interest records its inputs and the gradients at its outputs (with tensor hooks on
the outputs, which survive in-place activations). Nothing is computed until the step ends, because a module that is
called twice, a shared parameter and a loss with several backward calls all make a sum over individual gradients wrong
if it is computed as gradients arrive.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules.batchnorm import _BatchNorm

from distcockpit.capture.backward_passes import BackwardPasses
from distcockpit.capture.batch_axes import BatchAxes, given_shapes, shapes_of
from distcockpit.capture.hooks import Hook
from distcockpit.capture.output_hooks import Kept, adder, collector, owned_memory
from distcockpit.capture.own_copies import OwnCopies
from distcockpit.capture.parameter_gradients import ParameterGradients, first_hook
from distcockpit.gradients.forms import closed_form
from distcockpit.gradients.functions import Functions, Watch, batched, called_with, transforms
from distcockpit.gradients.known import form, is_small
from distcockpit.gradients.recording import Recording
from distcockpit.gradients.uses import Folded, Layer, Use, to_front
from distcockpit.losses.captured import ForwardPass, KnownLoss, LossCall, RecordedMicroBatch, received
from distcockpit.losses.interpretation import Interpretation, interpret
from distcockpit.losses.loop import LoopWatch, differentiated
from distcockpit.losses.loss_calls import LossCalls
from distcockpit.losses.mixed import OutputsOfCalls
from distcockpit.losses.objective import Objective
from distcockpit.losses.reductions import arguments_of_loss, terms_inside
from distcockpit.replay.memory import release
from distcockpit.replay.rng import RandomState
from distcockpit.replay.snapshot import Snapshot, autocast_type
from distcockpit.replay.trees import map_tensors, tensors
from distcockpit.shards import Shards, computing_device, is_piece, local

Observer = tuple[Callable[[Tensor, bool], Tensor | None], Collection[str]]
"""What to keep of an output, and for which layers."""


def _unseen(hook: Callable[..., None]) -> Callable[..., None]:
    """Hide what our hook calls from the model's calls: no mode sees it, neither ours nor the user's."""

    @functools.wraps(hook)
    def unseen(*args: Any) -> None:
        with torch._C.DisableTorchFunction():
            hook(*args)

    return unseen


LEAVING = ("_leave_model", "_leave_late")
"""Hooks that run while no mode is handling a call, so that a mode can be removed there."""


def _harmless(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Make a fault in our hooks cost the step, not the run (at a first step only if nothing was listed explicitly)."""

    @functools.wraps(hook)
    def harmless(capture: Capture, *args: Any) -> Any:
        if capture.fault is not None:
            if hook.__name__ in LEAVING:
                capture._abandon()
            return None
        try:
            return hook(capture, *args)
        except Exception as error:
            capture.give_up(error)
            return None

    return harmless


class Capture:
    """Collects the micro-batches of one tracked step.

    Args:
        model: The bare module.
        layers: Layers whose calls are kept.
        loss: What is known about the loss from outside.
        axes: The batch axes.
        thorough: Whether to check that the forward pass does not write to parameters.
        keeps_calls: Whether the calls are kept that individual gradients are computed from.
        output_gradients: Whether gradients are kept at the outputs of all layers, or only of those with parameters.
        observers: What to keep of the outputs of leaf modules, by name.
        batch_size: The batch size given by the user, overriding the batch axis of the first tensor.
        parameter_gradients: What watches the gradients that autograd gives the parameters.
        wrappers: Modules around the model.
        settled: Whether an earlier step was fine, so that passes without a backward are taken as intended.
        goes_on: Whether a fault only costs this step, and does not end the run.
        copies: Whether to copy the model's arguments, which the user may overwrite as soon as it has returned.
        tracked: The tracked parameters, by name, for a step of the loop; ``None`` for a second pass.
        shards: Of a sharded model.
        look: Called with the gradients at outputs of calls as they arrive, instead of keeping them.
        forms: Whether individual gradients of small parameters are formed in the backward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        loss: KnownLoss,
        axes: BatchAxes,
        *,
        thorough: bool = False,
        keeps_calls: bool = True,
        output_gradients: bool = True,
        observers: Mapping[str, Observer] | None = None,
        batch_size: int | None = None,
        parameter_gradients: ParameterGradients | None = None,
        copies: bool = True,
        settled: bool = False,
        goes_on: bool = False,
        wrappers: Sequence[nn.Module] = (),
        tracked: Mapping[str, Tensor] | None = None,
        shards: Shards | None = None,
        look: Callable[[Use, int, Tensor], None] | None = None,
        forms: bool = False,
    ) -> None:
        self._look, self._shards, self._forms = look, shards, forms
        self.came_again = False  # whether a gradient arrived at an output that one had arrived at before
        self._leaves: dict[str, nn.Parameter] = {}  # that stand for sharded parameters, once they were whole
        self._copies_of: dict[str, Tensor] = {}  # of these, for calls that are run again
        self._uncast: list[Tensor] = []  # what a sharded module was given
        self._model, self._layers, self._loss, self._axes = model, layers, loss, axes
        self._thorough, self._settled, self._goes_on = thorough, settled, goes_on
        self._batch_size, self._keeps_calls = batch_size, keeps_calls
        self.parameter_gradients = parameter_gradients or ParameterGradients({})
        self._copies, self._own, self._wrappers = copies, OwnCopies(), wrappers
        self.fault: Exception | None = None  # what went wrong, if that does not end the run
        self._overlap = False  # whether a pass began before an earlier one had its backward
        self._paused, self._thread = False, threading.get_ident()
        self._opened_by = self._thread  # the thread that runs the open pass
        self._output_gradients, self._observers = output_gradients, observers or {}
        self._device = computing_device(next(model.parameters()))
        self.micros: list[RecordedMicroBatch] = []
        self._pass: ForwardPass | None = None  # the pass that calls of layers belong to
        self._batch: list[Tensor] = []  # the tensors it was given
        self._calls: list[_Call] = []  # calls of the model that have not returned
        self._handles: list[Any] = []
        self._told = LossCalls(loss, self.micros, self._on_gradient)
        self._passes: list[ForwardPass] = []
        self.objective = Objective(self._passes, axes.of_terms, thorough, tracked or {})
        self._is_loops, self._steps_away = tracked is not None, 0
        self._outputs = OutputsOfCalls()
        self.edges: list[GradientEdge] = []  # in a second pass, where the outputs of calls are in the graph
        self._functions = next((layer.module for layer in layers if isinstance(layer.module, Functions)), None)
        self._called = {} if self._functions is None else self._functions.called  # now, before any are replaced
        self._parts = self._watch_for(-1) if self._is_loops and self._called else None
        self._loop = LoopWatch(self._see_in_loop, self._differentiates, self._parts)
        self._kept = Kept()
        self._before: dict[int, _Before] = {}
        self._open = False
        self._entered = 0.0
        self._to_show: list[tuple[Use, int, dict[Any, dict[str, Tensor]]]] = []  # for each axis that may be the batch
        self._late: tuple[nn.Module, Watch] | None = (
            None  # a module called by the backward pass, and what watches its calls
        )
        self._backward_passes = BackwardPasses(model)
        self._parameters = ""
        self.forward_seconds = 0.0
        self.skips = False  # whether passes had no backward and are left out

    # -- hooks -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Register the hooks. They run before the user's own, so they see what the layers computed."""
        self._open = True
        _running.append(self)
        keep = self._handles.append
        for path, module in ({} if self._shards is None else self._shards.modules).items():  # around FSDP's own hooks
            keep(module.register_forward_pre_hook(Hook(self._enter_sharded), with_kwargs=True, prepend=True))
            keep(
                module.register_forward_pre_hook(Hook(functools.partial(self._enter_unsharded, path)), with_kwargs=True)
            )
        keep(self._model.register_forward_pre_hook(Hook(self._enter_model), with_kwargs=True, prepend=True))
        for layer in self._layers:
            if layer.module is self._functions:
                continue
            if layer.parameters and self._keeps_calls:
                keep(
                    layer.module.register_forward_pre_hook(
                        Hook(self._enter_rerun_layer), with_kwargs=True, prepend=True
                    )
                )
            keep(
                layer.module.register_forward_hook(
                    Hook(functools.partial(self._leave_layer, layer)), with_kwargs=True, prepend=True
                )
            )
        keep(self._model.register_forward_hook(Hook(self._leave_model), prepend=False, always_call=True))
        for wrapper in self._wrappers:
            keep(wrapper.register_forward_hook(Hook(self._leave_wrapper)))
        if self._functions is not None:
            for path in self._functions.owners - {""}:  # a call of the model itself is another pass
                module = self._model.get_submodule(path)
                keep(module.register_forward_pre_hook(Hook(self._enter_late), with_kwargs=True, prepend=True))
                keep(module.register_forward_hook(Hook(self._leave_late), always_call=True))
        if self._loss.module is not None:
            keep(self._loss.module.register_forward_hook(Hook(self._leave_loss), with_kwargs=True, prepend=True))
        self._handles += self.parameter_gradients.watch(self._guarded)
        if self._is_loops:
            own = (p for p in self._model.parameters() if p.requires_grad and not is_piece(p))
            self._handles += [first_hook(p, self._kept_apart) for p in own]
        if self._is_loops:
            for module in {id(m): m for m in (*self._wrappers[:1], self._model)}.values():
                keep(module.register_forward_pre_hook(Hook(self._step_away), prepend=True))
                keep(module.register_forward_hook(Hook(self._step_back), always_call=True))
            self._loop.begin()

    def stop(self) -> None:
        """Remove every hook, including those on tensors."""
        self._open = False
        if self._is_loops:
            self._loop.end()
        if self._parts is not None:
            self._parts.forget()
        if self in _running:
            _running.remove(self)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def let_go(self) -> None:
        """Release everything that belongs to the step.

        Hooks, watches and what they fill form reference cycles, so memory would otherwise be held until the next
        garbage collection. A call in another thread may still reach a hook.
        """
        self.fault = self.fault or RuntimeError("The step has ended.")
        for forward in vars(self).get("_passes", ()):
            forward.reductions.clear()  # each of which knows its pass
        for name in vars(self).keys() - {"fault", "_calls", "_late", "_loop", "_open", "_steps_away", "_thread"}:
            delattr(self, name)

    def give_up(self, error: Exception) -> None:
        """Stop watching, because something is wrong.

        Raises:
            Exception: The error, if it is a reason to end the run.
        """
        if not self._goes_on:
            raise error
        self.fault = error
        release(error)
        self.parameter_gradients.forget()
        for forward in self._passes:
            forward.uses.clear()
        for watch in (self._loop, *self._watches):
            watch.is_muted = True

    @property
    def _watches(self) -> list[Watch]:
        """All active watches, innermost first."""
        found = [self._late and self._late[1], *(call.watch for call in reversed(self._calls))]
        return [watch for watch in found if watch is not None]

    def _abandon(self) -> None:
        """Remove what was active when something went wrong."""
        for watch in self._watches:
            watch.end()
        self._late = None
        self._calls.clear()

    def pause(self, paused: bool) -> None:
        """Pause or resume watching."""
        self._paused = self.parameter_gradients.paused = paused

    @property
    def _looks_away(self) -> bool:
        """True if a call is not part of the step: our own rerun, or another thread that evaluates the model meanwhile.

        Tensors inside `torch.func.vmap` or `grad` cannot be kept.
        """
        if transforms():
            return True
        here = threading.get_ident()
        if self._paused or (self._pass is not None and self._pass.is_open):
            return self._paused or here != self._opened_by
        return here != self._thread and not torch.is_grad_enabled()

    def _guarded(self, hook: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor | None]:
        return functools.partial(self._see, hook)

    @_harmless
    def _see(self, hook: Callable[[Tensor], Tensor | None], gradient: Tensor) -> Tensor | None:
        """Show a gradient of a parameter to what watches these."""
        return hook(gradient)

    @_unseen
    @_harmless
    def _enter_sharded(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look away while FSDP gathers parameters and casts inputs."""
        if self._looks_away:
            return
        self._uncast = tensors((args, kwargs))
        for watch in self._watches:
            watch.suspend()

    @_unseen
    @_harmless
    def _enter_unsharded(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Handle what FSDP has put in place of its shards."""
        if self._looks_away or self._shards is None:
            return
        before, self._uncast = self._uncast, []
        leaves = dict(self._shards.leaves(path))
        for watch in self._watches:
            watch.resume()
            watch.follow(before, tensors((args, kwargs)))
            for name, leaf in leaves.items():
                if leaf.requires_grad and self._functions is not None and self._functions.serves(name):
                    watch.know(name, leaf)
        for name, leaf in leaves.items():
            if leaf.requires_grad and self._leaves.get(name) is not leaf:
                self._handles += self.parameter_gradients.attach(name, leaf, self._guarded)
                self._handles.append(first_hook(leaf, self._kept_apart))
        self._leaves.update(leaves)

    def _values_of(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return copies of sharded parameters, for a call that is run again once they are sharded again.

        Raises:
            RuntimeError: If one is no longer whole.
        """
        here = [name for name in names if name in self._leaves]
        for name in here:
            leaf = self._leaves[name].detach()
            if name in self._copies_of:
                continue
            if leaf.numel() and not leaf.untyped_storage().size():
                raise RuntimeError(
                    f"Parameter '{name}' is used outside of the module that it is sharded with, so its value is gone. "
                    "Apply fully_shard to a module that contains every use."
                )
            self._copies_of[name] = leaf.clone()
        return {name: self._copies_of[name] for name in here}

    @_harmless
    def _enter_model(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._looks_away:
            return
        self._calls.append(_Call(self._pass, self._own))
        if not torch.is_grad_enabled():
            self._pass = None
            return
        if self._pass is not None and self._pass.is_open and not self._pass.uses:
            # A call of the model that only calls the model: Lightning routes training_step through it.
            for call in self._calls:
                call.is_rerouted |= call.made is self._pass
            self._pass.is_open = False
            self._forget(self._pass)
        # Any pass may have to be run again, because a loop may change at any step.
        before = Snapshot.take(module, self._device)
        micro = self.micros[-1] if self.micros else None
        batch_size = self._infer_batch_size(args, kwargs)
        # Its samples are those of the previous pass, e.g. if a sequence is cut into windows and the state is passed on.
        continues = self._loop.is_of_samples(tensors((args, kwargs)), batch_size)
        if micro is None or not continues and (micro.losses or any(p.went_backward for p in micro.passes)):
            micro = RecordedMicroBatch()
            self.micros.append(micro)
        micro.is_one_batch |= continues
        self._overlap |= any(not p.went_backward and p.batch_size for m in self.micros for p in m.passes)
        # The forward pass may empty the user's containers, and the tensors may be overwritten after it.
        self._batch = tensors((args, kwargs))
        self._own = OwnCopies(self._batch if self._copies else ())
        batch = batched((args, kwargs), self._axes.batch_dim, batch_size)
        args, kwargs = map_tensors(self._own, (args, kwargs))
        self._pass = ForwardPass(args, kwargs, batch_size, before)
        micro.passes.append(self._pass)
        self._passes.append(self._pass)
        self._calls[-1].made, self._opened_by = self._pass, threading.get_ident()
        self._parameters = self._fingerprint()
        self._entered = time.perf_counter()
        if self._functions is not None:
            watch = self._watch_for(batch_size)
            watch.mark(batch)
            if self._parts is not None:
                watch.learn(self._parts)
            for call in self._calls:
                if call.watch is not None:
                    call.watch.is_muted = True
            watch.begin()
            self._calls[-1].watch = watch

    def _watch_for(self, batch_size: int) -> Watch:
        return Watch(self._called, batch_size, self._device, self._use_function, self._see_in_model)

    @property
    def _watch(self) -> Watch | None:
        """The watch that sees calls of functions now."""
        return self._calls[-1].watch if self._calls else self._late and self._late[1]

    @_harmless
    def _enter_late(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Handle a module called by the backward pass, as in checkpointing, which switches modes off."""
        forward, functions = self._pass, self._functions
        if self._looks_away or self._calls or self._late is not None or not torch.is_grad_enabled():
            return
        if forward is not None and functions is not None:
            watch = self._watch_for(forward.batch_size)
            watch.mark(t for t in tensors((args, kwargs)) if t.requires_grad or forward.batch_size in t.shape)
            self._late = module, watch
            watch.begin()

    @_harmless
    def _leave_late(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._late is not None and self._late[0] is module:
            self._late[1].end()
            self._late = None

    def _fingerprint(self) -> str:
        """Return a digest of the parameters, to see whether the forward pass leaves them alone."""
        if not self._thorough:
            return ""
        with torch.no_grad():
            held = self._model.parameters() if self._shards is None else self._shards.parameters.values()
            return repr(torch.stack([local(p).sum(dtype=torch.float64) for p in held]).tolist())

    def _infer_batch_size(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        if self._batch_size is not None:
            return self._batch_size
        batch_size = self._axes.batch_size((args, kwargs))
        if batch_size is not None:
            return batch_size
        raise ValueError(
            "The model was called without a tensor argument that has a batch axis, so the batch size is unknown "
            f"(batch_dim={self._axes.batch_dim}). Pass it: track(step, batch_size=...)."
        )

    def _forget(self, forward: ForwardPass) -> None:
        """Discard a pass that turned out not to be one."""
        for micro in self.micros:
            micro.passes[:] = [each for each in micro.passes if each is not forward]
        self._passes[:] = [each for each in self._passes if each is not forward]

    @_harmless
    def _leave_model(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self._looks_away or not self._calls:
            return output
        call = self._calls.pop()
        if call.watch is not None:
            call.watch.end()
            if self._calls and (outer := self._calls[-1].watch) is not None:
                outer.is_muted = False
                outer.mark(tensors(output))
        if output is None and sys.exc_info()[0] is not None:  # the forward pass raised; a loop may catch that and retry
            if call.made is not None:
                self._forget(call.made)
            self._pass = call.before
            return output
        if call.is_rerouted:
            return output
        forward = call.made
        if forward is None:
            self._pass = call.before
            return output
        forward.is_open = False
        self.forward_seconds += time.perf_counter() - self._entered
        aliased = sum(t.requires_grad for t in tensors(output)) > 1
        if aliased:
            # An output may be computed from another, such as a loss from logits. Aliases separate the gradients that
            # arrive from outside.
            try:
                output = map_tensors(_alias, output)
            except Exception:  # an output type that cannot be reconstructed
                aliased = False
        forward.output = output
        forward.axes = self._axes.of("", 0, shapes_of(output), forward.batch_size)
        self._axes.resolve(forward)
        forward.writes_parameters = self._fingerprint() != self._parameters
        forward.writes_inputs = self._own.were_written
        if call.before is not None and call.before.is_open:
            self._pass, self._own = call.before, call.own
        self.objective.mark(output, forward)
        self._loop.follow(tensors(output))
        for position, tensor in enumerate(tensors(output)):
            if tensor.requires_grad:
                source, view = (tensor, None) if aliased else owned_memory(tensor, tensors((args, forward.kwargs)))
                add = adder(forward.output_gradients, position)
                if not self._keeps_calls:  # nothing is run again from there
                    add = _without_values(add)
                self._on_gradient(source, collector(add, view))
        return output

    @_harmless
    def _leave_wrapper(self, wrapper: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Handle copies that DDP may return instead of the model's outputs, and that the loss is computed from."""
        forward = self._pass
        if not self._looks_away and forward is not None and not forward.is_open and torch.is_grad_enabled():
            self._loop.follow(tensors(output))
            if shapes_of(output) == shapes_of(forward.output):
                forward.output = output

    @_unseen
    @_harmless
    def _see_in_model(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Handle a function called by the model."""
        forward = self._pass
        if not torch.is_grad_enabled() or forward is None or not forward.batch_size:
            return
        if not forward.is_open:  # a model that calls itself, or a recomputed call
            if self._calls:
                self.objective.see(function, args, kwargs, result)
            return
        found = terms_inside(function, args, kwargs, result, forward.batch_size)
        if found is None:
            return
        key, terms, given, reduction = found
        shapes = given_shapes(given, self._batch, self._watch)
        call = forward.calls[key]
        forward.calls[key] += 1
        (axis,) = self._axes.of(key, call, shapes_of(terms), forward.batch_size, shapes, forward.folds)
        if reduction is not None:
            reduction.inside, reduction.key, reduction.call = forward, key, call
            reduction.given, reduction.axis = shapes, axis
            forward.reductions.append(reduction)
            self.objective.add(reduction, result)

    @_unseen
    @_harmless
    def _see_in_loop(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.objective.see(function, args, kwargs, result)
        if function is self._loss.function and self._loss.module is not None:
            given = arguments_of_loss(function, args, kwargs)
            if given is not None:
                self._told.heard(self._loss.module, given, {}, result)

    def _differentiates(self, function: Any, args: Any, kwargs: Any) -> AbstractContextManager[None]:
        """Handle a call of the loop that is about to differentiate."""
        return self._prepare(function, args, kwargs) or nullcontext()

    @_harmless
    def _prepare(self, function: Any, args: Any, kwargs: Any) -> AbstractContextManager[None] | None:
        asked = differentiated(function, args, kwargs)
        if function is torch.autograd.grad and (asked.creates_graph or not self._are_parameters(asked.inputs)):
            self.objective.has_gradients |= asked.creates_graph
            for tensor, _ in asked.roots:
                self.objective.sets_aside(tensor)
            return self._away()
        with torch._C.DisableTorchFunction(), undisturbed():
            for tensor, gradient in asked.roots:
                root = self.objective.differentiate(tensor, gradient, self._on_node)
                if root is not None and self._shards is None and self.objective.splits(root):
                    with self._away():
                        self._outputs.differentiate(root)
        self._outputs.clear()
        return None

    def _are_parameters(self, inputs: Sequence[Any]) -> bool:
        tracked = {id(p) for p in self._model.parameters()}
        return all(id(each) in tracked for each in inputs)

    @contextmanager
    def _away(self) -> Generator[None, None, None]:
        """Inside, gradients are not those that the optimizer gets."""
        before = self._paused
        self.pause(True)
        try:
            yield
        finally:
            self.pause(before)

    def _on_node(self, node: Any, receive: Callable[[Sequence[Tensor | None]], None]) -> None:
        self._handles.append(node.register_prehook(functools.partial(self._reach_node, receive)))

    @_harmless
    def _reach_node(
        self, receive: Callable[[Sequence[Tensor | None]], None], gradients: Sequence[Tensor | None]
    ) -> None:
        if self._open and not self._paused:
            receive(gradients)
            self._backward_passes.reach(receive)

    @_harmless
    def _kept_apart(self, gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else self._kept.apart(gradient)

    def _step_away(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() == self._thread:
            self._steps_away += 1
            if self._steps_away == 1:
                self._loop.suspend()

    def _step_back(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self._thread:
            self._steps_away -= 1
            if not self._steps_away:
                self._loop.resume()

    @_unseen
    @_harmless
    def _enter_rerun_layer(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the state that a layer to be run again starts from."""
        if torch.is_grad_enabled() and not self._looks_away:
            kept = map_tensors(self._own, (args, kwargs))
            self._before[id(module)] = _Before(Snapshot.take(module, self._device), kept, _versions(kept))

    @_unseen
    @_harmless
    def _leave_layer(
        self, layer: Layer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if not torch.is_grad_enabled() or self._pass is None or self._looks_away:
            return
        if module is self._model and not self._pass.is_open:
            return  # a call that was rerouted
        before = self._before.pop(id(module), None)
        if before is None:
            kept = map_tensors(self._own, (args, kwargs)) if isinstance(module, _BatchNorm) else ((), {})
            before = _Before(Snapshot.of_modes(module, self._device), kept, _versions(kept))
        state = before.snapshot.random_state
        call, shapes = self._pass.calls[layer.path], shapes_of(output)
        given = given_shapes((args, kwargs), self._batch, self._watch)
        axes = self._axes.of(layer.path, call, shapes, self._pass.batch_size, given, self._pass.folds)
        self._pass.calls[layer.path] += 1
        use = Use(
            layer,
            None,
            *before.kept,
            versions=before.versions,
            before=before.snapshot,
            axes=axes,
            shapes=shapes,
            given=given,
            key=layer.path,
            call=call,
            is_late=not self._pass.is_open,
            drew=state is not None and state.torch_drew(),
        )
        self._pass.uses.append(use)
        self.objective.mark(output, self._pass)
        self._observe(use, output)
        if not (layer.parameters and self._keeps_calls or self._output_gradients):
            return
        self._receive(use, output, tensors((args, kwargs)), self._pass.uses)

    @_harmless
    def _use_function(self, recording: Recording, given: list[Tensor], output: Any, drawn: RandomState | None) -> None:
        """Handle a call of a function with parameters and something of the batch."""
        forward, functions = self._pass, self._functions
        if forward is None or functions is None:
            return
        key, shapes = called_with(recording.parameters), shapes_of(output)
        shapes_given = given_shapes(given, self._batch, self._watch)
        call = forward.calls[key]
        forward.calls[key] += 1
        if not any(leaf.requires_grad for leaf in tensors(output)):
            return
        if not self._keeps_calls:
            self.objective.mark(output, forward)
            return
        form = closed_form(recording, given, output)
        frozen = {id(f) for name, f in self._leaves.items() if not (f.requires_grad and functions.serves(name))}
        if form is None and frozen:
            recording.keep(frozen)
        names = {f"p{k}": full for k, full in enumerate(sorted(recording.parameters))} if form is None else form.names
        kept = [t.detach().clone() if form is None and id(t) in frozen else self._own(t) for t in given]
        checked = (*kept, *recording.constants)
        use = Use(
            functions.layer(call, names, recording.function, self._called),
            None if form is None else form.rule,
            (recording, *kept),
            {},
            versions=_versions([tensor for tensor in checked if id(tensor) not in frozen]),
            before=Snapshot(autocast_type(self._device), drawn),
            axes=self._axes.of(key, call, shapes, forward.batch_size, shapes_given, forward.folds),
            shapes=shapes,
            given=shapes_given,
            key=key,
            call=call,
            is_late=not forward.is_open,
            drew=drawn is not None,
            source=0 if form is None else form.source,
            values=self._values_of(recording.parameters) if form is None else {},
        )
        if forward.is_open:
            forward.uses.append(use)
        self.objective.mark(output, forward)
        self._receive(use, output, given, forward.uses)

    def _receive(self, use: Use, output: Any, given: list[Tensor], uses: list[Use]) -> None:
        """Attach receivers for output gradients to a call; one recomputed by checkpointing then becomes a use."""

        def add(position: int, forms: bool) -> Callable[[Tensor], None]:
            if self._look is not None:
                return functools.partial(self._look, use, position)
            to_use = adder(use.output_gradients, position, lambda: use.axes[position])

            def received(gradient: Tensor) -> None:
                self.came_again |= position in use.output_gradients
                if use.is_formed:
                    raise RuntimeError(
                        f"{use.layer} was differentiated again, unlike at earlier steps, when its individual gradients "
                        "were already formed. Later steps form them at their end."
                    )
                if use.is_late and use not in uses:
                    uses.append(use)
                to_use(gradient)
                if forms:
                    form(use, self._called)

            return received

        for position, leaf in enumerate(tensors(output)):
            if leaf.requires_grad:
                source, view = owned_memory(leaf, given)
                forms = self._forms and self._is_small(use, leaf)
                keep = Tensor.detach if self._look is not None else self._kept.for_now if forms else self._kept
                self._on_gradient(source, collector(add(position, forms), view, keep), use)

    def _is_small(self, use: Use, output: Tensor) -> bool:
        """True if the individual gradients of a call can be formed in the backward pass, and that saves memory."""
        if use.is_late or use.form is None or self._pass is None or self.objective.may_split:
            return False
        if not self._axes.is_known(use.key, use.call):
            return False
        return is_small(use, output, self._pass.batch_size, self._called)

    @torch.no_grad()
    def _observe(self, use: Use, output: Any) -> None:
        """Pass the first floating-point tensor among the outputs to the observers."""
        if not use.layer.is_leaf or not any(use.layer.path in paths for _, paths in self._observers.values()):
            return
        first = next((k for k, t in enumerate(tensors(output)) if t.is_floating_point()), None)
        if first is None:
            return
        values = tensors(output)[first].detach()
        axis = use.axes[first]
        if self._axes.is_known(use.key, use.call):
            use.observed = self._observations(use, values, None if isinstance(axis, Folded) else axis)
            return
        size = self._pass.batch_size if self._pass is not None else 0
        axes = [None, *(k for k, length in enumerate(values.shape) if length == size)]
        self._to_show.append((use, first, {axis: self._observations(use, values, axis) for axis in axes}))

    def _observations(self, use: Use, values: Tensor, axis: int | None) -> dict[str, Tensor]:
        values = to_front(values, axis)
        mine = {name: observe for name, (observe, paths) in self._observers.items() if use.layer.path in paths}
        kept = {name: observe(values, axis is not None) for name, observe in mine.items()}
        return {name: tensor for name, tensor in kept.items() if tensor is not None}

    @_harmless
    def _leave_loss(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        if torch.is_grad_enabled() and not self._looks_away:
            with undisturbed():
                self._told.heard(module, args, kwargs, output)

    @_harmless
    def record_losses(self, losses: Tensor, weight: float | None = None, divisor: float | None = None) -> None:
        """Record the losses of the latest forward pass, as given by the user; see `LossCalls.record`."""
        self._told.record(losses, weight, divisor)
        if losses.dim():
            self.objective.tell(losses)

    def _on_gradient(self, tensor: Tensor, receive: Callable[[Tensor], None], of: Use | LossCall | None = None) -> None:
        self._handles.append(tensor.register_hook(functools.partial(self._reach_tensor, receive, of)))
        if isinstance(of, Use) and not self._is_loops:
            self.edges.append(get_gradient_edge(tensor))
        elif isinstance(of, Use) and self.objective.may_split:
            self._outputs.keep(tensor, receive, of)

    @_harmless
    def _reach_tensor(
        self, receive: Callable[[Tensor], None], of: Use | LossCall | None, gradient: Tensor | None
    ) -> None:
        if self._open and not self._paused and gradient is not None:  # some of several outputs may have no gradient
            receive(gradient)
            if of is not None:
                self._backward_passes.reach(of)

    def uses(self) -> list[Use]:
        """Return the calls of layers that gradients reached, in the order of the forward passes."""
        return [use for micro in self.micros for forward in micro.passes for use in received(forward)]

    def finish(self) -> Interpretation:
        """Return the micro-batches of the step; see :func:`distcockpit.losses.interpretation.interpret`.

        Raises:
            RuntimeError: If it is unclear which pass the layer calls of a backward pass belong to.
        """
        if self.fault is not None:
            raise self.fault
        self._kept.check()
        late = [use for use in self.uses() if use.is_late and use.output_gradients]
        if self._overlap and late:
            raise RuntimeError(
                f"Layer '{late[0].layer.path}' was called in a backward pass, as activation checkpointing with "
                "use_reentrant=True does, while several forward passes of the model had no backward yet, so it is "
                "unclear which of them it belongs to. Use use_reentrant=False, or call backward after each forward "
                "pass."
            )
        for forward in [each for each in self._passes if each.is_aside and not each.went_backward]:
            self._forget(forward)
        self._backward_passes.check_layers()
        self._backward_passes.check_kept()
        self._axes.settle(self._model, self._passes, self._functions)
        for use, position, by_axis in self._to_show:
            axis = use.axes[position]
            use.observed = by_axis[axis if axis in by_axis else None]
        self.skips = self._settled and not all(f.went_backward or not f.batch_size for f in self._passes)
        loss = (
            self._loss if self._loop.scale is None else replace(self._loss, factor=float(self._loop.scale.result()[0]))
        )
        return interpret(self.micros, self.objective, loss, self._batch_size, skips=self._settled)


_running: list[Capture] = []
"""All captures that have hooks on modules."""


@contextmanager
def undisturbed() -> Generator[None, None, None]:
    """Inside, modules are run again, and captures of other cockpits in this thread ignore it."""
    others = [capture for capture in _running if capture._thread == threading.get_ident() and not capture._paused]
    for capture in others:
        capture.pause(True)
    try:
        yield
    finally:
        for capture in others:
            capture.pause(False)


@dataclass(eq=False)
class _Call:
    """A call of the model that has not returned."""

    before: ForwardPass | None  # what calls of layers belonged to before
    own: OwnCopies  # of the arguments of the enclosing call
    made: ForwardPass | None = None
    is_rerouted: bool = False  # whether it only calls the model again
    watch: Watch | None = None  # sees the calls of functions in it


@dataclass(frozen=True)
class _Before:
    """The state of a layer when it was called."""

    snapshot: Snapshot
    kept: tuple[tuple[Any, ...], dict[str, Any]]
    versions: list[tuple[Tensor, int]]


def _without_values(add: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """Return a receiver that only notes that a gradient arrived."""
    return lambda gradient: add(gradient.new_zeros(()))


def _alias(tensor: Tensor) -> Tensor:
    """Return a separate tensor that is the same for autograd; a loss may be scaled in place, where views lose hooks."""
    if not tensor.requires_grad:
        return tensor
    return tensor.view_as(tensor) if tensor.dim() else tensor.clone()


def _versions(tree: Any) -> list[tuple[Tensor, int]]:
    return [(tensor, tensor._version) for tensor in tensors(tree) if not tensor.is_inference()]
