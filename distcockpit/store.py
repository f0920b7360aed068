"""The Zarr store of a run: its schema, and the order of writes that keeps every committed row readable.

::

    run.zarr/                attributes: format, format_version, state, commit, committed_step, config, ...
    ├── alpha/               one group per quantity; its rows are the steps at which it was tracked
    │   ├── step             (step) int64, -1 where nothing was written
    │   ├── wall_time, epoch, batch_size   (step) coordinates
    │   ├── alpha, ...       (step, ...) the quantity's fields
    │   └── parameter, ...   (parameter) labels of the other dimensions
    └── log/                 the user's scalars

A commit writes chunks, then array documents, then group documents, and last the root document, whose consolidated
metadata holds every shape. A single key is replaced as a whole, so that the root document decides: rows beyond the
shapes it states do not exist. Pending bytes are forgotten only after it is written.

The only file that writes Zarr. zarr creates the documents once, in memory; after that only shapes change, and chunks
are encoded directly: its own append holds the interpreter lock and allocates enough to set off garbage collections.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import zarr
from numcodecs import Blosc
from zarr.codecs import BloscCodec
from zarr.storage import MemoryStore

from distcockpit.schema import COORDINATES, FORMAT, FORMAT_VERSION, Field, Group, Row

CHUNK_BYTES, MAX_CHUNK_ROWS, STEP_CHUNK_ROWS = 256 * 1024, 32768, 65536
STEP = Field((), "step", "1", "optimizer steps as numbered by the training loop", dtype="int64")
MODES = ("w-", "w", "a")

COMPRESSOR: Final = "lz4"
LEVEL: Final = 5


class Column:
    """One array: its document, its committed chunks, and the chunk that is still growing."""

    def __init__(self, key: str, document: dict[str, Any], fill: float | int) -> None:
        self.key, self.document = key, document
        self.rows = 0
        self.fill = fill
        chunk_shape = document["chunk_grid"]["configuration"]["chunk_shape"]
        self._tail = np.full(chunk_shape, fill, dtype=document["data_type"])
        # A chunk is at least 1 long on every axis, an array may be 0.
        self._row_shape = tuple(document["shape"][1:])
        self._row: tuple[slice, ...] = (slice(None), *(slice(size) for size in self._row_shape))
        self._blosc = Blosc(COMPRESSOR, LEVEL, Blosc.SHUFFLE)
        self._full: dict[str, bytes] = {}
        self._dirty = False

    @property
    def chunk_rows(self) -> int:
        """Rows per chunk."""
        return len(self._tail)

    def fitting(self, value: Any) -> Any:
        """The value in the type and shape of a row.

        Raises:
            ValueError: If it does not fit.
        """
        if not self._row_shape and isinstance(value, float | int | np.generic):
            return self._tail.dtype.type(value)
        array = np.asarray(value, self._tail.dtype)
        return array if array.shape == self._row_shape else np.broadcast_to(array, self._row_shape)

    def append(self, value: Any) -> bool:
        """Add a row; says whether that filled a chunk."""
        rows = len(self._tail)
        at = self.rows % rows
        if self._row_shape:
            self._tail[at : at + 1][self._row] = value
        else:
            self._tail[at] = value
        self.rows += 1
        self._dirty = True
        if self.rows % rows:
            return False
        self._full[self._chunk_key(self.rows // rows - 1)] = self._encoded()
        self._tail.fill(self.fill)
        self._dirty = False
        return True

    def skip(self, rows: int) -> None:
        """Begin behind ``rows`` rows that hold the fill value."""
        for index in range(rows // self.chunk_rows):
            self._full[self._chunk_key(index)] = self._encoded()
        self.rows, self._dirty = rows, rows % self.chunk_rows > 0

    def pending(self) -> dict[str, bytes]:
        """Chunks that are not in the store yet."""
        tail = {self._chunk_key(self.rows // self.chunk_rows): self._encoded()} if self._dirty else {}
        return {**self._full, **tail}

    def committed(self) -> None:
        """Forget what the store now has."""
        self._full.clear()
        self._dirty = False

    def current_document(self) -> dict[str, Any]:
        """The array's metadata with its present shape."""
        return {**self.document, "shape": [self.rows, *self.document["shape"][1:]]}

    def _encoded(self) -> bytes:
        return bytes(self._blosc.encode(self._tail))

    def _chunk_key(self, index: int) -> str:
        return "/".join([self.key, "c", str(index), *("0" for _ in self._tail.shape[1:])])


