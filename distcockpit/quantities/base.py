"""The base class of quantities: sums that are added over ranks, and a formula on the totals.

A quantity never communicates and never touches a model. ``local`` turns this rank's part of the pooled batch into
named sums; these are added over ranks; ``finalize`` turns the totals into a row. To add a quantity, write these two and
``group``, which says what the row looks like.
"""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from distcockpit.gradients.statistics import Statistic
from distcockpit.quantities.batch import BucketSums, LocalBatch, Model, Needs, Observed, ReplicatedValue
from distcockpit.schedules import Schedule
from distcockpit.store.schema import NAME, Group, Row

Sums = Mapping[str, Tensor | ReplicatedValue]
"""What one rank contributes, by name: tensors, which are summed over ranks in float64, and replicated values. Names and
shapes must be the same on all ranks, including ranks without samples."""

Totals = Mapping[str, np.ndarray]
"""The same after summing over ranks, as float64 arrays."""


@dataclass(frozen=True, kw_only=True)
class Quantity(ABC):
    """Something to track. Abstract; every option of a concrete quantity is a dataclass field.

    Args:
        name: Name of the group in the store; by default the class name in snake case.
        schedule: Steps to track; by default the cockpit's schedule.
        required: Raise an error if the loop or the model does not support it. Quantities from a preset are not
            required: they are NaN in that case, and one notice says why.
    """

    name: str = ""
    schedule: Schedule | None = field(default=None)
    required: bool = True

    source: ClassVar[str] = ""
    remembers_samples: ClassVar[bool] = False
    """True if ``memory`` depends on this rank's own samples. A resumed run then restores each rank's own; otherwise all
    ranks get rank 0's."""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", snake_case(type(self).__name__))
        if not NAME.fullmatch(self.name) or self.name in ("log", "zarr.json"):
            raise ValueError(
                f"{type(self).__name__}(name={self.name!r}): must consist of letters, digits, '_', '-' and '.', start "
                "with a letter, a digit or a single '_', and not be 'log', because it names a group in the store."
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
        """True if ``learn`` must see the latest totals before the next ``statistics``."""
        return False

    def with_schedule(self, schedule: Schedule) -> Quantity:
        """This quantity, with ``schedule`` if it has none of its own."""
        return self if self.schedule is not None else dataclasses.replace(self, schedule=schedule)

    def for_optimizers(self, names: Sequence[str]) -> list[Quantity]:
        """This quantity, and those that come with it if there are several optimizers.

        Args:
            names: Names of the optimizers.
        """
        return [self]

    def starts(self, step: int) -> bool:
        """True if a row begins at ``step``."""
        return self.schedule is not None and bool(self.schedule(step))

    def touches(self, step: int) -> bool:
        """True if ``step`` must be tracked for this quantity: its own steps, and steps at which an update ends."""
        return self.starts(step) or (self.ends_updates and step > 0 and self.starts(step - 1))

    @cached_property
    def ends_updates(self) -> bool:
        """True if a row that begins at a step ends at the next one."""
        return self.needs.update

    @abstractmethod
    def group(self, model: Model) -> Group:
        """What a row looks like in the store; description, source and options are added to its attributes."""

    def statistics(self, step: int, parameters: Mapping[str, Tensor], memory: dict[str, Any]) -> dict[str, Statistic]:
        """Accumulators to feed with this step's individual gradients, by name."""
        return {}

    def reduce(self, bucket: BucketSums, memory: dict[str, Any]) -> Mapping[str, Tensor]:
        """What to keep of the sums of a bucket of parameters; for quantities that need any of these.

        Large models are walked bucket by bucket, so that G is never there as a whole. Values of buckets are added up,
        element by element, and are in ``LocalBatch.reduced`` in the end.

        Args:
            bucket: The sums of some parameters, or of some rows of them.
            memory: As in :meth:`local`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} needs sums that are there bucket by bucket (bucket_sums, squared_gradients, "
            "pooled_curvature or averaged). Define reduce(bucket, memory), which returns what to add up over "
            "buckets; local() finds the total in batch.reduced."
        )

    @abstractmethod
    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """This rank's additive part.

        Args:
            batch: This rank's part of the pooled batch; it may have no samples.
            memory: Belongs to this quantity and persists from step to step, and across checkpoints with the cockpit's
                state: tensors, numbers, strings and containers of them.
        """

    def observe(self, output: Tensor, has_batch_axis: bool) -> Tensor | None:
        """What to keep of an output of a leaf module; for quantities that need outputs.

        It is called during the forward pass, because in-place modules overwrite outputs. As long as the batch axis is
        not known, it is called for each axis that may be it, and one of the results is used.

        Args:
            output: The first floating-point tensor that the module returned.
            has_batch_axis: True if its first axis is the batch axis (moved there from wherever it was).
        """
        raise NotImplementedError(f"{type(self).__name__} needs outputs, so it must define observe().")

    def observed_layers(self, leaves: Mapping[str, bool]) -> Iterable[str]:
        """The leaf modules whose outputs it observes; by default all.

        Args:
            leaves: Their names, each with True if it is an activation.
        """
        return leaves

    def sizes(self, observed: Observed) -> Mapping[str, int]:
        """Lengths of sums that depend on the outputs, by name; for quantities that need output sizes.

        Ranks compare them at the first tracked step; ``LocalBatch.sizes`` holds what they agreed on.
        """
        return {}

    def displacement(self, step: int, d: Mapping[str, Tensor], memory: dict[str, Any]) -> Sums:
        """Sums over the optimizer step that began at ``step``, for quantities that need the displacement.

        Rank 0 tells all of it. If parameters are sharded, each rank tells those of its pieces, and ranks add them up.

        Args:
            step: The step t.
            d: ``theta_{t+1} - theta_t`` by parameter, in the parameter's dtype, at least float32; flat and empty where
                another rank answers for it.
            memory: Belongs to this quantity and persists from step to step.
        """
        raise NotImplementedError(f"{type(self).__name__} needs the displacement, so it must define displacement().")

    def learn(self, totals: Totals, memory: dict[str, Any]) -> None:
        """Take what the next step needs from the totals; called on every rank."""

    @abstractmethod
    def finalize(self, totals: Totals, n: int) -> Row | None:
        """The row, from the totals over ranks and N; ``None`` if this step has no row."""

    def notice(self, row: Row, model: Model) -> str | None:
        """A message for users who do not look at the store; ``None`` if all is well. Logged when it changes."""
        return None

    def options(self) -> dict[str, str]:
        """The fields that define what is computed, for the store and for the comparison of ranks."""
        told = (f.name for f in dataclasses.fields(self) if f.name != "required")
        return {name: _text(getattr(self, name)) for name in told}

    def described_group(self, model: Model) -> Group:
        """The group, with the quantity's own attributes."""
        group = self.group(model)
        return dataclasses.replace(group, attributes={**self.attributes(), **group.attributes})

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
    """A string that is the same on all ranks: functions by name, not by address, sets sorted; also when nested."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (f"{f.name}={_text(getattr(value, f.name))}" for f in dataclasses.fields(value))
        return f"{type(value).__name__}({', '.join(fields)})"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_text(k)}: {_text(v)}' for k, v in value.items())}}}"
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return repr(value)
