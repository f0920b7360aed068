"""From the captured step to what quantities see: sums over individual gradients, and what ranks hold together.

The order is that of need. One walk over the individual gradients feeds everything that needs nothing pooled. Then the
element-wise vectors are pooled, the mean gradient G among them. A second walk takes the projections on G.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distcockpit.curvature import Curvature
from distcockpit.gradients.statistics import GradientSum, Projection, SquaredNorms, SquareSum, Statistic
from distcockpit.gradients.uses import MicroBatch
from distcockpit.gradients.walk import walk
from distcockpit.quantities.base import Quantity
from distcockpit.quantities.batch import Shard, Update
from distcockpit.session import Setup


@dataclass(frozen=True)
class Pool:
    """What the headers of all ranks say together."""

    n: int  # N
    weight: float  # W
    uniform: bool  # whether the shapes that may differ between ranks do not

    @property
    def samples_per_weight(self) -> float:
        """N/W."""
        return self.n / self.weight if self.weight else 0.0


@dataclass(frozen=True)
class Gathered:
    """Sums over individual gradients, of this rank and of all ranks."""

    gradient_sums: Mapping[str, Tensor]
    mean_gradient: Mapping[str, Tensor]
    squared_norms: Tensor
    projections: Tensor
    end_slopes: Tensor
    shard: Shard


def wanted(quantities: Sequence[Quantity], need: str) -> bool:
    """Whether any of the quantities has this need."""
    return any(getattr(q.needs, need) for q in quantities)


def gather(
    setup: Setup,
    pool: Pool,
    batches: Sequence[MicroBatch],
    active: Sequence[Quantity],
    own: Sequence[Statistic],
    update: Update | None,
    curvatures: Mapping[Curvature, Mapping[str, Tensor]],
) -> Gathered:
    """Walk, pool, and walk again.

    Args:
        setup: The set-up.
        pool: What the headers said.
        batches: The micro-batches, scaled.
        active: The quantities of this step.
        own: Statistics that quantities asked for themselves.
        update: The update that ended at this step.
        curvatures: This rank's part of the pooled diagonals.

    Raises:
        BaseException: What went wrong on this rank; the others are told NaN, so that they do not wait for it.
    """
    parameters = {name: p.detach() for name, p in setup.tracked.items()}
    values = {name: p.detach() for name, p in setup.bare.named_parameters()}
    local_n = sum(batch.batch_size for batch in batches)
    sums = GradientSum(parameters) if wanted(active, "mean_gradient") else None
    squares = SquareSum(parameters) if wanted(active, "squared_gradients") else None
    norms = SquaredNorms(parameters) if wanted(active, "squared_norms") else None
    slopes = None if update is None else Projection(update.direction, local_n)
    shared = [statistic for statistic in (sums, squares, norms, slopes) if statistic is not None]
    vectors: dict[object, Mapping[str, Tensor]] = {}
    if sums is not None:
        vectors["sums"] = sums.sums
    if squares is not None:
        vectors["squares"] = squares.sums
    for kind in dict.fromkeys(q.needs.curvature for q in active if q.needs.pooled_curvature):
        assert kind is not None  # what is pooled is asked for
        vectors[kind] = curvatures[kind]
    try:
        walk(batches, values, list(parameters), [*shared, *own])
    except BaseException:
        _pool(setup, {kind: {n: v * float("nan") for n, v in vector.items()} for kind, vector in vectors.items()})
        raise
    pooled = _pool(setup, vectors)
    nothing = torch.zeros(0, dtype=torch.float64, device=setup.device)
    mean = pooled["sums"] / pool.n if sums is not None else nothing
    mean_gradient = _by_name(mean, parameters) if sums is not None else {}
    onto = Projection(mean_gradient, local_n) if wanted(active, "projections") else None
    if onto is not None:
        walk(batches, values, list(parameters), [onto])
    rank, size, n_parameters = setup.world.rank, setup.world.size, setup.facts.n_parameters
    mine = slice(n_parameters * rank // size, n_parameters * (rank + 1) // size)
    return Gathered(
        gradient_sums={} if sums is None else sums.sums,
        mean_gradient=mean_gradient,
        squared_norms=nothing if norms is None else torch.stack(list(norms.values.values())),
        projections=nothing if onto is None else onto.values,
        end_slopes=nothing if slopes is None or update is None else slopes.values / update.norm,
        shard=Shard(
            mean=mean[mine],
            squares=pooled.get("squares", nothing)[mine],
            curvature={kind: flat[mine] for kind, flat in pooled.items() if isinstance(kind, Curvature)},
        ),
    )


def _pool(setup: Setup, vectors: Mapping[object, Mapping[str, Tensor]]) -> dict[object, Tensor]:
    """Add element-wise vectors over ranks, in one exchange; flat, in the order of the tracked parameters."""
    if not vectors:
        return {}
    parts = [vector[name].double().reshape(-1) for vector in vectors.values() for name in setup.tracked]
    total = setup.world.pool(torch.cat(parts))
    return dict(zip(vectors, total.chunk(len(vectors)), strict=True))


def _by_name(flat: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    parts = flat.split([p.numel() for p in parameters.values()])
    return {name: part.view_as(p) for (name, p), part in zip(parameters.items(), parts, strict=True)}
