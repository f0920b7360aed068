"""The arguments of DistCockpit: checked, and completed with what follows from them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distcockpit import __version__, curvature
from distcockpit.gradients.rules import is_unit
from distcockpit.gradients.uses import Layer
from distcockpit.layers import ACTIVATIONS
from distcockpit.presets import preset
from distcockpit.quantities.base import Model, Quantity
from distcockpit.schedules import Schedule
from distcockpit.session import Setup


def bare_module(model: nn.Module) -> nn.Module:
    """The module inside the wrapper.

    Raises:
        TypeError: If the model is no module, or wrapped in something that is not supported.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r}: must be a torch.nn.Module, mostly DistributedDataParallel(net).")
    if isinstance(model, DistributedDataParallel):
        return model.module
    kinds = {kind.__name__ for kind in type(model).__mro__}
    if kinds & {"FullyShardedDataParallel", "FSDPModule", "DataParallel"}:
        raise TypeError(
            f"model={type(model).__name__}: its parameters or its batch are split inside the wrapper, which is not "
            "supported. Use DistributedDataParallel."
        )
    return model


def chosen_quantities(quantities: str | Sequence[Quantity], schedule: Schedule) -> list[Quantity]:
    """The quantities, each with a schedule and a name of its own.

    Raises:
        ValueError: If two have one name, or there is none.
        TypeError: If something is no quantity, or the schedule is not callable.
    """
    if not callable(schedule):
        raise TypeError(f"schedule={schedule!r}: must be a callable step -> bool, such as every(10).")
    if isinstance(quantities, Quantity):
        raise TypeError(
            f"quantities={type(quantities).__name__}(...): must be a list, [{type(quantities).__name__}()]."
        )
    chosen = preset(quantities) if isinstance(quantities, str) else list(quantities)
    if not chosen:
        raise ValueError("quantities=[]: must hold at least one quantity; enabled=False turns the cockpit off.")
    for quantity in chosen:
        if not isinstance(quantity, Quantity):
            raise TypeError(f"quantities: {quantity!r} is no Quantity. Give objects, such as MeanGSNR().")
    names = [q.name for q in chosen]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"quantities: {names.count(name)} have the name {name!r}, which is their group in the store. Give "
                f"them different names: {type(chosen[names.index(name)]).__name__}(name=...)."
            )
    return [q.with_schedule(schedule) for q in chosen]


def check_loss_and_optimizer(
    loss_fn: nn.Module | None, optimizer: torch.optim.Optimizer | None, bare: nn.Module
) -> None:
    """Whether they are what they should be, and belong to the model.

    Raises:
        TypeError: If the loss is neither a module nor ``None``, or the optimizer is none.
        ValueError: If the optimizer is one of another model.
    """
    if loss_fn is not None and not isinstance(loss_fn, nn.Module):
        raise TypeError(
            f"loss_fn={loss_fn!r}: must be a loss module such as nn.CrossEntropyLoss(), or None for a loss computed by "
            "a function or inside the model."
        )
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise TypeError(f"optimizer={optimizer!r}: must be a torch.optim.Optimizer or None.")
    if optimizer is not None:
        mine = {id(p) for p in bare.parameters()}
        if not any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                f"optimizer={type(optimizer).__name__}: holds none of the model's parameters. Give the optimizer of "
                "this model."
            )


def check_choice(argument: str, value: str, choices: Sequence[str]) -> None:
    """Whether a value is among the allowed ones.

    Raises:
        ValueError: If not.
    """
    if value not in choices:
        raise ValueError(f"{argument}={value!r}: must be one of {list(choices)}.")


def model_facts(bare: nn.Module, layers: Sequence[Layer]) -> Model:
    """What quantities may know of the model."""
    tracked = {full for layer in layers for full in layer.parameters.values()}
    shapes = {name: tuple(p.shape) for name, p in bare.named_parameters() if name in tracked}
    leaves = {
        layer.path: isinstance(layer.module, ACTIVATIONS)
        for layer in layers
        if not any(layer.module.children()) or is_unit(layer.module)
    }
    return Model(shapes, leaves)


