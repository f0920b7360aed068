"""What all ranks agreed on when the cockpit was constructed, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from distcockpit.gradients.uses import Layer
from distcockpit.gradients.walk import BLOCK_ELEMENTS
from distcockpit.layers import Modules, batchnorms, training
from distcockpit.quantities.base import Quantity
from distcockpit.quantities.batch import Model
from distcockpit.reduce import World


@dataclass(frozen=True)
class Setup:
    """What all ranks agreed on at construction."""

    world: World
    bare: nn.Module  # the model without its wrappers
    wrappers: Sequence[nn.Module]  # these
    layers: Sequence[Layer]  # each with the parameters that it owns
    facts: Model
    quantities: Sequence[Quantity]
    loss_fn: nn.Module | None
    track_batchnorm: bool
    batch_dim: int
    slow_routes: bool  # whether parameters may take one
    memory_budget: int  # bytes of a block of individual gradients, and of what stays of them for the next walk
    grad_scaler: torch.amp.GradScaler | None
    optimizers: Mapping[str, torch.optim.Optimizer]  # by name; a single one has an empty name
    trainable: frozenset[str]  # names of all trainable parameters
    raise_errors: bool  # whether faults of the environment raise at the next step
    n_groups: Sequence[int]  # how many parameter groups each optimizer has
    loss_function: object  # what stands for the loss module, if the user gave a function

    @cached_property
    def tracked(self) -> dict[str, nn.Parameter]:
        """The tracked parameters, by name."""
        return {name: p for name, p in self.every.items() if name in self.facts.shapes}

    @cached_property
    def every(self) -> dict[str, nn.Parameter]:
        """All parameters, by name."""
        return dict(self.bare.named_parameters())

    def forget_parameters(self) -> None:
        """The model holds others now."""
        for name in ("every", "tracked"):
            vars(self).pop(name, None)

    @cached_property
    def batchnorms(self) -> Modules:
        """The batch norms of the model."""
        return batchnorms(self.bare)

    @cached_property
    def block_elements(self) -> int:
        """How many elements a block may have: more than fit a cache do not pay."""
        size = max(p.element_size() for p in self.tracked.values())
        return min(BLOCK_ELEMENTS, self.memory_budget // size)

    @property
    def batch_statistics_are_constants(self) -> bool:
        """Whether this step's individual gradients take the statistics of a batch as constants."""
        return bool(training(self.batchnorms))

    @cached_property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.bare.parameters()).device

    def learning_rates(self) -> list[float | Tensor]:
        """The present learning rates of the parameter groups that there were; NaN where a group has none."""
        pairs = zip(self.optimizers.values(), self.n_groups, strict=True)
        groups = [group for optimizer, count in pairs for group in optimizer.param_groups[:count]]
        return [float("nan") if (rate := group.get("lr")) is None else rate for group in groups]

    def loss_scale(self) -> float | None:
        """The present scale of mixed precision, if there is a scaler."""
        return None if self.grad_scaler is None else self.grad_scaler.get_scale()
