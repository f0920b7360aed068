"""What all ranks agreed on when the cockpit was constructed, and what follows from it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from distcockpit.capture.layers import ACTIVATIONS, find_layers, is_unit
from distcockpit.capture.wrapped import has_children
from distcockpit.gradients.differences import Differences
from distcockpit.gradients.factors import WHOLE
from distcockpit.gradients.uses import Layer, label
from distcockpit.gradients.walk import BLOCK_ELEMENTS, even_pieces
from distcockpit.quantities.base import Quantity
from distcockpit.quantities.batch import Model
from distcockpit.replay.batch_norms import Modules, batchnorms, training
from distcockpit.shards import Shards, computing_device, is_sharded, local, reshard
from distcockpit.world import World

Bucket = dict[str, slice]
"""Parameters, each with the rows that belong to the bucket."""

MOST_BYTES, FEWEST_ELEMENTS = 1 << 28, 1 << 16
"""Of the buckets that are there at a time, with all their vectors; what a tiny budget does not go below."""


@dataclass(frozen=True)
class Setup:
    """What all ranks agreed on at construction."""

    world: World
    bare: nn.Module  # the model without its wrappers
    wrappers: Sequence[nn.Module]  # the wrappers around it, outermost first
    layers: Sequence[Layer]  # each with the parameters that it owns
    facts: Model
    quantities: Sequence[Quantity]
    loss_fn: nn.Module | None
    track_batchnorm: bool
    batch_dim: int
    slow_routes: bool  # whether parameters may take a slow route
    memory_budget: int  # bytes for buckets, blocks of individual gradients, and those kept for the next walk
    grad_scaler: torch.amp.GradScaler | None
    optimizers: Mapping[str, torch.optim.Optimizer]  # by name; a single one has an empty name
    raise_errors: bool  # whether environment faults raise at the next step
    n_groups: Sequence[int]  # how many parameter groups each optimizer has
    loss_function: object  # the function passed in place of a loss module, if any
    include: Sequence[str] | None
    exclude: Sequence[str] | None
    halvings: int = 0  # of the blocks on this rank: one each time memory ran out
    structure: tuple[object, ...] = field(init=False)  # what identifies this part of the run

    def __post_init__(self) -> None:
        object.__setattr__(
            self,
            "structure",
            structure_of(dict(self.bare.named_modules()), dict(self.bare.named_parameters()), self.optimizers),
        )

    @cached_property
    def shards(self) -> Shards | None:
        """What this rank holds of a sharded model."""
        return Shards(self.bare, self.world.rank) if is_sharded(self.bare) else None

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters, by name, as the optimizer knows them."""
        return dict(self.bare.named_parameters()) if self.shards is None else self.shards.parameters

    @property
    def every(self) -> Mapping[str, Tensor]:
        """All parameters, by name; stand-ins for sharded ones."""
        return self.parameters if self.shards is None else self.shards.whole

    @property
    def tracked(self) -> Mapping[str, Tensor]:
        """The tracked parameters, by name; stand-ins for sharded ones."""
        if self.shards is None:
            return self.trainable
        return {name: tensor for name, tensor in self.shards.whole.items() if name in self.facts.shapes}

    @cached_property
    def trainable(self) -> Mapping[str, nn.Parameter]:
        """The tracked parameters, by name, as the optimizer knows them."""
        return {name: p for name, p in self.parameters.items() if name in self.facts.shapes}

    @property
    def held(self) -> dict[str, Tensor]:
        """What this rank holds of the tracked parameters, detached: all of them, or its pieces."""
        return {name: local(p) for name, p in self.trainable.items()}

    def own(self, held: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return what this rank answers for, of what it holds: its pieces; of unsharded parameters all on rank 0."""
        if self.shards is None:
            return held if self.world.rank == 0 else Own(held, ())
        return Own(held, {name for name, piece in self.shards.pieces.items() if piece.counts})

    @cached_property
    def buckets(self) -> list[Bucket]:
        """The tracked parameters, those together whose sums are exchanged together, as DDP's buckets are."""
        elements = min(MOST_BYTES, self.memory_budget) // (64 * self.buckets_at_a_time)  # eight vectors in float64
        return buckets(self.tracked, max(FEWEST_ELEMENTS, elements))

    @property
    def buckets_at_a_time(self) -> int:
        """Two if the next one is walked while ranks add up the vectors of one."""
        return 1 if self.world.size == 1 else 2

    @property
    def sums_are_in_grad(self) -> bool:
        """True if nobody averages what autograd leaves in ``.grad``, so that it needs no copy."""
        return self.world.size == 1 and not self.wrappers and self.shards is None

    @cached_property
    def may_copy_parameters(self) -> bool:
        """True if copies of all parameters, or gradients, fit into the memory; else they are there bucket by bucket."""
        return self._parameter_bytes <= self.memory_budget // 4

    @property
    def _parameter_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.tracked.values())

    def kept_bytes(self, *, beside_update: bool) -> int:
        """Bytes of formed individual gradients that may be kept for the next walk, beside an update that is kept."""
        update = self._parameter_bytes if beside_update and self.may_copy_parameters else 0
        return self.memory_budget // 4 - update

    def forget_parameters(self) -> None:
        """Drop the cached parameters, because the model now holds different ones."""
        for name in ("shards", "parameters", "trainable"):
            vars(self).pop(name, None)

    @cached_property
    def batchnorms(self) -> Modules:
        """The batch norms of the model."""
        return batchnorms(self.bare)

    @cached_property
    def block_elements(self) -> int:
        """Number of elements of a block: blocks that exceed a cache do not pay off."""
        size = max(p.element_size() for p in self.tracked.values())
        return max(1, min(BLOCK_ELEMENTS, self.memory_budget // 4 // size) >> self.halvings)

    @property
    def batch_statistics_are_constants(self) -> bool:
        """True if this step's individual gradients treat batch statistics as constants."""
        return bool(training(self.batchnorms))

    @cached_property
    def device(self) -> torch.device:
        """Where the model computes."""
        return computing_device(next(self.bare.parameters()))

    def is_as_it_was(self, modules: Mapping[str, nn.Module], parameters: Mapping[str, nn.Parameter]) -> bool:
        """True if the model and the optimizers have the parameters and modules this part of the run started with.

        Args:
            modules: Of the model now, by path.
            parameters: Likewise, by name.
        """
        owners = all(modules.get(layer.path) is layer.module for layer in self.layers if layer.parameters)
        return owners and structure_of(modules, parameters, self.optimizers) == self.structure

    def as_it_is(self) -> Setup:
        """Return a copy for the model and the optimizers as they are now.

        Raises:
            ValueError: If a layer cannot be tracked.
        """
        layers = find_layers(self.bare, self.include, self.exclude)
        if self.shards is not None:
            reshard(self.bare)  # optimizers hold the pieces, and an evaluation leaves the root whole
        return replace(
            self,
            layers=layers,
            facts=model_facts(self.bare, layers, self.optimizers, self.world.size),
            n_groups=[len(each.param_groups) for each in self.optimizers.values()],
        )

    def with_smaller_blocks(self) -> Setup:
        """Return a copy whose blocks are half as large, without looking at the model again: one rank may be alone."""
        other = copy(self)
        object.__setattr__(other, "halvings", self.halvings + 1)
        vars(other).pop("block_elements", None)
        return other

    def change_to(self, other: Setup) -> str:
        """Describe what is different in another part of the run."""
        here, there = self.facts.shapes, other.facts.shapes
        modules = {layer.path: layer.module for layer in self.layers}
        exchanged = [x.path for x in other.layers if modules.get(x.path, x.module) is not x.module]
        kinds = {
            "trained now": [name for name in there if name not in here],
            "no longer trained": [name for name in here if name not in there],
            "of a different shape": [name for name in there if there[name] != here.get(name, there[name])],
            "replaced by another module": [label(path) for path in exchanged],
        }
        told = [f"{_some(names)} {'is' if len(names) == 1 else 'are'} {what}" for what, names in kinds.items() if names]
        if list(self.n_groups) != list(other.n_groups):
            told.append(f"the optimizer has {sum(other.n_groups)} parameter groups instead of {sum(self.n_groups)}")
        return "; ".join(told) or "some modules were replaced, here or on another rank"

    def learning_rates(self) -> list[float | Tensor]:
        """Return the current learning rates of this part's parameter groups; NaN where a group has none."""
        pairs = zip(self.optimizers.values(), self.n_groups, strict=True)
        groups = [group for optimizer, count in pairs for group in optimizer.param_groups[:count]]
        return [float("nan") if (rate := group.get("lr")) is None else rate for group in groups]

    def loss_scale(self) -> float | None:
        """Return the current loss scale of mixed precision, if there is a scaler."""
        return None if self.grad_scaler is None else self.grad_scaler.get_scale()


class Own(Mapping[str, Tensor]):
    """Some tensors, flat and empty where another rank answers for them.

    Args:
        held: By name; asked for one after the other.
        mine: The names of those that this rank answers for.
    """

    def __init__(self, held: Mapping[str, Tensor], mine: Collection[str]) -> None:
        self._held, self._mine = held, mine

    def __getitem__(self, name: str) -> Tensor:
        if name in self._mine:
            return self._held[name]
        if isinstance(self._held, Differences):
            return self._held.nothing_of(name)
        return self._held[name].reshape(-1)[:0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


def buckets(parameters: Mapping[str, Tensor], elements: int) -> list[Bucket]:
    """Deal out parameters, in their order, to buckets of at most so many elements; larger ones by their rows.

    Args:
        parameters: By name.
        elements: The most that a bucket holds, unless a single row has more.
    """
    found: list[Bucket] = [{}]
    room = elements
    for name, parameter in parameters.items():
        size = parameter.numel()
        if size > elements and len(parameter) > 1:
            parts = even_pieces(len(parameter), elements // (size // len(parameter)))
            found += [{name: part} for part in parts]
            room = 0
            continue
        if size > room and found[-1]:
            found.append({})
            room = elements
        found[-1][name] = WHOLE
        room -= size
    return [bucket for bucket in found if bucket] or [{}]


def structure_of(
    modules: Mapping[str, nn.Module],
    parameters: Mapping[str, nn.Parameter],
    optimizers: Mapping[str, torch.optim.Optimizer],
) -> tuple[object, ...]:
    """Return what identifies a part of a run: parameters, modules and parameter groups."""
    shapes = {name: (p.shape, p.requires_grad) for name, p in parameters.items()}
    kinds = {path: type(module) for path, module in modules.items()}
    return shapes, kinds, [len(each.param_groups) for each in optimizers.values()]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"'{names[0]}'{more}"


def model_facts(
    bare: nn.Module, layers: Sequence[Layer], optimizers: Mapping[str, torch.optim.Optimizer], world_size: int
) -> Model:
    """Collect what quantities may know about the model, the optimizers and the ranks."""
    tracked = {full for layer in layers for full in layer.parameters.values()}
    shapes = {name: tuple(p.shape) for name, p in bare.named_parameters() if name in tracked}
    leaves = {
        layer.path: isinstance(layer.module, ACTIVATIONS)
        for layer in layers
        if not has_children(layer.module) or is_unit(layer.module)
    }
    owner: dict[str, str] = {}
    for layer in layers:
        for full in layer.parameters.values():
            owner.setdefault(full, layer.path)
    groups = [group for optimizer in optimizers.values() for group in optimizer.param_groups]
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
        optimizers=_held_by(optimizers, {name: parameters[name] for name in shapes})
        if list(optimizers) != [""]
        else {},
        world_size=world_size,
    )


def _held_by(
    optimizers: Mapping[str, torch.optim.Optimizer], parameters: Mapping[str, nn.Parameter]
) -> dict[str, list[str]]:
    """Return the names of the tracked parameters that each optimizer holds."""
    ids = {key: {id(p) for group in each.param_groups for p in group["params"]} for key, each in optimizers.items()}
    return {key: [name for name, p in parameters.items() if id(p) in own] for key, own in ids.items()}
