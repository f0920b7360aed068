"""The arguments of DistCockpit: validation, and what follows from them."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.metadata
import inspect
import operator
import platform
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from distcockpit.capture.cover import Cover
from distcockpit.capture.coverage import coverage
from distcockpit.capture.selfcheck import SelfCheck
from distcockpit.capture.wrapped import wrappers
from distcockpit.curvature import hutchinson
from distcockpit.curvature.diagonals import Diagonals
from distcockpit.presets import preset
from distcockpit.quantities.base import Quantity
from distcockpit.quantities.batch import Model
from distcockpit.quantities.learning_rate import LearningRate
from distcockpit.quantities.parameter_condition import ParameterCondition
from distcockpit.schedules import AnyOf, Schedule, every
from distcockpit.shards import is_sharded, problem_of, reshard
from distcockpit.sinks import Sink
from distcockpit.store.options import StoreOptions
from distcockpit.store.run_store import MODES
from distcockpit.store.schema import NAME
from distcockpit.tracking.active import of_individual_gradients
from distcockpit.tracking.setup import Setup

REDUCTIONS = ("mean", "sum", "batchmean")
BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


@dataclass(frozen=True)
class ArgumentRule:
    """What a value must be."""

    kind: str  # must be ...
    is_kind: Callable[[Any], bool]
    limits: str = ""  # must be ..., too
    is_within: Callable[[Any], bool] = lambda value: True
    or_none: bool = False


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    """A number, or a tensor or an array with one element."""
    return _is_real(value) or (getattr(value, "shape", None) in ((), (1,)) and hasattr(value, "__float__"))


def _is_index(value: object) -> bool:
    """An integer, or what stands for one, such as a tensor with one."""
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return not isinstance(value, bool)


def one_of(*choices: str) -> ArgumentRule:
    """One of these texts."""
    return ArgumentRule("", lambda value: True, f"one of {list(choices)}", lambda value: value in choices)


SECONDS = ArgumentRule(
    "a number of seconds", _is_real, "positive and finite", lambda value: 0 < float(value) < float("inf")
)
COUNT = ArgumentRule("an integer", _is_integer, "at least 1", lambda value: value >= 1)
RULES: dict[str, ArgumentRule] = {
    "flush_seconds": SECONDS,
    "wait_seconds": SECONDS,
    "store_seconds": SECONDS,
    "lock_seconds": SECONDS,
    "timeout_seconds": SECONDS,
    "flush_rows": COUNT,
    "queue_steps": COUNT,
    "mode": one_of(*MODES),
    "on_error": one_of("warn", "raise"),
    "fallback": one_of("warn", "error"),
    "grad_scaler": ArgumentRule(
        "a torch.amp.GradScaler or None", lambda value: hasattr(value, "get_scale"), or_none=True
    ),
    "track_batchnorm": ArgumentRule("True or False", lambda value: isinstance(value, bool)),
    "batch_dim": ArgumentRule(
        "an integer, the batch axis of the model's inputs",
        _is_integer,
        "at least 0; count axes from the front",
        lambda value: value >= 0,
    ),
    "sinks": ArgumentRule(
        "a list of sinks, such as [TensorBoard('runs/tensorboard')]",
        lambda value: isinstance(value, list | tuple) and all(isinstance(sink, Sink) for sink in value),
    ),
    "step": ArgumentRule(
        "an integer", _is_index, "at least 0 and below 2^53", lambda value: 0 <= operator.index(value) < 2**53
    ),
    "epoch": ArgumentRule("a number", _is_real, or_none=True),
    "batch_size": ArgumentRule("an integer", _is_integer, "at least 0", lambda value: value >= 0, or_none=True),
    "weight": ArgumentRule(
        "a number", _is_number, "at least 0 and finite", lambda value: 0 <= float(value) < float("inf"), or_none=True
    ),
    "divisor": ArgumentRule(
        "a number", _is_number, "positive and finite", lambda value: 0 < float(value) < float("inf"), or_none=True
    ),
}
"""What each argument must be, by its name; of DistCockpit, StoreOptions, ``track``, ``log`` and ``record_losses``."""


def check(call: str = "", /, **arguments: object) -> None:
    """Check arguments against their rules.

    Args:
        call: The method that takes them; of constructors none.
        arguments: By name.

    Raises:
        TypeError: If one is of the wrong kind.
        ValueError: If one is out of range.
    """
    for name, value in arguments.items():
        rule = RULES[name]
        if value is None and rule.or_none:
            continue
        what = f"{call}({name}={value!r})" if call else f"{name}={value!r}"
        if not rule.is_kind(value):
            raise TypeError(f"{what}: must be {rule.kind}.")
        if not rule.is_within(value):
            raise ValueError(f"{what}: must be {rule.limits}.")


def bare_module(model: nn.Module) -> nn.Module:
    """Unwrap the model: DistributedDataParallel and torch.compile, in any order.

    Raises:
        TypeError: If the model is not a module, or its wrapper is not supported.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r}: must be a torch.nn.Module, usually DistributedDataParallel(net).")
    bare = wrappers(model)[-1]
    for path, module in bare.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        what = f"model={type(model).__name__}" if not path else f"Module '{path}' of the model"
        if kinds & {"FullyShardedDataParallel", "DataParallel"}:
            raise TypeError(
                f"{what} is a {type(module).__name__}: it splits the parameters or the batch internally, which is not "
                "supported. Use DistributedDataParallel, or fully_shard (FSDP2)."
            )
    reshard(bare)
    check_devices(bare)
    return bare


