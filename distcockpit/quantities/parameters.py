"""The parameters themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from distcockpit.quantities.base import Quantity, Sums, Totals
from distcockpit.quantities.batch import LocalBatch, Model
from distcockpit.store.schema import COORDINATES, Field, Group, Row


@dataclass(frozen=True, kw_only=True)
class Parameters(Quantity):
    """Values of all tracked parameters before the optimizer step; one array per parameter, in its shape.

    Stores the whole model at every tracked step, so use it for small models and sparse schedules. Types with lower
    precision than float32 are stored as float32, which is exact. An array has the name of its parameter, with a "_"
    appended to names that the store reserves ("step", "epoch"); parameters without elements are left out.
    """

    source: ClassVar[str] = "Schneider et al. 2021, arXiv:2102.06604"

    def group(self, model: Model) -> Group:
        """One array per parameter, with dimensions named after it."""
        fields: dict[str, Field] = {}
        sizes: dict[str, int] = {}
        for name in _stored(model):
            axes = {f"{name}[{axis}]": size for axis, size in enumerate(model.shapes[name])}
            fields[_array(name)] = Field(tuple(axes), f"parameter {name}", "parameter", dtype=model.dtypes[name])
            sizes |= axes
        return Group(fields, sizes)

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """The values."""
        return {_array(name): batch.whole(name) for name in _stored(batch.model)}

    def finalize(self, totals: Totals, n: int) -> Row:
        """The same."""
        return dict(totals)


def _stored(model: Model) -> list[str]:
    return [name for name, shape in model.shapes.items() if 0 not in shape]


def _array(name: str) -> str:
    return f"{name}_" if name in ("step", *COORDINATES) else name
