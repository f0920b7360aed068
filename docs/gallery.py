"""The gallery: a page for each quantity, and one of all findings, drawn from runs that are trained for it."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from distcockpit import open_run, quantities
from distcockpit.findings import RULES, check
from distcockpit.instruments import INSTRUMENTS, draw, panel
from distcockpit.quantities import Quantity

HERE = Path(__file__).parent
RUNS = HERE / "_runs"
EXAMPLES = HERE.parent / "examples"
SHOWN = {
    "healthy": "healthy: a small network that learns handwritten digits on 4 ranks",
    "learning_rate": "sick: the same with a learning rate twenty times too large",
    "one_rank": "sick: one rank reads images that are not normalised",
    "vanishing": "sick: six hidden layers of sigmoids",
    "digits": "the digits example with all quantities of the preset `full`",
    "layers": "the digits example with the preset `layers`",
}
SICK = {
    "RankDisagreement": "one_rank",
    "RankHealth": "one_rank",
    "ReplicaDrift": "one_rank",
    "GradNorm": "vanishing",
    "Loss": "vanishing",
    "UpdateSize": "vanishing",
}
"""Which sick run shows it best; by default the one with the learning rate."""


def write_gallery(app: Any) -> None:
    """Train what is not there yet, and write the pages."""
    _train()
    folder = HERE / "gallery"
    folder.mkdir(exist_ok=True)
    classes = {
        name: kind
        for name, kind in vars(quantities).items()
        if inspect.isclass(kind) and issubclass(kind, Quantity) and kind is not Quantity
    }
    runs = {name: open_run(RUNS / f"{name}.zarr") for name in SHOWN}
    for name, kind in sorted(classes.items()):
        _write(folder / f"{name}.rst", _page(name, kind, runs, folder))
    _write(HERE / "findings.rst", _findings(runs, folder))
    entries = "\n".join(f"   gallery/{name}" for name in sorted(classes))
    text = (
        "Gallery\n=======\n\nA page for each quantity: its formula and source, a healthy run and a sick one; "
        f"and one of :doc:`all findings <findings>`, with causes and fixes.\n\n"
        f".. toctree::\n   :maxdepth: 1\n\n{entries}\n"
    )
    _write(HERE / "gallery.rst", text)


def _train() -> None:
    many = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    RUNS.mkdir(exist_ok=True)
    if not (RUNS / "vanishing.zarr").exists():
        bugs = [*many, str(EXAMPLES / "three_bugs.py"), "--folder", str(RUNS)]
        with (RUNS / "three_bugs.txt").open("w") as said:
            subprocess.run(bugs, check=True, env=environment, stdout=said)
    for name, preset in (("digits", "full"), ("layers", "layers")):
        if not (RUNS / f"{name}.zarr").exists():
            digits = [*many, str(EXAMPLES / "digits.py"), "--quantities", preset, "--every", "5", "--steps", "150"]
            subprocess.run(
                [*digits, "--store", str(RUNS / f"{name}.zarr")], check=True, env=environment, capture_output=True
            )


def _page(name: str, kind: type[Quantity], runs: dict[str, Any], folder: Path) -> str:
    parts = [name, "=" * len(name), "", f".. autoclass:: distcockpit.quantities.{name}", ""]
    for run in ("healthy", SICK.get(name, "learning_rate"), "digits", "layers"):
        if run in ("digits", "layers") and any(".. figure::" in part for part in parts):
            continue
        target = folder / f"{name}_{run}.png"
        if _draw(name, runs[run], target):
            parts += [f".. figure:: {target.name}", f"   :alt: {name}, {run}", "", f"   {SHOWN[run]}", ""]
    reads = [one for one in INSTRUMENTS.values() if name in one.needs]
    if reads:
        parts += [
            "How to read it",
            "--------------",
            "",
            *(" ".join((one.__doc__ or "").split()) + "\n" for one in reads),
        ]
    return "\n".join(parts) + "\n"


def _draw(name: str, run: Any, target: Path) -> bool:
    """Draw the plot that shows a quantity; False if the run has none."""
    wanted = [one.name for one in INSTRUMENTS.values() if name in one.needs]
    groups = [group for group, node in run.children.items() if node.attrs.get("quantity") == name]
    if not groups:
        return False
    places = {place.name: place for place in panel(run)}
    found = [p for n, p in places.items() if n.split("-")[0] in wanted or n in [f"more-{g}" for g in groups]]
    if not found:
        return False
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    draw(figure.add_subplot(), found[-1].picture)
    figure.savefig(target, dpi=110)
    return True


def _findings(runs: dict[str, Any], folder: Path) -> str:
    """A section for each rule: what it looks at, causes and fixes, and how it looks in a run of the gallery."""
    parts = [
        "Findings", "========", "",
        "What `distcockpit info` and the page say, and what to do about it. A finding is a question, not a verdict: a "
        "rule with a source held on the rows that it names.", "",
    ]  # fmt: skip
    parts += [
        "Quantities without a number", "---------------------------", "",
        "Nothing was tracked, or quantities are NaN in the newest rows: what the run noticed says why, such as batch "
        "norm in training mode, or a loss that is not a sum over samples.", "",
    ]  # fmt: skip
    found = {name: check(run).findings for name, run in runs.items()}
    for k, rule in enumerate(RULES):
        source = f"`{rule.source} <{rule.url}>`__" if rule.url else rule.source
        told = re.sub("^(Cause|Fix):", r"**\1:**", inspect.getdoc(rule.apply) or "", flags=re.MULTILINE)
        parts += [rule.name.capitalize(), "-" * len(rule.name), "", told, ""]
        parts += [f"Needs {' or '.join(rule.needs)}. Source: {source}.", ""]
        shown = [(run, one) for run in SHOWN for one in found[run] if one.rule == rule.name]
        for run, one in shown[:1]:
            parts += [f"    **{one.severity}: {one.title}.** {one.words}", ""]
            target = folder / f"finding_{k}.png"
            if any(_draw(name, runs[run], target) for name in rule.needs if runs[run].children):
                parts += [f".. figure:: gallery/{target.name}", f"   :alt: {rule.name}", "", f"   {SHOWN[run]}", ""]
    return "\n".join(parts)


def _write(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
