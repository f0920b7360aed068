"""Models whose parameters are sharded over ranks with ``fully_shard`` (FSDP2): what each rank holds, and the rest.

Between the calls of its modules, a rank holds a piece of each parameter. Whole ones exist inside a module's forward and
backward pass only, as leaves that FSDP puts in place of the sharded parameters. Here, nothing is ever unsharded.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Slot = tuple[nn.Module, str]
"""A module and the local name of one of its parameters."""


@dataclass(frozen=True)
class Piece:
    """What this rank holds of a parameter.

    Args:
        parameter: As the optimizer knows it.
        place: Where the piece lies in the whole parameter, axis by axis.
        number: Which of the pieces it is; ranks with the same number hold replicas.
        counts: Whether this rank answers for it; of several replicas, one rank does.
    """

    parameter: nn.Parameter
    place: tuple[slice, ...]
    number: int
    counts: bool

    @property
    def value(self) -> Tensor:
        """The piece itself, detached."""
        return local(self.parameter)

    def common(self, rows: slice, there: Tensor) -> tuple[slice, Tensor]:
        """Return what the piece and some rows have in common: rows of the piece, and the same elements of the rows.

        Args:
            rows: Of the whole parameter.
            there: The rows, ``[rows, *]``.
        """
        if not self.place:
            return slice(None), there
        own, first = self.place[0], rows.start or 0
        start, stop = max(own.start, first), min(own.stop, first + len(there))
        if start >= stop:
            return slice(0, 0), there[:0]
        part = there[(slice(start - first, stop - first), *self.place[1:])]
        return slice(start - own.start, stop - own.start), part


def is_piece(tensor: object) -> bool:
    """True if this is what a rank holds of a distributed tensor."""
    tensors: Any = sys.modules.get("torch.distributed.tensor")  # half a second to import, for models that use it
    return tensors is not None and isinstance(tensor, tensors.DTensor)


def runs_sharded(module: nn.Module) -> bool:
    """True if ``fully_shard`` was applied to this module."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def computing_device(parameter: Tensor) -> torch.device:
    """Return where a parameter is when a module computes with it; pieces may wait elsewhere (``CPUOffloadPolicy``)."""
    if is_piece(parameter):
        mesh: Any = parameter
        kind = mesh.device_mesh.device_type
        if kind != parameter.device.type:
            return torch.device(kind, torch.get_device_module(kind).current_device())
    return parameter.device


