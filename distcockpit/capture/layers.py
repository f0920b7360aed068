"""Which modules of a model are tracked, and what prevents it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from distcockpit.capture.wrapped import has_children
from distcockpit.gradients.uses import Layer
from distcockpit.replay.batch_norms import Modules, training

# The modules of torch.nn.modules.activation, except attention, which has parameters and a structure of its own.
ACTIVATIONS = tuple(
    kind
    for name in nn.modules.activation.__all__
    if (kind := getattr(nn.modules.activation, name)) is not nn.MultiheadAttention
)


def is_unit(module: nn.Module) -> bool:
    """True if a module uses the parameters below it without calling their modules: one layer, whatever is inside."""
    return isinstance(module, nn.MultiheadAttention) or is_parametrized(module)


def find_layers(
    model: nn.Module, include: Sequence[str] | None = None, exclude: Sequence[str] | None = None
) -> list[Layer]:
    """Return the modules to hook: those that own trainable parameters, and all leaf modules (for their outputs).

    Args:
        model: The bare module.
        include: Patterns of layer names (``fnmatch``); ``None`` takes all.
        exclude: Patterns of layer names to leave out.

    Returns:
        One layer per module, in the order of ``model.named_modules()``.

    Raises:
        ValueError: If no trainable parameter is left, or a parameter is shared by a tracked and an excluded layer.
    """
    every_name = {id(p): name for name, p in model.named_parameters()}
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    _check_patterns(model, include=include, exclude=exclude)
    if not names:
        raise ValueError(
            f"The model ({type(model).__name__}) has no trainable parameters, so there is nothing to track. "
            "Parameters are trainable when requires_grad is True."
        )
    for name, p in model.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"Parameter '{name}' has no shape yet. Call the model once with a batch before constructing "
                "DistCockpit."
            )
    layers, left_out = [], {}
    for path, module in _modules(model):
        unit = is_unit(module)
        own = dict(module.named_parameters(recurse=unit, remove_duplicate=False))
        parameters = {local: names[id(p)] for local, p in own.items() if id(p) in names}
        if not _selected(path, include, exclude):
            left_out.update({full: path for full in parameters.values()})
        elif parameters or unit or not has_children(module):
            below = {n: every_name[id(p)] for n, p in module.named_parameters(remove_duplicate=False)}
            is_leaf = unit or not has_children(module)
            layers.append(Layer(path, module, parameters, below, is_leaf))
    tracked = {full: layer.path for layer in layers for full in layer.parameters.values()}
    if not tracked:
        raise ValueError(
            f"include={include!r} and exclude={exclude!r} leave no layer with trainable parameters. Layer names are "
            f"{sorted({path for path in left_out.values()})[:8]}; patterns are matched against the whole name."
        )
    for full in tracked.keys() & left_out.keys():
        raise ValueError(
            f"Parameter '{full}' is shared by the tracked layer '{tracked[full]}' and the excluded layer "
            f"'{left_out[full]}'. Its per-sample gradients need both: include both or exclude both."
        )
    for layer in layers:
        if isinstance(layer.module, torch.jit.ScriptModule):
            raise ValueError(
                f"Layer '{layer.path}' ({type(layer.module).__name__}) is a scripted module, which does not support "
                f"hooks. Use it without torch.jit.script, or leave the layer out: exclude=['{layer.path}']."
            )
        for local in layer.parameters:
            if dict(layer.module.named_parameters(remove_duplicate=False))[local].is_complex():
                raise ValueError(
                    f"Layer '{layer.path}' ({type(layer.module).__name__}) has the complex parameter '{local}', which "
                    "is not supported. Store real and imaginary parts in one real parameter and use "
                    f"torch.view_as_complex, or leave the layer out: exclude=['{layer.path}']."
                )
        if isinstance(layer.module, nn.Embedding | nn.EmbeddingBag) and layer.parameters:
            for option, why in (
                ("max_norm", "writes to its weight in the forward pass"),
                ("scale_grad_by_freq", "divides by counts over the whole batch, which mixes its samples"),
            ):
                if getattr(layer.module, option):
                    raise ValueError(
                        f"Layer '{layer.path}' ({type(layer.module).__name__}) has {option}="
                        f"{getattr(layer.module, option)!r}, which {why}. Drop the option, or leave the layer out: "
                        f"exclude=['{layer.path}']."
                    )
    return layers


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules with their names, except those below a unit."""
    units: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(f"{unit}.") or unit == "" for unit in units):
            continue
        if is_unit(module):
            units.append(path)
        yield path, module


def _check_patterns(model: nn.Module, **options: Sequence[str] | None) -> None:
    """Check whether patterns are given as a list, and each matches a layer.

    Raises:
        TypeError: If they are a single string.
        ValueError: If one matches nothing.
    """
    paths = [path for path, _ in model.named_modules()]
    for option, patterns in options.items():
        if isinstance(patterns, str):
            raise TypeError(f"{option}={patterns!r}: must be a list of patterns, [{patterns!r}].")
        for pattern in patterns or ():
            if not any(fnmatchcase(path, pattern) for path in paths):
                raise ValueError(
                    f"{option}={patterns!r}: {pattern!r} matches no layer. Layer names are {paths[1:9]}; patterns are "
                    "matched against the whole name."
                )


def _selected(path: str, include: Sequence[str] | None, exclude: Sequence[str] | None) -> bool:
    wanted = include is None or any(fnmatchcase(path, pattern) for pattern in include)
    return wanted and not any(fnmatchcase(path, pattern) for pattern in exclude or ())


def problem_of_batchnorm(norms: Modules, track_batchnorm: bool) -> str:
    """Return why batch norms make individual gradients undefined, unless the user said how to treat batch statistics.

    Args:
        norms: The batch norms of the model.
        track_batchnorm: Whether batch statistics are treated as constants.

    Returns:
        The reason, and what to do; empty if there is no such batch norm.
    """
    for path, module in training(norms):
        kind = type(module).__name__
        if isinstance(module, nn.SyncBatchNorm):
            return (
                f"layer '{path}' ({kind}) normalises with statistics of all ranks, which per-sample gradients do not "
                "support. Put it in eval mode, or use BatchNorm with track_batchnorm=True."
            )
        if not track_batchnorm:
            return (
                f"layer '{path}' ({kind}) is in training mode: it mixes the samples of a batch, so per-sample "
                "gradients are not defined. Pass track_batchnorm=True to treat the batch statistics as constants, "
                "put the layer in eval mode, or use GroupNorm or LayerNorm."
            )
    return ""
