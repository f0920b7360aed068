"""Sphinx: ``python -m sphinx -W docs site``. The gallery trains four small runs and draws them."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from gallery import write_gallery  # noqa: E402

project = "distcockpit"
author = copyright = "The distcockpit authors"
release = importlib.metadata.version("distcockpit")
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "sphinx_click",
]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
default_role = "literal"
html_theme = "furo"
html_title = "distcockpit"
exclude_patterns = ["_runs"]
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_use_ivar = True


def to_rst(app: Any, what: str, name: str, object_: Any, options: Any, lines: list[str]) -> None:
    """Turn formulas between dollar signs, as docstrings have them, into reStructuredText."""
    text = "\n".join(lines)
    text = re.sub(r"\$\$(.+?)\$\$", lambda m: ".. math::\n\n   " + " ".join(m[1].split()) + "\n", text, flags=re.DOTALL)
    lines[:] = re.sub(r"(?<![\\$`])\$([^$\n]+)\$", r":math:`\1`", text).split("\n")


def setup(app: Any) -> None:
    """Connect the above."""
    app.connect("autodoc-process-docstring", to_rst)
    app.connect("builder-inited", write_gallery)
