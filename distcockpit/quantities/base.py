"""What every quantity is: sums that ranks add, and a formula on the total.

A quantity never communicates and never touches a model. ``local`` turns this rank's part of the pooled batch into
named sums; they are added over ranks; ``finalize`` turns the totals into a row. To add one, write these two and
``group``, which says what the row looks like.
"""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from distcockpit.curvature import Curvature
from distcockpit.gradients.statistics import Statistic
from distcockpit.schedules import Schedule
from distcockpit.schema import NAME, Group, Row

Sums = dict[str, Tensor]
"""Additive facts of one rank, by name; the total over ranks is their sum, in float64. Names and shapes must be the same
on all ranks, also on one without samples."""

Totals = Mapping[str, np.ndarray]
"""The same after adding up, as float64 arrays."""


@dataclass(frozen=True)
class Needs:
    """What a quantity asks of the tracked step, beside its own statistics over individual gradients.

    Args:
        losses: Individual losses.
        update: The step of the optimizer that began at the previous tracked step, and both ends of it.
        elementwise: The pooled element-wise sums of g_i and g_i^2, by way of :meth:`Quantity.elementwise`.
        output_gradients: Gradients at the outputs of all leaf modules.
        curvature: A diagonal of the curvature.
    """

    losses: bool = False
    update: bool = False
    elementwise: bool = False
    output_gradients: bool = False
    curvature: Curvature | None = None


@dataclass(frozen=True)
class Model:
    """Facts about the tracked part of a model that stay the same during a run."""

    shapes: Mapping[str, tuple[int, ...]]  # of the tracked parameters, by name
    leaves: Mapping[str, bool]  # names of tracked leaf modules -> whether it is an activation

    @property
    def parameters(self) -> list[str]:
        """Names of the tracked parameters."""
        return list(self.shapes)

    @property
    def n_parameters(self) -> int:
        """P: number of tracked elements."""
        return sum(int(np.prod(shape)) for shape in self.shapes.values())


@dataclass(frozen=True)
class Update:
    """The optimizer's step d = theta_{t+1} - theta_t, seen from the batches at both ends; this rank's part.

    Projections are float64 ``[B]``: ``<g_i, d> / |d|`` of this rank's samples.
    """

    norm: Tensor  # float64, a number
    direction: Mapping[str, Tensor]  # d, by parameter
    start_losses: Tensor
    start_slopes: Tensor
    end_slopes: Tensor
    start_n: int  # samples of all ranks at the start
    inputs_changed: bool  # whether kept inputs of the start were overwritten before the projection
    skipped: bool  # whether the gradient scaler skipped the optimizer's step

    def ending(self, end_slopes: Tensor) -> Update:
        """The same update, with the projections of the batch at its end."""
        return dataclasses.replace(self, end_slopes=end_slopes)


@dataclass(frozen=True)
class LocalBatch:
    """This rank's part of the pooled batch of a tracked step. Everything is scaled to the pooled meaning."""

    model: Model
    step: int
    n: int  # N: samples of all ranks
    local_n: int  # B_r
    rank: int
    world_size: int
    losses: Tensor  # float64 [B_r]: l_i; zeros where no quantity asked for them and none are known
    parameters: Mapping[str, Tensor]
    statistics: Mapping[str, Statistic]  # what Quantity.statistics asked for
    output_gradients: Mapping[str, Sequence[Tensor]]  # by leaf module: d l_i / d z_i, [B, *], one per call
    curvature: Mapping[Curvature, Mapping[str, Tensor]]  # this rank's part of the pooled diagonal, float64
    update: Update | None

    def once(self, value: float | Tensor | np.ndarray) -> Tensor:
        """A fact that all ranks hold alike, as a sum: itself (float64) on rank 0, zero elsewhere."""
        device = next(iter(self.parameters.values())).device
        fact = torch.as_tensor(value, dtype=torch.float64, device=device)
        return fact if self.rank == 0 else torch.zeros_like(fact)

    def vector(self, values: Sequence[Tensor | float]) -> Tensor:
        """Numbers as float64 ``[len(values)]`` on the model's device, without waiting for the device."""
        device = next(iter(self.parameters.values())).device
        parts = [torch.as_tensor(value, dtype=torch.float64, device=device) for value in values]
        return torch.stack(parts) if parts else torch.zeros(0, dtype=torch.float64, device=device)

    def slot(self, value: Tensor) -> Tensor:
        """A fact of this rank, as a sum: ``[world_size]``, zero in the slots of the others."""
        slots = value.new_zeros(self.world_size)
        slots[self.rank] = value
        return slots


