"""What ranks compare once, before they rely on it: sizes of outputs, and names and shapes of sums."""

from __future__ import annotations

from collections.abc import Mapping

from distcockpit.tracking.packed import Layout
from distcockpit.world import COMPARE, World, record_of


class Agreements:
    """What the ranks have agreed on in this part of the run.

    Args:
        world: The ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._sizes: dict[str, dict[str, int]] = {}
        self._layouts: dict[object, Layout] = {}
        self._replicated: dict[object, Layout] = {}

    def sizes_of(self, quantity: str) -> Mapping[str, int]:
        """Return the sizes that a quantity saw on all ranks, by name; 0 where ranks differ."""
        return self._sizes.get(quantity, {})

    def agree_on_sizes(self, sizes: Mapping[str, Mapping[str, int]]) -> None:
        """Compare output sizes with the other ranks, once per quantity; all ranks call it.

        Args:
            sizes: By quantity and name.
        """
        new = {quantity: dict(seen) for quantity, seen in sizes.items() if quantity not in self._sizes}
        if not new:
            return
        for theirs in self._world.all_gather_object(new):
            for quantity, seen in theirs.items():
                agreed = self._sizes.setdefault(quantity, {})
                for name, size in seen.items():
                    agreed[name] = size if agreed.get(name, size) == size else 0

    def layout_of(self, selection: object) -> Layout | None:
        """Return the layout of the sums of a selection of quantities; ``None`` until ranks have compared it."""
        return self._layouts.get(selection)

    def replicated_of(self, selection: object) -> Layout | None:
        """Return the layout of the replicated values of a selection of quantities, once it is known."""
        return self._replicated.get(selection)

    def note_replicated(self, selection: object, mine: Layout) -> None:
        """Remember the layout of replicated values, which are not exchanged."""
        self._replicated[selection] = mine

    def agree_on_layout(self, selection: object, mine: Layout | None, step: int) -> bool:
        """Compare the layout of the sums between ranks if it is new, because backends abort if lengths differ.

        Args:
            selection: The quantities of the sums.
            mine: The layout on this rank; ``None`` if it does not know.
            step: The step.

        Returns:
            False if a rank does not know the layout, so that nothing can be exchanged.

        Raises:
            RuntimeError: If a rank has a different layout.
        """
        if mine is not None and self._layouts.get(selection) == mine:
            return True
        self._world.header(record_of(COMPARE, step))  # a rank for which nothing is new would be at a different exchange
        layouts = self._world.all_gather_object(mine)
        if mine is None or None in layouts:
            return False
        theirs = [dict(layout.parts) for layout in layouts]
        for rank, there in enumerate(theirs):
            for name in dict.fromkeys([*theirs[0], *there]):
                if theirs[0].get(name) != there.get(name):
                    quantity, _, part = name.partition("/")
                    raise RuntimeError(
                        f"Quantity '{quantity}' at step {step}: the sum '{part}' has shape "
                        f"{there.get(name, 'nothing')} on rank {rank}, but {theirs[0].get(name, 'nothing')} on rank 0. "
                        "local() and displacement() must return the same names and shapes on all ranks, including "
                        "ranks without samples."
                    )
        self._layouts[selection] = mine
        return True
