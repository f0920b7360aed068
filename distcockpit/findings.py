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
from distcockpit.run import noise_scale

WRONG, LOOK = "wrong", "look"
"""How sure a rule is: something is broken; or something is unusual, and may be meant."""

WINDOW = 10
"""Rows that a median is taken over: a single row is noise."""

MANY = 1 / 3
"""Share of the windows of a run from which on a finding is told."""


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


@dataclass(frozen=True)
class Rule:
    """One rule.

    Args:
        name: What it looks for.
        picture: See `Finding`.
        needs: By class of quantity, the arrays that it takes; groups of any of these are handed to it.
        source: See `Finding`.
        url: See `Finding`.
        apply: From the run, and a group, to what it tells.
    """

    name: str
    picture: str
    needs: dict[str, tuple[str, ...]]
    source: str
    url: str
    apply: Callable[[xr.DataTree, xr.Dataset], Told]


RULES: list[Rule] = []


def rule(name: str, picture: str, needs: dict[str, tuple[str, ...]], source: str, url: str = "") -> Callable[..., Any]:
    """Add a rule to `RULES`."""

    def add(apply: Callable[[xr.DataTree, xr.Dataset], Told]) -> Callable[[xr.DataTree, xr.Dataset], Told]:
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
        groups = [
            node.to_dataset()
            for name, node in run.children.items()
            if set(one.needs.get(str(node.attrs.get("quantity", name)), ["-"])) <= set(node.data_vars)
            and node.sizes.get("step")
        ]
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


NONFINITE = "Numbers are not finite: by definition; IEEE 754 has no way back from NaN."


@rule(
    "numbers that are not finite",
    "ranks",
    {"RankHealth": ("nonfinite_losses", "nonfinite_gradients", "first_nonfinite_output", "first_nonfinite_gradient")},
    NONFINITE,
)
def _nonfinite(run: xr.DataTree, group: xr.Dataset) -> Told:
    bad = (group["nonfinite_losses"].values > 0) | (group["nonfinite_gradients"].values > 0)
    rows = np.flatnonzero(bad.any(axis=1))
    if not len(rows):
        return
    first, ranks = rows[0], np.flatnonzero(bad[rows[0]])
    where = []
    for field, what in (("first_nonfinite_output", "output"), ("first_nonfinite_gradient", "output gradient")):
        names = str(group[field].attrs.get("flag_meanings", "none")).split()
        index = int(group[field].values[first, ranks[0]])
        if 0 < index < len(names):
            where.append(f"the first layer with such an {what} is {plain(names[index])}")
    told = f"; {' and '.join(where)}" if where else ""
    yield {
        "severity": WRONG,
        "title": f"NaN or infinity from step {int(group['step'][first])} on rank {_listed(ranks)}",
        "words": f"Losses or gradients are not finite at {len(rows)} of {len(bad)} tracked steps{told}. A gradient "
        f"that is "
        "not finite on one rank makes the parameters of all ranks so with the next update. Look for a logarithm or a "
        "division of 0, for half precision without loss scaling, and at the data of that rank.",
    }


@rule("losses that are not finite", "losses", {"Loss": ("loss",)}, NONFINITE)
def _nonfinite_loss(run: xr.DataTree, group: xr.Dataset) -> Told:
    rows = np.flatnonzero(~np.isfinite(group["loss"].values))
    if len(rows):
        yield {
            "severity": WRONG,
            "title": f"the loss is not finite from step {int(group['step'][rows[0]])}",
            "words": f"The pooled loss is NaN or infinite at {len(rows)} of {group.sizes['step']} tracked steps.",
        }


@rule(
    "effective step size far from 0",
    "alpha",
    {"Alpha": ("alpha", "status", "f_start")},
    "Schneider et al. 2021, section 3.1: 0 is a step to the minimum along the update, 1 one to where the loss is as "
    "high "
    "again on the other side",
    "https://arxiv.org/abs/2102.06604",
)
def _alpha(run: xr.DataTree, group: xr.Dataset) -> Told:
    fitted = group["alpha"].values[group["status"].values == 0]
    middle = _windows(fitted)
    if not len(middle):
        return
    too_far, too_short = np.mean(middle > 0.3), np.mean(middle < -0.8)
    typical = f"the median of all {len(fitted)} fitted rows is {np.median(fitted):.2g}"
    if too_far >= MANY:
        loss = group["f_start"].values
        begin, highest = np.nanmedian(loss[:WINDOW]), np.nanmax(loss[WINDOW:], initial=-np.inf)
        jumps = highest > 1.5 * begin > 0
        yield {
            "severity": WRONG if jumps else LOOK,
            "title": f"steps go too far: α is above 0.3 through {too_far:.0%} of the run",
            "words": f"Steps end beyond the minimum along their own direction; {typical}. "
            + (
                f"The loss jumps as well, to {highest:.3g} from {begin:.3g} at the start: the learning rate is too "
                f"large "
                "for this curvature. Try a third of it, or a warm-up."
                if jumps
                else "A little of it is common in runs that learn fast. If the loss stalls or jumps, a smaller "
                "learning "
                "rate is the first thing to try."
            ),
        }
    if too_short >= MANY:
        yield {
            "severity": LOOK,
            "title": f"steps are much too short: α is below -0.8 through {too_short:.0%} of the run",
            "words": f"A step covers less than a tenth of the way to the minimum along its own direction; "
            f"{typical}. Early "
            "in training that is time lost to a small learning rate or a long warm-up; late in a decay it is meant.",
        }