@dataclass(frozen=True)
class Shard:
    """A range of the pooled element-wise sums, flattened over the tracked parameters; float64 arrays."""

    n: int
    first: np.ndarray  # sum_i g_i
    second: np.ndarray  # sum_i g_i^2


@dataclass(frozen=True, kw_only=True)
class Quantity(ABC):
    """Something that is tracked. Abstract; every option of a concrete quantity is a field.

    Args:
        name: Name of the group in the store; the class in snake case by default.
        schedule: Steps to track; the cockpit's own schedule by default.
    """

    name: str = ""
    schedule: Schedule | None = field(default=None)

    source: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", snake_case(type(self).__name__))
        if not NAME.fullmatch(self.name) or self.name in ("log", "zarr.json"):
            raise ValueError(
                f"{type(self).__name__}(name={self.name!r}): must be made of letters, digits, '_', '-' and '.', begin "
                "with a letter or a digit, and must not be 'log': it names a group in the store."
            )
        if self.schedule is not None and not callable(self.schedule):
            raise TypeError(
                f"{type(self).__name__}(schedule={self.schedule!r}): must be a callable step -> bool, such as "
                "every(10)."
            )

    @property
    def needs(self) -> Needs:
        """What the tracked step must provide."""
        return Needs()

    @property
    def reads_totals(self) -> bool:
        """Whether ``learn`` must see the latest total before the next ``statistics``."""
        return False

    def with_schedule(self, schedule: Schedule) -> Quantity:
        """This quantity, with ``schedule`` where it has none of its own."""
        return self if self.schedule is not None else dataclasses.replace(self, schedule=schedule)

    def starts(self, step: int) -> bool:
        """Whether a row begins at ``step``."""
        return self.schedule is not None and bool(self.schedule(step))

    def touches(self, step: int) -> bool:
        """Whether ``step`` must be tracked for this quantity."""
        return self.starts(step)

    @abstractmethod
    def group(self, model: Model) -> Group:
        """What a row looks like in the store."""

    def statistics(self, step: int, parameters: Mapping[str, Tensor], memory: dict[str, Any]) -> dict[str, Statistic]:
        """Accumulators to be fed with this step's individual gradients, by name."""
        return {}

    @abstractmethod
    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """This rank's additive part.

        Args:
            batch: This rank's part of the pooled batch; it may hold no sample.
            memory: Belongs to this quantity and lasts from step to step.
        """

    def elementwise(self, shard: Shard) -> dict[str, np.ndarray]:
        """Additive part of a range of elements, from their pooled sums; joins the totals."""
        return {}

    def learn(self, totals: Totals, memory: dict[str, Any]) -> None:
        """Take what the next step needs from the totals; every rank does."""

    @abstractmethod
    def finalize(self, totals: Totals, n: int) -> Row | None:
        """The row, from the totals over ranks and N; ``None`` if this step has no row."""

    def options(self) -> dict[str, str]:
        """The fields that define what is computed, for the store and for the comparison of ranks."""
        return {f.name: _text(getattr(self, f.name)) for f in dataclasses.fields(self)}

    def attributes(self) -> dict[str, Any]:
        """Attributes of the group in the store."""
        first_line = next(iter((type(self).__doc__ or "").strip().splitlines()), "")
        options = {name: text for name, text in self.options().items() if name != "name"}
        return {
            "quantity": type(self).__name__,
            "description": first_line,
            "source": self.source,
            "options": options,
        }


def snake_case(name: str) -> str:
    """``GradHist1d`` -> ``grad_hist_1d``, ``CABS`` -> ``cabs``, ``TICDiag`` -> ``tic_diag``."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z0-9])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return name.lower()


def _text(value: object) -> str:
    """A text that is the same on all ranks: functions by name, not by address."""
    if dataclasses.is_dataclass(value) or not callable(value):
        return repr(value)
    return getattr(value, "__qualname__", type(value).__qualname__)
