"""What looks wrong in a run, in words: rules on the rows of a store, each with the source that it follows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray

from distcockpit.names import plain
from distcockpit.rows import few, find, in_blocks, portion
from distcockpit.run import noise_scale

WRONG, LOOK = "wrong", "look"
"""How sure a rule is: something is broken; or something is unusual, and may be meant."""

WINDOW = 10
"""Rows that a median is taken over: a single row is noise."""

MANY = 1 / 3
"""Share of the windows of a run from which on a finding is told."""

MOST_ROWS = 4000
"""Rows of wide arrays that a rule on what is typical looks at, at equal distances; rules on events look at all."""

STEP, RANKS = "step", "step rank"


@dataclass(frozen=True)
class Finding:
    """One thing that looks wrong.

    Args:
        rule: Name of the rule.
        severity: "wrong" or "look".
        title: In a few words.
        words: What was seen, why it matters, and what to do.
        picture: Names of the instruments and quantities that show it, the best first.
        source: The paper, or the reason, that the rule follows.
        url: Where to read it.
    """

    rule: str
    severity: str
    title: str
    words: str
    picture: str
    source: str
    url: str = ""

    def as_dict(self) -> dict[str, str]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Checked:
    """The findings, and which rules could not be applied.

    Args:
        findings: The surest first.
        unchecked: By rule, the quantities that it would take.
    """

    findings: list[Finding]
    unchecked: dict[str, str]


Told = Iterator[dict[str, str]]
Apply = Callable[[xr.DataTree, xr.Dataset], Told]


@dataclass(frozen=True)
class Rule:
    """One rule.

    Args:
        name: What it looks for.
        picture: See `Finding`.
        needs: By class of quantity, the arrays that it takes with their dimensions; each such group is handed to it.
        source: See `Finding`.
        url: See `Finding`.
        apply: From the run, and a group, to what it tells.
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


def check(run: xr.DataTree) -> Checked:
    """Apply all rules.

    Args:
        run: What `open_run` returns.

    Returns:
        What looks wrong, the surest first, and the rules that the run has no quantities for.
    """
    findings, unchecked = [], {}
    for one in RULES:
        groups = [group for kind, fields in one.needs.items() for group in find(run, kind, **fields).values()]
        if not groups:
            unchecked[one.name] = " or ".join(one.needs)
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")  # rows may be NaN altogether
            for group in groups:
                findings += [
                    Finding(one.name, told["severity"], told["title"], told["words"], one.picture, one.source, one.url)
                    for told in one.apply(run, group)
                ]
    return Checked(sorted(findings, key=lambda f: f.severity != WRONG), unchecked)


NONFINITE = "By definition: IEEE 754 has no way back from NaN, and no product of an infinity is a step"


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
    steps, rows = group["step"].values, group.sizes["step"]
    bad = np.zeros((rows, group.sizes["rank"]), dtype=bool)
    for field in ("nonfinite_losses", "nonfinite_gradients"):
        for start, block in in_blocks(group[field]):
            bad[start : start + len(block)] |= block > 0
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
    lasts = found[-1] >= rows - 2
    yield {
        "severity": WRONG if lasts else LOOK,
        "title": f"NaN or infinity {'from' if lasts else 'at'} step {int(steps[first])} on rank {_listed(ranks)}",
        "words": f"Losses or gradients are not finite at {len(found)} of {rows} tracked steps{told}. "
        + (
            "With the next update a gradient that is not finite on one rank makes the parameters of all ranks so. "
            "Look for "
            "a logarithm or a division of 0, for half precision without loss scaling, and at the data of that rank."
            if lasts
            else f"The last such step is {int(steps[found[-1]])}, and the run went on. Steps at which a loss scale "
            f"was too "
            "large are skipped, and are as they should be; anything else is worth a look at the data of that rank."
        ),
    }


@rule("losses that are not finite", "losses", {"Loss": {"loss": STEP}}, NONFINITE)
def _nonfinite_loss(run: xr.DataTree, group: xr.Dataset) -> Told:
    bad = ~np.isfinite(group["loss"].values)
    rows = np.flatnonzero(bad)
    if len(rows):
        lasts = bool(bad[-2:].all())
        yield {
            "severity": WRONG if lasts else LOOK,
            "title": f"the loss is not finite {'from' if lasts else 'at'} step {int(group['step'][rows[0]])}",
            "words": f"The pooled loss is NaN or infinite at {len(rows)} of {len(bad)} tracked steps; of a batch "
            f"without "
            "samples it is NaN, too.",
        }