def check_shards(bare: nn.Module, ranks: Sequence[int], *, track_batchnorm: bool) -> None:
    """Check that sharded parameters can be pooled over the ranks.

    Raises:
        TypeError: If a parameter is sharded in other ways than by fully_shard, or over other ranks.
        ValueError: If an option needs whole parameters.
    """
    for name, p in bare.named_parameters():
        if problem := problem_of(name, p, ranks, whole=not is_sharded(bare)):
            raise TypeError(problem)
    if track_batchnorm and is_sharded(bare):
        raise ValueError(
            "track_batchnorm=True: the model is sharded with fully_shard, so the step cannot be run again with batch "
            "statistics as constants. Leave it out, or use layers without batch statistics, such as GroupNorm."
        )


def check_devices(bare: nn.Module) -> None:
    """Check that the model is on one device, with memory of its own.

    Raises:
        ValueError: If not; names parameters and a way out.
    """
    on = {p.device: name for name, p in reversed(list(bare.named_parameters()))}  # with its first parameter
    if any(device.type == "meta" for device in on):
        raise ValueError(
            f"Parameter '{on[torch.device('meta')]}' is on the meta device: it has no values yet. Call "
            "model.to_empty(device=...) and initialise the parameters before you pass the model to DistCockpit."
        )
    if len(on) > 1:
        where = ", ".join(f"'{name}' on {device}" for device, name in reversed(on.items()))
        raise ValueError(
            f"The model ({type(bare).__name__}) is spread over several devices: {where}. Each rank must hold its model "
            "on one device: use more ranks with DistributedDataParallel, or wrap only the part of one device."
        )


Optimizers = Mapping[str, torch.optim.Optimizer]
"""The optimizers of the model, by name."""


def named_optimizers(optimizer: object) -> Optimizers:
    """Return the optimizers by name; a single one has an empty name, those in a list are named by index.

    Raises:
        TypeError: If an entry is not an optimizer.
        ValueError: If there is none, or a name cannot name a group in the store.
    """
    if optimizer is None:
        return {}
    if isinstance(optimizer, Mapping):
        named = dict(optimizer)
    elif isinstance(optimizer, list | tuple):
        named = {str(k): each for k, each in enumerate(optimizer)}
    else:
        named = {"": optimizer}
    for name, each in named.items():
        if not hasattr(each, "param_groups"):
            raise TypeError(f"optimizer={each!r}: must be a torch.optim.Optimizer, a list or a dict of them, or None.")
        if not isinstance(name, str) or (name and not NAME.fullmatch(f"a_{name}")):
            raise ValueError(
                f"optimizer={{{name!r}: ...}}: names must be strings of letters, digits, '_', '-' and '.', because "
                "they name groups in the store."
            )
    if not named:
        raise ValueError(f"optimizer={optimizer!r}: holds no optimizer. Pass one, or omit the argument.")
    return {"": named["0"]} if list(named) == ["0"] and not isinstance(optimizer, Mapping) else named


