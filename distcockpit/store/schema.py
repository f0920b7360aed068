"""What a row of the store looks like: the fields of a group, independent of Zarr and torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

NAME = re.compile(r"(?!__)[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""Names of groups and arrays that every store and file system accepts."""

FORMAT, FORMAT_VERSION = "distcockpit", 1
"""What the root of a store says about itself."""

Row = Mapping[str, Any]
"""Values by field name: numbers, or arrays of the field's shape."""


@dataclass(frozen=True)
class Field:
    """One array of a group; its first dimension is always ``step``.

    Args:
        dims: Names of the other dimensions.
        long_name: Axis label for plots.
        units: Units; "1" is dimensionless.
        description: A sentence for the reader of the store.
        dtype: NumPy name of the data type.
        codes: Meanings of the values 0, 1, ... of a status (the CF conventions' flags).
    """

    dims: tuple[str, ...] = ()
    long_name: str = ""
    units: str = "1"
    description: str = ""
    dtype: str = "float64"
    codes: tuple[str, ...] = ()

    @property
    def fill(self) -> float | int:
        """The fill value, where nothing was written: NaN for floats, 0 for counts."""
        return np.nan if np.dtype(self.dtype).kind == "f" else 0

    def attributes(self) -> dict[str, Any]:
        """Attributes of the array, with CF names."""
        attributes: dict[str, Any] = {"long_name": self.long_name, "units": self.units}
        if self.description:
            attributes["description"] = self.description
        if self.codes:
            attributes["flag_values"] = list(range(len(self.codes)))
            attributes["flag_meanings"] = " ".join(self.codes)
        return attributes


@dataclass(frozen=True)
class Group:
    """One group of the store: the rows of one quantity.

    Args:
        fields: Arrays by name.
        sizes: Size of every dimension, or the labels along it.
        attributes: Attributes of the group: description, source, options.
    """

    fields: Mapping[str, Field]
    sizes: Mapping[str, int | Sequence[str]] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, one in self.fields.items():
            if not NAME.fullmatch(name) or name == "step" or name in COORDINATES:
                raise ValueError(f"Group: a field cannot be named {name!r}.")
            for dim in one.dims:
                if dim not in self.sizes:
                    raise ValueError(
                        f"Group: field {name!r} has the dimension {dim!r}, which is missing from "
                        f"sizes={dict(self.sizes)!r}."
                    )

    def size(self, dim: str) -> int:
        """Length of a dimension."""
        size = self.sizes[dim]
        return size if isinstance(size, int) else len(size)


COORDINATES = {
    "wall_time": Field((), "wall time at the end of the step", "seconds since 1970-01-01"),
    "epoch": Field((), "epoch", "1", "as given to track or log, NaN where not given"),
    "batch_size": Field((), "batch size", "samples", "samples of all ranks together", dtype="int64"),
}
"""Coordinates on ``step`` that every group has."""


def coordinates_of(group: str) -> list[str]:
    """Names of the coordinates on ``step`` in this group; the user's log has no batch size."""
    return [name for name in COORDINATES if not (group == "log" and name == "batch_size")]
