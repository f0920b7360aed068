"""Differences of parameters, such as an optimizer's step, without the memory of all of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from distcockpit.gradients.factors import WHOLE, rows_of


class Differences(Mapping[str, Tensor]):
    """The differences of tensors of the same dtype, in at least float32, each computed when it is asked for.

    Args:
        after: By name.
        before: At least the same names.
        keep: Whether to keep what was computed.
    """

    def __init__(self, after: Mapping[str, Tensor], before: Mapping[str, Tensor], *, keep: bool = False) -> None:
        self._after, self._before, self._keep = after, before, keep
        self._kept: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name in self._kept:
            return self._kept[name]
        found = self._subtract(name, WHOLE)
        if self._keep:
            self._kept[name] = found
        return found

    def rows(self, name: str, rows: slice) -> Tensor:
        """Return some rows, without computing the others if these are not kept."""
        return self[name][rows] if self._keep else self._subtract(name, rows)

    @property
    def kept(self) -> Collection[Tensor]:
        """The differences that are kept."""
        return self._kept.values()

    def _subtract(self, name: str, rows: slice) -> Tensor:
        after, before = (rows_of(each[name].detach(), rows) for each in (self._after, self._before))
        kind = torch.promote_types(after.dtype, torch.float32)
        return after.to(kind) - before.to(kind)

    def __iter__(self) -> Iterator[str]:
        return iter(self._after)

    def __len__(self) -> int:
        return len(self._after)
