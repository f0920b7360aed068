"""What a quantity sees: facts about the model, and this rank's part of the pooled batch at a tracked step."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distcockpit.curvature.diagonals import Curvature
from distcockpit.curvature.hutchinson import TraceEstimate
from distcockpit.curvature.lanczos import Eigenvalue, LargestEigenvalue
from distcockpit.gradients.differences import squared_norms
from distcockpit.gradients.statistics import Statistic
from distcockpit.gradients.uses import label
from distcockpit.replay.devices import sent
from distcockpit.shards import Piece


@dataclass(frozen=True)
class Needs:
    """What a quantity needs from the tracked step, in addition to its own statistics over individual gradients.

    Args:
        loss: The pooled loss.
        losses: Individual losses.
        mean_squared: ``|G|^2`` by parameter, with G the pooled mean gradient.
        bucket_sums: G, this rank's part of it, and what else is summed element by element, bucket by bucket, in
            :meth:`Quantity.reduce`.
        mean_gradient: All of G, and of this rank's part of it, at the end of the step. That is as much memory as the
            parameters take, in float64: prefer ``bucket_sums``.
        squared_norms: The sums of ``|g_i|^2``, by parameter.
        projections: ``<g_i, G>`` of every sample; includes G.
        squared_gradients: The pooled sums of ``g_i^2``, element by element, in ``BucketSums.shard``.
        curvature: A diagonal of the curvature, or its sum over each parameter.
        pooled_curvature: The same, pooled element by element, in ``BucketSums.shard``.
        trace: Estimates of traces of the curvature.
        eigenvalue: An eigenvalue of the pooled Hessian.
        outputs: Outputs of the leaf modules, via :meth:`Quantity.observe`.
        output_sizes: Sums whose length depends on outputs, via :meth:`Quantity.sizes`.
        output_gradients: Gradients at the outputs of all leaf modules.
        backward: The extremes of gradients at the outputs of calls with parameters, in backward order.
        update: The optimizer step that began at the previous tracked step, as seen from the batches at both ends.
        displacement: The optimizer step itself, via :meth:`Quantity.displacement`.
        initial: The parameters at the first call of `track`, on rank 0.
        optimizer: The parameter groups and learning rates of the optimizer.
        averaged: What ``.grad`` holds when `track` ends, and what it would hold after plain averaging over ranks, in
            ``BucketSums.averaged``.
        held: How much memory the step holds beside what the loop does.
        values: The values of parameters, in :meth:`Quantity.statistics`; of a sharded model they are there bucket by
            bucket, while the individual gradients of the bucket are.
    """

    loss: bool = False
    losses: bool = False
    mean_squared: bool = False
    bucket_sums: bool = False
    mean_gradient: bool = False
    squared_norms: bool = False
    projections: bool = False
    squared_gradients: bool = False
    curvature: Curvature | None = None
    pooled_curvature: bool = False
    trace: TraceEstimate | None = None
    eigenvalue: LargestEigenvalue | None = None
    outputs: bool = False
    output_sizes: bool = False
    output_gradients: bool = False
    backward: bool = False
    update: bool = False
    displacement: bool = False
    initial: bool = False
    optimizer: bool = False
    averaged: bool = False
    held: bool = False
    values: bool = False

    @property
    def second_order(self) -> bool:
        """True if the step is re-run, for curvature."""
        return any(each is not None for each in (self.curvature, self.trace, self.eigenvalue))


@dataclass(frozen=True)
class Model:
    """Facts about the model and the ranks that stay the same during a run."""

    shapes: Mapping[str, tuple[int, ...]]  # of the tracked parameters, by name
    leaves: Mapping[str, bool] = field(default_factory=dict)  # tracked leaf modules -> whether it is an activation
    layers: Mapping[str, Sequence[str]] = field(default_factory=dict)  # layers -> tracked parameters, each in one
    dtypes: Mapping[str, str] = field(default_factory=dict)  # NumPy dtype names of the tracked parameters
    every_parameter: Sequence[str] = ()  # names of all parameters, tracked or not
    parameter_groups: Mapping[str, int] = field(default_factory=dict)  # tracked parameters -> group of the optimizer
    n_parameter_groups: int = 0
    optimizers: Mapping[str, Sequence[str]] = field(default_factory=dict)  # if several: name -> tracked parameters
    world_size: int = 1

    @property
    def parameters(self) -> list[str]:
        """Names of the tracked parameters."""
        return list(self.shapes)

    @property
    def n_parameters(self) -> int:
        """P: number of tracked elements."""
        return sum(int(np.prod(shape)) for shape in self.shapes.values())

    @property
    def layer_labels(self) -> list[str]:
        """Names of the layers with tracked parameters, as the store shows them."""
        return [label(path) for path in self.layers]

    @property
    def parts_of_updates(self) -> list[Sequence[str]]:
        """The tracked parameters that move together: those of each optimizer, and those that no optimizer holds."""
        if not self.optimizers:
            return [self.parameters]
        held = {name for names in self.optimizers.values() for name in names}
        return [*self.optimizers.values(), [name for name in self.shapes if name not in held]]


@dataclass(frozen=True)
class Update:
    """The optimizer step d = theta_{t+1} - theta_t, as seen from the batches at both ends; this rank's part.

    Projections are float64 ``[K, B]``: ``<g_i, d_k> / |d|`` of this rank's samples, for each of the K parts of d from
    ``Model.parts_of_updates``; they add up to the projection on d.
    """

    norm: Tensor  # float64, a number: |d|
    norms: Tensor  # float64 [K]: |d_k|
    direction: Mapping[str, Tensor]  # d, by parameter
    start_losses: Tensor
    start_slopes: Tensor
    end_slopes: Tensor
    start_n: int  # samples of all ranks at the start
    inputs_changed: bool  # whether kept inputs of the start were overwritten before the projection
    skipped: bool  # whether the gradient scaler skipped the optimizer's step
    interrupted: bool | Tensor = False  # whether a rank does not know its start, so that it is lost

    def ending(self, end_slopes: Tensor) -> Update:
        """The same update, with the projections of the batch at its end."""
        return dataclasses.replace(self, end_slopes=end_slopes)


@dataclass(frozen=True)
class Shard:
    """This rank's range of the pooled element-wise vectors of a bucket, flattened over its parameters; float64.

    Together, the ranges of all ranks hold every element once. Vectors that no quantity asked for are empty.
    """

    mean: Tensor  # G; only together with one of the others
    squares: Tensor  # sum_i g_i^2
    curvature: Mapping[Curvature, Tensor]  # h


@dataclass(frozen=True)
class Averaged:
    """The gradient that the optimizer gets, before clipping, in the scale in which it was accumulated; of a bucket."""

    held: Mapping[str, Tensor]  # float64: what the step added to .grad on this rank; if sharded, to its piece
    plain: Mapping[str, Tensor]  # float64: the mean over ranks of each rank's autograd gradient, of the same elements
    mean: Mapping[str, Tensor]  # G, likewise


@dataclass(frozen=True)
class _Pooled:
    """A tracked step, the pooled batch, and the rank that looks at it."""

    model: Model
    step: int
    n: int  # N: samples of all ranks
    local_n: int  # B_r
    rank: int
    world_size: int


@dataclass(frozen=True)
class BucketSums(_Pooled):
    """What is summed element by element over samples, for some parameters, or some rows of them; as for `LocalBatch`.

    It is freed when :meth:`Quantity.reduce` has returned. Vectors that no quantity asked for are empty.
    """

    has_gradients: bool  # whether samples have individual gradients; if not, these are NaN
    rows: Mapping[str, slice]  # the parameters of the bucket, each with its rows that belong to it
    mean: Mapping[str, Tensor]  # the pooled G; float64, or float32 from autograd in a single process
    part_of_mean: Mapping[str, Tensor]  # this rank's (1/N) sum_i g_i over its samples, at least float32
    mean_squared: Tensor  # float64 [parameters of the bucket]: |G|^2
    own: Mapping[str, Tensor]  # the part of G that this rank alone answers for: all on rank 0; if sharded, its range
    shard: Shard
    averaged: Averaged | None

    def by_parameter(self, values: Tensor) -> Tensor:
        """Numbers of the parameters of this bucket as those of all: ``[*, parameters]``, zero for all others."""
        found = values.new_zeros(*values.shape[:-1], len(self.model.shapes))
        names = self.model.parameters
        for k, name in enumerate(self.rows):
            found[..., names.index(name)] = values[..., k]
        return found

    def number(self, value: float | Tensor) -> Tensor:
        """A number as float64, on the model's device."""
        return sent(value, self.mean_squared.device)


