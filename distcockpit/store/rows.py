"""The groups of a run, and their rows in blocks that fit into memory, however long the run or wide the rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

MOST_NUMBERS = 4_000_000
"""How many numbers are read at a time: 32 MB."""


def find(run: xr.DataTree, kind: str, **fields: str) -> dict[str, xr.Dataset]:
    """The groups of a class of quantities that have rows, by name.

    Args:
        run: A run.
        kind: Name of the class, such as ``"HessTrace"``, whatever the groups are called; ``"log"`` is the user's
            scalars.
        fields: Numeric arrays that the group must have, with their dimensions, such as ``trace="step parameter"``.
    """

    def fits(node: xr.DataTree) -> bool:
        there = node.data_vars
        return bool(node.sizes.get("step")) and all(
            name in there and there[name].dims == tuple(dims.split()) and there[name].dtype.kind in "fiu"
            for name, dims in fields.items()
        )

    return {
        name: node.to_dataset() for name, node in run.children.items() if kind_of(name, node) == kind and fits(node)
    }


def kind_of(name: str, node: xr.DataTree) -> str:
    """The quantity class of a group."""
    return str(node.attrs.get("quantity", "log" if name == "log" else ""))


def across(array: xr.DataArray) -> int:
    """How many numbers a row has."""
    return int(np.prod(array.shape[1:], dtype=float)) or 1


def few(array: xr.DataArray, most: int) -> xr.DataArray:
    """At most this many evenly spaced rows, including the first and the last; lazily, nothing is read yet."""
    rows = array.sizes["step"]
    return array if rows <= most else array.isel(step=np.linspace(0, rows - 1, most).astype(int))


def portion(array: xr.DataArray, most: int | None = None) -> xr.DataArray:
    """As many evenly spaced rows as are read at a time; lazily, nothing is read yet."""
    return few(array, max(1, (most or MOST_NUMBERS) // across(array)))


def in_blocks(array: xr.DataArray, starts: NDArray[Any] | None = None) -> Iterator[tuple[int, NDArray[Any]]]:
    """All rows, block by block, each with the number of its first row.

    Args:
        array: With the dimension ``step`` first.
        starts: Rows at which blocks may begin; by default any.
    """
    rows = array.sizes["step"]
    most = max(1, MOST_NUMBERS // across(array))
    begin = 0
    while begin < rows:
        end = min(rows, begin + most)
        if starts is not None and end < rows:
            earlier = starts[(starts > begin) & (starts <= end)]
            end = (
                int(earlier[-1]) if len(earlier) else int(starts[starts > begin][0]) if (starts > begin).any() else rows
            )
        yield begin, array.isel(step=slice(begin, end)).values
        begin = end
