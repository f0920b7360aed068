"""Stores with rows that a test chooses, written by the package's own store: what a long run, or a stranger, left."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distcockpit.quantities import Quantity
from distcockpit.quantities.batch import Model
from distcockpit.store.keys import FolderKeys
from distcockpit.store.run_store import CLOSED, RunStore
from distcockpit.store.schema import Group

SHAPES = {"0.weight": (8, 6), "0.bias": (8,), "2.weight": (8, 8), "2.bias": (8,), "4.weight": (5, 8), "4.bias": (5,)}
LAYERS = {"0": ["0.weight", "0.bias"], "2": ["2.weight", "2.bias"], "4": ["4.weight", "4.bias"]}


def model(names: Callable[[str], str] = str, ranks: int = 4) -> Model:
    """Facts about a perceptron with three layers, under names that a test chooses."""
    return Model(
        shapes={names(name): shape for name, shape in SHAPES.items()},
        leaves={names(name): False for name in LAYERS},
        layers={names(layer): [names(name) for name in inside] for layer, inside in LAYERS.items()},
        dtypes={names(name): "float32" for name in SHAPES},
        every_parameter=[names(name) for name in SHAPES],
        parameter_groups={names(name): 0 for name in SHAPES},
        n_parameter_groups=1,
        world_size=ranks,
    )


class Written:
    """A run that grows as a test says.

    Args:
        path: Folder.
        quantities: Which groups there are.
        facts: About the model.
        attributes: Further attributes of the root.
    """

    def __init__(
        self, path: Path, quantities: Sequence[Quantity], facts: Model | None = None, **attributes: Any
    ) -> None:
        facts = facts or model()
        self.path, self.step = path, 0
        self.groups: dict[str, Group] = {q.name: q.described_group(facts) for q in quantities}
        told = {
            "parameters": {n: list(s) for n, s in facts.shapes.items()},
            "config": {},
            "world_size": facts.world_size,
        }
        self.store = RunStore(FolderKeys(path), "w-", self.groups, told | attributes)
        self._random = np.random.default_rng(0)

    def rows(self, n: int, batch_size: int = 64, commit: bool = True, **values: Mapping[str, Any]) -> Written:
        """Append n rows to every group.

        Args:
            n: How many.
            batch_size: Of each row.
            commit: Whether they can be seen.
            values: By group and field what stands there: [n, *shape], or something that is broadcast to it. Other
                numbers are drawn around 1, counts and status codes are 0.
        """
        full = {
            (name, field): self._values(n, name, field, values.get(name, {}).get(field))
            for name, group in self.groups.items()
            for field in group.fields
        }
        for k in range(n):
            step = self.step + k
            at = {"wall_time": 1.8e9 + step, "epoch": float(step // 10), "batch_size": batch_size}
            for name, group in self.groups.items():
                if self.store.append(name, step, {field: full[name, field][k] for field in group.fields}, at):
                    self.store.commit()
            for name, value in values.get("log", {}).items():
                self.store.append("log", step, {name: np.broadcast_to(value, n)[k]}, at)
        self.step += n
        if commit:
            self.store.commit()
        return self

    def close(self) -> Path:
        self.store.commit(CLOSED)
        self.store.release()
        return self.path

    def say(self, path: str, **attributes: Any) -> None:
        """Change attributes of a group or an array, as somebody with an editor would; after the run was closed."""
        document = json.loads((self.path / "zarr.json").read_text())
        document["consolidated_metadata"]["metadata"][path]["attributes"] |= attributes
        (self.path / "zarr.json").write_text(json.dumps(document))

    def _values(self, n: int, name: str, field: str, given: Any) -> Any:
        one, group = self.groups[name].fields[field], self.groups[name]
        shape = (n, *(group.size(dim) for dim in one.dims))
        if given is not None:
            given = np.asarray(given)
            return np.broadcast_to(given.reshape(given.shape + (1,) * (len(shape) - given.ndim)), shape)
        if one.fill == 0:
            return np.zeros(shape, dtype=one.dtype)
        return 1 + 0.1 * self._random.random(shape)