@dataclass(frozen=True)
class Times:
    """Where this rank's time went, in seconds (NaN if unknown), and what it exchanged."""

    elapsed: float  # since the construction of the cockpit
    step: float  # from the end of the previous backward pass to the end of this one
    outside: float  # part of it, between the `track` of the previous step and this one: data, optimizer
    track: float  # part of it, inside `track`: forward and backward
    forward: float  # part of it, in the forward pass of the model
    wait: float  # in the exchanges before the sums, for the other ranks
    cockpit: float  # in the cockpit's own work for this step up to the sums, without the wait
    exchanges: int  # collectives since the same point of the previous tracked step
    exchanged_bytes: int  # what this rank passed to them


@dataclass(frozen=True)
class Held:
    """What a step holds beside what the loop does and beside ``memory_budget``, on this rank, in bytes."""

    factors: (
        int  # inputs of calls with parameters, and the gradients at their outputs, when the backward pass has ended
    )
    copies: int  # copies of parameters and of their gradients, and an update that is kept


Observed = Sequence[Sequence[tuple[str, Tensor]]]
"""What a quantity's ``observe`` kept: by micro-batch, then by call in forward order, with the name of the module."""


@dataclass(frozen=True)
class ReplicatedValue:
    """A value that is the same on all ranks: taken from rank 0, not sent. Other ranks hold ``None``."""

    value: Tensor | None


