"""The page as one self-contained HTML file: data, code and the plotting library are inside."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files
from typing import Any

from jinja2 import Environment
from markupsafe import Markup
from plotly.offline import get_plotlyjs


def html(content: dict[str, Any]) -> str:
    """The page.

    Args:
        content: What `distcockpit.view.page.content.content` returns; with ``refresh_seconds`` and ``token``, the page
            polls its server for updates.
    """
    here = files("distcockpit.view.page")
    library, script = get_plotlyjs(), (here / "page.js").read_text("utf-8")
    data = _in_script(json.dumps(content, allow_nan=False))
    policy = "; ".join([
        "default-src 'none'",
        # Names come from an untrusted store: only these scripts may run, whatever a name contains.
        f"script-src {_hash(library)} {_hash(script)}",
        "style-src 'unsafe-inline'",  # Plotly's styles are set by its code
        "img-src data: blob:",
        "connect-src 'self'" if content.get("refresh_seconds") else "connect-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
    ])
    template = Environment(autoescape=True).from_string((here / "page.html").read_text("utf-8"))
    return template.render(
        title=content["title"],
        policy=policy,
        style=Markup((here / "page.css").read_text("utf-8")),
        content=Markup(data),
        library=Markup(library),
        script=Markup(script),
    )


def _in_script(data: str) -> str:
    """JSON that cannot close the script element it is in."""
    return data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
