"""The header of a tracked step: the first exchange, after which every rank knows N, W and the state of the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distcockpit.losses.interpretation import alike
from distcockpit.tracking.packed import pack
from distcockpit.tracking.session import Session
from distcockpit.tracking.setup import Setup
from distcockpit.world import Record

UNKNOWN = float("nan")


@dataclass(frozen=True)
class BatchTotals:
    """What the headers of all ranks add up to."""

    n: int  # N
    weight: float  # W
    is_mixed: bool = False  # whether ranks differentiate different combinations of losses
    owns: Sequence[float] = ()  # the factors of the ranks' means, if they differ
    is_sum: bool = False  # whether the sum over samples is divided by nothing, on any rank
    rounds: bool = False  # whether any rank may take autograd's rounded sums where squares are subtracted

    @classmethod
    def of(cls, records: Sequence[Mapping[str, float]]) -> BatchTotals:
        """From the headers of all ranks."""
        present = [r for r in records if r["batch_size"]]
        is_sum = bool(present) and all(r["is_sum"] for r in present)
        same = any(alike([r[name] for r in present]) for name in ("own", "coefficient"))
        return cls(
            int(sum(r["batch_size"] for r in records)),
            sum(r["of_sum" if is_sum else "weight"] for r in present),
            not alike([r["mix"] for r in present]) or any(math.isinf(r["mix"]) for r in present),
            () if same else [r["own"] for r in present],
            is_sum,
            any(r["rounds"] for r in records),
        )

    @property
    def samples_per_weight(self) -> float:
        """N/W."""
        return self.n / self.weight if self.weight else 0.0


@dataclass(frozen=True)
class ModelState:
    """The state of the model and the optimizers at a step."""

    every: Mapping[str, Tensor]  # all parameters
    learning_rates: Sequence[float | Tensor]
    scale: float | None  # the loss scale of mixed precision

    @classmethod
    def of(cls, setup: Setup) -> ModelState:
        """Return the state on this rank."""
        return cls({name: p.detach() for name, p in setup.every.items()}, setup.learning_rates(), setup.loss_scale())


@dataclass(frozen=True)
class Header:
    """What every rank knows once the headers of all have come."""

    totals: BatchTotals
    state: ModelState
    epoch: float | None
    riding: dict[str, Tensor]  # this rank's part of the user's scalars, by ``step/name``

    @classmethod
    def of(cls, session: Session, records: Sequence[Record], state: ModelState | None, epoch: float | None) -> Header:
        """Broadcast the model from the first rank that still trains to ranks that have joined; all ranks call it.

        Args:
            session: This rank's side of the run.
            records: The headers.
            state: The current model; ``None`` on ranks that have joined.
            epoch: The epoch of the step.
        """
        joined = session.joined.note(records)
        if joined:
            source = next(rank for rank in range(session.setup.world.size) if rank not in joined)
            state, epoch = _broadcast(session.setup, source, state, epoch)
        assert state is not None  # ranks that train know their own
        return cls(BatchTotals.of(records), state, epoch, session.share_logs(records))


def _broadcast(
    setup: Setup, source: int, state: ModelState | None, epoch: float | None
) -> tuple[ModelState, float | None]:
    facts = {"facts": torch.full((2 + setup.facts.n_parameter_groups,), UNKNOWN, dtype=torch.float64, device="cpu")}
    if state is not None:
        known = (UNKNOWN if value is None else value for value in (epoch, state.scale, *state.learning_rates))
        facts = {"facts": torch.stack([torch.as_tensor(v, dtype=torch.float64).cpu() for v in known])}
    every = {name: p.detach() for name, p in setup.every.items()} if state is None else state.every
    buffer = pack({**facts, **every}, setup.device)
    setup.world.broadcast(buffer, source)
    if state is not None:
        return state, epoch
    parts = buffer.split([value.numel() for value in (*facts.values(), *every.values())])
    heard = zip(every.items(), parts[1:], strict=True)
    values = {name: part.view(p.shape).to(p.dtype) for (name, p), part in heard}
    epoch, scale, *rates = (None if value != value else value for value in parts[0].tolist())
    return ModelState(values, [UNKNOWN if rate is None else rate for rate in rates], scale), epoch