def chosen_quantities(
    quantities: str | Quantity | Sequence[str | Quantity],
    schedule: Schedule | int,
    optimizers: Optimizers,
    model: Model,
) -> list[Quantity]:
    """Resolve the quantities, each with its own schedule and name, and add the learning rates.

    Raises:
        ValueError: If two share a name, or there are none.
        TypeError: If an entry is not a quantity, or the schedule is not callable.
    """
    if isinstance(schedule, int) and not isinstance(schedule, bool):
        schedule = every(schedule)
    if not callable(schedule):
        raise TypeError(
            f"schedule={schedule!r}: must be a callable step -> bool, such as every(10), or an integer n for every(n)."
        )
    listed = [quantities] if isinstance(quantities, str | Quantity) else list(quantities)
    if not listed:
        raise ValueError(
            "quantities=[]: must contain at least one quantity. To turn the cockpit off, pass enabled=False."
        )
    chosen = []
    for each in listed:
        mine = preset(each) if isinstance(each, str) else [each]
        chosen += [q for q in mine if not isinstance(each, str) or q not in chosen]  # presets may overlap
    for quantity in chosen:
        if not isinstance(quantity, Quantity):
            raise TypeError(
                f"quantities: {quantity!r} is not a Quantity. Pass instances, such as MeanGSNR(), or preset names."
            )
    if len(optimizers) > 1:
        given = {q.name for q in chosen}
        held = [name for name, parameters in model.optimizers.items() if parameters]
        chosen = [each for q in chosen for each in q.for_optimizers(held) if each is q or each.name not in given]
    names = [q.name for q in chosen]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"quantities: {names.count(name)} are named {name!r}, which is also the name of their group in the "
                f"store. Give each its own name: {type(chosen[names.index(name)]).__name__}(name=...)."
            )
    chosen = [q.with_schedule(schedule) for q in chosen]
    if optimizers and "learning_rate" not in names:
        schedules = tuple(dict.fromkeys(q.schedule for q in chosen if q.schedule is not None))
        chosen.append(LearningRate(required=False, schedule=schedules[0] if len(schedules) == 1 else AnyOf(schedules)))
    return chosen


MODULES: dict[object, type[nn.Module]] = {
    F.cross_entropy: nn.CrossEntropyLoss,
    F.mse_loss: nn.MSELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.binary_cross_entropy: nn.BCELoss,
    F.nll_loss: nn.NLLLoss,
    F.l1_loss: nn.L1Loss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.huber_loss: nn.HuberLoss,
    F.kl_div: nn.KLDivLoss,
}
"""The loss module that calls each function."""


def loss_module(loss_fn: object) -> tuple[nn.Module | None, object]:
    """Return the loss module, and the function it was given as, if any.

    Raises:
        TypeError: If the loss can neither be called nor is ``None``.
    """
    if loss_fn is None:
        return None, None
    if isinstance(loss_fn, nn.Module):
        return wrappers(loss_fn)[-1], None
    if not callable(loss_fn):
        raise TypeError(
            f"loss_fn={loss_fn!r}: must be a loss module such as nn.CrossEntropyLoss(), a function, or None. Only "
            "curvature needs loss_fn: the loss itself is found as the loop computes it."
        )
    if loss_fn in MODULES:
        return MODULES[loss_fn](), loss_fn
    # A function of the user's own, whose reduction is unknown: like a loss module of the user's own.
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    return type(name, (nn.Module,), {"forward": staticmethod(loss_fn)})(), None