@rule(
    "a loss that jumps or does not fall",
    "losses",
    {"Loss": {"loss": STEP}},
    "Goodfellow, Bengio, Courville 2016, section 11.5: a training error that stays high points to a defect",
    "https://www.deeplearningbook.org/contents/guidelines.html",
)
def _loss(run: xr.DataTree, group: xr.Dataset) -> Told:
    loss = group["loss"].values
    loss = loss[np.isfinite(loss)]
    if len(loss) < WINDOW:
        return
    begin, last = loss[:3].min(), loss[-WINDOW:]
    end, scatter = np.median(last), np.median(np.abs(last - np.median(last))) * 1.5
    above = np.count_nonzero(loss > 1.5 * begin)
    if begin > 0 and above >= 2:
        yield {
            "severity": WRONG,
            "title": f"the loss jumps: to {loss.max():.3g}, from {begin:.3g} at the start",
            "words": f"At {above} of {len(loss)} tracked steps it is more than 1.5 times what it was at the start; "
            f"now it is "
            f"{end:.3g}. A learning rate that is too large is the usual cause, or data that are not what the rest is.",
        }
    elif len(loss) >= 5 * WINDOW and end > begin - max(0.02 * abs(begin), 2 * scatter):
        yield {
            "severity": LOOK,
            "title": f"the loss does not fall: {begin:.4g} at the start, {end:.4g} now",
            "words": f"The median of the last {WINDOW} of {len(loss)} rows is not below the start by more than "
            f"their scatter. "
            "That is as it should be for a run that began where another one ended. Else nothing was learned: look "
            "at the "
            "learning rate, at gradients that vanish, and at what the model is given.",
        }


@rule(
    "effective step size far from 0",
    "alpha",
    {"Alpha": {"alpha": STEP, "status": STEP}},
    "Schneider et al. 2021, section 3.1: 0 is a step to the minimum along the update, 1 one to where the loss is as "
    "high "
    "again on the other side",
    "https://arxiv.org/abs/2102.06604",
)
def _alpha(run: xr.DataTree, group: xr.Dataset) -> Told:
    alpha = group["alpha"].values
    fitted = alpha[(group["status"].values == 0) & np.isfinite(alpha)]
    middle = _windows(fitted)
    if not len(middle):
        return
    typical = np.median(fitted)
    rows = f"of the {len(fitted)} rows with a fit, of {len(alpha)} in all, the median is {typical:.2g}"
    too_far, too_short, uphill = (np.mean(far) for far in (middle > 0.3, (middle >= -1) & (middle < -0.8), middle < -1))
    if too_far >= MANY and typical > 0.2:
        yield {
            "severity": LOOK,
            "title": f"steps go too far: α is above 0.3 in {too_far:.0%} of the run",
            "words": f"Steps end beyond the minimum along their own direction; {rows}. A little of it is common in "
            f"runs that "
            "learn fast. If the loss stalls or jumps, a smaller learning rate is the first thing to try.",
        }
    if too_short >= MANY and typical < -0.7:
        yield {
            "severity": LOOK,
            "title": f"steps are much too short: α is below -0.8 in {too_short:.0%} of the run",
            "words": f"A step covers less than a fifth of the way to the minimum along its own direction; {rows}. "
            f"Early in "
            "training that is time lost to a small learning rate or a long warm-up; late in a decay it is meant.",
        }
    if uphill >= MANY and typical < -1:
        yield {
            "severity": WRONG,
            "title": f"steps go uphill: α is below -1 in {uphill:.0%} of the run",
            "words": f"The minimum along the step's direction lies behind it; {rows}. Look at the sign of the "
            f"update, and at "
            "a momentum that still carries on.",
        }