class RunStore:
    """A run being written.

    Args:
        path: Folder of the store.
        mode: "w-" refuses an existing run, "w" replaces one.
        groups: The groups of the quantities.
        attributes: Attributes of the root.

    Raises:
        FileExistsError: If there is a run and ``mode="w-"``, or something that is no run of distcockpit.
        NotImplementedError: For ``mode="a"``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        mode: str,
        groups: Mapping[str, Group],
        attributes: Mapping[str, Any],
    ) -> None:
        self.path = Path(path).resolve()
        self._attributes = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "state": "running",
            "generation": 0,
            "commit": 0,
            "committed_step": -1,
            **attributes,
        }
        self._columns: dict[str, dict[str, Column]] = {}
        self._labels: dict[str, dict[str, Any]] = {}
        self._group_attributes: dict[str, dict[str, Any]] = {}
        self._first: dict[str, bytes] = {}
        self._last_step = -1
        for name, group in {
            **groups,
            "log": Group({}, {}, {"description": "scalars of the training script"}),
        }.items():
            self._add_group(name, group)
        make_room(self.path, mode)
        self.path.mkdir(parents=True, exist_ok=True)
        # The first key makes the folder recognisable as a run of ours, should the rest fail.
        self._put_document("", _group_document(self._attributes, {}))
        self.commit()

    # -- schema --------------------------------------------------------------------------------------------------

    def _add_group(self, name: str, group: Group) -> None:
        self._columns[name], self._labels[name] = {}, {}
        self._group_attributes[name] = dict(group.attributes)
        self._add_column(name, "step", STEP, group)
        for coordinate in _coordinates(name):
            self._add_column(name, coordinate, COORDINATES[coordinate], group)
        for field_name, field in group.fields.items():
            self._add_column(name, field_name, field, group)
        for dim, labels in group.sizes.items():
            if not isinstance(labels, int):
                self._add_labels(name, dim, list(labels))

    def _add_column(self, group_name: str, name: str, field: Field, group: Group) -> Column:
        inner = tuple(group.size(dim) for dim in field.dims)
        rows = STEP_CHUNK_ROWS if name == "step" else _chunk_rows(inner, np.dtype(field.dtype).itemsize)
        attributes = field.attributes()
        if name not in COORDINATES and name != "step":
            attributes["coordinates"] = " ".join(_coordinates(group_name))
        fill = -1 if name == "step" else field.fill
        documents = _documents(
            lambda root: root.create_array(
                name,
                shape=(0, *inner),
                chunks=(rows, *(max(1, size) for size in inner)),
                dtype=field.dtype,
                fill_value=fill,
                dimension_names=("step", *field.dims),
                compressors=BloscCodec(
                    cname=COMPRESSOR, clevel=LEVEL, shuffle="shuffle", typesize=np.dtype(field.dtype).itemsize
                ),
                attributes=attributes,
            )
        )
        column = Column(f"{group_name}/{name}", json.loads(documents[f"{name}/zarr.json"]), fill)
        self._columns[group_name][name] = column
        return column

    def _add_labels(self, group_name: str, dim: str, labels: list[str]) -> None:
        def create(root: zarr.Group) -> None:
            array = root.create_array(dim, shape=(len(labels),), dtype=str, dimension_names=(dim,))
            array[:] = np.array(labels, dtype=object)

        documents = _documents(create)
        self._labels[group_name][dim] = json.loads(documents.pop(f"{dim}/zarr.json"))
        self._first.update({f"{group_name}/{k}": v for k, v in documents.items() if not k.endswith("zarr.json")})

    # -- rows ----------------------------------------------------------------------------------------------------

    def append(self, group: str, step: int, row: Row, coordinates: Mapping[str, Any]) -> bool:
        """Add a row; it is stored at the next commit.

        Args:
            group: Name of the group.
            step: The step of the row.
            row: A value for each field. In the group ``log`` a new name makes a new array.
            coordinates: ``wall_time``, ``epoch`` and ``batch_size``.

        Returns:
            Whether a chunk was filled, so that a commit is due.

        Raises:
            ValueError: If the row does not fit the group; it then leaves no trace.
        """
        columns = self._columns[group]
        if group == "log":
            for name in [name for name in row if name not in columns]:
                column = self._add_column("log", name, Field((), name), Group({}))
                column.skip(columns["step"].rows)
        elif missing := (columns.keys() - {"step", *COORDINATES}) ^ row.keys():
            raise ValueError(
                f"Row of {group!r} at step {step}: {sorted(missing)} stand in the row or in the group's fields, but "
                "not in both. finalize() must give every field that group() declares, and no other."
            )
        values = {"step": step, **coordinates, **row}
        # All values are converted before one is appended, so that a row that does not fit leaves no trace.
        fitting = {name: column.fitting(values[name]) for name, column in columns.items() if name in values}
        full = [column.append(fitting.get(name, column.fill)) for name, column in columns.items()]
        self._last_step = max(self._last_step, step)
        return any(full)

    def describe(self, attributes: Mapping[str, Any]) -> None:
        """Exchange attributes of the root; they are stored at the next commit."""
        self._attributes = {**self._attributes, **attributes}

    def commit(self, state: str = "running") -> None:
        """Make all rows durable: chunks, arrays, groups, and last the root.

        Raises:
            OSError: If the store cannot be written; the rows are kept and tried again at the next commit.
        """
        everything = [column for columns in self._columns.values() for column in columns.values()]
        for key, data in self._first.items():
            self._put(key, data)
        for column in everything:
            for key, data in column.pending().items():
                self._put(key, data)
        metadata: dict[str, Any] = {}
        for group, columns in self._columns.items():
            arrays = {name: column.current_document() for name, column in columns.items()} | self._labels[group]
            for name, document in arrays.items():
                self._put_document(f"{group}/{name}", document)
            self._put_document(group, _group_document(self._group_attributes[group], arrays))
            metadata[group] = _group_document(self._group_attributes[group], {})
            metadata.update({f"{group}/{name}": document for name, document in arrays.items()})
        attributes = {
            **self._attributes,
            "state": state,
            "commit": self._attributes["commit"] + 1,
            "committed_step": self._last_step,
        }
        self._put_document("", _group_document(attributes, metadata))
        self._attributes = attributes
        self._first.clear()
        for column in everything:
            column.committed()

    # -- keys ----------------------------------------------------------------------------------------------------

    def _put_document(self, node: str, document: dict[str, Any]) -> None:
        self._put(f"{node}/zarr.json" if node else "zarr.json", json.dumps(document, indent=1).encode())

    def _put(self, key: str, data: bytes) -> None:
        """Replace one key as a whole."""
        target = self.path / key
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{target.name}.{os.getpid()}.partial")
        try:
            temporary.write_bytes(data)
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def make_room(path: Path, mode: str) -> None:
    """See that a new run may be written at ``path``; with ``mode="w"`` remove an old one, and only a run of ours.

    Raises:
        FileExistsError: If something stands in the way.
        NotImplementedError: For ``mode="a"``.
    """
    if mode == "a":
        raise NotImplementedError("mode='a': resuming a run is not available yet; use a new path, or mode='w'.")
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    ours = _format_of(path) == FORMAT
    if not ours:
        raise FileExistsError(
            f"store={str(path)!r} exists and is no run of distcockpit, so it is left alone. Choose another path."
        )
    if mode == "w-":
        raise FileExistsError(
            f"store={str(path)!r} already holds a run. Choose another path, or mode='w' to replace that run."
        )
    aside = path.with_name(f".{path.name}.{os.getpid()}.old")
    path.rename(aside)  # at once, so that no reader sees half a run
    shutil.rmtree(aside)


def local_path(store: object) -> Path:
    """The folder that ``store`` names.

    Raises:
        TypeError: If it is no path.
        ValueError: If it is a URL.
    """
    if not isinstance(store, str | os.PathLike):
        raise TypeError(f"store={store!r}: must be a path; other Zarr stores are not supported yet.")
    if "://" in os.fspath(store):
        raise ValueError(f"store={store!r}: must be a local path; remote stores are not supported yet.")
    return Path(store).absolute()  # the training script may change its working directory


def _format_of(path: Path) -> str | None:
    try:
        return json.loads((path / "zarr.json").read_bytes())["attributes"]["format"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _coordinates(group: str) -> list[str]:
    """Names of the coordinates on ``step``; the user's log knows no batch size."""
    return [name for name in COORDINATES if not (group == "log" and name == "batch_size")]


def _chunk_rows(inner: tuple[int, ...], itemsize: int) -> int:
    """The power of two of rows that comes closest to the chunk size from below, at least one."""
    rows = max(1, CHUNK_BYTES // max(1, itemsize * int(np.prod(inner, dtype=np.int64))))
    return min(MAX_CHUNK_ROWS, 1 << (rows.bit_length() - 1))


def _documents(create: Any) -> dict[str, bytes]:
    """The keys that zarr writes for an array, made in memory."""
    memory = MemoryStore()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        create(zarr.create_group(memory))
    return {key: value.to_bytes() for key, value in memory._store_dict.items()}


def _group_document(attributes: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A group with consolidated metadata, as zarr reads it."""
    return {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": copy.deepcopy(dict(attributes)),
        "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": dict(metadata)},
    }