@rule(
    "a loss that does not fall",
    "losses",
    {"Loss": ("loss",)},
    "Goodfellow, Bengio, Courville 2016, section 11.5: a training error that stays high points to a defect",
    "https://www.deeplearningbook.org/contents/guidelines.html",
)
def _flat(run: xr.DataTree, group: xr.Dataset) -> Told:
    loss = group["loss"].values
    loss = loss[np.isfinite(loss)]
    if len(loss) < 5 * WINDOW:
        return
    begin, end = np.median(loss[:WINDOW]), np.median(loss[-WINDOW:])
    if end > begin - 0.02 * abs(begin):
        yield {
            "severity": WRONG,
            "title": f"the loss does not fall: {begin:.4g} at the start, {end:.4g} now",
            "words": f"Medians of the first and the last {WINDOW} of {len(loss)} rows. Nothing was learned, or it "
            f"was lost "
            "again: look at the learning rate, at gradients that vanish, and at what the model is given.",
        }


@rule(
    "gradients that vanish or explode with depth",
    "grad_norm gradient_geometry",
    {"GradNorm": ("grad_norm",), "GradientGeometry": ("norm",)},
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
    sizes = np.array([np.prod(shapes[names[k]]) for k in weights])
    typical = np.nanmedian(norm.values[:, weights], axis=0) / np.sqrt(sizes)
    first, last = typical[0], typical[-1]
    trend = np.corrcoef(np.arange(len(typical)), pd.Series(typical).rank())[0, 1]  # Spearman's
    ratio = first / last
    if ratio < 1e-3 and trend > 0.6 or ratio > 1e3 and trend < -0.6:
        vanish = ratio < 1
        weak, strong = (weights[0], weights[-1]) if vanish else (weights[-1], weights[0])
        yield {
            "severity": WRONG,
            "title": f"gradients {'vanish' if vanish else 'explode'} towards the input",
            "words": f"The gradient of an element of {plain(names[weights[0]])} is typically {ratio:.1g} times that of "
            f"{plain(names[weights[-1]])}, and the {len(weights)} weights follow the trend: "
            f"{plain(names[weak])} hardly learns beside {plain(names[strong])}. Saturating activations and the "
            f"scale of the "
            "initialisation are the usual causes; ReLUs, residual connections or normalisation layers the usual "
            "ways out.",
        }


@rule(
    "parameters without a gradient",
    "grad_norm gradient_geometry",
    {"GradNorm": ("grad_norm",), "GradientGeometry": ("norm",)},
    "A gradient of exactly 0 means that the loss does not depend on the parameter",
)
def _no_gradient(run: xr.DataTree, group: xr.Dataset) -> Told:
    norm = group["grad_norm" if "grad_norm" in group else "norm"]
    never = np.isfinite(norm.values).any(axis=0) & (np.nan_to_num(norm.values) == 0).all(axis=0)
    dead = [str(name) for name in norm["parameter"].values[never]]
    if dead and len(dead) < norm.sizes["parameter"] and norm.sizes["step"] >= WINDOW:
        yield {
            "severity": LOOK,
            "title": f"{len(dead)} parameters never get a gradient",
            "words": f"Their gradient is exactly 0 at all {norm.sizes['step']} tracked steps: {_some(dead)}. They "
            f"are unused, "
            "cut off by a detach, or behind units that are dead.",
        }


@rule(
    "a rank that differs",
    "ranks",
    {"RankDisagreement": ("grad_norm", "cosine", "loss")},
    "All ranks draw from one distribution (Li et al. 2020, PyTorch Distributed, section 2.2: data parallelism averages "
    "gradients of equal meaning), so that a rank is the extreme one only by chance",
    "https://arxiv.org/abs/2006.15704",
)
def _rank(run: xr.DataTree, group: xr.Dataset) -> Told:
    ranks = group.sizes["rank"]
    if ranks < 2 or group.sizes["step"] < WINDOW:
        return
    for field, what in (("loss", "loss"), ("grad_norm", "gradient norm")):
        values = group[field].values
        for rank in range(ranks):
            others = np.nanmedian(np.delete(values, rank, axis=1), axis=1)
            ratio = values[:, rank] / others
            ratio = ratio[np.isfinite(ratio)]
            if len(ratio) < WINDOW:
                continue
            typical, above = np.median(ratio), np.mean(ratio > 1)
            if typical > 2 and above >= 0.9 or ranks > 2 and typical < 0.5 and above <= 0.1:
                share = above if typical > 1 else 1 - above
                alone = "" if ranks > 2 else " With two ranks it may as well be the other one that is unusual."
                yield {
                    "severity": WRONG,
                    "title": f"rank {rank} differs: its {what} is {typical:.2g} times that of the others",
                    "words": f"The {what} on rank {rank} is {'above' if typical > 1 else 'below'} the median of the "
                    f"other "
                    f"ranks at {share:.0%} of {len(ratio)} tracked steps. Ranks differ by chance, not always in the "
                    f"same "
                    f"direction: look at what this rank reads, and how it is prepared.{alone}",
                }


@rule(
    "replicas that drift apart",
    "ranks",
    {"ReplicaDrift": ("replica_drift",)},
    "Data parallelism holds the same parameters on each rank, bit for bit (Li et al. 2020, section 2.2)",
    "https://arxiv.org/abs/2006.15704",
)
def _drift(run: xr.DataTree, group: xr.Dataset) -> Told:
    rows = np.flatnonzero(group["replica_drift"].values > 0)
    if len(rows):
        yield {
            "severity": WRONG,
            "title": f"ranks hold different parameters from step {int(group['step'][rows[0]])}",
            "words": f"At {len(rows)} of {group.sizes['step']} tracked steps parameters differ between ranks, "
            f"{int(group['replica_drift'].values.max())} at most. Something updates them by other numbers on each "
            f"rank.",
        }


@rule(
    "a rank that is slow",
    "ranks",
    {"RankHealth": ("forward_seconds", "outside_seconds")},
    "All wait for the slowest: times before the first exchange are each rank's own (Ousterhout et al. 2015, blocked "
    "time "
    "analysis)",
    "https://www.usenix.org/conference/nsdi15/technical-sessions/presentation/ousterhout",
)
def _slow(run: xr.DataTree, group: xr.Dataset) -> Told:
    own = (group["forward_seconds"] + group["outside_seconds"]).values
    ranks = own.shape[1]
    if ranks < 2 or len(own) < WINDOW:
        return
    for rank in range(ranks):
        ratio = own[:, rank] / np.nanmedian(np.delete(own, rank, axis=1), axis=1)
        if np.nanmedian(ratio) > 1.5 and np.mean(ratio > 1) >= 0.9:
            yield {
                "severity": LOOK,
                "title": f"rank {rank} is slow: {np.nanmedian(ratio):.2g} times the time of the others",
                "words": f"Forward pass and what lies outside of `track` take {np.nanmedian(own[:, rank]):.2g} s on "
                f"rank "
                f"{rank}, and all ranks wait for it. Look at its data loading, its device, and what else runs there.",
            }


@rule(
    "noise scale far from the batch size",
    "noise_scale",
    {"GradientNoiseScale": ("noise", "signal")},
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
    if not np.isfinite(scale) or 0.1 * batch <= scale <= 10 * batch:
        return
    above = scale > batch
    yield {
        "severity": LOOK,
        "title": f"the gradient noise scale is {_times(scale / batch)} the batch size",
        "words": f"In the last {last.sizes['step']} rows it is about {scale:.3g} samples, the batch has {batch:.3g}. "
        + (
            "The gradient is mostly noise: a larger batch, by more ranks or by accumulation, would save steps "
            "nearly in "
            "proportion."
            if above
            else "The gradient is nearly exact: a smaller batch would need about as many steps, and less of everything."
        ),
    }


def _times(ratio: float) -> str:
    return f"{ratio:.2g} times" if ratio >= 1 else f"1/{1 / ratio:.2g} of"


def _windows(values: NDArray[Any]) -> NDArray[Any]:
    """Medians over `WINDOW` rows each; of all, if there are fewer but at least half as many."""
    if len(values) < WINDOW // 2:
        return np.empty(0)
    return np.median(np.lib.stride_tricks.sliding_window_view(values, min(WINDOW, len(values))), axis=1)


def _listed(ranks: NDArray[Any]) -> str:
    few = ", ".join(map(str, ranks[:4]))
    return few if len(ranks) <= 4 else f"{few} and {len(ranks) - 4} more"


def _some(names: list[str]) -> str:
    few = ", ".join(map(plain, names[:4]))
    return few if len(names) <= 4 else f"{few} and {len(names) - 4} more"