@rule(
    "gradients that vanish or explode with depth",
    "grad_norm gradient_geometry",
    {"GradNorm": {"grad_norm": "step parameter"}, "GradientGeometry": {"norm": "step parameter"}},
    "Glorot and Bengio 2010, section 4.2: gradients should be of one size in all layers; Hochreiter 1991",
    "https://proceedings.mlr.press/v9/glorot10a.html",
)
def _depth(run: xr.DataTree, group: xr.Dataset) -> Told:
    norm = group["grad_norm" if "grad_norm" in group else "norm"]
    shapes = run.attrs.get("parameters", {})
    names = [str(name) for name in norm["parameter"].values]
    weights = [k for k, name in enumerate(names) if len(shapes.get(name, ())) >= 2]
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
            "title": f"gradients {'vanish' if ratio < 1 else 'explode'} towards the input",
            "words": f"The gradient of an element of {first} is typically {ratio:.1g} times that of {last}, and the "
            f"{len(weights)} weights follow the trend: {weak} hardly learns beside {strong}. Saturating activations "
            f"and the "
            "scale of the initialisation are the usual causes; ReLUs, residual connections or normalisation layers the "
            "usual ways out.",
        }


@rule(
    "parameters without a gradient",
    "grad_norm gradient_geometry",
    {"GradNorm": {"grad_norm": "step parameter"}, "GradientGeometry": {"norm": "step parameter"}},
    "By definition: a gradient of exactly 0 means that the loss does not depend on the parameter",
)
def _no_gradient(run: xr.DataTree, group: xr.Dataset) -> Told:
    norm = group["grad_norm" if "grad_norm" in group else "norm"]
    looked = portion(norm, MOST_ROWS * 250).values
    dead = [str(name) for name in norm["parameter"].values[(looked == 0).all(axis=0)]]
    if dead and len(dead) < norm.sizes["parameter"] and len(looked) >= WINDOW:
        yield {
            "severity": LOOK,
            "title": f"{len(dead)} of {norm.sizes['parameter']} parameters never get a gradient",
            "words": f"Their gradient is exactly 0 at all {len(looked)} rows that were looked at: {_some(dead)}. "
            f"They are "
            "unused, cut off by a detach, or behind units that are dead.",
        }


@rule(
    "a rank that differs",
    "ranks",
    {"RankDisagreement": {"grad_norm": RANKS, "loss": RANKS}},
    "All ranks draw from one distribution (Li et al. 2020, PyTorch Distributed, section 2.2: data parallelism averages "
    "gradients of equal meaning), so that a rank is the extreme one only by chance",
    "https://arxiv.org/abs/2006.15704",
)
def _rank(run: xr.DataTree, group: xr.Dataset) -> Told:
    for field, what in (("loss", "loss"), ("grad_norm", "gradient norm")):
        values = few(group[field], MOST_ROWS).values
        values = values[(values > 0).all(axis=1)]  # ratios of losses that may be negative mean nothing
        if len(values) < 2 * WINDOW or values.shape[1] < 2:
            continue
        ratio = values / _others(values)
        typical, above = np.median(ratio, axis=0), np.mean(ratio > 1, axis=0)
        low = (typical < 0.5) & (above <= 0.1) if values.shape[1] > 2 else np.zeros(values.shape[1], dtype=bool)
        for rank in np.flatnonzero((typical > 2) & (above >= 0.9) | low):
            side, share = ("above", above[rank]) if typical[rank] > 1 else ("below", 1 - above[rank])
            alone = "" if values.shape[1] > 2 else " With two ranks it may as well be the other one that is unusual."
            yield {
                "severity": WRONG,
                "title": f"rank {rank} differs: its {what} is {typical[rank]:.2g} times that of the others",
                "words": f"The {what} on rank {rank} is {side} the median of the ranks at {share:.0%} of "
                f"{len(values)} tracked "
                "steps. Ranks differ by chance, not always in the same direction: look at what this rank reads, and "
                "how it "
                f"is prepared.{alone}",
            }


