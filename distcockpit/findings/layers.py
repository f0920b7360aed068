"""Rules on gradients layer by layer."""

from __future__ import annotations

import numpy as np
import pandas as pd
import xarray as xr

from distcockpit.findings.rule import LOOK, MOST_ROWS, WINDOW, WRONG, Told, rule, some
from distcockpit.store.names import plain
from distcockpit.store.rows import portion

MOST_NAMED = 20
"""Parameters that a finding points at in the figure."""


@rule(
    "gradients that vanish or explode with depth",
    "grad_norm gradient_geometry",
    {"GradNorm": {"grad_norm": "step parameter"}, "GradientGeometry": {"norm": "step parameter"}},
    "Glorot and Bengio 2010, section 4.2: gradients should be of one size in all layers; Hochreiter 1991",
    "https://proceedings.mlr.press/v9/glorot10a.html",
)
def _depth(run: xr.DataTree, group: xr.Dataset) -> Told:
    """The weights are taken in the order of the model, each as the size of a typical element of its gradient.

    Cause: Saturating activations (sigmoid, tanh), an initialisation whose variance shrinks or grows with depth, or a
    deep network without residual connections.

    Fix: ReLU-like activations, a variance-preserving initialisation, residual connections, normalisation layers.
    """
    norm = group["grad_norm" if "grad_norm" in group else "norm"]
    segments = run.attrs.get("segments", ())
    shapes = (dict(segments[-1]) if segments else {}).get("parameters") or run.attrs.get("parameters", {})
    names = [str(name) for name in norm["parameter"].values]
    # In the order of the model as it is now; parameters that were added during the run have their columns at the end.
    weights = [names.index(name) for name, shape in shapes.items() if len(shape) >= 2 and name in names]
    if len(weights) < 3:
        return
    sizes = np.array([np.prod(shapes[names[k]], dtype=float) for k in weights])
    typical = np.nanmedian(portion(norm, MOST_ROWS * 250).values[:, weights], axis=0) / np.sqrt(sizes)
    ratio = typical[0] / typical[-1]
    trend = np.corrcoef(np.arange(len(typical)), pd.Series(typical).rank())[0, 1]  # Spearman's
    if (ratio < 1e-3 and trend > 0.6) or (ratio > 1e3 and trend < -0.6):
        first, last = plain(names[weights[0]]), plain(names[weights[-1]])
        weak, strong = (first, last) if ratio < 1 else (last, first)
        yield {
            "severity": WRONG,
            "members": (names[weights[0]], names[weights[-1]]),
            "title": f"gradients {'vanish' if ratio < 1 else 'explode'} towards the input",
            "words": f"The gradient of an element of {first} is typically {ratio:.1g} times that of {last}, and the "
            f"{len(weights)} weights follow the trend: {weak} hardly learns compared to {strong}. Usual causes are "
            "saturating activations and the scale of the initialisation; usual remedies are ReLUs, residual "
            "connections and normalisation layers.",
        }


@rule(
    "parameters without a gradient",
    "grad_norm gradient_geometry",
    {"GradNorm": {"grad_norm": "step parameter"}, "GradientGeometry": {"norm": "step parameter"}},
    "By definition: a gradient of exactly 0 means that the loss does not depend on the parameter",
)
def _no_gradient(run: xr.DataTree, group: xr.Dataset) -> Told:
    """The gradient is exactly 0 in every row that is read.

    Cause: The parameter is never used, a `detach` or `no_grad` cuts it off, or all units behind it are dead.

    Fix: Remove it or freeze it if that is intended. Otherwise follow the forward pass from the parameter to the loss.
    """
    norm = group["grad_norm" if "grad_norm" in group else "norm"]
    looked = portion(norm, MOST_ROWS * 250).values
    dead = [str(name) for name in norm["parameter"].values[(looked == 0).all(axis=0)]]
    if dead and len(dead) < norm.sizes["parameter"] and len(looked) >= WINDOW:
        yield {
            "severity": LOOK,
            "members": tuple(dead[:MOST_NAMED]),
            "title": f"{len(dead)} of {norm.sizes['parameter']} parameters never get a gradient",
            "words": f"Their gradient is exactly 0 in all {len(looked)} rows that were checked: {some(dead)}. They are "
            "unused, cut off by a detach, or behind dead units.",
        }
