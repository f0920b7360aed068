"""Live copies of the rows, beside the store: TensorBoard, Weights & Biases.

A sink gets every row when it is finished, on the background thread of rank 0: its numbers, and histograms of one
dimension. The store holds all of it; a sink that fails is left out from then on, and the run goes on.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from distcockpit.store.names import visible
from distcockpit.store.schema import Row


@dataclass(frozen=True)
class Histogram:
    """Counts of one dimension; the moments, which they do not hold, from the middles of the bins."""

    counts: np.ndarray
    edges: np.ndarray

    @property
    def moments(self) -> tuple[float, float]:
        """Sum and sum of squares."""
        middles = (self.edges[1:] + self.edges[:-1]) / 2
        return float(self.counts @ middles), float(self.counts @ middles**2)

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Histogram | None:
        """That of a row, if it has one that says something."""
        if not {"counts", "edges"} <= set(row) or np.ndim(row["counts"]) != 1:
            return None
        counts, edges = np.asarray(row["counts"]), np.asarray(row["edges"], dtype=float)
        return cls(counts, edges) if counts.sum() and np.isfinite(edges).all() else None


class Sink(ABC):
    """Where rows go beside the store. All calls come from rank 0."""

    @abstractmethod
    def start(self) -> None:
        """The cockpit is constructed; an error here is the user's to see."""

    @abstractmethod
    def write(
        self, name: str, step: int, wall_time: float, numbers: Mapping[str, float], histogram: Histogram | None
    ) -> None:
        """A row of a quantity, or of the user's own scalars (``log``).

        Args:
            name: Of the quantity.
            step: Of the row; rows of one quantity come in order, those of several need not.
            wall_time: Seconds since the epoch.
            numbers: By field; finite.
            histogram: That of the row, if it has one.
        """

    @abstractmethod
    def close(self) -> None:
        """The run ends."""


def numbers_of(row: Row) -> dict[str, float]:
    """The finite numbers of a row, without arrays."""
    found = {key: float(value) for key, value in row.items() if np.ndim(value) == 0}
    return {visible(key): value for key, value in found.items() if math.isfinite(value)}


class TensorBoard(Sink):
    """Event files of TensorBoard, with tags ``quantity/field``; needs the extra ``export``.

    Args:
        folder: Where the files go; `tensorboard --logdir` shows it while the run goes on.
        flush_seconds: Longest time until a row is in the file.
    """

    def __init__(self, folder: str | os.PathLike[str], flush_seconds: float = 10.0) -> None:
        self.folder, self._flush_seconds = os.fspath(folder), flush_seconds
        self._writer: Any = None

    def start(self) -> None:
        """Make the file.

        Raises:
            ImportError: If tensorboardX is missing.
            OSError: If the folder cannot be written.
        """
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "sinks=[TensorBoard(...)] needs tensorboardX: pip install distcockpit[export]."
            ) from error
        try:
            self._writer = SummaryWriter(self.folder, flush_secs=self._flush_seconds)
        except OSError as error:
            raise OSError(
                f"sinks=[TensorBoard({str(self.folder)!r})]: the folder cannot be written ({error}). Choose another."
            ) from error

    def write(
        self, name: str, step: int, wall_time: float, numbers: Mapping[str, float], histogram: Histogram | None
    ) -> None:
        """Scalars, and the counts of a histogram as they are."""
        for key, value in numbers.items():
            self._writer.add_scalar(f"{name}/{key}", value, step, walltime=wall_time)
        if histogram is not None:
            add_histogram(self._writer, f"{name}/counts", step, wall_time, histogram)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


def add_histogram(writer: Any, tag: str, step: int, wall_time: float, histogram: Histogram) -> None:
    """Counts for TensorBoard.

    Args:
        writer: A ``tensorboardX.SummaryWriter``.
        tag: Name of the histogram.
        step: Step.
        wall_time: Seconds since the epoch.
        histogram: The counts.
    """
    counts, edges = histogram.counts, histogram.edges
    total, squares = histogram.moments
    writer.add_histogram_raw(
        tag,
        min=float(edges[0]),
        max=float(edges[-1]),
        num=int(counts.sum()),
        sum=total,
        sum_squares=squares,
        bucket_limits=edges[1:].tolist(),
        bucket_counts=counts.tolist(),
        global_step=step,
        walltime=wall_time,
    )


class WandB(Sink):
    """Weights & Biases; needs the extra ``wandb``. Each quantity has an axis of its own, ``quantity/step``.

    Without ``run`` it has a run of its own, so that the steps of yours are left alone. In a run that is given, rows
    ride with what you log next: of two rows of one quantity in between, W&B keeps the newer.

    Args:
        run: A run of yours, on rank 0 (``None`` on the others).
        options: Arguments of ``wandb.init`` for a run of its own: ``project=``, ``mode="offline"``, ...
    """

    def __init__(self, run: Any = None, **options: Any) -> None:
        if run is not None and options:
            raise TypeError(
                f"WandB(run=..., {', '.join(options)}=...): options only apply to a run that WandB starts itself. Pass "
                "either run= or options."
            )
        self._run, self._options, self._is_ours = run, options, run is None
        self._defined: set[str] = set()

    def start(self) -> None:
        """Begin the run.

        Raises:
            ImportError: If wandb is missing.
        """
        try:
            import wandb
        except ImportError as error:
            raise ImportError("sinks=[WandB(...)] needs wandb: pip install distcockpit[wandb].") from error
        if self._is_ours:
            self._run = wandb.init(**{"reinit": "create_new", "job_type": "distcockpit", **self._options})

    def write(
        self, name: str, step: int, wall_time: float, numbers: Mapping[str, float], histogram: Histogram | None
    ) -> None:
        """One record."""
        import wandb

        if name not in self._defined:
            self._defined.add(name)
            self._run.define_metric(f"{name}/step", hidden=True)
            self._run.define_metric(f"{name}/*", step_metric=f"{name}/step")
        record: dict[str, Any] = {f"{name}/{key}": value for key, value in numbers.items()}
        if histogram is not None and len(histogram.counts) <= wandb.Histogram.MAX_LENGTH:
            record[f"{name}/counts"] = wandb.Histogram(np_histogram=(histogram.counts, histogram.edges))
        self._run.log({**record, f"{name}/step": step}, commit=self._is_ours)

    def close(self) -> None:
        """End the run, if it is its own."""
        if self._is_ours:
            self._run.finish()