def check_optimizers(optimizers: Optimizers, bare: nn.Module) -> None:
    """Check whether the optimizers belong to the model.

    Raises:
        ValueError: If an optimizer belongs to another model, or two hold the same parameter.
    """
    mine = {id(p): name for name, p in bare.named_parameters()}
    held: dict[int, str] = {}
    for name, optimizer in optimizers.items():
        ids = [id(p) for group in optimizer.param_groups for p in group["params"]]
        if mine.keys().isdisjoint(ids):
            raise ValueError(
                f"optimizer={type(optimizer).__name__}: holds none of the model's parameters. Pass this model's "
                "optimizer."
            )
        if twice := [p for p in ids if held.setdefault(p, name) != name]:
            raise ValueError(
                f"optimizer: '{held[twice[0]]}' and '{name}' both hold parameter '{mine.get(twice[0], '?')}', so its "
                "updates cannot be told apart. Give each parameter to one optimizer only."
            )


def options_of_store(options: object, flat: Mapping[str, Any], taking: type) -> StoreOptions:
    """Merge ``store_options`` with store options passed as plain keywords.

    Args:
        options: What the user passed as ``store_options``.
        flat: The remaining keywords.
        taking: The class they were passed to.

    Raises:
        TypeError: If ``options`` is not a StoreOptions, or a keyword is unknown.
    """
    if not isinstance(options, StoreOptions):
        raise TypeError(f"store_options={options!r}: must be a StoreOptions, such as StoreOptions(flush_seconds=5).")
    known = [each.name for each in dataclasses.fields(StoreOptions)]
    for name in flat:
        if name not in known:
            close = difflib.get_close_matches(name, [*inspect.signature(taking).parameters, *known], 1)
            raise TypeError(
                f"{taking.__name__}() has no argument {name!r}.{f' Did you mean {close[0]!r}?' if close else ''}"
            )
    if flat:
        given = ", ".join(f"{name}={value!r}" for name, value in flat.items())
        warnings.warn(
            f"DistCockpit({given}): pass store options as store_options=StoreOptions({given}). Passing them as plain "
            "keywords is deprecated and will stop working in the next release.",
            DeprecationWarning,
            stacklevel=3,
        )
    return dataclasses.replace(options, **flat)


def memory_in_bytes(argument: str, value: object) -> int:
    """Convert an amount of memory to bytes.

    Raises:
        TypeError: If it is neither an integer nor a string.
        ValueError: If it is not an amount of memory, or not positive.
    """
    rule = "must be a positive number of bytes, or a string such as '256MiB' (B, kB, MB, GB, KiB, MiB, GiB)."
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"{argument}={value!r}: {rule}")
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(value).lower())
    if found is None or (found[2] or "b") not in BYTES or not float(found[1]) * BYTES[found[2] or "b"] >= 1:
        raise ValueError(f"{argument}={value!r}: {rule}")
    return int(float(found[1]) * BYTES[found[2] or "b"])


def description(
    facts: Model, quantities: Sequence[Quantity], loss_fn: nn.Module | None, **options: object
) -> dict[str, str]:
    """What all ranks must agree on, by name."""
    agreed = {"distcockpit version": importlib.metadata.version("distcockpit"), "torch version": torch.__version__}
    agreed |= {f"quantity '{q.name}'": f"{type(q).__name__}({q.options()})" for q in quantities}
    agreed |= {f"parameter {i}": f"'{name}' {shape}" for i, (name, shape) in enumerate(facts.shapes.items())}
    kinds = int | float | str
    of_loss = {} if loss_fn is None else {k: v for k, v in vars(loss_fn).items() if isinstance(v, kinds)}
    agreed["loss_fn"] = f"{type(loss_fn).__name__} {of_loss}"
    agreed |= {name: str(value) for name, value in options.items()}
    agreed["tracked modules"] = str(list(facts.leaves))
    agreed["the optimizer's parameter groups"] = str((facts.n_parameter_groups, dict(facts.parameter_groups)))
    agreed["optimizers"] = str(dict(facts.optimizers))
    agreed["the order of quantities"] = str([q.name for q in quantities])
    return agreed


