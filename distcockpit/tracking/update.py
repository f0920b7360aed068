"""The optimizer's step d = theta_{t+1} - theta_t: what is kept until it is known, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from distcockpit.gradients import kernels
from distcockpit.gradients.statistics import Projection
from distcockpit.gradients.uses import MicroBatch
from distcockpit.gradients.walk import walk
from distcockpit.quantities.base import Quantity
from distcockpit.quantities.batch import Update, difference
from distcockpit.tracking.recorder import Stamp


@dataclass(frozen=True)
class Start:
    """What is kept of a step at which an update begins."""

    stamp: Stamp
    values: Mapping[str, Tensor]  # the parameters before the update
    losses: Tensor
    scale: float | None  # of the gradient scaler
    batches: Sequence[MicroBatch]  # empty if no quantity looks at the update from both ends
    displaced: Sequence[Quantity]  # those that need the displacement
    slopes: Tensor | None = None  # in a resumed run: of this rank's samples along the parts of the update [K, B]
    inputs_were_changed: bool = False  # in a resumed run: whether that was so when it was saved
    norm: float | None = None  # in a resumed run: the length of the update that they belong to
    _displacement: dict[str, Tensor] = field(default_factory=dict)

    @property
    def inputs_changed(self) -> bool:
        """True if a kept input was overwritten."""
        return self.inputs_were_changed or any(use.inputs_changed for batch in self.batches for use in batch.uses)

    def displacement(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The step that the optimizer has made since, by parameter; to be asked for when it has."""
        if not self._displacement:
            self._displacement.update({name: difference(p, self.values[name]) for name, p in parameters.items()})
        return self._displacement

    def project(
        self,
        parameters: Mapping[str, Tensor],
        parts: Sequence[Sequence[str]],
        scale: float | None,
        block_elements: int,
    ) -> Update:
        """The update, and the slopes of the start's samples along it.

        Args:
            parameters: The tracked parameters as they are now.
            parts: The parameters that move together.
            scale: Of the gradient scaler now.
            block_elements: As for `walk`.
        """
        direction = self.displacement(parameters)
        squares = kernels.squared_norms(list(direction.values()))
        norm = squares.sum().sqrt()
        names = list(direction)
        each = [norm] if len(parts) == 1 else [squares[[names.index(n) for n in part]].sum().sqrt() for part in parts]
        changed = self.inputs_changed
        if self.slopes is not None:
            slopes = self.slopes
        else:
            projection = Projection(direction, len(self.losses), parts)
            if not changed:
                walk(self.batches, self.values, list(parameters), [projection], block_elements)
            slopes = projection.values / norm
        return Update(
            norm=norm,
            norms=torch.stack(each),
            direction=direction,
            start_losses=self.losses,
            start_slopes=slopes,
            end_slopes=slopes[:, :0],
            start_n=self.stamp.n,
            inputs_changed=changed,
            skipped=self.scale is not None and scale is not None and scale < self.scale,
            interrupted=self.norm is not None and not math.isclose(float(norm), self.norm, rel_tol=1e-6),
        )


def interrupted_update(parameters: Mapping[str, Tensor], n_parts: int) -> Update:
    """An update of which only the end was seen."""
    nothing = torch.zeros(0, dtype=torch.float64, device=next(iter(parameters.values())).device)
    unknown = nothing.new_full((n_parts,), float("nan"))
    none = nothing.new_zeros(n_parts, 0)
    return Update(
        unknown[0], unknown, {}, nothing, none, none, 0, inputs_changed=False, skipped=False, interrupted=True
    )
