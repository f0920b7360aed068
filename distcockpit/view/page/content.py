"""The content of a page as plain data: facts, findings and figures. The page itself only arranges it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import xarray as xr

from distcockpit.findings import Checked, Finding, check
from distcockpit.instruments import INSTRUMENTS, panels
from distcockpit.instruments.panel import SECTIONS
from distcockpit.instruments.picture import Picture, empty
from distcockpit.store.names import for_plotly, plain
from distcockpit.view.page.figure import figure
from distcockpit.view.summary import facts

MOST_PAGES = 100
"""Maximum number of plots of one instrument, for example one per parameter."""


def content(runs: Mapping[str, xr.DataTree], progress: Callable[[str], None] = lambda name: None) -> dict[str, Any]:
    """Everything shown on the page of one or several runs.

    Args:
        runs: Runs by display name.
        progress: Called with the name of each plot before it is made.
    """
    places = panels(runs, progress)
    checked = {name: check(run) for name, run in runs.items()}
    sections: dict[str, list[dict[str, Any]]] = {name: [] for name in SECTIONS}
    for place in places:
        pages = {"": place.picture} if isinstance(place.picture, Picture) else dict(place.picture)
        pages = {name: page for name, page in pages.items() if not empty(page)}
        shown = list(pages.items())[:MOST_PAGES]
        one = INSTRUMENTS.get(place.name.split("-")[0])
        sections[place.section].append({
            "id": place.name,
            "help": " ".join((one.__doc__ or "").split()) if one else "",
            "left_out": len(pages) - len(shown),
            "pages": [
                {"name": plain(name), "title": plain(page.title), "note": plain(page.note), **figure(page)}
                for name, page in shown
            ],
        })
    on_page = {one["id"]: [page["name"] for page in one["pages"]] for there in sections.values() for one in there}
    return {
        "title": " and ".join(plain(name) for name in runs),
        "runs": [{"name": plain(name), "facts": facts(run)} for name, run in runs.items()],
        "findings": [
            {"run": plain(name), **finding.as_dict(), **_place(finding, name if len(runs) > 1 else "", on_page)}
            for name, each in checked.items()
            for finding in each.findings
        ],
        "unchecked": _unchecked(checked),
        "sections": [{"name": name, "pictures": there} for name, there in sections.items() if there],
    }


def _place(finding: Finding, run: str, shown: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Where the page shows the finding: the figure, which of its plots, and which curves."""
    names = [name for wanted in finding.picture.split() for name in shown if _is_of(name, wanted)]
    if not names:
        return {"picture": "", "page": "", "members": []}
    pages = (finding.page, f"{finding.page}, {run}", *finding.members)
    page = next((plain(page) for page in pages if plain(page) in shown[names[0]]), "")
    return {"picture": names[0], "page": page, "members": [for_plotly(name, 10_000) for name in finding.members]}


def _is_of(name: str, instrument: str) -> bool:
    return name.split("-")[0] == instrument or name == f"more-{instrument}"


def _unchecked(checked: Mapping[str, Checked]) -> dict[str, str]:
    """Rules that could not be applied to any of the runs."""
    each = [one.unchecked for one in checked.values()]
    return {rule: needs for rule, needs in each[0].items() if all(rule in other for other in each)}
