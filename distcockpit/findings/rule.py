"""What a rule is and what it reports, and the few statistics that rules share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray

from distcockpit.store.names import plain

WRONG, LOOK = "wrong", "look"
"""How certain a rule is: something is broken, or something is unusual and may be intended."""

WINDOW = 10
"""Number of rows to take a median over: a single row is too noisy."""

MANY = 1 / 3
"""A finding is reported if it holds in this fraction of a run's windows."""

MOST_ROWS = 4000
"""Number of evenly spaced rows of wide arrays that rules on typical values read; rules on events read all rows."""

STEP, RANKS = "step", "step rank"


@dataclass(frozen=True)
class Finding:
    """One thing that looks wrong.

    Args:
        rule: Name of the rule.
        severity: "wrong" or "look".
        title: A short title.
        words: What was seen, why it matters, and what to do.
        picture: Names of the instruments and quantities that show it, the best first.
        page: Which plot of these, such as "loss" of the ranks.
        members: Names of the layers and parameters that it is about.
        source: The paper, or the reasoning, that the rule is based on.
        url: Where to read it.
    """

    rule: str
    severity: str
    title: str
    words: str
    picture: str
    source: str
    url: str = ""
    page: str = ""
    members: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Checked:
    """The findings, and which rules could not be applied.

    Args:
        findings: The most certain first.
        unchecked: By rule, the quantities that it would need.
    """

    findings: list[Finding]
    unchecked: dict[str, str]


Told = Iterator[dict[str, Any]]
Apply = Callable[[xr.DataTree, xr.Dataset], Told]


@dataclass(frozen=True)
class Rule:
    """One rule.

    Args:
        name: What it looks for.
        picture: See `Finding`.
        needs: By quantity class, the arrays it needs, with their dimensions; it is applied to each such group.
        source: See `Finding`.
        url: See `Finding`.
        apply: Takes the run and a group, and returns what it found.
    """

    name: str
    picture: str
    needs: dict[str, dict[str, str]]
    source: str
    url: str
    apply: Apply


RULES: list[Rule] = []


def rule(name: str, picture: str, needs: dict[str, dict[str, str]], source: str, url: str = "") -> Callable[..., Apply]:
    """Add a rule to `RULES`."""

    def add(apply: Apply) -> Apply:
        RULES.append(Rule(name, picture, needs, source, url, apply))
        return apply

    return add


def windows(values: NDArray[Any]) -> NDArray[Any]:
    """Medians over `WINDOW` rows each, or over all rows if there are fewer, but at least half as many."""
    if len(values) < WINDOW // 2:
        return np.empty(0)
    return pd.Series(values).rolling(min(WINDOW, len(values))).median().dropna().to_numpy()


def others(values: NDArray[Any]) -> NDArray[Any]:
    """What to compare ranks with, for values [steps, ranks]: the median of all or, for two ranks, the other one."""
    return values[:, ::-1] if values.shape[1] == 2 else np.median(values, axis=1, keepdims=True)


def listed(ranks: NDArray[Any]) -> str:
    """Numbers as text; if there are many, only the first few."""
    few_ranks = ", ".join(map(str, ranks[:4]))
    return few_ranks if len(ranks) <= 4 else f"{few_ranks} and {len(ranks) - 4} more"


def some(names: list[str]) -> str:
    """Names as text; if there are many, only the first few."""
    shown = ", ".join(map(plain, names[:4]))
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
