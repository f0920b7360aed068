"""Make names and strings from an untrusted store safe to display."""

from __future__ import annotations

import html
import unicodedata

LONGEST = 120
FORBIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Unicode categories of characters with effects instead of glyphs: escape sequences, text direction, line breaks."""


def plain(text: object, longest: int = LONGEST) -> str:
    """One line of visible characters; invisible ones are replaced, and long strings are shortened in the middle."""
    seen = visible(text)
    if len(seen) <= longest:
        return seen
    head = longest // 2
    return f"{seen[:head]}…{seen[head + 1 - longest :]}"


def visible(text: object) -> str:
    """The whole string, with a visible stand-in for each invisible character."""
    return "".join("\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) in FORBIDDEN else c for c in str(text))


def for_plotly(text: object, longest: int = LONGEST) -> str:
    """Escape for Plotly, whose strings support some tags and templates, but no entities for quotes."""
    return html.escape(plain(text, longest), quote=False).replace("%{", "&#37;{")


def for_figure(text: object) -> str:
    """Escape for Matplotlib, which parses anything between dollar signs as a formula."""
    return plain(text).replace("$", r"\$")


def in_words(units: str) -> str:
    """The unit of an array as its reader would say it; empty for plain numbers."""
    return UNITS.get(units, units)


UNITS = {
    "1": "",
    "s": "seconds",
    "B": "bytes",
    "parameter": "parameter units",
    "loss / parameter": "loss per parameter unit",
    "(loss / parameter)^2": "squared loss per parameter unit",
    "loss / parameter^2": "loss per squared parameter unit",
    "loss / output": "loss per output unit",
}
