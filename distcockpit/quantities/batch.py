"""What a quantity sees: facts about the model, and this rank's part of the pooled batch of a tracked step."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distcockpit.curvature.diagonals import Curvature
from distcockpit.curvature.hutchinson import TraceEstimate
from distcockpit.curvature.lanczos import Eigenvalue, LargestEigenvalue
from distcockpit.gradients import kernels
from distcockpit.gradients.statistics import Statistic
from distcockpit.gradients.uses import label


@dataclass(frozen=True)
class Needs:
    """What a quantity asks of the tracked step, beside its own statistics over individual gradients.

    Args:
        loss: The pooled loss.
        losses: Individual losses.
        mean_gradient: The pooled mean gradient G, and this rank's part of it.
        squared_norms: The sums of ``|g_i|^2``, by parameter.
        projections: ``<g_i, G>`` of every sample; brings G as well.
        squared_gradients: The pooled sums of ``g_i^2``, element by element, in ``LocalBatch.shard``.
        curvature: A diagonal of the curvature.
        pooled_curvature: The same, pooled element by element, in ``LocalBatch.shard``.
        trace: Estimates of traces of the curvature.
        eigenvalue: An eigenvalue of the pooled Hessian.
        outputs: Outputs of the leaf modules, by way of :meth:`Quantity.observe`.
        output_sizes: Sums whose length depends on outputs, by way of :meth:`Quantity.sizes`.
        output_gradients: Gradients at the outputs of all leaf modules.
        update: The step of the optimizer that began at the previous tracked step, seen from the batches at both ends.
        displacement: The step of the optimizer itself, by way of :meth:`Quantity.displacement`.
        initial: The parameters at the first call of `track`, on rank 0.
        optimizer: The parameter groups and learning rates of the optimizer.
        averaged: What ``.grad`` holds when `track` ends, and what it would hold after a plain average over ranks.
    """

    loss: bool = False
    losses: bool = False
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
    update: bool = False
    displacement: bool = False
    initial: bool = False
    optimizer: bool = False
    averaged: bool = False

    @property
    def second_order(self) -> bool:
        """True if the step is run again, for curvature."""
        return any(each is not None for each in (self.curvature, self.trace, self.eigenvalue))


@dataclass(frozen=True)
class Model:
    """Facts about the model and the ranks that stay the same during a run."""

    shapes: Mapping[str, tuple[int, ...]]  # of the tracked parameters, by name
    leaves: Mapping[str, bool] = field(default_factory=dict)  # tracked leaf modules -> whether it is an activation
    layers: Mapping[str, Sequence[str]] = field(default_factory=dict)  # layers -> tracked parameters, each in one
    dtypes: Mapping[str, str] = field(default_factory=dict)  # NumPy names of the tracked parameters' types
    every_parameter: Sequence[str] = ()  # names of all parameters, tracked or not
    parameter_groups: Mapping[str, int] = field(default_factory=dict)  # tracked parameters -> group of the optimizer
    n_parameter_groups: int = 0
    optimizers: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of several: name -> tracked parameters
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
        """The tracked parameters that move together: those of each optimizer, and what none of several holds."""
        if not self.optimizers:
            return [self.parameters]
        held = {name for names in self.optimizers.values() for name in names}
        return [*self.optimizers.values(), [name for name in self.shapes if name not in held]]


class ByParameter(Mapping[str, Tensor]):
    """A tensor for each parameter, in its shape.

    Args:
        parts: By name, in the order of the parameters.
    """

    def __init__(self, parts: Mapping[str, Tensor]) -> None:
        self._parts = dict(parts)

    @classmethod
    def of(cls, flat: Tensor, like: Mapping[str, Tensor]) -> ByParameter:
        """Cut a vector ``[P]`` into these shapes."""
        parts = zip(like.items(), flat.split([p.numel() for p in like.values()]), strict=True)
        result = cls({name: part.view(p.shape) for (name, p), part in parts})
        result.flat = flat
        return result

    @cached_property
    def flat(self) -> Tensor:
        """All of them as one vector, float64 ``[P]``."""
        parts = [part.double().reshape(-1) for part in self._parts.values()]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)

    def replace(self, parts: Mapping[str, Tensor]) -> None:
        """Have other tensors of some parameters."""
        self._parts |= parts
        vars(self).pop("flat", None)

    def __getitem__(self, name: str) -> Tensor:
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def difference(after: Tensor, before: Tensor) -> Tensor:
    """Of two tensors of one type, in at least float32."""
    kind = torch.promote_types(after.dtype, torch.float32)
    return after.detach().to(kind) - before.detach().to(kind)


@dataclass(frozen=True)
class Update:
    """The optimizer's step d = theta_{t+1} - theta_t, seen from the batches at both ends; this rank's part.

    Projections are float64 ``[K, B]``: ``<g_i, d_k> / |d|`` of this rank's samples, for each of the K parts of d that
    ``Model.parts_of_updates`` tells; they add up to that on d.
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
    interrupted: bool = False  # whether the run was interrupted in between, and what it began with is lost

    def ending(self, end_slopes: Tensor) -> Update:
        """The same update, with the projections of the batch at its end."""
        return dataclasses.replace(self, end_slopes=end_slopes)


