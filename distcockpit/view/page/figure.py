"""Plots as Plotly figures: plain dictionaries, drawn by plotly.js."""

from __future__ import annotations

import base64
import math
from dataclasses import replace
from typing import Any

import numpy as np

from distcockpit.instruments.data import thinned
from distcockpit.instruments.drawing import spread
from distcockpit.instruments.picture import (
    BLACK,
    FARTHEST,
    GREY,
    Band,
    Bars,
    Heat,
    Level,
    Line,
    Numbers,
    Picture,
    Zone,
    empty,
    never_negative,
)
from distcockpit.store.names import for_plotly

BESIDE = [0.88, 1.0]

MOST_LEGEND = 12
"""With more curves, the names of some stand at their ends; the list of layers and hovering name the others."""

MOST_NAMES = 8

MARGIN = {"l": 64, "r": 12, "t": 30, "b": 44}
"""In pixels; the tools that appear on hovering have their place above the plot."""

DASHES = {"solid": "solid", "dashed": "dash", "dotted": "dot", "points": "solid"}
Dict = dict[str, Any]


def figure(picture: Picture) -> Dict:
    """Data and layout of a figure."""
    picture = replace(picture, marks=thinned(picture.marks))  # which keeps the lowest and the highest points
    low, high = _range(picture)
    data: list[Dict] = []
    for mark in picture.marks:
        if isinstance(mark, Line):
            data.append(_line(mark, picture))
        elif isinstance(mark, Band):
            data += _band(mark, picture)
        elif isinstance(mark, Heat):
            data.append(_heat(mark, picture))
    marks = [m for m in picture.marks if not (isinstance(m, Level) and picture.scale == "log" and m.y <= 0)]
    whole = {"tickformat": "d", "minallowed": low, "maxallowed": high} if picture.whole else {}
    layout: Dict = {
        "xaxis": {"title": {"text": for_plotly(picture.x)}, "zeroline": False},
        "yaxis": {
            "title": {"text": _broken(for_plotly(picture.y))},
            "zeroline": False,
            "range": [low, high],
            **_ticks(picture),
            **whole,
        },
        "shapes": [_zone(m, picture, low, high) for m in marks if isinstance(m, Zone)]
        + [_level(m, picture) for m in marks if isinstance(m, Level)],
        "annotations": [_words(m, picture, low, high) for m in marks if isinstance(m, Zone | Level) and m.label],
        "margin": MARGIN,
        "showlegend": 1 < len([t for t in data if t.get("showlegend")]) <= MOST_LEGEND and not picture.right,
    }
    if not layout["showlegend"] and (names := _names_at_ends(picture, low, high)):
        layout["annotations"] += names
        layout["margin"] = {**MARGIN, "r": 120}
    if empty(picture):
        note = {"x": 0.5, "y": 0.5, "xref": "paper", "yref": "paper", "showarrow": False, "text": "no finite value"}
        layout["annotations"] = [note]
    if picture.right and not empty(picture):
        data.append(_bars(picture.right, picture, sideways=True))
        layout["xaxis"]["domain"] = [0, BESIDE[0] - 0.02]
        layout["xaxis2"] = {"domain": BESIDE, "showticklabels": False, "showgrid": False, "zeroline": False}
    if picture.top and not empty(picture):
        data.append(_bars(picture.top, picture))
        layout["yaxis"]["domain"] = [0, BESIDE[0] - 0.02]
        layout["yaxis2"] = {"domain": BESIDE, "showticklabels": False, "showgrid": False, "zeroline": False}
    return {"data": data, "layout": layout}


def encoded(values: Numbers, kind: str = "f4") -> Dict:
    """Numbers in plotly.js's binary encoding, with NaN for gaps."""
    array = np.ascontiguousarray(values, dtype=f"<{kind}")
    made: Dict = {"dtype": kind, "bdata": base64.b64encode(array.tobytes()).decode()}
    return made if array.ndim == 1 else {**made, "shape": ", ".join(map(str, array.shape))}


def _on_axis(values: Any, picture: Picture) -> Numbers:
    """Positions of values on plotly.js's y-axis, which does not support asinh."""
    y = np.asarray(values, dtype=float)
    if picture.scale == "log":
        return y
    y = np.clip(y, -FARTHEST, FARTHEST)
    return np.arcsinh(y / picture.linear) if picture.scale == "asinh" else y


