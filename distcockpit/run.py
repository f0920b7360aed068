"""Reading a run: a tree of xarray datasets, and statistics over epochs. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import xarray as xr
from zarr.abc.store import Store

from distcockpit.reading import open_store, problems

T = TypeVar("T")


def open_run(store: str | os.PathLike[str] | Store, storage_options: Mapping[str, Any] | None = None) -> xr.DataTree:
    """Open the store of a run, finished or still being written.

    The store need not be trusted: nothing in it is executed, and sizes are checked before memory is allocated.

    Args:
        store: A path, a URL such as ``s3://bucket/run.zarr`` (extra ``remote``), or a store of zarr.
        storage_options: Options of fsspec for a URL: credentials, endpoint.

    Returns:
        One node per quantity, ``run["alpha"]["alpha"]``, with the dimension ``step`` and the coordinates ``epoch``,
        ``wall_time`` and ``batch_size`` on it; data are read when they are used. ``run.attrs`` tells of the run. It
        holds what was committed when it was opened; open it again to see more.

    Raises:
        FileNotFoundError: If there is nothing.
        OSError: If the store cannot be reached.
        ValueError: If it is no run of distcockpit, of a newer format, or damaged.
    """
    run = open_store(store, storage_options)
    opened: Any = run.store()  # xarray takes stores of zarr, though its types do not say so
    return xr.open_datatree(opened, engine="zarr", zarr_format=3, consolidated=True)


def verify(store: str | os.PathLike[str] | Store, storage_options: Mapping[str, Any] | None = None) -> list[str]:
    """Read every chunk of a run; what is missing would read as NaN or zero without a word.

    Args:
        store: As for `open_run`.
        storage_options: As for `open_run`.

    Returns:
        What is wrong, a sentence each; nothing if all is well.

    Raises:
        FileNotFoundError: If there is nothing.
        ValueError: If it is no run of distcockpit, or of a newer format.
    """
    return problems(open_store(store, storage_options))


def _quantile(q: float) -> Callable[[xr.DataArray], xr.DataArray]:
    return lambda group: group.quantile(q, dim="step", skipna=True).drop_vars("quantile")


def _std(group: xr.DataArray) -> xr.DataArray:
    return group.std(dim="step")


LINES: dict[str, Callable[[xr.DataArray], xr.DataArray]] = {
    "mean": lambda group: group.mean(dim="step"),
    "median": lambda group: group.median(dim="step"),
    "min": lambda group: group.min(dim="step"),
    "max": lambda group: group.max(dim="step"),
    "Q1": _quantile(0.25),
    "Q3": _quantile(0.75),
    "std": _std,
    "IQR": lambda group: _quantile(0.75)(group) - _quantile(0.25)(group),
}
"""Names of the line aggregations."""

RANGES: dict[str, tuple[Callable[[xr.DataArray], xr.DataArray], Callable[[xr.DataArray], xr.DataArray]]] = {
    "std": (
        lambda group: group.mean(dim="step") - _std(group),
        lambda group: group.mean(dim="step") + _std(group),
    ),
    "Q1-Q3": (LINES["Q1"], LINES["Q3"]),
    "min-max": (LINES["min"], LINES["max"]),
}
"""Names of the range aggregations; "std" is one standard deviation below and above the mean."""


def line_aggregation(data: xr.DataArray, method: str = "mean") -> xr.DataArray:
    """One value per epoch of something stored per step; NaN steps do not count.

    Args:
        data: An array of a run with the dimension ``step`` and the coordinate ``epoch``.
        method: "mean", "median", "min", "max", "Q1", "Q3", "std" (ddof 0) or "IQR".

    Returns:
        The dimension ``epoch`` in place of ``step``.

    Raises:
        ValueError: If the method is unknown, or no epoch was stored.
    """
    return _per_epoch(data, _named(LINES, "line_aggregation", method))


def range_aggregation(data: xr.DataArray, method: str = "std") -> tuple[xr.DataArray, xr.DataArray]:
    """Lower and upper end of a band per epoch of something stored per step; NaN steps do not count.

    Args:
        data: An array of a run with the dimension ``step`` and the coordinate ``epoch``.
        method: "std" (mean - std, mean + std), "Q1-Q3" or "min-max".

    Returns:
        Two arrays with the dimension ``epoch`` in place of ``step``.

    Raises:
        ValueError: If the method is unknown, or no epoch was stored.
    """
    low, high = _named(RANGES, "range_aggregation", method)
    return _per_epoch(data, low), _per_epoch(data, high)


def _named(table: dict[str, T], argument: str, method: str) -> T:
    if method not in table:
        raise ValueError(f"{argument}(method={method!r}): must be one of {list(table)}.")
    return table[method]


def _per_epoch(data: xr.DataArray, reduce: Callable[[xr.DataArray], xr.DataArray]) -> xr.DataArray:
    if not np.isfinite(data["epoch"]).any():
        raise ValueError(f"{data.name}: no epoch was stored. Pass it while training: track(step, epoch=epoch).")
    return data.groupby("epoch").map(reduce)