@dataclass(frozen=True)
class Shard:
    """This rank's range of the pooled element-wise vectors, flattened over the tracked parameters; float64.

    The ranges of all ranks together hold every element once. What no quantity asked for is empty.
    """

    mean: Tensor  # G; with one of the others
    squares: Tensor  # sum_i g_i^2
    curvature: Mapping[Curvature, Tensor]  # h


@dataclass(frozen=True)
class Averaged:
    """The gradient that the optimizer gets, before clipping, in the scale in which it is accumulated."""

    held: ByParameter  # float64: what the step added to .grad on this rank
    plain: ByParameter  # float64: the mean over ranks of what autograd gave each
    factor: Tensor  # float64, a number: this rank's part of the scale, held / factor is in units of G


@dataclass(frozen=True)
class Times:
    """Where this rank's time went, in seconds; NaN where it is not known; and what it exchanged."""

    elapsed: float  # since the construction of the cockpit
    step: float  # from the end of the previous backward pass to the end of this one
    outside: float  # of it, between the `track` of the previous step and that of this one: data, optimizer
    track: float  # of it, inside `track`: forward and backward
    forward: float  # of it, in the forward of the model
    wait: float  # in the exchanges before the sums, for the other ranks
    cockpit: float  # in the cockpit's own work for this step up to the sums, the wait left out
    exchanges: int  # collectives since the previous tracked step came this far
    exchanged_bytes: int  # what this rank handed to them


Observed = Sequence[Sequence[tuple[str, Tensor]]]
"""What a quantity's ``observe`` kept: by micro-batch, then by call in forward order, with the name of the module."""


@dataclass(frozen=True)
class ReplicatedValue:
    """Something that all ranks hold alike: told by rank 0, not sent. Other ranks hold ``None``."""

    value: Tensor | None


ASKED_FOR = {
    "update": ("update",),
    "mean_gradient": ("mean_gradient", "projections"),
    "part_of_mean": ("mean_gradient", "projections"),
    "mean_squared": ("mean_gradient", "projections"),
    "squared_norms": ("squared_norms",),
    "projections": ("projections",),
    "shard": ("squared_gradients", "pooled_curvature"),
    "observed": ("outputs",),
    "output_gradients": ("output_gradients",),
    "curvature": ("curvature",),
    "traces": ("trace",),
    "eigenvalues": ("eigenvalue",),
    "initial": ("initial",),
    "learning_rates": ("optimizer",),
    "averaged": ("averaged",),
}
"""Which needs (any of them) bring which attribute of a `LocalBatch`."""


@cache
def _not_asked_for(needs: Needs) -> list[str]:
    return [name for name, any_of in ASKED_FOR.items() if not any(getattr(needs, need) for need in any_of)]


