"""Rules on steps and batches: the effective step size, and the gradient noise scale."""

from __future__ import annotations

import numpy as np
import xarray as xr

from distcockpit.findings.rule import LOOK, MANY, STEP, WINDOW, WRONG, Told, rule, windows
from distcockpit.run import smoothed
from distcockpit.store.rows import find

FAR = 0.5
"""Halfway from the minimum along a step to where it gains nothing; runs that learn fast are often a little above 0."""


@rule(
    "effective step size far from 0",
    "alpha",
    {"Alpha": {"alpha": STEP, "status": STEP}},
    "Schneider et al. 2021, on α: 0 is a step to the minimum along the update, 1 a step to where the loss is "
    "equally high on the other side",
    "https://arxiv.org/abs/2102.06604",
)
def _alpha(run: xr.DataTree, group: xr.Dataset) -> Told:
    """The median of α over windows of ten rows, in a third of the run or more.

    Steps that overshoot are reported unless the loss still falls: runs that learn fast often have α above 0.

    Cause: Above 0, the learning rate or the momentum is too large for the curvature; near -1, the learning rate is too
    small, or a warm-up is too long; below -1, the update does not point downhill, as with a sign error or stale
    momentum.

    Fix: Change the learning rate by factors of 2 to 3 until the median is near or a bit below 0. A little above 0 is
    common in runs that learn well; it is no reason to stop one.
    """
    alpha = group["alpha"].values
    fitted = alpha[(group["status"].values == 0) & np.isfinite(alpha)]
    middle = windows(fitted)
    if not len(middle):
        return
    typical = np.median(fitted)
    rows = f"the median over the {len(fitted)} rows with a fit (of {len(alpha)} in all) is {typical:.2g}"
    too_far, too_short, uphill = (np.mean(far) for far in (middle > FAR, (middle >= -1) & (middle < -0.8), middle < -1))
    if too_far >= MANY and typical > 0.4 and not _still_falls(run):
        yield {
            "severity": LOOK,
            "title": f"steps overshoot: α is above {FAR:g} in {too_far:.0%} of the run",
            "words": f"Steps end beyond the minimum along their own direction; {rows}. They gain little, and at 1 "
            "nothing. The loss stalls or jumps, or was not tracked: try a smaller learning rate first.",
        }
    if too_short >= MANY and typical < -0.7:
        yield {
            "severity": LOOK,
            "title": f"steps are much too short: α is below -0.8 in {too_short:.0%} of the run",
            "words": f"A step covers less than a fifth of the way to the minimum along its own direction; {rows}. "
            "Early in training, a small learning rate or a long warm-up is wasting time; late in a decay, this is "
            "intended.",
        }
    if uphill >= MANY and typical < -1:
        yield {
            "severity": WRONG,
            "title": f"steps go uphill: α is below -1 in {uphill:.0%} of the run",
            "words": f"The minimum along the step's direction lies behind it; {rows}. Check the sign of the update, "
            "and whether momentum still carries it on.",
        }


def _still_falls(run: xr.DataTree) -> bool:
    """True if the loss of the last quarter of the rows is lower than that of the quarter before."""
    for group in find(run, "Loss", loss=STEP).values():
        loss = group["loss"].values
        quarter = len(loss) // 4
        if quarter >= 2:
            before, last = np.median(loss[-2 * quarter : -quarter]), np.median(loss[-quarter:])
            return bool(before - last > 0.05 * abs(before))
    return False


@rule(
    "noise scale far from the batch size",
    "noise_scale",
    {"GradientNoiseScale": {"noise": STEP, "signal": STEP}},
    "McCandlish et al. 2018, section 2.2: far below the noise scale, larger batches save steps; far above it, they "
    "save next to none",
    "https://arxiv.org/abs/1812.06162",
)
def _noise(run: xr.DataTree, group: xr.Dataset) -> Told:
    """The noise scale over the last quarter of the run is at least ten times the batch size, or at most a tenth of it.

    Cause: The batch was chosen for memory or by habit, not for its gradient.

    Fix: Far above the batch size: more ranks or gradient accumulation, and a larger learning rate with it. Far below: a
    smaller batch, which costs less for nearly the same step.
    """
    last = group.isel(step=slice(-max(WINDOW, group.sizes["step"] // 4), None))
    if last.sizes["step"] < WINDOW or "batch_size" not in last.coords:
        return
    # Without xarray's arithmetic, whose first use imports Dask.
    noise, signal = (float(smoothed(last[part].values, 0.95)[-1]) for part in ("noise", "signal"))
    scale = noise / signal if signal > 0 else np.nan
    batch = float(np.median(last["batch_size"]))
    if not (np.isfinite(scale) and scale > 0 and batch > 0) or 0.1 * batch <= scale <= 10 * batch:
        return
    times = f"{scale / batch:.2g} times" if scale > batch else f"1/{batch / scale:.2g} of"
    yield {
        "severity": LOOK,
        "title": f"the gradient noise scale is {times} the batch size",
        "words": f"In the last {last.sizes['step']} rows it is about {count(scale)} samples, the batch has "
        f"{count(batch)}. "
        + (
            "The gradient is mostly noise: a larger batch, through more ranks or gradient accumulation, would save "
            "steps nearly in proportion."
            if scale > batch
            else "The gradient is nearly exact: a smaller batch would need about as many steps, and less compute."
        ),
    }


def count(number: float) -> str:
    """A number of samples with three digits, and without a power of ten: 1,080."""
    rounded = float(f"{number:.3g}")
    return f"{rounded:,.0f}" if rounded >= 100 else f"{rounded:g}"