def _line(mark: Line, picture: Picture) -> Dict:
    x, y = mark.x, np.where(np.isfinite(mark.y), mark.y, np.nan)
    shown = "customdata" if picture.scale == "asinh" else "y"
    points = mark.style == "points" or len(x) == 1
    trace: Dict = {
        "type": "scatter",
        "mode": "markers" if points else "lines",
        "x": encoded(x, "f8"),
        "y": encoded(_on_axis(y, picture), "f8"),
        "name": for_plotly(mark.label),
        "showlegend": bool(mark.label),
        "meta": {"member": for_plotly(mark.member, 10_000)},
        "legendgroup": for_plotly(mark.member or mark.label, 10_000),
        "hovertemplate": f"%{{{shown}:.5g}}<extra>{for_plotly(mark.label)}</extra>",
    }
    if picture.scale == "asinh":
        trace["customdata"] = encoded(y, "f8")
    if points:
        return {**trace, "marker": {"color": mark.color, "size": 4}}
    return {**trace, "line": {"color": mark.color, "dash": DASHES[mark.style], "width": 1.5}}


def _band(mark: Band, picture: Picture) -> list[Dict]:
    common: Dict = {
        "type": "scatter",
        "mode": "lines",
        "x": encoded(mark.x, "f8"),
        "line": {"width": 0, "color": mark.color},
        "hoverinfo": "skip",
        "showlegend": False,
        "meta": {"member": for_plotly(mark.member, 10_000)},
        "legendgroup": for_plotly(mark.member or mark.label, 10_000),
    }
    low, high = (encoded(_on_axis(y, picture), "f8") for y in (mark.low, mark.high))
    return [{**common, "y": low}, {**common, "y": high, "fill": "tonexty", "fillcolor": _faint(mark.color, 0.2)}]


def _heat(mark: Heat, picture: Picture) -> Dict:
    z, shown = np.asarray(mark.z, dtype=float), "customdata" if mark.log else "z"
    trace: Dict = {
        "type": "heatmap",
        "x": encoded(mark.x, "f8"),
        "y": encoded(mark.y, "f8"),
        "colorscale": "Cividis",
        "colorbar": {"title": {"text": for_plotly(mark.label), "side": "right"}, "thickness": 12},
        "hovertemplate": f"{for_plotly(picture.x)} %{{x:.5g}}<br>%{{y:.5g}}<br>%{{{shown}:.5g}}<extra></extra>",
    }
    if mark.log:
        trace["customdata"] = encoded(z)
        with np.errstate(all="ignore"):
            z = np.where(z > 0, np.log10(z), np.nan)
        low, high = (np.nanmin(z), np.nanmax(z)) if np.isfinite(z).any() else (0, 0)
        decades = range(math.floor(low), math.floor(high) + 1)
        trace["colorbar"] |= {"tickvals": list(decades), "ticktext": [f"10<sup>{k}</sup>" for k in decades]}
    return {**trace, "z": encoded(z)}


def _bars(bars: Bars, picture: Picture, sideways: bool = False) -> Dict:
    edges = _on_axis(bars.edges, picture) if sideways else np.asarray(bars.edges, dtype=float)
    places, sizes = encoded((edges[1:] + edges[:-1]) / 2, "f8"), encoded(bars.heights, "f8")
    common: Dict = {
        "type": "bar",
        "width": encoded(np.diff(edges), "f8"),
        "marker": {"color": GREY},
        "showlegend": False,
    }
    common |= {"name": "", "meta": {"member": ""}}
    if sideways:
        return {**common, "orientation": "h", "x": sizes, "y": places, "xaxis": "x2", "hovertemplate": "%{x}"}
    return {**common, "x": places, "y": sizes, "yaxis": "y2", "hovertemplate": "%{y}"}


def _broken(label: str) -> str:
    """Break a label that is longer than the axis is high, with its unit on a separate line."""
    return "<br>[".join(label.rsplit(" [", 1)) if len(label) > 40 else label


def _range(picture: Picture) -> tuple[float, float]:
    """Limits of the y-axis, in plotly.js's coordinates."""
    values = [np.zeros(0)]
    for mark in picture.marks:
        if isinstance(mark, Heat) and not empty(picture):
            return float(mark.y[0]), float(mark.y[-1])
        if not isinstance(mark, Zone):
            values += [np.atleast_1d(getattr(mark, n)) for n in ("y", "low", "high") if n in vars(mark)]
    y = np.concatenate([v.astype(float) for v in values])
    y = y[np.isfinite(y)]
    with np.errstate(all="ignore"):
        y = np.log10(y[y > 0]) if picture.scale == "log" else _on_axis(y, picture)
    y = y[np.isfinite(y)]
    if not len(y):
        return 0.0, 1.0
    margin = 0.05 * float(np.ptp(y)) or 0.05 * abs(float(y[0])) or 1.0
    low = float(y.min()) - margin
    return max(low, 0.0) if never_negative(picture) and picture.scale != "log" else low, float(y.max()) + margin