@dataclass(frozen=True)
class LocalBatch:
    """This rank's part of the pooled batch of a tracked step. Everything is scaled to the pooled meaning.

    To read what was not asked for (``Quantity.needs``) is an error that names the need.
    """

    model: Model
    step: int
    n: int  # N: samples of all ranks
    local_n: int  # B_r
    rank: int
    world_size: int
    loss: Tensor | None  # float64, a number: this rank's sum of l_i; None if it is not known
    losses: Tensor  # float64 [B_r]: l_i; zeros where they are not known
    losses_known: bool
    has_gradients: bool  # whether samples have gradients of their own; where they have none, these are NaN
    parameters: Mapping[str, Tensor]
    every_parameter: Mapping[str, Tensor]
    initial: Mapping[str, Tensor]  # the parameters at the first call of `track`, on rank 0; empty if not known
    statistics: Mapping[str, Statistic]  # what Quantity.statistics asked for
    mean_gradient: ByParameter  # the pooled G, by parameter, float64; float32 where autograd gave it so to one process
    part_of_mean: ByParameter  # of this rank: (1/N) sum_i g_i over its samples, by parameter, at least float32
    mean_squared: Tensor  # float64 [parameters]: |G|^2
    squared_norms: Tensor  # float64 [parameters]: this rank's sum_i |g_i|^2
    projections: Tensor  # float64 [B_r]: <g_i, G>
    shard: Shard
    observed: Observed
    sizes: Mapping[str, int]  # what `sizes` said on all ranks that said anything; 0 where they differ
    output_gradients: Mapping[str, Sequence[Tensor]]  # by leaf module: d l_i / d z_i, [B, *], one per call
    backward: Sequence[tuple[str, Tensor]]  # gradients at outputs of layers with parameters, as the backward met them
    curvature: Mapping[Curvature, Mapping[str, Tensor]]  # this rank's part of the pooled diagonal, float64
    traces: Mapping[TraceEstimate, Tensor]  # this rank's part of the pooled estimates, float64 [samples, parameters]
    eigenvalues: Mapping[LargestEigenvalue, Eigenvalue]  # on rank 0
    update: Update | None
    learning_rates: Sequence[float | Tensor]
    averaged: Averaged | None
    times: Times

    def __getattr__(self, name: str) -> Any:
        need = ASKED_FOR.get(name)
        if need is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")
        raise AttributeError(f"batch.{name} is only available to quantities with Needs({need[0]}=...).")

    def for_quantity(self, needs: Needs, **its_own: Any) -> LocalBatch:
        """The same, as a quantity with these needs sees it.

        Args:
            needs: What it may read.
            its_own: Attributes that differ between quantities.
        """
        seen = object.__new__(type(self))  # copy.copy takes five times as long
        vars(seen).update(vars(self), **its_own)
        for name in _not_asked_for(needs):
            del vars(seen)[name]
        return seen

    def replicated(
        self, value: Callable[[], float | Tensor | np.ndarray] | float | Tensor | np.ndarray
    ) -> ReplicatedValue:
        """A value that all ranks hold alike: rank 0 stores its own, and nothing is sent.

        Args:
            value: A number or an array, or a function that returns one, which is called on rank 0 only.
        """
        if self.rank:
            return ReplicatedValue(None)
        device = next(iter(self.parameters.values())).device
        known = value() if callable(value) and not isinstance(value, Tensor) else value
        return ReplicatedValue(torch.as_tensor(known, dtype=torch.float64, device=device))

    def once(self, value: Callable[[], float | Tensor | np.ndarray] | float | Tensor | np.ndarray) -> ReplicatedValue:
        """The old name of `replicated`."""
        warnings.warn("batch.once(...) is deprecated: use batch.replicated(...).", DeprecationWarning, stacklevel=2)
        return self.replicated(value)

    @property
    def known_losses(self) -> Tensor:
        """The individual losses, NaN where they are not known; float64 ``[B_r]``."""
        return self.losses if self.losses_known else torch.full_like(self.losses, torch.nan)

    def vector(self, values: Sequence[Tensor | float]) -> Tensor:
        """Numbers as float64 ``[len(values)]`` on the model's device, without waiting for the device."""
        device = next(iter(self.parameters.values())).device
        if not any(isinstance(value, Tensor) for value in values):
            return torch.tensor(values, dtype=torch.float64, device=device)
        parts = [torch.as_tensor(value, dtype=torch.float64, device=device) for value in values]
        return torch.stack(parts)

    def slot(self, value: Tensor | float) -> Tensor:
        """A fact of this rank, as a sum: ``[world_size, *value.shape]``, zero in the slots of the others."""
        device = next(iter(self.parameters.values())).device
        own = torch.as_tensor(value, dtype=torch.float64, device=device)
        slots = own.new_zeros(self.world_size, *own.shape)
        slots[self.rank] = own
        return slots

    def collected(self, values: Tensor, index: Sequence[int], size: int) -> Tensor:
        """Sums of the values that have the same index: ``[size]``, from ``values [k]`` and ``index [k]``."""
        return values.new_zeros(size).index_add_(0, torch.tensor(index, device=values.device), values)

    def squared_norm(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """``|t|^2`` by parameter, float64 ``[parameters]``."""
        return kernels.squared_norms([tensors[name] for name in self.parameters])
