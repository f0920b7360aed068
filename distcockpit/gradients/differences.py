"""Tensors by parameter, such as an optimizer's step, without the memory of all of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from distcockpit.gradients import kernels
from distcockpit.gradients.factors import WHOLE, rows_of


class ByRows(Mapping[str, Tensor]):
    """Tensors by parameter, any rows of which can be had without the others."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where they are."""

    @abstractmethod
    def rows(self, name: str, rows: slice) -> Tensor:
        """Return some rows."""

    def inner_rows(self, values: Tensor, name: str, rows: slice) -> Tensor:
        """Return inner products of ``values [N, D]`` with the D elements of some rows, float64 ``[N]``."""
        return kernels.inner_rows(values, self.rows(name, rows).reshape(-1))


class Gathered(ByRows):
    """Whole rows of what is sharded over ranks, for the buckets that are being walked.

    Args:
        pieces: What this rank holds of each; ``None`` if it does not know.
        names: Of all of them.
        device: Where rows are.
    """

    def __init__(self, pieces: Mapping[str, Tensor] | None, names: Iterable[str], device: torch.device) -> None:
        self.pieces, self._names, self._device = pieces, list(names), device
        self._held: dict[str, list[tuple[slice, Tensor]]] = {}

    @property
    def device(self) -> torch.device:
        """See `ByRows.device`."""
        return self._device

    def hold(self, bucket: Mapping[str, slice], found: Mapping[str, Tensor]) -> None:
        """Have the rows of a bucket from here on."""
        for name, part in bucket.items():
            self._held.setdefault(name, []).append((part, found[name]))

    def drop(self, bucket: Mapping[str, slice]) -> None:
        """Free the rows of a bucket."""
        for name, part in bucket.items():
            self._held[name] = [(rows, values) for rows, values in self._held.get(name, ()) if rows != part]

    def __getitem__(self, name: str) -> Tensor:
        return self.rows(name, WHOLE)

    def rows(self, name: str, rows: slice) -> Tensor:
        """Return some rows of a bucket that is held.

        Raises:
            KeyError: If none that is held has these rows.
        """
        for part, values in self._held.get(name, ()):
            if part in (WHOLE, rows):
                return values if part == rows else rows_of(values, rows)
            if rows != WHOLE and part.start <= rows.start and rows.stop <= part.stop:
                return values[rows.start - part.start : rows.stop - part.start]
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Differences(ByRows):
    """The differences of tensors of the same dtype, in at least float32, each computed when it is asked for.

    Args:
        after: By name.
        before: At least the same names.
        keep: Whether to keep what was computed.
    """

    def __init__(self, after: Mapping[str, Tensor], before: Mapping[str, Tensor], *, keep: bool = False) -> None:
        self._after, self._before, self._keep = after, before, keep
        self._kept: dict[str, Tensor] = {}
        self._squares: dict[str, Tensor] = {}

    @property
    def device(self) -> torch.device:
        """See `ByRows.device`."""
        return next(iter(self._after.values())).device

    def squared_norm(self, name: str) -> Tensor:
        """Return the sum of all squares, float64; it is added up once."""
        if name not in self._squares:
            pair = self._pair(name, WHOLE)
            self._squares[name] = kernels.squared_norm(self[name]) if self._keep else kernels.squared_distance(*pair)
        return self._squares[name]

    def inner_rows(self, values: Tensor, name: str, rows: slice) -> Tensor:
        """Return inner products of ``values [N, D]`` with the D elements of some rows, float64 ``[N]``."""
        if self._keep:
            return super().inner_rows(values, name, rows)
        after, before = (t.reshape(-1) for t in self._pair(name, rows))
        return kernels.inner_rows_with_difference(values, after, before)

    def __getitem__(self, name: str) -> Tensor:
        if name in self._kept:
            return self._kept[name]
        found = self._subtract(name, WHOLE)
        if self._keep:
            self._kept[name] = found
        return found

    def rows(self, name: str, rows: slice) -> Tensor:
        """Return some rows, without computing the others if these are not kept."""
        return rows_of(self[name], rows) if self._keep else self._subtract(name, rows)

    def nothing_of(self, name: str) -> Tensor:
        """Return none of the elements: flat and empty, of the type of the difference."""
        after = self._after[name].detach()
        return after.reshape(-1)[:0].to(torch.promote_types(after.dtype, torch.float32))

    @property
    def kept(self) -> Collection[Tensor]:
        """The differences that are kept."""
        return self._kept.values()

    def _pair(self, name: str, rows: slice) -> tuple[Tensor, Tensor]:
        after, before = (rows_of(each[name].detach(), rows) for each in (self._after, self._before))
        return after, before

    def _subtract(self, name: str, rows: slice) -> Tensor:
        after, before = self._pair(name, rows)
        kind = torch.promote_types(after.dtype, torch.float32)
        return after.to(kind) - before.to(kind)

    def __iter__(self) -> Iterator[str]:
        return iter(self._after)

    def __len__(self) -> int:
        return len(self._after)


def squared_norms(tensors: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
    """Return ``|t|^2`` by name, float64 ``[names]``; tensors are asked for one after the other."""
    if isinstance(tensors, Differences):
        return torch.stack([tensors.squared_norm(name) for name in names])
    return torch.stack([kernels.squared_norm(tensors[name]) for name in names])
