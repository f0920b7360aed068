"""The Zarr store of a run: its schema, and the order of writes that keeps every committed row readable.

::

    run.zarr/                attributes: format, version, state, reason, generation, commit, committed_step, ...
    ├── alpha/               one group per quantity; its rows are the steps at which it was tracked
    │   ├── step             (step) int64, -1 where nothing was written
    │   ├── wall_time, epoch, batch_size   (step) coordinates
    │   ├── alpha, ...       (step, ...) the quantity's fields
    │   └── parameter, ...   (parameter) labels of the other dimensions
    ├── log/                 the user's scalars
    └── writer/              the writer's lock; only while there is one, and not in the consolidated metadata

A commit writes chunks, then array documents, then group documents, and finally the root document, whose consolidated
metadata holds every shape. Replacing a single key is atomic, so the root document decides: rows beyond the shapes it
states do not exist. Pending bytes are discarded only after it is written. A resumed run drops rows in the reverse
order: root, groups, arrays, the last chunks, whatever lies beyond; ``generation`` increases.

If the model changes, arrays grow along their labelled dimensions: new names are appended, and rows hold the fill value
for names that the model did not have at the time. Chunks keep their size, and additional chunks are added along such a
dimension. ``segments`` says from which step on each part of the run has which parameters.

The only file that writes Zarr. zarr creates the documents once, in memory; after that only shapes change, and chunks
are encoded directly: zarr's own append holds the GIL and allocates enough to trigger garbage collections.
"""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import zarr
from zarr.codecs import BloscCodec
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import MemoryStore

from distcockpit.store.columns import COMPRESSOR, LEVEL, Column
from distcockpit.store.keys import PARTIAL, Keys
from distcockpit.store.lock import KEY as LOCK
from distcockpit.store.lock import Lock
from distcockpit.store.schema import COORDINATES, FORMAT, FORMAT_VERSION, Field, Group, Row, coordinates_of

CHUNK_BYTES, MAX_CHUNK_ROWS, STEP_CHUNK_ROWS = 256 * 1024, 32768, 65536
STEP = Field((), "step", "1", "optimizer steps as numbered by the training loop", dtype="int64")
MODES = ("w-", "w", "a")
MOST_PARTS = 50  # that the attribute ``segments`` distinguishes
ROOT = "zarr.json"
SCHEDULE = re.compile(r"schedule=[^(),]*(\([^()]*\))?(, )?")  # in an option's string


@dataclass(frozen=True)
class State:
    """What the store says of the run: "running", "closed", or "ended" for a reason."""

    state: str
    reason: str = ""


RUNNING, CLOSED = State("running"), State("closed")


