"""What quantities make of the sums of each bucket of parameters, added up over the buckets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from distcockpit.quantities.base import Quantity
from distcockpit.quantities.batch import BucketSums
from distcockpit.tracking.memories import Memories


class Reductions:
    """Those of one step.

    Args:
        quantities: The quantities of the step that need the sums of buckets.
        memories: What quantities keep.
    """

    def __init__(self, quantities: Sequence[Quantity], memories: Memories) -> None:
        self._quantities, self._memories = quantities, memories
        self._found: dict[str, dict[str, Tensor]] = {q.name: {} for q in quantities}
        self.failed: dict[str, Exception] = {}  # by quantity

    def see(self, bucket: BucketSums) -> None:
        """Show a bucket to each quantity; one that fails is left out from then on."""
        for q in self._quantities:
            if q.name in self.failed:
                continue
            found = self._found[q.name]
            try:
                for name, value in q.reduce(bucket, self._memories.of(q)).items():
                    found[name] = found[name] + value if name in found else value.double()
            except Exception as error:
                self.failed[q.name] = error

    def of(self, quantity: Quantity) -> Mapping[str, Tensor]:
        """What a quantity made of all buckets."""
        return self._found.get(quantity.name, {})
