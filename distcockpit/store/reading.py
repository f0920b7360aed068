"""Reading untrusted stores: nothing in a store is executed, and its claimed sizes are checked before allocating memory.

Only what distcockpit writes is read: Zarr v3 with consolidated metadata, numbers and strings, blosc. Documents are
checked before an array is opened, and the claimed size of a chunk before it is decoded.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numcodecs import Blosc
from numpy.typing import NDArray
from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import WrapperStore

from distcockpit.store.keys import Keys, keys_of
from distcockpit.store.names import plain
from distcockpit.store.schema import FORMAT, FORMAT_VERSION, NAME

TYPES = ("bool", "string", *(f"{sign}int{n}" for sign in ("", "u") for n in (8, 16, 32, 64)), "float32", "float64")
CODECS = ({"bytes", "blosc"}, {"vlen-utf8", "blosc"})
MAX_CHUNK_BYTES = 1 << 30
MAX_LABEL_BYTES = 1 << 26
MAX_DOCUMENT_BYTES = 1 << 28
MOST_PROBLEMS = 1000
CHUNK = re.compile(r"(?P<array>.+)/c/\d+(/\d+)*")


class UnsafeStoreError(ValueError):
    """The store is damaged, or was not written by distcockpit."""


@dataclass(frozen=True)
class Run:
    """A store whose documents have been checked."""

    keys: Keys
    attributes: Mapping[str, Any]
    arrays: Mapping[str, Mapping[str, Any]]  # metadata, by path
    documents: Mapping[str, bytes]  # by key, as they were checked, whatever the store says later

    def store(self) -> Store:
        """The store for zarr and xarray to read; it checks each chunk."""
        return _Checked(self.keys.store(), self.documents, {p: _chunk_bytes(d) for p, d in self.arrays.items()})

    def chunks(self, path: str) -> Iterator[str]:
        """The keys of the chunks that an array must have."""
        for index in itertools.product(*map(range, self._grid(path))):
            yield "/".join([path, "c", *map(str, index)])

    def n_chunks(self, path: str) -> int:
        """How many chunks there are."""
        return math.prod(self._grid(path))

    def _grid(self, path: str) -> list[int]:
        document = self.arrays[path]
        shape, chunk = document["shape"], document["chunk_grid"]["configuration"]["chunk_shape"]
        # Ranks that joined in a later part of the run have no chunks in earlier parts.
        sizes = [c if dim == "rank" else n for n, c, dim in zip(shape, chunk, document["dimension_names"], strict=True)]
        return [math.ceil(n / c) for n, c in zip(sizes, chunk, strict=True)]


def open_store(store: str | os.PathLike[str] | Store, storage_options: Mapping[str, Any] | None = None) -> Run:
    """The run in a store, with its documents checked.

    Args:
        store: A path, a URL or a zarr store.
        storage_options: fsspec options, for a URL.

    Raises:
        FileNotFoundError: If there is nothing there.
        OSError: If the store cannot be reached.
        UnsafeStoreError: If it is not a distcockpit run, has a newer format, or is damaged.
    """
    keys = keys_of(store, storage_options)
    problem, (data, root) = f"store={keys.name!r} is not a valid distcockpit run", _root(keys)
    try:
        _check_root(root["attributes"])
        arrays = dict(_checked(root["consolidated_metadata"]["metadata"]))
        for path, document in arrays.items():
            if path.endswith("/step"):
                _check_rows(keys, path, document)
    except UnsafeStoreError as error:
        if keys.get_one("zarr.json") != data:  # it was truncated in the meantime
            return open_store(store, storage_options)
        raise UnsafeStoreError(f"{problem}: {error}.") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnsafeStoreError(f"{problem}: its metadata is damaged ({error!r}).") from None
    metadata = root["consolidated_metadata"]["metadata"]
    documents = {f"{path}/zarr.json": json.dumps(document).encode() for path, document in metadata.items()}
    return Run(keys, root["attributes"], arrays, {"zarr.json": data, **documents})


def commit(store: str | os.PathLike[str] | Store, storage_options: Mapping[str, Any] | None = None) -> str:
    """A string that identifies this commit of a run; reads only one document.

    Args:
        store: As for `open_store`.
        storage_options: As for `open_store`.

    Raises:
        FileNotFoundError: If there is nothing there.
        OSError: If the store cannot be reached.
        UnsafeStoreError: If it is not a distcockpit run, or has a newer format.
    """
    _, root = _root(keys_of(store, storage_options))
    return "-".join(plain(root["attributes"].get(name, "")) for name in ("writer", "generation", "commit", "state"))


def _root(keys: Keys) -> tuple[bytes, dict[str, Any]]:
    """The root document.

    Raises:
        FileNotFoundError: If there is nothing there.
        OSError: If the store cannot be reached.
        UnsafeStoreError: If it is not a distcockpit run, or has a newer format.
    """
    try:
        nothing = keys.is_empty()
    except Exception as error:  # each kind of store raises its own
        raise OSError(f"store={keys.name!r} could not be read: {type(error).__name__}: {error}") from error
    if nothing:
        raise FileNotFoundError(f"store={keys.name!r}: there is no run here.")
    problem = f"store={keys.name!r} is not a distcockpit run"
    size = keys.size("zarr.json")
    if size is None or size > MAX_DOCUMENT_BYTES:
        inside = [] if "://" in keys.name else sorted(str(path.parent) for path in Path(keys.name).glob("*/zarr.json"))
        raise UnsafeStoreError(
            f"{problem}, but a folder of runs; open one of them: {inside[-1]!r}." if inside else f"{problem}."
        )
    try:
        data = keys.get_one("zarr.json") or b""
        root = json.loads(data)
        found, version = root["attributes"]["format"], root["attributes"]["format_version"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UnsafeStoreError(f"{problem}.") from None
    if found != FORMAT or not isinstance(version, int):
        raise UnsafeStoreError(f"{problem}.")
    if version > FORMAT_VERSION:
        raise UnsafeStoreError(
            f"store={keys.name!r} has format version {version}, but this distcockpit only reads versions up to "
            f"{FORMAT_VERSION}. Install a newer distcockpit."
        )
    return data, root


def problems(run: Run, progress: Callable[[int, int], None]) -> list[str]:
    """What is damaged: chunks that are missing or cannot be decoded, rows without a step. Every chunk is read."""
    told: list[str] = []
    total, done = sum(run.n_chunks(path) for path in run.arrays), 0
    for path, document in run.arrays.items():
        steps = []
        for key in run.chunks(path):
            if len(told) >= MOST_PROBLEMS:
                return [*told, f"and possibly more: {total - done} chunks were not checked"]
            data = run.keys.get_one(key)
            if data is None:
                told.append(f"{key} is missing")
            else:
                try:
                    _check_chunk(data, *_chunk_bytes(document))
                    steps.append(Blosc().decode(data))
                except (ValueError, RuntimeError) as error:
                    told.append(f"{key} is damaged: {error}")
            if not path.endswith("/step"):
                steps.clear()  # only the row numbers are looked at as well
            done += 1
            progress(done, total)
        if len(steps) == run.n_chunks(path) and path.endswith("/step"):
            told += _disorder(path, np.frombuffer(b"".join(steps), "<i8")[: document["shape"][0]])
    return told


def _disorder(path: str, steps: NDArray[np.int64]) -> list[str]:
    """Rows that were never written, or are not in the order of their steps."""
    before = np.concatenate([[-1], steps[:-1]])
    return [f"{path}: row {k} has step {steps[k]} after step {before[k]}" for k in np.flatnonzero(steps <= before)[:10]]


def _checked(metadata: Mapping[str, Any]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """The arrays, by path.

    Raises:
        UnsafeStoreError: If anything differs from what distcockpit writes.
    """
    for path, document in metadata.items():
        names = path.split("/")
        if not 1 <= len(names) <= 2 or not all(NAME.fullmatch(name) for name in names):
            raise UnsafeStoreError(f"{path!r} is not a valid name of a group or an array")
        if document["zarr_format"] != 3 or document["node_type"] not in ("group", "array"):
            raise UnsafeStoreError(f"{path!r} is not a Zarr v3 group or array")
        _check_attributes(path, document.get("attributes", {}))
        if document["node_type"] == "group":
            if f"{path}/step" not in metadata:
                raise UnsafeStoreError(f"{path!r} has no array 'step'")
            continue
        grid, codecs = document["chunk_grid"], [codec["name"] for codec in document["codecs"]]
        shape, chunk = document["shape"], grid["configuration"]["chunk_shape"]
        whole = all(type(n) is int and n >= 0 for n in shape) and all(type(n) is int and n > 0 for n in chunk)
        if document["data_type"] not in TYPES or set(codecs) not in CODECS or len(codecs) != 2:
            raise UnsafeStoreError(f"{path!r} has unsupported type {document['data_type']!r} and codecs {codecs}")
        if grid["name"] != "regular" or document.get("storage_transformers") or not whole or len(shape) != len(chunk):
            raise UnsafeStoreError(f"{path!r} has unsupported shape {shape} or chunks {chunk}")
        separator = document["chunk_key_encoding"]
        if separator["name"] != "default" or separator.get("configuration", {}).get("separator", "/") != "/":
            raise UnsafeStoreError(f"{path!r} uses a different chunk key encoding")
        dims = document.get("dimension_names") or []
        if (
            len(dims) != len(shape)
            or not all(isinstance(dim, str) for dim in dims)
            or dims[:1] not in (["step"], [names[1]])
        ):
            raise UnsafeStoreError(f"{path!r} has unsupported dimensions {dims}")
        if _chunk_bytes(document)[1] > MAX_CHUNK_BYTES or math.prod(map(float, shape[1:])) > MAX_CHUNK_BYTES:
            raise UnsafeStoreError(f"{path!r} has chunks of shape {chunk}, more than {MAX_CHUNK_BYTES} bytes")
        yield path, document


TEXTS = ("coordinates", "quantity", "description", "source", "long_name", "units", "flag_meanings")


def _check_attributes(path: str, attributes: Mapping[str, Any]) -> None:
    """Check that attributes are ones that distcockpit writes: xarray acts on others, such as scale_factor.

    Raises:
        UnsafeStoreError: If not.
    """
    for name, value in attributes.items():
        if name in ("scale_factor", "add_offset", "_FillValue", "missing_value", "dtype"):
            raise UnsafeStoreError(f"{path!r} has the unsupported attribute {name!r}")
        if (name in TEXTS and not isinstance(value, str)) or (name == "options" and not isinstance(value, dict)):
            raise UnsafeStoreError(f"{path!r} has the attribute {name!r} with {value!r}")


ROOT_TYPES = {
    "versions": dict,
    "parameters": dict,
    "segments": list,
    "world_size": int,
    "config": dict,
    "coverage": dict,
}


def _check_root(attributes: Mapping[str, Any]) -> None:
    """Check that the root's attributes have the types that readers rely on.

    Raises:
        UnsafeStoreError: If not.
    """
    for name, kind in ROOT_TYPES.items():
        if name in attributes and not isinstance(attributes[name], kind):
            raise UnsafeStoreError(f"the attribute {name!r} is {attributes[name]!r}")
    for shape in attributes.get("parameters", {}).values():
        if not isinstance(shape, list) or not all(type(n) is int for n in shape):
            raise UnsafeStoreError(f"a parameter has the shape {shape!r}")
    for part in attributes.get("segments", []):
        if not isinstance(part, dict) or not isinstance(part.get("versions", {}), dict):
            raise UnsafeStoreError(f"a segment is {part!r}")


def _check_rows(keys: Keys, path: str, document: Mapping[str, Any]) -> None:
    """Check that a group has as many chunks as its rows need: readers load the steps when they open it.

    Raises:
        UnsafeStoreError: If not.
    """
    (rows,), (chunk,) = document["shape"], document["chunk_grid"]["configuration"]["chunk_shape"]
    needed, there = math.ceil(rows / chunk), keys.count(f"{path}/c", math.ceil(rows / chunk))
    if there < needed:
        raise UnsafeStoreError(f"{path!r} has {rows} rows, which need {needed} chunks, but there are only {there}")


def _chunk_bytes(document: Mapping[str, Any]) -> tuple[int, int]:
    """Minimum and maximum size of a decoded chunk in bytes."""
    elements = math.prod(document["chunk_grid"]["configuration"]["chunk_shape"])
    if document["data_type"] == "string":
        return 0, max(MAX_LABEL_BYTES, 0 if elements < MAX_LABEL_BYTES else MAX_CHUNK_BYTES + 1)
    size = elements * np.dtype(document["data_type"]).itemsize
    return size, size


def _check_chunk(data: bytes, least: int, most: int) -> None:
    """Check that blosc would allocate as much as expected.

    Raises:
        UnsafeStoreError: If not.
    """
    decoded, encoded = (int.from_bytes(data[at : at + 4], "little") for at in (4, 12))
    if len(data) < 16 or encoded != len(data) or not least <= decoded <= most:
        raise UnsafeStoreError(f"a chunk claims to have {decoded} bytes, but {least} to {most} are expected")


class _Checked(WrapperStore[Store]):
    """A store whose chunks are checked before they are decoded."""

    def __init__(self, store: Store, documents: Mapping[str, bytes], sizes: Mapping[str, tuple[int, int]]) -> None:
        super().__init__(store)
        self._documents, self._sizes = documents, sizes

    def _with_store(self, store: Store) -> _Checked:
        return type(self)(store, self._documents, self._sizes)

    def with_read_only(self, read_only: bool = False) -> _Checked:
        """The same, read-only or not; zarr's wrapper has this from 3.1.6 on, and asks for it before."""
        return self._with_store(self._store.with_read_only(read_only))

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """The bytes of a key.

        Raises:
            UnsafeStoreError: If it is a chunk of another array, or claims to be longer than it may be.
        """
        if key in self._documents or key.endswith("zarr.json"):
            document = self._documents.get(key)
            return None if document is None else prototype.buffer.from_bytes(document)
        found = CHUNK.fullmatch(key)
        buffer = await self._store.get(key, prototype, None if found else byte_range)
        if found and buffer is not None:
            if found["array"] not in self._sizes or byte_range is not None:
                raise UnsafeStoreError(f"{key} does not belong to the run")
            _check_chunk(buffer.to_bytes(), *self._sizes[found["array"]])
        return buffer