class RunStore:
    """A run being written.

    Args:
        keys: Where its bytes go.
        mode: "w-" refuses an existing run, "w" replaces it, "a" continues it if there is one.
        groups: The groups of the quantities.
        attributes: Attributes of the root.
        segment: Facts about this part of the run, for the attribute ``segments``.
        lock_seconds: A writer that did not renew its lock for this long is gone.
        unwritten_bytes: Maximum memory for full chunks that the store did not accept; rows beyond it are dropped.

    Raises:
        FileExistsError: If there is a run and ``mode="w-"``, something that is not one of our runs, or another writer.
        ValueError: If the existing run is not the one to resume.
        OSError: If the store cannot be written.
    """

    def __init__(
        self,
        keys: Keys,
        mode: str,
        groups: Mapping[str, Group],
        attributes: Mapping[str, Any],
        segment: Mapping[str, Any] | None = None,
        lock_seconds: float = 60.0,
        unwritten_bytes: int = 256 << 20,
    ) -> None:
        self._keys, self._lock = keys, Lock(keys, lock_seconds)
        self._unwritten_bytes = unwritten_bytes
        self._attributes: dict[str, Any] = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            **asdict(RUNNING),
            "generation": 0,
            "commit": 0,
            "committed_step": -1,
            "dropped_rows": 0,
            "segments": [{**(segment or {}), "first_step": -1, "last_step": -1}],
            **attributes,
            "writer": self._lock.writer.token,
        }
        self._columns: dict[str, dict[str, Column]] = {}
        self._labels: dict[str, dict[str, Any]] = {}  # documents of the dimension labels
        self._names: dict[str, dict[str, list[str]]] = {}  # the labels themselves
        self._groups: dict[str, Group] = {}  # what the next rows look like
        self._group_attributes: dict[str, dict[str, Any]] = {}
        self._first: dict[str, bytes] = {}
        self._last_step = -1
        self._found: dict[str, np.ndarray] = {}  # steps that a resumed run holds, by group, until `begin`
        self._has_begun = False
        self._written: dict[str, bytes] = {}  # documents, by key
        self._pending_bytes = 0
        self.unwritten_rows = 0
        for name, group in {
            **groups,
            "log": Group({}, {}, {"description": "scalars of the training script"}),
        }.items():
            self._add_group(name, group)
        self._open(mode)

    @property
    def name(self) -> str:
        """Name shown to users."""
        return self._keys.name

    @property
    def dropped_rows(self) -> int:
        """Rows lost since the run began, because they came faster than the store could take them."""
        return self._attributes["dropped_rows"]

    @property
    def first_step(self) -> int | None:
        """The first step that a resumed run has a row for, if any."""
        return min((int(steps[0]) for steps in self._found.values() if len(steps)), default=None)

    # -- opening -------------------------------------------------------------------------------------------------------

    def _open(self, mode: str) -> None:
        try:
            root = self._root()
            is_ours = root.get("format") == FORMAT
            if not is_ours and any(not key.endswith((LOCK, PARTIAL)) for key in self._keys.list()):
                raise FileExistsError(
                    f"store={self.name!r} exists and is not a distcockpit run, so it is left untouched. Choose another "
                    "path."
                )
            if is_ours and mode == "w-":
                raise FileExistsError(
                    f"store={self.name!r} already holds a run. Choose another path, mode='a' to resume that run, or "
                    "mode='w' to replace it."
                )
            self._lock.check(patient=mode == "a")
            if is_ours and mode == "w":
                self._keys.clear()
            self._lock.take()
            try:
                if is_ours and mode == "a" and self._has_groups():  # otherwise it was killed before its first commit
                    self._resume(root)
                else:
                    # The first key makes the folder recognisable as one of our runs, in case the rest fails.
                    self._put({ROOT: _group_document(self._attributes, {})})
                    self._has_begun = True
                    self.commit()
            except BaseException:
                self._lock.release()
                raise
        except (FileExistsError, ValueError):
            raise
        except Exception as error:  # each kind of store raises its own
            raise OSError(f"store={self.name!r} could not be written: {type(error).__name__}: {error}") from error

    def _has_groups(self) -> bool:
        data = self._keys.get_one(ROOT)
        return data is not None and bool(json.loads(data)["consolidated_metadata"]["metadata"])

    def _root(self) -> dict[str, Any]:
        """The attributes of the existing root; empty if there is none."""
        try:
            return dict(json.loads(self._keys.get_one(ROOT) or b"{}")["attributes"])
        except (ValueError, KeyError, TypeError):
            return {}

    def _resume(self, root: Mapping[str, Any]) -> None:
        """Take over the contents of an existing run.

        Raises:
            ValueError: If it is a different run.
        """
        different = f"store={self.name!r}, mode='a': cannot resume a different run:"
        if root["format_version"] != FORMAT_VERSION:
            raise ValueError(
                f"store={self.name!r}, mode='a': has format version {root['format_version']}, but this distcockpit "
                f"writes {FORMAT_VERSION}. Choose another path."
            )
        every, here = root["parameters"], _identity(self._attributes)
        parts = [_identity({**root, "parameters": part.get("parameters", every)}) for part in root["segments"]]
        there = here if here in parts else parts[0]
        for name in dict.fromkeys([*there, *here]):
            if there.get(name) != here.get(name):
                raise ValueError(
                    f"{different} it has {name} = {there.get(name, 'nothing')}, this one has "
                    f"{here.get(name, 'nothing')}. Construct DistCockpit as before, or choose another path."
                )
        data = self._keys.get_one(ROOT) or b""
        self._written[ROOT] = data
        metadata = json.loads(data)["consolidated_metadata"]["metadata"]
        for path, document in metadata.items():  # the user's scalars, and anything only an earlier part of the run has
            group, _, name = path.partition("/")
            if name and name not in self._columns.get(group, {name}) and document["dimension_names"][0] == "step":
                is_float = np.dtype(document["data_type"]).kind == "f"
                self._columns[group][name] = Column(path, document, np.nan if is_float else 0)
        self._first.clear()
        try:
            for group, columns in self._columns.items():
                for dim in self._names[group]:
                    self._labels[group][dim] = document = metadata[f"{group}/{dim}"]
                    self._names[group][dim] = self._read_labels(f"{group}/{dim}", document)
                for name, column in columns.items():
                    columns[name] = column.adopt(metadata[f"{group}/{name}"], self._names[group])
                step, rows = columns["step"], metadata[f"{group}/step"]["shape"][0]
                self._found[group] = step.read(rows, self._keys.get(step.all_chunks(rows)))
        except KeyError as error:
            raise ValueError(f"{different} it has no array {error}. Choose another path.") from error
        except ValueError as error:
            raise ValueError(f"{different} {error}. Choose another path.") from error
        kept = ("generation", "commit", "committed_step", "dropped_rows", "parameters")
        (segment,) = self._attributes["segments"]
        if "parameters" in root["segments"][0]:
            segment = {**segment, "parameters": self._attributes["parameters"]}
        segments = [*root["segments"], segment]
        self._attributes |= {name: root[name] for name in kept} | {"segments": segments}

    def begin(self, step: int, limits: Mapping[str, int]) -> None:
        """Called when this segment's first step is known: drop the rows of a resumed run that will be rewritten.

        Args:
            step: The first step that is tracked or logged.
            limits: For each group, the first step whose row is dropped; by default ``step``.

        Raises:
            Exception: If the store cannot be read or written; call it again.
        """
        *earlier, segment = self._attributes["segments"]
        earlier = [{**each, "last_step": min(each["last_step"], step - 1)} for each in earlier]
        segments = [*earlier, {**segment, "first_step": step, "last_step": step - 1}]
        if not self._has_begun:
            rows = {group: int(np.searchsorted(steps, limits.get(group, step))) for group, steps in self._found.items()}
            columns = [(column, rows[group]) for group, each in self._columns.items() for column in each.values()]
            chunks = self._keys.get([key for column, n in columns for key in column.last_chunk(n)])
            for column, n in columns:
                column.cut(n, chunks)
            last = [int(steps[rows[group] - 1]) for group, steps in self._found.items() if rows[group]]
            self._last_step = max(last, default=-1)
            self._attributes |= {"segments": segments}
            if any(rows[group] < len(steps) for group, steps in self._found.items()):
                self._shrink()
            self._arrange()
            self._found, self._has_begun = {}, True
        self._attributes |= {"segments": segments}

    def change(self, step: int, groups: Mapping[str, Group], facts: Mapping[str, Any]) -> None:
        """Begin another part of the run, whose rows may have other parameters and layers.

        Args:
            step: The first step of the part.
            groups: The groups of the quantities from now on.
            facts: What the attribute ``segments`` says about the part.
        """
        every = self._attributes["parameters"]
        *earlier, segment = ({"parameters": every, **part} for part in self._attributes["segments"])
        part = {**segment, **facts, "first_step": step, "last_step": step - 1}
        ended = {**segment, "last_step": min(self._last_step, step - 1)}
        if len(earlier) < MOST_PARTS:
            segments = [*earlier, ended, part]
        else:  # a model that changes at every step
            segments = [*earlier, {**part, "first_step": segment["first_step"], "change": "changes very often"}]
        every = {**facts["parameters"], **every}
        self._attributes = {**self._attributes, "segments": segments, "parameters": every}
        self._groups |= groups
        self._arrange()

    def _shrink(self) -> None:
        documents = self._documents()
        attributes = {
            **self._attributes,
            "generation": self._attributes["generation"] + 1,
            "commit": self._attributes["commit"] + 1,
            "committed_step": self._last_step,
        }
        self._check_root()
        self._put({ROOT: _group_document(attributes, documents.consolidated)})
        self._attributes = attributes
        self._put(documents.groups)
        self._put(documents.arrays)
        columns = [column for each in self._columns.values() for column in each.values()]
        self._keys.put({key: data for column in columns for key, data in column.tail().items()})
        by_key = {column.key: column for column in columns}
        self._keys.delete([
            key
            for key in self._keys.list()
            if key.endswith(PARTIAL)
            or ((column := by_key.get(key.partition("/c/")[0])) is not None and column.is_beyond(key))
        ])

    # -- schema --------------------------------------------------------------------------------------------------------

    def _add_group(self, name: str, group: Group) -> None:
        self._columns[name], self._labels[name], self._names[name] = {}, {}, {}
        self._groups[name] = group
        self._group_attributes[name] = dict(group.attributes)
        self._add_column(name, "step", STEP, group)
        for coordinate in coordinates_of(name):
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
            attributes["coordinates"] = " ".join(coordinates_of(group_name))
        fill = -1 if name == "step" else field.fill
        document = json.loads(_array_document((rows, *inner), ("step", *field.dims), np.dtype(field.dtype).name, fill))
        column = Column(f"{group_name}/{name}", {**document, "attributes": attributes}, fill)
        self._columns[group_name][name] = column
        return column

    def _add_labels(self, group_name: str, dim: str, labels: list[str]) -> None:
        before = self._labels[group_name].get(dim)
        chunk = before["chunk_grid"]["configuration"]["chunk_shape"] if before else [max(1, len(labels))]

        def create(root: zarr.Group) -> None:
            blosc = BloscCodec(cname=COMPRESSOR, clevel=LEVEL, shuffle="noshuffle", typesize=1)
            options: dict[str, Any] = {"dimension_names": (dim,), "compressors": blosc, "chunks": tuple(chunk)}
            array = root.create_array(dim, shape=(len(labels),), dtype=str, **options)
            array[:] = np.array(labels, dtype=object)

        documents = _made_by_zarr(create)
        self._names[group_name][dim] = labels
        self._labels[group_name][dim] = json.loads(documents.pop(f"{dim}/zarr.json"))
        self._first.update({f"{group_name}/{k}": v for k, v in documents.items() if not k.endswith("zarr.json")})

    def _read_labels(self, path: str, document: Mapping[str, Any]) -> list[str]:
        """The labels along a dimension of an existing run."""
        (size,), (chunk,) = document["shape"], document["chunk_grid"]["configuration"]["chunk_shape"]
        found = self._keys.get([f"{path}/c/{index}" for index in range(-(-size // chunk))])
        make = default_buffer_prototype().buffer.from_bytes
        data = {key: make(each) for key, each in {**found, f"{path}/{ROOT}": json.dumps(document).encode()}.items()}
        return [str(name) for name in np.asarray(zarr.open_array(MemoryStore(data), path=path, mode="r")[:])]

    def _arrange(self) -> None:
        """Make room in each array for what the next rows hold, and record where it goes."""
        for name, group in self._groups.items():
            columns, places = self._columns[name], {}
            for dim, size in group.sizes.items():
                if isinstance(size, int):
                    places[dim] = list(range(size))
                    continue
                names = list(dict.fromkeys([*self._names[name].get(dim, ()), *size]))
                if names != self._names[name].get(dim):
                    self._add_labels(name, dim, names)
                places[dim] = [names.index(each) for each in size]
            for field_name in group.fields.keys() - columns.keys():
                self._add_column(name, field_name, group.fields[field_name], group).skip(columns["step"].rows)
            lengths = {dim: len(places[dim]) for dim in group.sizes} | {d: len(n) for d, n in self._names[name].items()}
            for field_name, column in columns.items():
                column.widen(lengths)
                if field_name in group.fields:
                    field = group.fields[field_name]
                    column.expect([places[dim] for dim in field.dims], field.codes)

    # -- rows ----------------------------------------------------------------------------------------------------------

    def append(self, group: str, step: int, row: Row, coordinates: Mapping[str, Any]) -> bool:
        """Add a row; it is stored at the next commit. If the memory for unwritten rows is full, it is dropped.

        Args:
            group: Name of the group.
            step: The step of the row.
            row: A value for each field. In the group ``log``, a new name creates a new array.
            coordinates: ``wall_time``, ``epoch`` and ``batch_size``.

        Returns:
            True if a chunk was filled, so that a commit is due.

        Raises:
            ValueError: If the row does not fit the group; it then leaves no trace.
        """
        columns = self._columns[group]
        if group == "log":
            for name in [name for name in row if name not in columns]:
                column = self._add_column("log", name, Field((), name), Group({}))
                column.skip(columns["step"].rows)
        elif missing := self._groups[group].fields.keys() ^ row.keys():
            raise ValueError(
                f"Row of {group!r} at step {step}: {sorted(missing)} are in the row or in the group's fields, but not "
                "in both. finalize() must return every field that group() declares, and no others."
            )
        values = {"step": step, **coordinates, **row}
        # All values are converted before one is appended, so that a row that does not fit leaves no trace.
        fitting = {name: column.fitting(values[name]) for name, column in columns.items() if name in values}
        if self._pending_bytes > self._unwritten_bytes:
            self.drop(1)
            return False
        full = sum([column.append(fitting.get(name, column.fill)) for name, column in columns.items()])
        self._pending_bytes += full
        self.unwritten_rows += 1
        self._last_step = max(self._last_step, step)
        return full > 0

    def drop(self, rows: int) -> None:
        """Count lost rows; the store will report them."""
        self._attributes = {**self._attributes, "dropped_rows": self._attributes["dropped_rows"] + rows}

    def describe(self, attributes: Mapping[str, Any]) -> None:
        """Update attributes of the root; they are stored at the next commit."""
        self._attributes = {**self._attributes, **attributes}

    # -- writing -------------------------------------------------------------------------------------------------------

    def commit(self, state: State = RUNNING) -> None:
        """Make all rows durable: chunks, arrays, groups, and finally the root. A resumed run must have begun.

        Raises:
            Exception: If the store cannot be written; the rows are kept and retried at the next commit.
        """
        if not self._has_begun:
            return
        columns = [column for each in self._columns.values() for column in each.values()]
        self._check_root()
        documents = self._documents()
        self._keys.put(self._first)
        self._keys.put({key: data for column in columns for key, data in column.pending().items()})
        self._put(documents.arrays)
        self._put(documents.groups)
        *earlier, segment = self._attributes["segments"]
        segments = [*earlier, {**segment, "last_step": self._last_step}]
        attributes = {
            **self._attributes,
            **asdict(state),
            "segments": segments,
            "commit": self._attributes["commit"] + 1,
            "committed_step": self._last_step,
        }
        self._put({ROOT: _group_document(attributes, documents.consolidated)})
        self._attributes = attributes
        self._first.clear()
        for column in columns:
            column.committed()
        self._pending_bytes = self.unwritten_rows = 0

    def renew(self) -> None:
        """Renew the lock on the store, if it is due."""
        self._lock.renew()

    @property
    def seconds_to_renewal(self) -> float:
        """Seconds until `renew` has something to do."""
        return self._lock.seconds_to_renewal

    def release(self) -> None:
        """Release the lock on the store."""
        self._lock.release()

    def _check_root(self) -> None:
        """Check that the root is the one that this process wrote.

        Raises:
            FileNotFoundError: If it is gone.
            FileExistsError: If another process wrote it.
        """
        data = self._keys.get_one(ROOT)
        if data is not None and data == self._written.get(ROOT):
            return
        if data is None:
            raise FileNotFoundError(f"{self.name} was removed while it was being written")
        if self._root().get("writer") != self._lock.writer.token:
            raise FileExistsError(f"{self.name} is now being written by another process")

    def _documents(self) -> _Documents:
        arrays: dict[str, Any] = {}
        groups: dict[str, Any] = {}
        consolidated: dict[str, Any] = {}
        for group, columns in self._columns.items():
            mine = {name: column.current_document() for name, column in columns.items()} | self._labels[group]
            arrays |= {f"{group}/{name}": document for name, document in mine.items()}
            groups[group] = _group_document(self._group_attributes[group], mine)
            consolidated[group] = _group_document(self._group_attributes[group], {})
            consolidated |= {f"{group}/{name}": document for name, document in mine.items()}
        return _Documents(
            {f"{name}/{ROOT}": document for name, document in arrays.items()},
            {f"{name}/{ROOT}": document for name, document in groups.items()},
            consolidated,
        )

    def _put(self, documents: Mapping[str, Any]) -> None:
        """Write the documents that are not there yet."""
        data = {key: json.dumps(document).encode() for key, document in documents.items()}
        new = {key: each for key, each in data.items() if self._written.get(key) != each}
        self._keys.put(new)
        self._written |= new


def _chunk_rows(inner: tuple[int, ...], itemsize: int) -> int:
    """Rows per chunk: the largest power of two that does not exceed the chunk size, at least one."""
    rows = max(1, CHUNK_BYTES // max(1, itemsize * int(np.prod(inner, dtype=np.int64))))
    return min(MAX_CHUNK_ROWS, 1 << (rows.bit_length() - 1))


@lru_cache(maxsize=256)
def _array_document(chunk: tuple[int, ...], dims: tuple[str, ...], dtype: str, fill: float) -> bytes:
    """The document of an array without rows; zarr takes a millisecond for each kind, but a run has few kinds."""
    blosc = BloscCodec(cname=COMPRESSOR, clevel=LEVEL, shuffle="shuffle", typesize=np.dtype(dtype).itemsize)
    documents = _made_by_zarr(
        lambda root: root.create_array(
            "array",
            shape=(0, *chunk[1:]),
            chunks=tuple(max(1, size) for size in chunk),
            dtype=dtype,
            fill_value=fill,
            dimension_names=dims,
            compressors=blosc,
        )
    )
    return documents["array/zarr.json"]


def _made_by_zarr(create: Callable[[zarr.Group], object]) -> dict[str, bytes]:
    """The keys that zarr writes for an array, created in memory."""
    memory = MemoryStore()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        create(zarr.create_group(memory))
    return {key: value.to_bytes() for key, value in memory._store_dict.items()}


@dataclass(frozen=True)
class _Documents:
    arrays: dict[str, Any]  # by key
    groups: dict[str, Any]
    consolidated: dict[str, Any]


def _identity(attributes: Mapping[str, Any]) -> dict[str, str]:
    """The facts, by name, that must match for a run to be resumed; schedules may change."""
    quantities = attributes.get("config", {}).get("quantities", [])
    same = {f"parameter '{name}'": str(shape) for name, shape in attributes.get("parameters", {}).items()}
    for options in quantities:
        kept = {key: SCHEDULE.sub("", text) for key, text in options.items() if key != "schedule"}
        same[f"quantity {options.get('name')}"] = str(kept)  # the name is in quotes
    return same


def _group_document(attributes: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A group with consolidated metadata, as zarr reads it."""
    return {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": copy.deepcopy(dict(attributes)),
        "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": dict(metadata)},
    }
