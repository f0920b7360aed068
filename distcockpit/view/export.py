"""Runs in other tools' formats: TensorBoard event files, CSV, Parquet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

from distcockpit.run import to_dataframe
from distcockpit.sinks import Histogram, add_histogram
from distcockpit.store.names import visible

FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What a spreadsheet interprets as the start of a formula."""


def export_csv(run: xr.DataTree, folder: Path, progress: Callable[[str], None]) -> list[Path]:
    """Write one table per quantity with one row per step, as `distcockpit.run.to_dataframe` makes it."""
    return _tables(run, folder, ".csv", lambda frame, path: frame.to_csv(path), progress)


def export_parquet(run: xr.DataTree, folder: Path, progress: Callable[[str], None]) -> list[Path]:
    """Write the same tables as `export_csv`, but with types."""
    return _tables(run, folder, ".parquet", lambda frame, path: frame.to_parquet(path), progress)


def _tables(
    run: xr.DataTree,
    folder: Path,
    suffix: str,
    write: Callable[[pd.DataFrame, Path], None],
    progress: Callable[[str], None],
) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, node in run.children.items():
        progress(name)
        frame = to_dataframe(node)
        frame.columns = pd.Index(_different([visible(column) for column in frame.columns]))
        texts = [column for column in frame if frame[column].dtype.kind not in "fiubM"]
        frame[texts] = frame[texts].map(_cell)
        paths.append(folder / f"{name}{suffix}")
        write(frame, paths[-1])
    return paths


def _different(names: list[str]) -> list[str]:
    """Number names that became identical when invisible characters were replaced."""
    seen: dict[str, int] = {}
    for k, name in enumerate(names):
        seen[name] = seen.get(name, 0) + 1
        names[k] = name if seen[name] == 1 else f"{name} ({seen[name]})"
    return names


def _cell(text: object) -> str:
    """A string that no spreadsheet executes."""
    name = visible(text)
    return f"'{name}" if name.startswith(FORMULA) else name


def export_tensorboard(run: xr.DataTree, folder: Path, progress: Callable[[str], None]) -> list[Path]:
    """Write numbers as scalars, named arrays as one scalar per name, and one-dimensional histograms as histograms.

    Tags are ``quantity/field`` and ``quantity/field/name``; wall times are those of the run. NaN is left out, as
    TensorBoard has no gaps.

    Raises:
        FileExistsError: If the folder holds event files, which TensorBoard would show together with these.
    """
    from tensorboardX import SummaryWriter

    folder.mkdir(parents=True, exist_ok=True)
    before = set(folder.iterdir())
    if any("tfevents" in path.name for path in before):
        raise FileExistsError(
            f"{str(folder)!r} already holds event files, which TensorBoard would mix with these. Choose another folder."
        )
    with SummaryWriter(str(folder)) as writer:
        for name, node in run.children.items():
            progress(name)
            data = node.to_dataset().load()
            steps, times = data["step"].values, data["wall_time"].values.astype("datetime64[ns]").astype(np.int64) / 1e9
            if {"counts", "edges"} <= set(data.data_vars):
                for step, time, counts, edges in zip(
                    steps, times, data["counts"].values, data["edges"].values, strict=True
                ):
                    histogram = Histogram.of({"counts": counts, "edges": edges})
                    if histogram is not None:
                        add_histogram(writer, f"{name}/counts", int(step), float(time), histogram)
            for field, array in data.data_vars.items():
                if array.dtype.kind not in "fiu" or array.ndim > 2 or field in ("counts", "edges"):
                    continue
                inner = array.transpose("step", ...)
                labels = [""]
                if inner.ndim == 2:
                    dim = inner.dims[1]
                    known = inner[dim].values if dim in inner.coords else range(inner.shape[1])
                    labels = _different([f"/{visible(label)}" for label in known])
                columns = inner.values.reshape(len(steps), len(labels))
                for label, column in zip(labels, columns.T, strict=True):
                    for step, time, value in zip(steps, times, column, strict=True):
                        if not np.isnan(value):
                            writer.add_scalar(f"{name}/{field}{label}", float(value), int(step), walltime=float(time))
    return sorted(set(folder.iterdir()) - before)


FORMATS = {"tensorboard": export_tensorboard, "csv": export_csv, "parquet": export_parquet}
"""Export functions by name."""
