"""Names and texts that come from a store, made fit to be shown; anybody may have written them."""

from __future__ import annotations

import html
import unicodedata

LONGEST = 120
FORBIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Unicode categories of characters that act instead of being seen: escape sequences, directions of writing, breaks."""


def plain(text: object, longest: int = LONGEST) -> str:
    """One line of visible characters; what is not visible is replaced, and what is too long is cut in the middle."""
    seen = visible(text)
    if len(seen) <= longest:
        return seen
    head = longest // 2
    return f"{seen[:head]}…{seen[head + 1 - longest :]}"


def visible(text: object) -> str:
    """The whole text, with something to be seen in place of each character that is not."""
    return "".join("\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) in FORBIDDEN else c for c in str(text))


def for_plotly(text: object, longest: int = LONGEST) -> str:
    """For Plotly's texts, which know some tags and templates, and no entities for quotes."""
    return html.escape(plain(text, longest), quote=False).replace("%{", "&#37;{")


def for_figure(text: object) -> str:
    """For Matplotlib, which takes what is between dollars for a formula."""
    return plain(text).replace("$", r"\$")
