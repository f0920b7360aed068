"""An instrument: which quantities it shows, and how; call it with axes and a run to draw."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import xarray as xr
from matplotlib.axes import Axes

from distcockpit.instruments.drawing import draw
from distcockpit.instruments.picture import Pages, Picture
from distcockpit.store.rows import find

View = Callable[[xr.DataTree, dict[str, xr.Dataset]], Picture | Pages]


@dataclass(frozen=True)
class Instrument:
    """A plot of a run.

    Args:
        name: Its name.
        section: Section of the panel.
        needs: By quantity class, the arrays it needs, with their dimensions. With one class there is a plot for each
            group of it; with several, there is one plot of all that are available.
        view: Makes the plot.
    """

    name: str
    section: str
    needs: Mapping[str, Mapping[str, str]]
    view: View

    def groups(self, run: xr.DataTree) -> dict[str, xr.Dataset]:
        """The groups of a run that it shows, by name."""
        return {n: group for kind, fields in self.needs.items() for n, group in find(run, kind, **fields).items()}

    def pictures(self, run: xr.DataTree) -> dict[str, Picture | Pages]:
        """The plots of this run, by a name that is unique within it; empty if it has no such rows."""
        found = self.groups(run)
        if len(self.needs) > 1:
            return {self.name: self.view(run, found)} if found else {}
        return {name: self.view(run, {name: group}) for name, group in found.items()}

    def __call__(self, axes: Axes, run: xr.DataTree, group: str | None = None) -> None:
        """Draw.

        Args:
            axes: Axes to draw on; anything next to the plot, such as a distribution, is drawn in insets.
            run: What `open_run` returns.
            group: Which group, if the run has several quantities of the class; by default the first.

        Raises:
            ValueError: If the run has nothing to show.
        """
        pictures = self.pictures(run)
        if not pictures or (group is not None and group not in pictures):
            raise ValueError(
                f"{self.name}(run, group={group!r}): shows {' and '.join(self.needs)}; the run has rows of "
                f"{list(pictures) or 'none of these'}, and holds the quantities {list(run.children)}."
            )
        draw(axes, pictures[group or next(iter(pictures))])


def instrument(section: str, **needs: Mapping[str, str]) -> Callable[[View], Instrument]:
    """Turn a function of a run and its groups into an instrument; see `Instrument`."""
    return lambda view: _documented(Instrument(view.__name__, section, needs, view), view)


def _documented(made: Instrument, view: View) -> Instrument:
    object.__setattr__(made, "__doc__", view.__doc__)
    return made
