"""All plots of a run, in the order of the panel: training, step size, gradients, curvature, ranks, time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import xarray as xr

from distcockpit.instruments.anything import anything
from distcockpit.instruments.data import scale
from distcockpit.instruments.picture import CYCLE, Band, Heat, Line, Pages, Picture, empty
from distcockpit.instruments.table import INSTRUMENTS

SECTIONS = ("training", "step size", "gradients", "curvature", "ranks", "time", "more")


@dataclass(frozen=True)
class Place:
    """One instrument and what it shows."""

    name: str
    section: str
    picture: Picture | Pages

    def by_page(self) -> dict[str, Picture]:
        """Its plots by name: its own name, or ``name/page``."""
        if isinstance(self.picture, Picture):
            return {self.name: self.picture}
        return {f"{self.name}/{page}": picture for page, picture in self.picture.items()}


def panel(
    run: xr.DataTree, progress: Callable[[str], None] = lambda name: None, only: Collection[str] | None = None
) -> Iterator[Place]:
    """Every plot of this run, by section; quantities without their own instrument come last.

    Args:
        run: What `open_run` returns.
        progress: Called with the name of each plot before it is made.
        only: Names of instruments; by default all.
    """
    shown: set[str] = set()
    by_section = sorted(INSTRUMENTS.values(), key=lambda one: SECTIONS.index(one.section))
    for one in by_section:
        if only is not None and one.name not in only:
            continue
        progress(one.name)
        shown |= set(one.groups(run))
        for name, picture in one.pictures(run).items():
            if not _nothing(picture):
                yield Place(name if name == one.name else f"{one.name}-{name}", one.section, picture)
    for name, node in run.children.items():
        if only is not None or name in shown or not node.sizes.get("step"):
            continue
        progress(name)
        pages = anything(name, node.to_dataset())
        if not _nothing(pages):
            yield Place(f"more-{name}", "more", pages)


def panels(
    runs: Mapping[str, xr.DataTree],
    progress: Callable[[str], None] = lambda name: None,
    only: Collection[str] | None = None,
) -> list[Place]:
    """The panel of one run, or of several in the same plots.

    Args:
        runs: Runs by display name.
        progress: As for `panel`.
        only: As for `panel`.
    """
    if len(runs) == 1:
        return list(panel(next(iter(runs.values())), progress, only))
    found: dict[str, tuple[str, dict[str, Picture | Pages]]] = {}
    for label, run in runs.items():
        for place in panel(run, progress, only):
            found.setdefault(place.name, (place.section, {}))[1][label] = place.picture
    order = sorted(found.items(), key=lambda item: SECTIONS.index(item[1][0]))
    colors = {label: CYCLE[k % len(CYCLE)] for k, label in enumerate(runs)}
    return [Place(name, section, overlay(pictures, colors)) for name, (section, pictures) in order]


def overlay(pictures: Mapping[str, Picture | Pages], colors: Mapping[str, str]) -> Picture | Pages:
    """The plots of several runs overlaid, one colour per run; heat maps, which would hide each other, stay separate."""
    if not all(isinstance(p, Picture) for p in pictures.values()):
        names = list(
            dict.fromkeys(name for pages in pictures.values() if not isinstance(pages, Picture) for name in pages)
        )
        each = {
            name: {
                run: pages[name] for run, pages in pictures.items() if not isinstance(pages, Picture) and name in pages
            }
            for name in names
        }
        flat: dict[str, Picture] = {}
        for name, of_runs in each.items():
            merged = overlay(of_runs, colors)
            flat |= {name: merged} if isinstance(merged, Picture) else {f"{name}, {k}": p for k, p in merged.items()}
        return flat
    of_runs = {run: p for run, p in pictures.items() if isinstance(p, Picture)}
    if any(isinstance(mark, Heat) for p in of_runs.values() for mark in p.marks):
        return {run: replace(p, title=f"{p.title}: {run}") for run, p in of_runs.items()}
    members = list(
        dict.fromkeys(m.member for p in of_runs.values() for m in p.marks if isinstance(m, Line | Band) and m.member)
    )
    if len(members) > 1:  # a plot for each layer: colours tell the runs apart
        by_member = {name: {run: _only(p, name) for run, p in of_runs.items()} for name in ("", *members)}
        curves = [(name or "all", overlay(part, colors)) for name, part in by_member.items()]
        return {name: part for name, part in curves if isinstance(part, Picture) and not empty(part)}
    first = next(iter(of_runs.values()))
    fixed = [mark for mark in first.marks if not isinstance(mark, Line | Band)]
    moving = [mark for run, p in of_runs.items() for mark in _of_run(run, p, colors[run])]
    merged = replace(first, marks=[*fixed, *moving], right=None, top=None)
    if {p.scale for p in of_runs.values()} == {"asinh"}:
        return merged
    return replace(merged, **{"scale": "linear", **scale([mark for mark in moving if isinstance(mark, Line)])})


def _only(picture: Picture, member: str) -> Picture:
    """The curves of one layer or parameter; without a name, those that belong to none."""
    kept = [mark for mark in picture.marks if not isinstance(mark, Line | Band) or mark.member == member]
    kept = [replace(m, label="") if isinstance(m, Line) and member else m for m in kept]
    return replace(picture, marks=kept, title=f"{picture.title}: {member}" if member else picture.title)


def _of_run(run: str, picture: Picture, color: str) -> list[Line | Band]:
    """The curves of one run, named after it and distinguished by line style; points stay points."""
    curves = [mark for mark in picture.marks if isinstance(mark, Line | Band)]
    alone = len([mark for mark in curves if isinstance(mark, Line)]) == 1
    named: list[Line | Band] = []
    for mark in curves:
        label = run if alone or not mark.label else f"{run}: {mark.label}"
        mark = replace(mark, color=color, label=label if isinstance(mark, Line) or mark.label else "")
        if isinstance(mark, Line) and not mark.member and mark.style != "points":
            before = sum(isinstance(n, Line) and not n.member and n.style != "points" for n in named)
            mark = replace(mark, style=("solid", "dashed", "dotted")[min(before, 2)])
        named.append(mark)
    return named


def _nothing(picture: Picture | Pages) -> bool:
    pages = [picture] if isinstance(picture, Picture) else list(picture.values())
    return all(empty(page) for page in pages)
