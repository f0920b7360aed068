"""One array of a store while it grows: its document, and the rows that are not written yet."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numcodecs import Blosc

COMPRESSOR: Final = "lz4"
LEVEL: Final = 5

GROWING = "rank"
"""The one dimension beside ``step`` whose length may differ between the segments of a run."""


class Column:
    """One array: its document, its rows by number, and the chunks that are still to be written.

    Args:
        key: Name of the array, with its group.
        document: Its metadata.
        fill: What stands where nothing was written.
    """

    def __init__(self, key: str, document: dict[str, Any], fill: float | int) -> None:
        self.key, self.document, self.fill = key, document, fill
        self.rows = 0
        self._chunk: tuple[int, ...] = tuple(document["chunk_grid"]["configuration"]["chunk_shape"])
        self._row_shape = tuple(document["shape"][1:])
        # A chunk is at least 1 long on every axis, an array may be 0.
        self._grid = [max(1, math.ceil(n / c)) for n, c in zip(self._row_shape, self._chunk[1:], strict=True)]
        inner = [k * c for k, c in zip(self._grid, self._chunk[1:], strict=True)]
        self._tail = np.full([self._chunk[0], *inner], fill, dtype=document["data_type"])
        self._row: tuple[slice, ...] = (slice(None), *(slice(size) for size in self._row_shape))
        self._may_be_short = [dim == GROWING for dim in document["dimension_names"][1:]]
        self._blosc = Blosc(COMPRESSOR, LEVEL, Blosc.SHUFFLE)
        self._full: dict[str, bytes] = {}
        self._dirty = False

    @property
    def chunk_rows(self) -> int:
        """Rows per chunk."""
        return self._chunk[0]

    def fitting(self, value: Any) -> Any:
        """The value in the type and shape of a row.

        Raises:
            ValueError: If it does not fit.
        """
        if not self._row_shape and isinstance(value, float | int | np.generic):
            return self._tail.dtype.type(value)
        array = np.asarray(value, self._tail.dtype)
        if array.shape == self._row_shape:
            return array
        if any(self._may_be_short) and array.ndim == len(self._row_shape):  # fewer ranks than in another segment
            sizes = zip(array.shape, self._row_shape, self._may_be_short, strict=True)
            if all(size == whole or (short and size < whole) for size, whole, short in sizes):
                row = np.full(self._row_shape, self.fill, self._tail.dtype)
                row[tuple(slice(size) for size in array.shape)] = array
                return row
        return np.broadcast_to(array, self._row_shape)

    def append(self, value: Any) -> int:
        """Add a row; says how many bytes of full chunks that added."""
        rows = self.chunk_rows
        at = self.rows % rows
        if self._row_shape:
            self._tail[at : at + 1][self._row] = value
        else:
            self._tail[at] = value
        self.rows += 1
        self._dirty = True
        if self.rows % rows:
            return 0
        encoded = self._encoded(self.rows // rows - 1)
        self._full.update(encoded)
        self._tail.fill(self.fill)
        self._dirty = False
        return sum(map(len, encoded.values()))

    def skip(self, rows: int) -> None:
        """Begin behind ``rows`` rows that hold the fill value."""
        for index in range(rows // self.chunk_rows):
            self._full.update(self._encoded(index))
        self.rows, self._dirty = rows, rows % self.chunk_rows > 0

    # -- what a commit writes ------------------------------------------------------------------------------------------

    def pending(self) -> dict[str, bytes]:
        """Chunks that are not in the store yet."""
        return {**self._full, **self.tail()} if self._dirty else dict(self._full)

    def tail(self) -> dict[str, bytes]:
        """The last chunk, if it holds rows."""
        return self._encoded(self.rows // self.chunk_rows) if self.rows % self.chunk_rows else {}

    def committed(self) -> None:
        """Forget what the store now has."""
        self._full.clear()
        self._dirty = False

    def current_document(self) -> dict[str, Any]:
        """The array's metadata with its present shape."""
        return {**self.document, "shape": [self.rows, *self.document["shape"][1:]]}

    # -- resuming ------------------------------------------------------------------------------------------------------

    def adopt(self, found: Mapping[str, Any]) -> Column:
        """The column that goes on with an array of a store; it holds no rows until `cut` says how many.

        Args:
            found: Metadata of the array.

        Raises:
            ValueError: If this one could not go on with it.
        """
        mine = self.document
        for name in ("data_type", "codecs", "dimension_names"):
            if found.get(name) != mine[name]:
                raise ValueError(f"array {self.key!r} has {name} {found.get(name)!r}, this run has {mine[name]!r}")
        inner = []
        for size, dim, there in zip(mine["shape"][1:], mine["dimension_names"][1:], found["shape"][1:], strict=True):
            if dim != GROWING and size != there:
                raise ValueError(f"array {self.key!r} has length {there} along {dim!r}, this run has {size}")
            inner.append(max(size, there))
        return Column(
            self.key,
            {**mine, "shape": [0, *inner], "chunk_grid": found["chunk_grid"]},
            self.fill,
        )

    def last_chunk(self, rows: int) -> list[str]:
        """The keys that hold the last rows of ``rows``, if these do not fill their chunk."""
        return [self._key(rows // self.chunk_rows, at) for at in self._places] if rows % self.chunk_rows else []

    def cut(self, rows: int, chunks: Mapping[str, bytes]) -> None:
        """Hold ``rows`` rows.

        Args:
            rows: Their number.
            chunks: What the store has under the keys of `last_chunk`.
        """
        self.rows = rows
        kept = rows % self.chunk_rows
        for at in self._places:
            data = chunks.get(self._key(rows // self.chunk_rows, at))
            if data is not None and kept:
                self._tail[:kept][self._inner(at)] = self._decoded(data)[:kept]
        self.committed()

    def is_beyond(self, key: str) -> bool:
        """Whether this is the key of a chunk of this array that holds none of its rows."""
        _, _, index = key.removeprefix(f"{self.key}/").partition("c/")
        first = index.partition("/")[0]
        return first.isdigit() and int(first) >= math.ceil(self.rows / self.chunk_rows)

    def read(self, rows: int, chunks: Mapping[str, bytes]) -> np.ndarray:
        """All of the first ``rows`` rows of an array without inner dimensions, from the keys of `all_chunks`."""
        parts = [self._decoded(chunks[key]) for key in self.all_chunks(rows)]
        return np.concatenate([*parts, self._tail[:0]])[:rows]

    def all_chunks(self, rows: int) -> list[str]:
        """The keys that hold ``rows`` rows."""
        indices = range(math.ceil(rows / self.chunk_rows))
        return [self._key(index, at) for index in indices for at in self._places]

    # -- chunks --------------------------------------------------------------------------------------------------------

    @property
    def _places(self) -> list[tuple[int, ...]]:
        """Where a row's chunks lie along the inner dimensions: mostly there is one."""
        return list(itertools.product(*(range(n) for n in self._grid)))

    def _inner(self, at: tuple[int, ...]) -> tuple[slice, ...]:
        sizes = zip(at, self._chunk[1:], strict=True)
        return (slice(None), *(slice(k * size, (k + 1) * size) for k, size in sizes))

    def _encoded(self, index: int) -> dict[str, bytes]:
        return {
            self._key(index, at): bytes(self._blosc.encode(np.ascontiguousarray(self._tail[self._inner(at)])))
            for at in self._places
        }

    def _decoded(self, data: bytes) -> np.ndarray:
        """A chunk.

        Raises:
            ValueError: If it is not what a chunk of this array must be.
        """
        expected = math.prod(self._chunk) * self._tail.dtype.itemsize
        if len(data) < 16 or int.from_bytes(data[4:8], "little") != expected:  # before blosc makes room for it
            raise ValueError(f"a chunk of array {self.key!r} is damaged")
        try:
            flat = np.frombuffer(self._blosc.decode(data), self._tail.dtype)
        except RuntimeError as error:
            raise ValueError(f"a chunk of array {self.key!r} is damaged: {error}") from error
        return flat.reshape(self._chunk)

    def _key(self, index: int, at: tuple[int, ...]) -> str:
        return "/".join([self.key, "c", str(index), *map(str, at)])
