"""Rules on the loss: non-finite numbers, and a loss that jumps or does not fall."""

from __future__ import annotations

import numpy as np
import xarray as xr

from distcockpit.findings.rule import LOOK, RANKS, STEP, WINDOW, WRONG, Told, listed, rule, windows
from distcockpit.store.names import plain
from distcockpit.store.rows import in_blocks

NONFINITE = "By definition: IEEE 754 has no way back from NaN, and no product with infinity is a valid step"


@rule(
    "numbers that are not finite",
    "ranks",
    {
        "RankHealth": {
            "nonfinite_losses": RANKS,
            "nonfinite_gradients": RANKS,
            "first_nonfinite_output": RANKS,
            "first_nonfinite_gradient": RANKS,
        }
    },
    NONFINITE,
)
def _nonfinite(run: xr.DataTree, group: xr.Dataset) -> Told:
    """Losses and gradients of each rank are looked at before they are averaged, which spreads a NaN to all ranks.

    Cause: A logarithm or a division of 0, an overflow in float16, a learning rate at which the training diverges, or a
    broken sample on one rank.

    Fix: Start with the layer and the rank that are named. Clamp what is divided by, use bfloat16 or a loss scaler, and
    check the data of that rank. If α was above 0 or the loss grew before, lower the learning rate.
    """
    steps, rows = group["step"].values, group.sizes["step"]
    bad, page = np.zeros((rows, group.sizes["rank"]), dtype=bool), ""
    for field in ("nonfinite_losses", "nonfinite_gradients"):
        for start, block in in_blocks(group[field]):
            bad[start : start + len(block)] |= block > 0
            page = field if (block > 0).any() else page
    found = np.flatnonzero(bad.any(axis=1))
    if not len(found):
        return
    first, ranks = found[0], np.flatnonzero(bad[found[0]])
    where = []
    for field, what in (("first_nonfinite_output", "output"), ("first_nonfinite_gradient", "output gradient")):
        names = str(group[field].attrs.get("flag_meanings", "none")).split(" ")
        index = int(group[field][first].values[ranks[0]])
        if 0 < index < len(names):
            where.append(f"the first layer with such an {what} is {plain(names[index])}")
    told = f"; {' and '.join(where)}" if where else ""
    lasts = bool(bad[-2:].any(axis=1).all())
    yield {
        "severity": WRONG if lasts else LOOK,
        "page": page,
        "title": f"NaN or infinity {'from' if lasts else 'at'} step {int(steps[first])} on rank {listed(ranks)}",
        "words": f"Losses or gradients are not finite at {len(found)} of {rows} tracked steps{told}. "
        + (
            "At the next update, a non-finite gradient on one rank makes the parameters of all ranks non-finite. Look "
            "for a logarithm or a division of 0, half precision without loss scaling, and bad data on that rank."
            if lasts
            else f"The last such step is {int(steps[found[-1]])}, and the run went on. Skipped steps are normal if a "
            "loss scale was too large; otherwise, check the data of that rank."
        ),
    }


@rule("losses that are not finite", "losses", {"Loss": {"loss": STEP}}, NONFINITE)
def _nonfinite_loss(run: xr.DataTree, group: xr.Dataset) -> Told:
    """The loss of the whole batch is NaN or infinite.

    Cause: As for numbers that are not finite; also a batch without samples, whose mean does not exist.

    Fix: Look at that finding first: it names the rank and the layer.
    """
    bad = ~np.isfinite(group["loss"].values)
    rows = np.flatnonzero(bad)
    if len(rows):
        lasts = bool(bad[-2:].all())
        yield {
            "severity": WRONG if lasts else LOOK,
            "title": f"the loss is not finite {'from' if lasts else 'at'} step {int(group['step'][rows[0]])}",
            "words": f"The pooled loss is NaN or infinite at {len(rows)} of {len(bad)} tracked steps; it is also NaN "
            "for a batch without samples.",
        }


@rule(
    "a loss that jumps or does not fall",
    "losses",
    {"Loss": {"loss": STEP}},
    "Goodfellow, Bengio, Courville 2016, section 11.5: a training error that stays high points to a defect",
    "https://www.deeplearningbook.org/contents/guidelines.html",
)
def _loss(run: xr.DataTree, group: xr.Dataset) -> Told:
    """The loss is compared with what it was at the start, and with its own scatter.

    Cause: If it jumps: steps that are too large, or data unlike the rest. If it does not fall: a learning rate that is
    far too small, gradients that vanish, labels that do not belong to their inputs, or a run that continues a trained
    model.

    Fix: Look at α. Above 0.5, lower the learning rate; near -1, raise it. Then check whether the model can fit one
    batch.
    """
    loss = group["loss"].values
    loss = loss[np.isfinite(loss)]
    if len(loss) < WINDOW:
        return
    begin, soon, last = loss[0], loss[:3].min(), loss[-WINDOW:]
    end, scatter = np.median(last), np.median(np.abs(last - np.median(last))) * 1.5
    high = 1.5 * begin
    above, stays = np.count_nonzero(loss > high), bool((windows(loss) > high).any())
    if begin > 0 and above >= 2:
        yield {
            "severity": WRONG if stays else LOOK,
            "title": f"the loss jumps to {loss.max():.3g}, from {begin:.3g} at the start",
            "words": f"At {above} of {len(loss)} tracked steps it is more than 1.5 times what it was at the start"
            f"{', and stays there for a while' if stays else ', a few at a time'}; now it is {end:.3g}. The usual "
            "causes are a learning rate that is too large, or data unlike the rest.",
        }
    # An output bias is learned within three rows, and nothing more; a run that learned much in them is well.
    elif len(loss) >= 5 * WINDOW and end > max(soon - max(0.02 * abs(soon), 2 * scatter), begin - 0.1 * abs(begin)):
        yield {
            "severity": LOOK,
            "title": f"the loss does not fall: {soon:.4g} at the start, {end:.4g} now",
            "words": f"The median of the last {WINDOW} of {len(loss)} rows is not below the start by more than their "
            "scatter. That is expected of a run that continues another one. Otherwise nothing was learned: check the "
            "learning rate, whether gradients vanish, and the inputs of the model.",
        }