ASKED_FOR = {
    "update": ("update",),
    "mean_gradient": ("mean_gradient",),
    "part_of_mean": ("mean_gradient",),
    "mean_squared": ("mean_squared", "mean_gradient", "projections"),
    "squared_norms": ("squared_norms",),
    "projections": ("projections",),
    "observed": ("outputs",),
    "output_gradients": ("output_gradients",),
    "backward": ("backward",),
    "curvature": ("curvature",),
    "traces": ("trace",),
    "eigenvalues": ("eigenvalue",),
    "initial": ("initial",),
    "learning_rates": ("optimizer",),
    "scale_of_grad": ("averaged",),
    "held": ("held",),
}
"""Which needs (any of them) provide which attribute of a `LocalBatch`."""


@cache
def _not_asked_for(needs: Needs) -> frozenset[str]:
    return frozenset(n for n, any_of in ASKED_FOR.items() if not any(getattr(needs, need) for need in any_of))


@dataclass(frozen=True)
class LocalBatch(_Pooled):
    """This rank's part of the pooled batch at a tracked step. Everything is scaled for the pooled batch.

    Reading an attribute that was not requested (``Quantity.needs``) is an error that names the missing need.
    """

    loss: Tensor | None  # float64, a number: this rank's sum of l_i; None if unknown
    losses: Tensor  # float64 [B_r]: l_i; zeros if unknown
    losses_known: bool
    has_gradients: bool  # whether samples have individual gradients; if not, these are NaN
    parameters: Mapping[str, Tensor]  # the tracked ones; NaN if they are sharded
    every_parameter: Mapping[str, Tensor]  # what this rank holds of each parameter, tracked or not
    own_parameters: Mapping[str, Tensor]  # what this rank alone answers for: all on rank 0; if sharded, its pieces
    pieces: Mapping[str, Piece] | None  # where these belong, in a sharded model
    initial: Mapping[str, Tensor]  # own_parameters at the first call of `track`; empty if not known
    statistics: Mapping[str, Statistic]  # what Quantity.statistics asked for
    reduced: Mapping[str, Tensor]  # what Quantity.reduce returned, added up over the buckets; float64
    mean_gradient: Mapping[str, Tensor]  # the pooled G; float64, or float32 from autograd in a single process
    part_of_mean: Mapping[str, Tensor]  # this rank's (1/N) sum_i g_i over its samples, at least float32
    mean_squared: Tensor  # float64 [parameters]: |G|^2
    squared_norms: Tensor  # float64 [parameters]: this rank's sum_i |g_i|^2
    projections: Tensor  # float64 [B_r]: <g_i, G>
    observed: Observed
    sizes: Mapping[str, int]  # what `sizes` returned on all ranks that returned anything; 0 where they differ
    output_gradients: Mapping[str, Sequence[Tensor]]  # by leaf module: d l_i / d z_i, [B, *], one per call
    backward: Sequence[tuple[str, Tensor]]  # by layer with parameters: extremes of output gradients, in backward order
    curvature: Mapping[Curvature, Mapping[str, Tensor]]  # this rank's part of the pooled diagonal or its sums, float64
    traces: Mapping[TraceEstimate, Tensor]  # this rank's part of the pooled estimates, float64 [samples, parameters]
    eigenvalues: Mapping[LargestEigenvalue, Eigenvalue]  # on rank 0
    update: Update | None
    learning_rates: Sequence[float | Tensor]
    scale_of_grad: Tensor  # float64, a number: this rank's part of what .grad is to be divided by, to be in units of G
    times: Times
    held: Held | None

    def __getattr__(self, name: str) -> Any:
        need = ASKED_FOR.get(name)
        if need is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")
        raise AttributeError(f"batch.{name} is only available to quantities with Needs({need[0]}=...).")

    def for_quantity(self, needs: Needs, **its_own: Any) -> LocalBatch:
        """The same batch, as seen by a quantity with these needs.

        Args:
            needs: What the quantity may read.
            its_own: Attributes that differ between quantities.
        """
        seen, hidden = object.__new__(type(self)), _not_asked_for(needs)  # copy.copy is five times slower
        every = vars(self) | its_own
        vars(seen).update({name: value for name, value in every.items() if name not in hidden})
        return seen

    def replicated(
        self, value: Callable[[], float | Tensor | np.ndarray] | float | Tensor | np.ndarray
    ) -> ReplicatedValue:
        """A value that is the same on all ranks: rank 0 stores its own, and nothing is sent.

        Args:
            value: A number or an array, or a function that returns one, which is called on rank 0 only.
        """
        if self.rank:
            return ReplicatedValue(None)
        device = next(iter(self.parameters.values())).device
        known = value() if callable(value) and not isinstance(value, Tensor) else value
        return ReplicatedValue(sent(known, device))

    def once(self, value: Callable[[], float | Tensor | np.ndarray] | float | Tensor | np.ndarray) -> ReplicatedValue:
        """The old name of `replicated`."""
        warnings.warn("batch.once(...) is deprecated: use batch.replicated(...).", DeprecationWarning, stacklevel=2)
        return self.replicated(value)

    def of_parameters(self, value: Callable[[], Tensor]) -> Tensor | ReplicatedValue:
        """A sum over elements of ``own_parameters``: on rank 0 over all of them; if sharded, over this rank's pieces.

        Args:
            value: Returns this rank's part of the sum.
        """
        return self.replicated(value) if self.pieces is None else value()

    def whole(self, name: str) -> Tensor | ReplicatedValue:
        """The values of a parameter; of a sharded one, this rank's piece of it, and zeros elsewhere."""
        if self.pieces is None:
            return self.replicated(self.parameters[name])
        piece, like = self.pieces[name], self.parameters[name]
        found = torch.zeros(like.shape, dtype=torch.float64, device=like.device)
        if piece.counts:
            rows, place = piece.common(slice(None), found)
            place.copy_(self.own_parameters[name][rows] if found.dim() else self.own_parameters[name])
        return found

    @property
    def known_losses(self) -> Tensor:
        """The individual losses, NaN where unknown; float64 ``[B_r]``."""
        return self.losses if self.losses_known else torch.full_like(self.losses, torch.nan)

    def vector(self, values: Sequence[Tensor | float]) -> Tensor:
        """Numbers as float64 ``[len(values)]`` on the model's device, without waiting for the device."""
        device = next(iter(self.parameters.values())).device
        if not any(isinstance(value, Tensor) for value in values):
            return sent(values, device)
        return torch.stack([sent(value, device) for value in values])

    def slot(self, value: Tensor | float) -> Tensor:
        """A value of this rank, as a sum: ``[world_size, *value.shape]``, zero in the slots of the other ranks."""
        device = next(iter(self.parameters.values())).device
        own = sent(value, device)
        slots = own.new_zeros(self.world_size, *own.shape)
        slots[self.rank] = own
        return slots

    def collected(self, values: Tensor, index: Sequence[int], size: int) -> Tensor:
        """Sums of the values with the same index: ``[size]``, from ``values [k]`` and ``index [k]``."""
        return values.new_zeros(size).index_add_(0, sent(index, values.device, torch.int64), values)

    def squared_norm(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """``|t|^2`` by parameter, float64 ``[parameters]``; tensors are asked for one after the other."""
        return squared_norms(tensors, self.parameters)
