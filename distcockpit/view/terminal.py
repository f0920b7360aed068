"""A run in the terminal: tables of what it holds and of its newest values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from distcockpit.findings import Checked, check
from distcockpit.findings.rule import WINDOW
from distcockpit.run import noise_scale
from distcockpit.store.names import in_words, plain
from distcockpit.store.rows import find, kind_of

BARS = "▁▂▃▄▅▆▇█"
NEWEST = 2
"""How many values of a quantity `info` prints."""

RANKS = (
    ("RankDisagreement", "loss", "loss of the ranks"),
    ("RankDisagreement", "grad_norm", "gradient norm of the ranks"),
    ("RankHealth", "forward_seconds", "forward pass of the ranks"),
)
"""By quantity class, what the live view compares between ranks."""

STYLES = {"wrong": "bold red", "look": "yellow"}


def info(run: xr.DataTree, facts: dict[str, str], name: str) -> RenderableType:
    """A run on 80 columns: facts, what looks wrong, and the newest values of each quantity.

    Args:
        run: What `open_run` returns.
        facts: Facts about the run.
        name: Its name.
    """
    told = Table(box=None, pad_edge=False, header_style="bold")
    told.add_column("quantity", overflow="fold")
    told.add_column("rows", justify="right", no_wrap=True)
    told.add_column("steps", no_wrap=True)
    told.add_column("newest values", overflow="fold")
    for group, node in run.children.items():
        data = node.to_dataset()
        numbers = data["step"].values
        steps = f"{numbers[0]} to {numbers[-1]}" if len(numbers) else ""
        words = (group, str(len(numbers)), steps, newest(data, NEWEST) if len(numbers) else "")
        told.add_row(*(Text(plain(word)) for word in words))
    parts = [segments(run), Text("")] if len(run.attrs.get("segments", ())) > 1 else []
    head = (Text(plain(name), "bold"), Text(_facts(facts)), Text(""), findings(check(run)), Text(""))
    return Group(*head, *parts, told)


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


def newest(data: xr.Dataset, most: int) -> str:
    """The newest values as text: numbers (the newest known), a status by its meaning, arrays by shape."""
    words: list[str] = []
    for name in data.data_vars:
        array = data[name]
        if array.dims[:1] != ("step",):
            continue
        if len(words) == most:
            return ", ".join([*words, "..."])
        if array.ndim > 1:
            words.append(f"{name} [{' × '.join(map(str, array.shape[1:]))}]")
        elif array.dtype.kind in "fiu":
            value = _newest_known(array[-1000:].values)[1]
            meanings = str(array.attrs.get("flag_meanings", "")).split()
            is_status = array.dtype.kind in "iu" and 0 <= int(value) < len(meanings)
            words.append(f"{name} {meanings[int(value)] if is_status else f'{float(value):.4g}'}")
    return ", ".join(words)


def _newest_known(values: NDArray[Any]) -> tuple[int, Any]:
    """Where the newest finite value is, counted from the end, and what it is; the newest if none is finite."""
    known = np.flatnonzero(np.isfinite(values))
    at = int(known[-1]) - len(values) if len(known) else -1
    return at, values[at]


def findings(checked: Checked) -> RenderableType:
    """What looks wrong, in words."""
    if not checked.findings:
        return Text("Nothing looks wrong by the rules that could be applied.", "green")
    parts: list[RenderableType] = []
    for found in checked.findings:
        parts.append(Text(f"{found.severity}: {plain(found.title)}", STYLES[found.severity]))
        parts.append(Padding(Text(plain(found.words, 600)), (0, 0, 0, 2)))
        parts.append(Padding(Text(f"Rule: {plain(found.source, 600)}", "dim"), (0, 0, 0, 2)))
    return Group(*parts)


def view(run: xr.DataTree, facts: dict[str, str], name: str, height: int = 40) -> RenderableType:
    """The live view: what looks wrong, the ranks side by side, and each number with a sparkline of its history."""
    checked = check(run)
    titles = [Text(f"{found.severity}: {plain(found.title)}", STYLES[found.severity]) for found in checked.findings]
    head = Group(Text(plain(name), "bold"), Text(_facts(facts)), *(titles or [Text("nothing looks wrong", "green")]))
    compared = [Text(words) for words in _ranks(run)]
    told = Table(expand=True, box=None, pad_edge=False)
    told.add_column("quantity", no_wrap=True)
    told.add_column("step", justify="right")
    told.add_column("newest", justify="right", no_wrap=True)
    told.add_column("unit", no_wrap=True)
    told.add_column("course", no_wrap=True, ratio=1)
    rows = list(_numbers(run))
    room = max(3, height - 8 - len(titles) - len(compared))
    for quantity, step, value, unit, course in rows[:room]:
        told.add_row(Text(plain(quantity, 40)), str(step), f"{value:.4g}", Text(plain(unit, 24)), Text(course))
    if len(rows) > room:
        told.add_row(Text(f"and {len(rows) - room} more", "dim"), "", "", "", "")
    return Panel(Group(head, *compared, Text(""), told), title="distcockpit")


def _ranks(run: xr.DataTree) -> Iterator[str]:
    """What differs most between ranks in the last rows: the lowest and the highest rank, and how high they are."""
    for kind, field, what in RANKS:
        for node in find(run, kind, **{field: "step rank"}).values():
            array = node[field]
            if array.sizes["rank"] < 2:
                continue
            values = array[-WINDOW:].values.astype(float)
            values = values[np.isfinite(values).all(axis=1)]
            if len(values):
                typical = np.median(values, axis=0)
                low, high = int(typical.argmin()), int(typical.argmax())
                unit = in_words(str(array.attrs.get("units", "1")))
                unit = f" {unit}" if unit == "seconds" else ""
                yield f"{what}: {typical[low]:.3g} (rank {low}) to {typical[high]:.3g} (rank {high}){unit}"
                break


def lost(shown: RenderableType, why: str) -> RenderableType:
    """The last view, below the reason for not having a newer one."""
    return Group(Text(f"waiting: {plain(why, 300)}", "bold red"), shown)


def _numbers(run: xr.DataTree) -> Iterator[tuple[str, int, float, str, str]]:
    """The main number of each quantity that has one, losses first: name, newest step, value, unit, history."""
    by_importance = sorted(run.children.items(), key=lambda child: kind_of(*child) not in ("Loss", "log"))
    for group, node in by_importance:
        data = node.to_dataset()
        if not data.sizes.get("step"):
            continue
        if kind_of(group, node) == "GradientNoiseScale" and {"noise", "signal"} <= set(data):
            data = data.isel(step=slice(-10_000, None))
            shown = {f"{group}/batch": noise_scale(data) / data["batch_size"].values}
            shown = {name: array.assign_attrs(units="x batch size") for name, array in shown.items()}
        else:
            main = [name for name in (group, "total") if name in data and data[name].dims == ("step",)]
            fields = main[:1] or [str(name) for name in data.data_vars]
            shown = {group if name == group else f"{group}/{name}": data[name] for name in fields}
        for label, array in shown.items():
            if array.dims == ("step",) and array.dtype.kind == "f":
                values = array[-10_000:].values
                at, value = _newest_known(values) if group == "log" else (-1, values[-1])  # the log naturally has gaps
                unit = in_words(str(array.attrs.get("units", "1")))
                yield label, int(data["step"][at].values), value, unit, sparkline(values)


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