@rule(
    "replicas that drift apart",
    "ranks",
    {"ReplicaDrift": {"replica_drift": STEP}},
    "Data parallelism holds the same parameters on each rank, bit for bit (Li et al. 2020, section 2.2)",
    "https://arxiv.org/abs/2006.15704",
)
def _drift(run: xr.DataTree, group: xr.Dataset) -> Told:
    drift = group["replica_drift"].values
    rows = np.flatnonzero(drift > 0)
    if len(rows):
        yield {
            "severity": WRONG,
            "title": f"ranks hold different parameters from step {int(group['step'][rows[0]])}",
            "words": f"At {len(rows)} of {len(drift)} tracked steps parameters differ between ranks, "
            f"{int(drift.max())} at "
            "most. Something updates them by other numbers on each rank.",
        }


@rule(
    "a rank that is slow",
    "ranks",
    {"RankHealth": {"forward_seconds": RANKS, "outside_seconds": RANKS}},
    "All wait for the slowest: times before the first exchange are each rank's own (Ousterhout et al. 2015, blocked "
    "time "
    "analysis)",
    "https://www.usenix.org/conference/nsdi15/technical-sessions/presentation/ousterhout",
)
def _slow(run: xr.DataTree, group: xr.Dataset) -> Told:
    own = few(group["forward_seconds"], MOST_ROWS).values + few(group["outside_seconds"], MOST_ROWS).values
    own = own[np.isfinite(own).all(axis=1)]
    if len(own) < 2 * WINDOW or own.shape[1] < 2:
        return
    ratio = own / _others(own)
    typical = np.median(ratio, axis=0)
    for rank in np.flatnonzero((typical > 1.5) & (np.mean(ratio > 1, axis=0) >= 0.9)):
        yield {
            "severity": LOOK,
            "title": f"rank {rank} is slow: {typical[rank]:.2g} times the time of the others",
            "words": f"Forward pass and what lies outside of `track` take {np.median(own[:, rank]):.2g} s on rank "
            f"{rank}, and "
            "all ranks wait for it. Look at its data loading, its device, and what else runs there.",
        }


@rule(
    "noise scale far from the batch size",
    "noise_scale",
    {"GradientNoiseScale": {"noise": STEP, "signal": STEP}},
    "McCandlish et al. 2018, section 2.2: far below the noise scale larger batches save steps, far above it they "
    "save next "
    "to none",
    "https://arxiv.org/abs/1812.06162",
)
def _noise(run: xr.DataTree, group: xr.Dataset) -> Told:
    last = group.isel(step=slice(-max(WINDOW, group.sizes["step"] // 4), None))
    if last.sizes["step"] < WINDOW or "batch_size" not in last.coords:
        return
    scale = float(noise_scale(last, weight=0.95)[-1])
    batch = float(np.median(last["batch_size"]))
    if not (np.isfinite(scale) and scale > 0 and batch > 0) or 0.1 * batch <= scale <= 10 * batch:
        return
    times = f"{scale / batch:.2g} times" if scale > batch else f"1/{batch / scale:.2g} of"
    yield {
        "severity": LOOK,
        "title": f"the gradient noise scale is {times} the batch size",
        "words": f"In the last {last.sizes['step']} rows it is about {scale:.3g} samples, the batch has {batch:.3g}. "
        + (
            "The gradient is mostly noise: a larger batch, by more ranks or by accumulation, would save steps "
            "nearly in "
            "proportion."
            if scale > batch
            else "The gradient is nearly exact: a smaller batch would need about as many steps, and less of everything."
        ),
    }


def _others(values: NDArray[Any]) -> NDArray[Any]:
    """What ranks are compared with, for values [steps, ranks]: the median of all, or of two ranks the other one."""
    return values[:, ::-1] if values.shape[1] == 2 else np.median(values, axis=1, keepdims=True)


def _windows(values: NDArray[Any]) -> NDArray[Any]:
    """Medians over `WINDOW` rows each; of all, if there are fewer but at least half as many."""
    if len(values) < WINDOW // 2:
        return np.empty(0)
    return pd.Series(values).rolling(min(WINDOW, len(values))).median().dropna().to_numpy()


def _listed(ranks: NDArray[Any]) -> str:
    few_ranks = ", ".join(map(str, ranks[:4]))
    return few_ranks if len(ranks) <= 4 else f"{few_ranks} and {len(ranks) - 4} more"


def _some(names: list[str]) -> str:
    shown = ", ".join(map(plain, names[:4]))
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