def available(
    quantities: Sequence[Quantity],
    bare: nn.Module,
    loss_fn: nn.Module | None,
    optimizers: Optimizers,
    mixing: str,
) -> tuple[list[Quantity], list[str]]:
    """Split the quantities into those that can be tracked, and the reasons why others of a preset cannot.

    Args:
        quantities: All of them.
        bare: The bare module.
        loss_fn: The loss module.
        optimizers: By name.
        mixing: Why individual gradients are undefined, or empty; if undefined, they are NaN, or an error.

    Raises:
        ValueError: If a required quantity cannot be tracked; for curvature, see ``Diagonals.check_support``.
    """
    found, missing = [], []
    for quantity in quantities:
        try:
            _check_needs(quantity, bare, loss_fn, optimizers)
            if mixing and (quantity.required or quantity.needs.second_order) and of_individual_gradients(quantity):
                raise ValueError(f"{mixing[0].upper()}{mixing[1:]}")
        except ValueError as error:
            if quantity.required:
                raise
            missing.append(f"{quantity.name} is left out: {error}")
        else:
            found.append(quantity)
    return found, missing


def _check_needs(quantity: Quantity, bare: nn.Module, loss_fn: nn.Module | None, optimizers: Optimizers) -> None:
    needs = quantity.needs
    if is_sharded(bare) and (needs.second_order or isinstance(quantity, ParameterCondition)):
        raise ValueError(
            f"quantity '{quantity.name}' needs whole parameters, but the model is sharded with fully_shard. Leave the "
            "quantity out, or track a smaller model with DistributedDataParallel."
        )
    if needs.pooled_curvature and (needs.curvature is None or needs.curvature.summed):
        raise ValueError(
            f"quantity '{quantity.name}' has Needs(pooled_curvature=True, curvature={needs.curvature}), but it takes a "
            "diagonal to be pooled element by element. Pass one that is not summed, such as TICDiag().needs.curvature."
        )
    if needs.curvature is not None:
        Diagonals(bare, loss_fn).check_support(quantity.name, needs.curvature)
    if needs.trace is not None:
        hutchinson.check_support(quantity.name, needs.trace, loss_fn)
    differentiated = needs.eigenvalue is not None or needs.trace is not None
    if differentiated and loss_fn is not None and getattr(loss_fn, "reduction", None) not in REDUCTIONS:
        raise ValueError(
            f"quantity '{quantity.name}' reruns the step, which needs a loss module with reduction 'mean' or 'sum', or "
            f"a model that returns its loss, but loss_fn={type(loss_fn).__name__}. Pass DistCockpit such a module, or "
            "leave the quantity out."
        )
    if needs.optimizer and not optimizers:
        raise ValueError(
            f"quantity '{quantity.name}' needs the learning rates, but optimizer=None. Pass DistCockpit the "
            "optimizer, or leave the quantity out."
        )


def attributes(setup: Setup, cover: Cover) -> dict[str, Any]:
    """Return the root attributes of the store that say what is tracked."""
    return {
        "versions": versions(),
        "world_size": setup.world.size,
        "parameters": {name: list(shape) for name, shape in setup.facts.shapes.items()},
        "coverage": coverage(setup.bare, cover, SelfCheck(dict(setup.tracked))).attributes(),
        "config": {
            "quantities": [{"type": type(q).__name__, **q.options()} for q in setup.quantities],
            "model": type(setup.bare).__name__,
            "loss_fn": type(setup.loss_fn).__name__,
            "optimizer": ", ".join(type(each).__name__ for each in setup.optimizers.values()) or "NoneType",
        },
    }


def segment(world_size: int, hosts: Sequence[str]) -> dict[str, Any]:
    """Describe where this part of the run takes place.

    Args:
        world_size: Number of ranks.
        hosts: The host of each rank.
    """
    return {
        "world_size": world_size,
        "hosts": list(dict.fromkeys(hosts)),
        "versions": versions(),
        "started": time.time(),
    }


def versions() -> dict[str, str]:
    """Return the versions of everything the numbers depend on."""
    zarr = importlib.metadata.version("zarr")
    return {
        "distcockpit": importlib.metadata.version("distcockpit"),
        "torch": torch.__version__,
        "zarr": zarr,
        "python": platform.python_version(),
    }
