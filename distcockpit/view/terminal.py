"""A run in the terminal: tables of what it holds and of its newest values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from distcockpit.findings import Checked, check
from distcockpit.store.names import plain

BARS = "▁▂▃▄▅▆▇█"
STYLES = {"wrong": "bold red", "look": "yellow"}


def table(run: xr.DataTree, facts: dict[str, str], name: str, size: str = "") -> RenderableType:
    """Quantities, rows and steps of a run, and facts about the run as a whole.

    Args:
        run: What `open_run` returns.
        facts: Facts about the run.
        name: Its name.
        size: Its size.
    """
    told = Table(title=Text(plain(name)), caption=Text(_facts({**facts, **({"size": size} if size else {})})))
    for column, justify in (("quantity", "left"), ("class", "left"), ("rows", "right"), ("steps", "left")):
        told.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type] # Rich names them as literals
    told.add_column("newest values", overflow="fold")
    for group, node in run.children.items():
        data = node.to_dataset()
        rows = data.sizes.get("step", 0)
        steps = f"{int(data['step'][0])} to {int(data['step'][-1])}" if rows else ""
        words = (group, node.attrs.get("quantity", ""), str(rows), steps, newest(data) if rows else "")
        told.add_row(*(Text(plain(word)) for word in words))
    return told


def segments(run: xr.DataTree) -> RenderableType:
    """The parts of a run that was resumed, or whose model changed."""
    told = Table(title="parts")
    for column in ("part", "ranks", "steps", "hosts", "torch", "what changed"):
        told.add_column(column, overflow="fold")
    for k, part in enumerate(run.attrs.get("segments", ())):
        words = (
            k,
            part.get("world_size", ""),
            f"{part.get('first_step', '')} to {part.get('last_step', '')}",
            ", ".join(map(str, part.get("hosts", ()))),
            dict(part.get("versions", {})).get("torch", ""),
            part.get("change", ""),
        )
        told.add_row(*(Text(plain(word)) for word in words))
    return told


def newest(data: xr.Dataset, most: int = 4) -> str:
    """The newest values as text: numbers (the newest known), a status by its meaning, arrays by shape."""
    words = []
    for name, array in data.data_vars.items():
        known = array.dropna("step") if array.dims == ("step",) else array
        if "step" not in array.dims:
            continue
        value = (known if known.sizes["step"] else array).isel(step=-1).values
        meanings = str(array.attrs.get("flag_meanings", "")).split()
        if value.ndim:
            words.append(f"{name} [{' × '.join(map(str, value.shape))}]")
        elif value.dtype.kind in "iu" and 0 <= int(value) < len(meanings):
            words.append(f"{name} {meanings[int(value)]}")
        elif value.dtype.kind in "fiu":
            words.append(f"{name} {float(value):.4g}")
    return ", ".join(words[:most]) + (", ..." if len(words) > most else "")


def findings(checked: Checked) -> RenderableType:
    """What looks wrong, in words."""
    if not checked.findings:
        return Text("Nothing looks wrong by the rules that could be applied.")
    parts = []
    for found in checked.findings:
        title = Text(
            f"{'wrong' if found.severity == 'wrong' else 'look'}: {plain(found.title)}", STYLES[found.severity]
        )
        parts.append(Group(title, Text(f"  {plain(found.words, 600)}"), Text(f"  Rule: {found.source}", "dim")))
    return Group(*parts)


def view(run: xr.DataTree, facts: dict[str, str], name: str, height: int = 40) -> RenderableType:
    """The live view: what looks wrong, and each number with a sparkline of its history."""
    checked = check(run)
    titles = [Text(f"{found.severity}: {plain(found.title)}", STYLES[found.severity]) for found in checked.findings]
    head = Group(Text(plain(name), "bold"), Text(_facts(facts)), *(titles or [Text("nothing looks wrong", "green")]))
    told = Table(expand=True, box=None, pad_edge=False)
    told.add_column("quantity", no_wrap=True)
    told.add_column("step", justify="right")
    told.add_column("newest", justify="right", no_wrap=True)
    told.add_column("unit", no_wrap=True)
    told.add_column("course", no_wrap=True, ratio=1)
    rows = list(_numbers(run))
    room = max(3, height - 8 - len(titles))
    for quantity, step, value, unit, course in rows[:room]:
        told.add_row(Text(plain(quantity, 40)), str(step), f"{value:.4g}", Text(plain(unit, 24)), Text(course))
    if len(rows) > room:
        told.add_row(Text(f"and {len(rows) - room} more", "dim"), "", "", "", "")
    return Panel(Group(head, Text(""), told), title="distcockpit")


def lost(shown: RenderableType, why: str) -> RenderableType:
    """The last view, below the reason for not having a newer one."""
    return Group(Text(f"waiting: {plain(why, 300)}", "bold red"), shown)


def _numbers(run: xr.DataTree) -> Iterator[tuple[str, int, float, str, str]]:
    """The main number of each quantity that has one: name, newest step, value, unit, history."""
    for group, node in run.children.items():
        data = node.to_dataset()
        if not data.sizes.get("step"):
            continue
        main = [name for name in (group, "total") if name in data and data[name].dims == ("step",)]
        for name, array in data[main[:1] or [str(name) for name in data.data_vars]].data_vars.items():
            if array.dims == ("step",) and array.dtype.kind == "f":
                values = array[-10_000:].values
                known = np.flatnonzero(np.isfinite(values))
                at = int(known[-1]) if len(known) and group == "log" else -1  # the log naturally has gaps
                label = group if name == group else f"{group}/{name}"
                unit = str(array.attrs.get("units", "1"))
                yield label, int(data["step"][-10_000:].values[at]), values[at], unit, sparkline(values)


def sparkline(values: NDArray[Any], width: int = 40) -> str:
    """Means of stretches as bars from the minimum to the maximum; a space where nothing is finite."""
    values = np.clip(values, -1e300, 1e300)  # differences and sums of larger values would overflow
    parts = [part[np.isfinite(part)] for part in np.array_split(values, min(width, len(values)))]
    means = [part.mean() if len(part) else math.nan for part in parts]
    known = [m for m in means if math.isfinite(m)]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    step = (high - low) / len(BARS) or 1.0
    return "".join(" " if not math.isfinite(m) else BARS[min(len(BARS) - 1, int((m - low) / step))] for m in means)


def _facts(facts: dict[str, str]) -> str:
    return " · ".join(f"{name} {value}" for name, value in facts.items())