def check_options(grad_scaler: object, flush_seconds: object, track_batchnorm: object) -> None:
    """Whether the remaining options are of the right kind.

    Raises:
        TypeError: If one is not.
        ValueError: If ``flush_seconds`` is not positive.
    """
    if grad_scaler is not None and not hasattr(grad_scaler, "get_scale"):
        raise TypeError(f"grad_scaler={grad_scaler!r}: must be a torch.amp.GradScaler or None.")
    if not isinstance(track_batchnorm, bool):
        raise TypeError(f"track_batchnorm={track_batchnorm!r}: must be True or False.")
    if isinstance(flush_seconds, bool) or not isinstance(flush_seconds, Real):
        raise TypeError(f"flush_seconds={flush_seconds!r}: must be a number of seconds.")
    if not float(flush_seconds) > 0:
        raise ValueError(f"flush_seconds={flush_seconds!r}: must be positive.")


def check_step(call: str, step: object) -> int:
    """A step as a plain integer.

    Raises:
        TypeError: If it is no integer.
        ValueError: If it is negative or too large for the store.
    """
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(step, bool):
        raise TypeError(f"{call}(step={step!r}): must be an integer.")
    if not 0 <= number < 2**53:
        raise ValueError(f"{call}(step={step!r}): must be at least 0 and below 2^53.")
    return number


def check_epoch(call: str, epoch: object) -> float | None:
    """An epoch as a plain number.

    Raises:
        TypeError: If it is no number.
    """
    if epoch is None:
        return None
    if isinstance(epoch, bool) or not isinstance(epoch, Real):
        raise TypeError(f"{call}(epoch={epoch!r}): must be a number.")
    return float(epoch)


def check_batch(weight: object, batch_size: object) -> None:
    """Whether the user's word on the batch makes sense.

    Raises:
        TypeError: If one is no number.
        ValueError: If one is negative, or the weight is not finite.
    """
    if batch_size is not None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int):
            raise TypeError(f"track(batch_size={batch_size!r}): must be an integer.")
        if batch_size < 0:
            raise ValueError(f"track(batch_size={batch_size!r}): must be at least 0.")
    if weight is not None:
        if isinstance(weight, bool) or not isinstance(weight, Real):
            raise TypeError(f"track(weight={weight!r}): must be a number.")
        if not 0 <= float(weight) < float("inf"):
            raise ValueError(f"track(weight={weight!r}): must be at least 0 and finite.")


def description(
    facts: Model, quantities: Sequence[Quantity], loss_fn: nn.Module | None, track_batchnorm: bool
) -> dict[str, str]:
    """What all ranks must agree on, by name."""
    agreed = {"distcockpit version": __version__, "torch version": torch.__version__}
    agreed |= {f"quantity '{q.name}'": f"{type(q).__name__}({q.options()})" for q in quantities}
    agreed |= {f"parameter {i}": f"'{name}' {shape}" for i, (name, shape) in enumerate(facts.shapes.items())}
    options = {} if loss_fn is None else {k: v for k, v in vars(loss_fn).items() if isinstance(v, int | float | str)}
    agreed["loss_fn"] = f"{type(loss_fn).__name__} {options}"
    agreed["track_batchnorm"] = str(track_batchnorm)
    agreed["tracked modules"] = str(list(facts.leaves))
    agreed["the order of quantities"] = str([q.name for q in quantities])
    return agreed


def check_curvature(quantities: Sequence[Quantity], bare: nn.Module, loss_fn: nn.Module | None) -> None:
    """Whether BackPACK can serve every curvature that is asked for; raises as ``curvature.check_support``."""
    for quantity in quantities:
        if quantity.needs.curvature is not None:
            curvature.check_support(quantity.name, quantity.needs.curvature, bare, loss_fn)


def attributes(setup: Setup, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Attributes of the store's root that tell what was tracked."""
    return {
        "versions": {"distcockpit": __version__, "torch": torch.__version__},
        "world_size": setup.world.size,
        "parameters": {name: list(shape) for name, shape in setup.facts.shapes.items()},
        "layers": {layer.path: layer.rule.description for layer in setup.layers if layer.parameters},
        "config": {
            "quantities": [{"type": type(q).__name__, **q.options()} for q in setup.quantities],
            "model": type(setup.bare).__name__,
            "loss_fn": type(setup.loss_fn).__name__,
            "optimizer": type(optimizer).__name__,
        },
    }
