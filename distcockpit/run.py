"""Reading a run: a tree of xarray datasets, and statistics of it. Does not need torch."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, Literal, TypeVar

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray
from zarr.abc.store import Store

from distcockpit.store.lock import is_abandoned
from distcockpit.store.reading import open_store, problems

T = TypeVar("T")


def open_run(store: str | os.PathLike[str] | Store, storage_options: Mapping[str, Any] | None = None) -> xr.DataTree:
    """Open the store of a run, finished or still being written.

    Untrusted stores are safe to open: nothing in them is executed, and sizes are checked before memory is allocated.

    Args:
        store: A path, a URL such as ``s3://bucket/run.zarr`` (extra ``remote``), or a zarr store.
        storage_options: fsspec options for a URL: credentials, endpoint.

    Returns:
        One node per quantity, ``run["alpha"]["alpha"]``, with the dimension ``step`` and the coordinates ``epoch``,
        ``wall_time`` and ``batch_size`` on it, and names along ``parameter`` and ``layer``. Data are loaded lazily, as
        Dask chunks if it is installed (extra ``dask``). ``run.attrs`` describes the run: its ``state`` is "running",
        "closed", "ended" (``reason`` says why), or "killed" if it neither ended nor has a writer any more. It holds
        what was committed when it was opened; open it again to see more.

    Raises:
        FileNotFoundError: If there is nothing there.
        OSError: If the store cannot be reached.
        ValueError: If it is not a distcockpit run, has a newer format, or is damaged.
    """
    return _opened(store, storage_options, {} if find_spec("dask") else None)


def look_at(store: str | os.PathLike[str] | Store, storage_options: Mapping[str, Any] | None = None) -> xr.DataTree:
    """As `open_run`, but without Dask, which takes longer to import than most runs take to read."""
    return _opened(store, storage_options, None)


def _opened(
    store: str | os.PathLike[str] | Store, storage_options: Mapping[str, Any] | None, chunks: dict[str, int] | None
) -> xr.DataTree:
    if store == "":
        raise FileNotFoundError("store='': there is no run. A cockpit that is off (DISTCOCKPIT=off) writes none.")
    run = open_store(store, storage_options)
    opened: Any = run.store()  # xarray accepts zarr stores, though its types do not say so
    try:
        tree = xr.open_datatree(opened, engine="zarr", zarr_format=3, consolidated=True, chunks=chunks)
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"store={run.keys.name!r} is not a valid distcockpit run: {error!r}.") from error
    if tree.attrs.get("state") == "running" and is_abandoned(run.keys):
        if open_store(store, storage_options).attributes.get("state") != "running":  # it ended in the meantime
            return _opened(store, storage_options, chunks)
        tree.attrs["state"] = "killed"
    return tree


def verify(
    store: str | os.PathLike[str] | Store,
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[str]:
    """Read every chunk of a run, because missing chunks would otherwise silently read as NaN or zero.

    Args:
        store: As for `open_run`.
        storage_options: As for `open_run`.
        progress: Called after each chunk with the number of chunks read, and their total.

    Returns:
        What is wrong, one sentence each; empty if all is well.

    Raises:
        FileNotFoundError: If there is nothing there.
        ValueError: If it is not a distcockpit run, or has a newer format.
    """
    return problems(open_store(store, storage_options), progress)


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


def line_aggregation(data: xr.DataArray, method: str | float = "mean") -> xr.DataArray:
    """One value per epoch of something stored per step; NaN steps do not count.

    Args:
        data: An array of a run with the dimension ``step`` and the coordinate ``epoch``.
        method: "mean", "median", "min", "max", "Q1", "Q3", "std" (ddof 0) or "IQR"; a number such as 0.9 is that
            quantile.

    Returns:
        The dimension ``epoch`` in place of ``step``.

    Raises:
        ValueError: If the method is unknown, or no epoch was stored.
    """
    if isinstance(method, float | int) and 0 <= method <= 1:
        return _per_epoch(data, _quantile(method))
    return _per_epoch(data, _named(LINES, "line_aggregation", method))


def range_aggregation(
    data: xr.DataArray, method: str | tuple[float, float] = "std"
) -> tuple[xr.DataArray, xr.DataArray]:
    """Lower and upper end of a band per epoch of something stored per step; NaN steps do not count.

    Args:
        data: An array of a run with the dimension ``step`` and the coordinate ``epoch``.
        method: "std" (mean - std, mean + std), "Q1-Q3" or "min-max"; two numbers such as (0.1, 0.9) are quantiles.

    Returns:
        Two arrays with the dimension ``epoch`` in place of ``step``.

    Raises:
        ValueError: If the method is unknown, or no epoch was stored.
    """
    if isinstance(method, tuple):
        return line_aggregation(data, method[0]), line_aggregation(data, method[1])
    low, high = _named(RANGES, "range_aggregation", method)
    return _per_epoch(data, low), _per_epoch(data, high)


def _named(table: dict[str, T], function: str, value: str | float, argument: str = "method") -> T:
    if not isinstance(value, str) or value not in table:
        numbers = ", or a number from 0 to 1" if argument == "method" else ""
        raise ValueError(f"{function}({argument}={value!r}): must be one of {list(table)}{numbers}.")
    return table[value]


def _per_epoch(data: xr.DataArray, reduce: Callable[[xr.DataArray], xr.DataArray]) -> xr.DataArray:
    data = data.compute()  # Dask cannot group by unloaded values, nor take a median over all chunks
    if not np.isfinite(data["epoch"]).any():
        raise ValueError(f"{data.name}: no epoch was stored. Pass it while training: track(step, epoch=epoch).")
    return data.groupby("epoch").map(reduce)


def exponential_smoothing(data: xr.DataArray, weight: float = 0.9) -> xr.DataArray:
    r"""Exponentially weighted mean over the rows up to each one, without the bias towards the first.

    $$m_t = \frac{\sum_{s \le t} w^{t-s} x_s}{\sum_{s \le t} w^{t-s}}$$

    Rows that are NaN or infinite do not count (they show the mean of the rows before); the others count the same,
    however many steps lie between them.

    Args:
        data: An array of a run with the dimension ``step``.
        weight: w, the weight of a row relative to the next one; 0 is no smoothing. A mean over about 1 / (1 - w) rows.

    Returns:
        The same dimensions, coordinates and attributes; NaN before the first value.

    Raises:
        ValueError: If the weight is not in [0, 1).
    """
    if not 0 <= weight < 1:
        raise ValueError(f"exponential_smoothing(weight={weight!r}): must be at least 0, and less than 1.")
    rows = data.transpose("step", ...)
    return rows.copy(data=smoothed(rows.values, weight)).transpose(*data.dims)


def smoothed(values: NDArray[Any], weight: float) -> NDArray[Any]:
    """`exponential_smoothing` of plain numbers, along the first axis."""
    flat = np.where(np.isfinite(values), values, np.nan).reshape(len(values), math.prod(values.shape[1:]))
    mean = pd.DataFrame(flat).ewm(alpha=1 - weight, adjust=True, ignore_na=True).mean()
    return mean.to_numpy().reshape(values.shape)


def noise_scale(
    parts: xr.DataTree | xr.Dataset, weight: float = 0.9, source: Literal["samples", "layers", "ranks"] = "samples"
) -> xr.DataArray:
    r"""The simple gradient noise scale, $\operatorname{tr}\Sigma / |\mathcal G|^2$, from parts that are smoothed first.

    The ratio of the two parts of a single step is itself very noisy; McCandlish et al. 2018, arXiv:1812.06162, appendix
    A.1, therefore average each part over steps before dividing.

    Args:
        parts: The rows of `GradientNoiseScale`, ``run["gradient_noise_scale"]``.
        weight: As for `exponential_smoothing`.
        source: "samples", "layers" (one value per layer) or "ranks".

    Returns:
        In samples, by ``step`` (and ``layer``). NaN where the squared gradient is not above 0: too few rows for the
        amount of noise.

    Raises:
        ValueError: If the source is unknown, or these are not the rows of that quantity.
    """
    data = parts.to_dataset() if isinstance(parts, xr.DataTree) else parts
    prefix = _named({"samples": "", "layers": "layer_", "ranks": "rank_"}, "noise_scale", source, "source")
    if prefix + "noise" not in data:
        raise ValueError(
            f"noise_scale(parts=...): holds {list(data)}; pass the rows of GradientNoiseScale, "
            'run["gradient_noise_scale"].'
        )
    noise, signal = (exponential_smoothing(data[prefix + part], weight) for part in ("noise", "signal"))
    with np.errstate(all="ignore"):
        ratio = noise.copy(data=np.where(signal.values > 0, noise.values / signal.values, np.nan))
    return ratio.rename("noise_scale").assign_attrs(long_name="gradient noise scale", units="samples")


def to_dataframe(run: xr.DataTree) -> pd.DataFrame:
    """A table of one quantity, ``to_dataframe(run["alpha"])``, or of a whole run; one row per step.

    Args:
        run: A node of a run, or the run.

    Returns:
        The index is ``step``; the first columns are ``epoch``, ``wall_time`` and ``batch_size``. A number per step is
        one column, ``alpha``; an array has one column per element, ``trace[0.weight]``, ``counts[3, 17]``. For a whole
        run, the rows of all quantities are joined by step, with columns such as ``alpha/alpha``, and NaN where a
        quantity has no row.
    """
    if run.children:
        nodes = {name: to_dataframe(node) for name, node in run.children.items()}
        return pd.concat([frame.add_prefix(f"{name}/") for name, frame in nodes.items()], axis=1).sort_index()
    data = run.to_dataset().load()
    columns = {name: data[name].values for name in ("epoch", "wall_time", "batch_size") if name in data.coords}
    for name, array in data.data_vars.items():
        inner = array.transpose("step", ...)
        labels = [inner[dim].values if dim in inner.coords else range(n) for dim, n in inner.sizes.items()][1:]
        flat = inner.values.reshape(inner.sizes["step"], math.prod(inner.shape[1:]))
        for k, where in enumerate(itertools.product(*labels)):
            columns[f"{name}[{', '.join(map(str, where))}]" if where else str(name)] = flat[:, k]
    return pd.DataFrame(columns, index=pd.Index(data["step"].values, name="step"))
