"""The distribution of individual gradient elements over time."""

from __future__ import annotations

import numpy as np
import xarray as xr

from distcockpit.instruments.data import MOST_COLUMNS, edges_of, named
from distcockpit.instruments.instrument import instrument
from distcockpit.instruments.picture import Heat, Numbers, Picture
from distcockpit.store.rows import few


@instrument("gradients", GradHist1d={"counts": "step bin", "edges": "step edge"})
def grad_hist_1d(run: xr.DataTree, groups: dict[str, xr.Dataset]) -> Picture:
    """Counts of gradient elements, one column per step, coloured on a log scale.

    What was beyond the range is in its last bins. Where the range was adapted, counts are shared out over cells of
    equal size. Schneider et al. 2021, arXiv:2102.06604, section 3.2.
    """
    (node,) = groups.values()
    rows = few(node["counts"], MOST_COLUMNS)
    counts, edges = rows.values, few(node["edges"], MOST_COLUMNS).values
    if (edges != edges[-1]).any():
        edges, counts = _on_one_grid(edges, counts)
    else:
        edges = edges[-1]
    total = node["counts"].sizes["step"]
    note = "" if len(counts) == total else f"{len(counts)} of {total} rows, evenly spaced"
    cells = Heat(edges_of(rows["step"].values), edges, counts.T, named(node["counts"], "elements"), log=True)
    return Picture(
        "individual gradient elements", named(node["edges"], "value of a gradient element"), [cells], note=note
    )


def _on_one_grid(edges: Numbers, counts: Numbers) -> tuple[Numbers, Numbers]:
    """Counts [rows, bins] of rows with different edges, on common edges; as if spread evenly within each bin."""
    finite = np.asarray(np.isfinite(edges).all(axis=1))
    if not finite.any():
        return np.array([0.0, 1.0]), np.full((len(counts), 1), np.nan)
    common = np.linspace(edges[finite].min(), edges[finite].max(), counts.shape[1] + 1)
    below = np.concatenate([np.zeros((len(counts), 1)), counts.cumsum(axis=1)], axis=1)
    rows = [
        np.diff(np.interp(common, e, b)) if ok else np.full(len(common) - 1, np.nan)
        for e, b, ok in zip(edges, below, finite.tolist(), strict=True)
    ]
    return common, np.array(rows)
