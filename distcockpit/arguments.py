"""The arguments of DistCockpit: checked, and completed with what follows from them."""

from __future__ import annotations

import importlib.metadata
import operator
import platform
import re
import time
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distcockpit import __version__, hutchinson
from distcockpit.coverage import Coverage
from distcockpit.curvature import Diagonals
from distcockpit.gradients.rules import is_unit
from distcockpit.gradients.uses import Layer
from distcockpit.layers import ACTIVATIONS
from distcockpit.losses import is_decomposable
from distcockpit.presets import preset
from distcockpit.quantities.base import Quantity
from distcockpit.quantities.batch import Model
from distcockpit.quantities.learning_rate import LearningRate
from distcockpit.schedules import AnyOf, Schedule
from distcockpit.session import Setup

BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


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


def chosen_quantities(
    quantities: str | Sequence[Quantity], schedule: Schedule, optimizer: torch.optim.Optimizer | None
) -> list[Quantity]:
    """The quantities, each with a schedule and a name of its own; the learning rates with them.

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
    chosen = [q.with_schedule(schedule) for q in chosen]
    if optimizer is not None and "learning_rate" not in names:
        schedules = tuple(dict.fromkeys(q.schedule for q in chosen if q.schedule is not None))
        chosen.append(LearningRate(schedule=schedules[0] if len(schedules) == 1 else AnyOf(schedules)))
    return chosen


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


def model_facts(
    bare: nn.Module, layers: Sequence[Layer], optimizer: torch.optim.Optimizer | None, world_size: int
) -> Model:
    """What quantities may know of the model, the optimizer and the ranks."""
    tracked = {full for layer in layers for full in layer.parameters.values()}
    shapes = {name: tuple(p.shape) for name, p in bare.named_parameters() if name in tracked}
    leaves = {
        layer.path: isinstance(layer.module, ACTIVATIONS)
        for layer in layers
        if not any(layer.module.children()) or is_unit(layer.module)
    }
    owner: dict[str, str] = {}
    for layer in layers:
        for full in layer.parameters.values():
            owner.setdefault(full, layer.path)
    groups = [] if optimizer is None else optimizer.param_groups
    group_of = {id(p): k for k, group in enumerate(groups) for p in group["params"]}
    parameters = dict(bare.named_parameters())
    return Model(
        shapes,
        leaves,
        layers={path: [name for name in shapes if owner[name] == path] for path in dict.fromkeys(owner.values())},
        dtypes={name: "float64" if parameters[name].dtype == torch.float64 else "float32" for name in shapes},
        every_parameter=list(parameters),
        parameter_groups={name: group_of[id(parameters[name])] for name in shapes if id(parameters[name]) in group_of},
        n_parameter_groups=len(groups),
        world_size=world_size,
    )


def check_options(grad_scaler: object, track_batchnorm: object, batch_dim: object) -> None:
    """Whether the remaining options are of the right kind.

    Raises:
        TypeError: If one is not.
        ValueError: If ``batch_dim`` is negative.
    """
    if grad_scaler is not None and not hasattr(grad_scaler, "get_scale"):
        raise TypeError(f"grad_scaler={grad_scaler!r}: must be a torch.amp.GradScaler or None.")
    if not isinstance(track_batchnorm, bool):
        raise TypeError(f"track_batchnorm={track_batchnorm!r}: must be True or False.")
    if isinstance(batch_dim, bool) or not isinstance(batch_dim, int):
        raise TypeError(
            f"batch_dim={batch_dim!r}: must be an integer, the axis of the model's inputs that is the batch."
        )
    if batch_dim < 0:
        raise ValueError(f"batch_dim={batch_dim!r}: must be at least 0; count axes from the front.")


def check_seconds(**options: object) -> None:
    """Whether these are times.

    Raises:
        TypeError: If one is no number.
        ValueError: If one is not positive.
    """
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name}={value!r}: must be a number of seconds.")
        if not 0 < float(value) < float("inf"):
            raise ValueError(f"{name}={value!r}: must be positive and finite.")


def check_counts(**options: object) -> None:
    """Whether these are counts.

    Raises:
        TypeError: If one is no integer.
        ValueError: If one is not positive.
    """
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}={value!r}: must be an integer.")
        if value < 1:
            raise ValueError(f"{name}={value!r}: must be at least 1.")


def memory_in_bytes(argument: str, value: object) -> int:
    """An amount of memory as a number.

    Raises:
        TypeError: If it is neither a number nor a text.
        ValueError: If it is no amount of memory, or not positive.
    """
    rule = "must be a positive number of bytes, or a text such as '256MiB' (B, kB, MB, GB, KiB, MiB, GiB)."
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"{argument}={value!r}: {rule}")
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(value).lower())
    if found is None or (found[2] or "b") not in BYTES or not float(found[1]) * BYTES[found[2] or "b"] >= 1:
        raise ValueError(f"{argument}={value!r}: {rule}")
    return int(float(found[1]) * BYTES[found[2] or "b"])


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
    facts: Model, quantities: Sequence[Quantity], loss_fn: nn.Module | None, **options: object
) -> dict[str, str]:
    """What all ranks must agree on, by name."""
    agreed = {"distcockpit version": __version__, "torch version": torch.__version__}
    agreed |= {f"quantity '{q.name}'": f"{type(q).__name__}({q.options()})" for q in quantities}
    agreed |= {f"parameter {i}": f"'{name}' {shape}" for i, (name, shape) in enumerate(facts.shapes.items())}
    kinds = int | float | str
    of_loss = {} if loss_fn is None else {k: v for k, v in vars(loss_fn).items() if isinstance(v, kinds)}
    agreed["loss_fn"] = f"{type(loss_fn).__name__} {of_loss}"
    agreed |= {name: str(value) for name, value in options.items()}
    agreed["tracked modules"] = str(list(facts.leaves))
    agreed["the optimizer's parameter groups"] = str((facts.n_parameter_groups, dict(facts.parameter_groups)))
    agreed["the order of quantities"] = str([q.name for q in quantities])
    return agreed


def check_needs(
    quantities: Sequence[Quantity],
    bare: nn.Module,
    loss_fn: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Whether there is what the quantities need. For curvature, raises as ``Diagonals.check_support``.

    Raises:
        ValueError: If the loss module or the optimizer is missing.
    """
    for quantity in quantities:
        needs = quantity.needs
        if needs.curvature is not None:
            Diagonals(bare, loss_fn).check_support(quantity.name, needs.curvature)
        if needs.trace is not None:
            hutchinson.check_support(quantity.name, needs.trace, loss_fn)
        differentiated = needs.eigenvalue is not None or needs.trace is not None
        if differentiated and loss_fn is not None and not is_decomposable(loss_fn):
            raise ValueError(
                f"quantity '{quantity.name}' runs the step again, with a loss module of reduction 'mean' or 'sum', "
                f"or a model that returns its loss, not with loss_fn={type(loss_fn).__name__}. Give DistCockpit such a "
                "module, or leave the quantity out."
            )
        if needs.optimizer and optimizer is None:
            raise ValueError(
                f"quantity '{quantity.name}' needs the learning rates, but optimizer=None. Give DistCockpit the "
                "optimizer, or leave the quantity out."
            )


def attributes(setup: Setup, table: Coverage) -> dict[str, Any]:
    """Attributes of the store's root that tell what was tracked."""
    return {
        "versions": versions(),
        "world_size": setup.world.size,
        "parameters": {name: list(shape) for name, shape in setup.facts.shapes.items()},
        "coverage": table.attributes(),
        "config": {
            "quantities": [{"type": type(q).__name__, **q.options()} for q in setup.quantities],
            "model": type(setup.bare).__name__,
            "loss_fn": type(setup.loss_fn).__name__,
            "optimizer": type(setup.optimizer).__name__,
        },
    }


def segment(world_size: int, hosts: Sequence[str]) -> dict[str, Any]:
    """Where this part of a run takes place.

    Args:
        world_size: Number of ranks.
        hosts: The host of each.
    """
    return {
        "world_size": world_size,
        "hosts": list(dict.fromkeys(hosts)),
        "versions": versions(),
        "started": time.time(),
    }


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    zarr = importlib.metadata.version("zarr")
    return {
        "distcockpit": __version__,
        "torch": torch.__version__,
        "zarr": zarr,
        "python": platform.python_version(),
    }