def _ticks(picture: Picture) -> Dict:
    if picture.scale != "asinh":
        low, high = _range(picture)
        by_decade = {"dtick": 1, "exponentformat": "power"} if picture.scale == "log" and high - low > 2 else {}
        return {"type": picture.scale, **by_decade}
    low, high = (np.sinh(end) * picture.linear for end in _range(picture))
    decades = 10.0 ** np.arange(
        np.floor(np.log10(picture.linear)), np.ceil(np.log10(max(-low, high, picture.linear))) + 1
    )
    each = decades[:: max(1, len(decades) // 5)]
    at = np.concatenate([-each[::-1], [0.0], each])
    at = at[(at >= low) & (at <= high)]
    return {"tickvals": _on_axis(at, picture).tolist(), "ticktext": [f"{v:g}" for v in at]}


def _zone(mark: Zone, picture: Picture, low: float, high: float) -> Dict:
    far = 10 * (high - low)
    if picture.scale == "log":  # the axis range is in powers of ten, but shapes are not
        y0, y1 = (
            float(np.clip(end, 10.0 ** max(low - far, -300), 10.0 ** min(high + far, 300)))
            for end in (mark.low, mark.high)
        )
    else:
        y0, y1 = (float(np.clip(_on_axis(end, picture), low - far, high + far)) for end in (mark.low, mark.high))
    shape = {"type": "rect", "xref": "x domain", "yref": "y", "x0": 0, "x1": 1, "layer": "below", "line": {"width": 0}}
    return {**shape, "y0": y0, "y1": y1, "fillcolor": _faint(mark.color, 0.12)}


def _level(mark: Level, picture: Picture) -> Dict:
    y = _on_axis(mark.y, picture).item()
    shape = {"type": "line", "xref": "x domain", "yref": "y", "x0": 0, "x1": 1, "layer": "below"}
    return {**shape, "y0": y, "y1": y, "line": {"width": 1, "color": BLACK}}


def _words(mark: Zone | Level, picture: Picture, low: float, high: float) -> Dict:
    """A label inside the plot: next to a level, or in the corner of a zone."""
    if isinstance(mark, Level):
        y = _on_axis(mark.y, picture).item()
        y, anchor = float(np.log10(y)) if picture.scale == "log" else y, "bottom"
    else:
        y, anchor = (high, "top") if np.isinf(mark.high) else (low, "bottom")
    text = {"text": for_plotly(mark.label), "font": {"size": 11}, "showarrow": False}
    return {**text, "xref": "x domain", "x": 0.995, "xanchor": "right", "yref": "y", "y": y, "yanchor": anchor}


def _names_at_ends(picture: Picture, low: float, high: float) -> list[Dict]:
    """The names of some of many curves, at their right ends, spread so that they do not overlap."""
    ends = []
    for mark in picture.marks:
        if not isinstance(mark, Line) or not mark.member:
            continue
        known = np.flatnonzero(np.isfinite(mark.y))
        if len(known):
            with np.errstate(all="ignore"):
                y = float(np.ravel(_on_axis(mark.y[known[-1]], picture))[0])
                y = np.log10(y) if picture.scale == "log" else y
            if np.isfinite(y):
                ends.append((min(max((y - low) / (high - low), 0.0), 1.0), mark))
    if len(ends) <= 1:
        return []
    if len(ends) > MOST_NAMES:
        ends = [ends[k] for k in np.linspace(0, len(ends) - 1, MOST_NAMES).astype(int)]
    ends.sort(key=lambda end: end[0])
    common: Dict = {"xref": "paper", "yref": "y domain", "x": 1.01, "xanchor": "left", "yanchor": "middle"}
    return [
        {**common, "y": y, "text": for_plotly(mark.label, 24), "font": {"size": 10}, "showarrow": False}
        for y, (_, mark) in zip(spread([height for height, _ in ends], 0.06), ends, strict=True)
    ]


def _faint(color: str, opacity: float) -> str:
    red, green, blue = (int(color[k : k + 2], 16) for k in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"
