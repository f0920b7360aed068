"""One growing array of a store: its metadata document, and the rows that are not written yet."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numcodecs import Blosc

COMPRESSOR: Final = "lz4"
LEVEL: Final = 5

GROWING = "rank"
"""The only dimension without names whose length may change in a resumed run."""


class Column:
    """One array: its document, its rows by number, and the chunks that are still to be written.

    Args:
        key: Name of the array, with its group.
        document: Its metadata.
        fill: The fill value, where nothing was written.
    """

    def __init__(self, key: str, document: dict[str, Any], fill: float | int) -> None:
        self.key, self.document, self.fill = key, document, fill
        self.rows = 0
        self._chunk: tuple[int, ...] = tuple(document["chunk_grid"]["configuration"]["chunk_shape"])
        self._blosc = Blosc(COMPRESSOR, LEVEL, Blosc.SHUFFLE)
        self._full: dict[str, bytes] = {}
        self._dirty = False
        self._codes: np.ndarray | None = None  # the code stored for each value
        self._lay_out()

    def _lay_out(self) -> None:
        self._row_shape = self._given = tuple(self.document["shape"][1:])
        self._spread: tuple[np.ndarray, ...] | None = None  # where a value goes in the row, if it does not fill it
        # A chunk is at least 1 long on every axis; an array may have length 0.
        self._grid = [max(1, math.ceil(n / c)) for n, c in zip(self._row_shape, self._chunk[1:], strict=True)]
        inner = [k * c for k, c in zip(self._grid, self._chunk[1:], strict=True)]
        self._tail = np.full([self._chunk[0], *inner], self.fill, dtype=self.document["data_type"])
        self._row: tuple[slice, ...] = (slice(None), *(slice(size) for size in self._row_shape))

    @property
    def chunk_rows(self) -> int:
        """Rows per chunk."""
        return self._chunk[0]

    # -- rows of varying length ----------------------------------------------------------------------------------------

    def widen(self, lengths: Mapping[str, int]) -> None:
        """Make room for longer rows; earlier ones hold the fill value there.

        Args:
            lengths: By dimension; dimensions that are already longer stay as they are.
        """
        dims = self.document["dimension_names"][1:]
        inner = [max(size, lengths.get(dim, 0)) for size, dim in zip(self._row_shape, dims, strict=True)]
        if inner == list(self._row_shape):
            return
        before, tail = set(self._places), self._tail
        self.document = {**self.document, "shape": [0, *inner]}
        self._lay_out()
        empty = self._encoded(0)
        self._tail[tuple(map(slice, tail.shape))] = tail
        for at in set(self._places) - before:
            for index in range(self.rows // self.chunk_rows):
                self._full[self._key(index, at)] = empty[self._key(0, at)]
        self._dirty |= self.rows % self.chunk_rows > 0

    def expect(self, places: Sequence[Sequence[int]], codes: Sequence[str] = ()) -> None:
        """Declare what the values of the next rows are.

        Args:
            places: For each dimension, the positions of a value's elements along it.
            codes: Meanings of 0, 1, ..., if it is a status.
        """
        self._given = tuple(map(len, places))
        is_whole = all(list(at) == list(range(n)) for at, n in zip(places, self._row_shape, strict=True))
        self._spread = None if is_whole else np.ix_(*places)
        known = str(self.document.get("attributes", {}).get("flag_meanings", "")).split()
        self._codes = None
        if list(codes) != known[: len(codes)]:
            known += [code for code in codes if code not in known]
            flags = {"flag_values": list(range(len(known))), "flag_meanings": " ".join(known)}
            self.document = {**self.document, "attributes": {**self.document["attributes"], **flags}}
            self._codes = np.array([known.index(code) for code in codes], self._tail.dtype)

    def fitting(self, value: Any) -> Any:
        """Convert a value to the type and shape of a row.

        Raises:
            ValueError: If it does not fit.
        """
        if not self._row_shape and self._codes is None and isinstance(value, float | int | np.generic):
            return self._tail.dtype.type(value)
        array = np.broadcast_to(np.asarray(value, self._tail.dtype), self._given)
        if self._codes is not None:
            array = self._codes[array]
        if self._spread is None:
            return array
        row = np.full(self._row_shape, self.fill, self._tail.dtype)
        row[self._spread] = array
        return row

    def append(self, value: Any) -> int:
        """Add a row; return how many bytes of full chunks that added."""
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
        """Start after ``rows`` rows that hold the fill value."""
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
        """Forget what is now in the store."""
        self._full.clear()
        self._dirty = False

    def current_document(self) -> dict[str, Any]:
        """The array's metadata with its current shape."""
        return {**self.document, "shape": [self.rows, *self.document["shape"][1:]]}

    # -- resuming ------------------------------------------------------------------------------------------------------

    def adopt(self, found: Mapping[str, Any], labelled: Collection[str]) -> Column:
        """The column that continues an array of a store; it holds no rows until `cut` says how many.

        Args:
            found: Metadata of the array.
            labelled: The dimensions whose elements have names.

        Raises:
            ValueError: If this column cannot continue it.
        """
        mine = self.document
        for name in ("data_type", "codecs", "dimension_names"):
            if found.get(name) != mine[name]:
                raise ValueError(f"array {self.key!r} has {name} {found.get(name)!r}, but this run has {mine[name]!r}")
        for size, dim, there in zip(mine["shape"][1:], mine["dimension_names"][1:], found["shape"][1:], strict=True):
            if dim != GROWING and dim not in labelled and size != there:
                raise ValueError(f"array {self.key!r} has length {there} along {dim!r}, but this run has {size}")
        kept = {name: found[name] for name in ("chunk_grid", "attributes")}
        return Column(self.key, {**mine, **kept, "shape": [0, *found["shape"][1:]]}, self.fill)

    def last_chunk(self, rows: int) -> list[str]:
        """The keys of the last chunk of ``rows`` rows, if it is not full."""
        return [self._key(rows // self.chunk_rows, at) for at in self._places] if rows % self.chunk_rows else []

    def cut(self, rows: int, chunks: Mapping[str, bytes]) -> None:
        """Truncate to ``rows`` rows.

        Args:
            rows: Number of rows.
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
        """True if this is the key of a chunk of this array that lies beyond its rows."""
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
        """Where a row's chunks lie along the inner dimensions; usually there is just one."""
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
        """Decode a chunk.

        Raises:
            ValueError: If it is not a valid chunk of this array.
        """
        expected = math.prod(self._chunk) * self._tail.dtype.itemsize
        if len(data) < 16 or int.from_bytes(data[4:8], "little") != expected:  # before blosc allocates memory
            raise ValueError(f"a chunk of array {self.key!r} is damaged")
        try:
            flat = np.frombuffer(self._blosc.decode(data), self._tail.dtype)
        except RuntimeError as error:
            raise ValueError(f"a chunk of array {self.key!r} is damaged: {error}") from error
        return flat.reshape(self._chunk)

    def _key(self, index: int, at: tuple[int, ...]) -> str:
        return "/".join([self.key, "c", str(index), *map(str, at)])
