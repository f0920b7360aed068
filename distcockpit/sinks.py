"""Live copies of the rows, in addition to the store: TensorBoard, Weights & Biases.

A sink gets every row when it is finished, on rank 0's background thread: its numbers, and one-dimensional histograms.
The store holds everything; a sink that fails is dropped from then on, and the run continues.
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
    """One-dimensional counts; the moments, which the counts do not hold, are estimated from the bin centres."""

    counts: np.ndarray
    edges: np.ndarray

    @property
    def moments(self) -> tuple[float, float]:
        """Sum and sum of squares."""
        middles = (self.edges[1:] + self.edges[:-1]) / 2
        return float(self.counts @ middles), float(self.counts @ middles**2)

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Histogram | None:
        """The histogram of a row, if it has one that is not empty."""
        if not {"counts", "edges"} <= set(row) or np.ndim(row["counts"]) != 1:
            return None
        counts, edges = np.asarray(row["counts"]), np.asarray(row["edges"], dtype=float)
        return cls(counts, edges) if counts.sum() and np.isfinite(edges).all() else None


class Sink(ABC):
    """Where rows go in addition to the store. All calls come from rank 0."""

    @abstractmethod
    def start(self) -> None:
        """Called when the cockpit is constructed; errors raised here reach the user."""

    @abstractmethod
    def write(
        self, name: str, step: int, wall_time: float, numbers: Mapping[str, float], histogram: Histogram | None
    ) -> None:
        """Write a row of a quantity, or of the user's own scalars (``log``).

        Args:
            name: Name of the quantity.
            step: Step of the row; rows of one quantity come in order, rows of different quantities need not.
            wall_time: Seconds since the epoch.
            numbers: The finite numbers of the row, by field.
            histogram: The row's histogram, if it has one.
        """

    @abstractmethod
    def close(self) -> None:
        """Called when the run ends."""


def numbers_of(row: Row) -> dict[str, float]:
    """The finite numbers of a row, without arrays."""
    found = {key: float(value) for key, value in row.items() if np.ndim(value) == 0}
    return {visible(key): value for key, value in found.items() if math.isfinite(value)}


class TensorBoard(Sink):
    """Event files of TensorBoard, with tags ``quantity/field``; needs the extra ``export``.

    Args:
        folder: Where the files go; `tensorboard --logdir` shows it while the run is going.
        flush_seconds: Maximum time until a row is in the file.
    """

    def __init__(self, folder: str | os.PathLike[str], flush_seconds: float = 10.0) -> None:
        self.folder, self._flush_seconds = os.fspath(folder), flush_seconds
        self._writer: Any = None

    def start(self) -> None:
        """Create the file.

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
        """Write scalars, and the counts of a histogram unchanged."""
        for key, value in numbers.items():
            self._writer.add_scalar(f"{name}/{key}", value, step, walltime=wall_time)
        if histogram is not None:
            add_histogram(self._writer, f"{name}/counts", step, wall_time, histogram)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


def add_histogram(writer: Any, tag: str, step: int, wall_time: float, histogram: Histogram) -> None:
    """Write counts as a TensorBoard histogram.

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
    """Weights & Biases; needs the extra ``wandb``. Each quantity has its own step axis, ``quantity/step``.

    Without ``run``, the sink creates its own run, so the steps of yours are left alone. If you pass a run, rows are
    committed with whatever you log next: if a quantity has two rows in between, W&B keeps the newer one.

    Args:
        run: A run of yours, on rank 0 (``None`` on the others).
        options: Arguments of ``wandb.init`` for the sink's own run: ``project=``, ``mode="offline"``, ...
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
        """Start the run.

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
        """Log one record."""
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
        """Finish the run if the sink created it."""
        if self._is_ours:
            self._run.finish()