def is_sharded(model: nn.Module) -> bool:
    """True if ``fully_shard`` was applied to the model or to a module in it."""
    return "torch.distributed.fsdp" in sys.modules and any(map(runs_sharded, model.modules()))


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, detached; all of it if it is not sharded."""
    whole: Any = tensor
    with torch.no_grad():
        return whole.to_local().detach() if is_piece(tensor) else tensor.detach()


def reshard(model: nn.Module) -> None:
    """Free what is whole of a sharded model, such as the root after an evaluation; no other rank is needed for that."""
    for module in model.modules():
        if runs_sharded(module):
            module.reshard()  # type: ignore[operator]


class Shards:
    """The pieces of a sharded model.

    Args:
        model: The bare module.
        rank: This rank, among those whose batches are pooled.
    """

    def __init__(self, model: nn.Module, rank: int) -> None:
        self.modules: dict[str, Any] = {path: m for path, m in model.named_modules() if runs_sharded(m)}
        reshard(model)
        self.pieces = {name: _piece(p, rank) for name, p in model.named_parameters()}
        names = {id(piece.parameter): name for name, piece in self.pieces.items()}
        self._slots: dict[str, list[tuple[Slot, str]]] = {
            path: [
                ((owner, slot), names[id(p)])
                for owner in module.modules()
                for slot, p in owner._parameters.items()
                if is_piece(p)
            ]
            for path, module in self.modules.items()
        }
        self._whole: dict[str, Tensor] = {}
        for name, piece in self.pieces.items():
            p = piece.parameter
            self._whole[name] = _nothing(p) if is_piece(p) else p

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters, by name, as the optimizer knows them."""
        return {name: piece.parameter for name, piece in self.pieces.items()}

    @property
    def whole(self) -> Mapping[str, Tensor]:
        """Stand-ins for the parameters, of their shapes and types; those of sharded ones have no memory and are NaN."""
        return self._whole

    def leaves(self, path: str) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters in a sharded module that are whole now, with their names in the model."""
        for (owner, slot), name in self._slots[path]:
            leaf = owner._parameters[slot]
            if leaf is not None and not is_piece(leaf):
                if leaf.dtype != self._whole[name].dtype:  # MixedPrecisionPolicy(param_dtype=...)
                    self._whole[name] = _nothing(leaf)
                yield name, leaf


def _piece(parameter: nn.Parameter, rank: int) -> Piece:
    place, number, counts = [slice(0, size) for size in parameter.shape], 0, True
    if not is_piece(parameter):
        return Piece(parameter, tuple(place), number, rank == 0)
    spread: Any = parameter
    mesh = spread.device_mesh
    for axis, (placement, coordinate) in enumerate(zip(spread.placements, mesh.get_coordinate(), strict=True)):
        if placement.is_shard():
            size = parameter.shape[placement.dim]
            chunk = -(-size // mesh.size(axis))
            place[placement.dim] = slice(min(size, coordinate * chunk), min(size, (coordinate + 1) * chunk))
            number = coordinate
        else:
            counts &= coordinate == 0
    return Piece(parameter, tuple(place), number, counts)


def problem_of(name: str, parameter: nn.Parameter, ranks: Sequence[int], *, whole: bool) -> str:
    """Return why a parameter cannot be pooled over ranks; empty if it can.

    Args:
        name: Its name.
        parameter: It.
        ranks: Those whose batches are pooled.
        whole: Whether no module of the model is sharded with ``fully_shard``.
    """
    if not is_piece(parameter):
        return ""
    spread: Any = parameter
    mesh, placements = spread.device_mesh, spread.placements
    kinds = [type(each).__name__ for each in placements]
    if whole or kinds.count("Shard") > 1 or set(kinds) - {"Shard", "Replicate"}:
        return (
            f"Parameter '{name}' is sharded as {tuple(placements)}, by more than fully_shard: tensor, expert and "
            "context parallelism are not supported. Use fully_shard alone, over one mesh of all ranks."
        )
    among = sorted(mesh.mesh.flatten().tolist())
    if among != sorted(ranks):
        return (
            f"Parameter '{name}' is sharded over ranks {among}, but the batches of ranks {sorted(ranks)} are pooled. "
            "Pass process_group=, the group of all ranks that share the model's mesh."
        )
    return ""


def _nothing(like: Tensor) -> Tensor:
    return torch.full((), float("nan"), dtype=like.dtype, device=computing_device(like)).expand(like.shape)


def _anything(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter of this shape with arbitrary values, which takes the memory of its longest axes alone.

    Neighbouring rows overlap, so that all elements come from one short random vector: a matrix is a Hankel matrix,
    which is of full rank.
    """
    shape, generator = parameter.shape, torch.Generator().manual_seed(sum(parameter.shape))
    length = sum(size - 1 for size in shape) + 1 if parameter.numel() else 0
    values = torch.randn(length, generator=generator, device="cpu") / math.sqrt(math.prod(shape[1:]) or 1)
    values = values.to(computing_device(parameter), parameter.dtype)
    return nn.Parameter(values.as_strided(shape, [1] * len(shape)), requires_grad=parameter.requires_grad)


@contextmanager
def apart(model: nn.Module) -> Generator[None, None, None]:
    """Inside, calls of the model or of modules in it reach no other rank: FSDP's hooks are off."""
    kinds = ("_forward_pre_hooks", "_forward_hooks")
    before = [
        (hooks, dict(hooks))
        for module in model.modules()
        if runs_sharded(module)
        for hooks in (getattr(module, kind) for kind in kinds)
    ]
    for hooks, those in before:
        for key, hook in those.items():
            if (getattr(hook, "__module__", None) or "").startswith("torch.distributed.fsdp"):
                del hooks[key]
    try:
        yield
    finally:
        for hooks, those in before:
            more = {key: hook for key, hook in hooks.items() if key not in those}
            hooks.clear()
            hooks.update({**those, **more})


@contextmanager
def stood_in(model: nn.Module) -> Generator[None, None, None]:
    """Inside, a sharded model runs on this rank alone, with arbitrary values in place of its parameters.

    That shows what does not depend on values: shapes, and which samples an output depends on. Other models stay as they
    are.
    """
    if not is_sharded(model):
        yield
        return
    slots: list[tuple[nn.Module, str, Any]] = [
        (owner, slot, p) for owner in model.modules() for slot, p in owner._parameters.items() if is_piece(p)
    ]
    others = {id(p): _anything(p) for _, _, p in slots}
    try:
        for owner, slot, p in slots:
            owner._parameters[slot] = others[id(p)]
        with apart(model):
            yield
    finally:
        for owner, slot, p in slots:
            owner._parameters[slot] = p
