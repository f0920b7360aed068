"""Rules that compare ranks: their data, their parameters, their time."""

from __future__ import annotations

import numpy as np
import xarray as xr

from distcockpit.findings.rule import LOOK, MOST_ROWS, RANKS, STEP, WINDOW, WRONG, Told, others, rule
from distcockpit.store.rows import few


@rule(
    "a rank that differs",
    "ranks",
    {"RankDisagreement": {"grad_norm": RANKS, "loss": RANKS}},
    "All ranks draw from one distribution (Li et al. 2020, PyTorch Distributed, section 2.2: data parallelism averages "
    "gradients with the same meaning), so a rank is the extreme one only by chance",
    "https://arxiv.org/abs/2006.15704",
)
def _rank(run: xr.DataTree, group: xr.Dataset) -> Told:
    """A rank's loss or gradient norm is above twice, or below half, the median of the ranks at nine of ten steps.

    Cause: This rank reads other data (a shard that is not shuffled, a missing normalisation, another augmentation), or
    its model is in another mode.

    Fix: Compare a batch of this rank with one of another rank: shapes, means, labels.
    """
    for field, what in (("loss", "loss"), ("grad_norm", "gradient norm")):
        values = few(group[field], MOST_ROWS).values
        values = values[(values > 0).all(axis=1)]  # ratios of losses that may be negative mean nothing
        if len(values) < 2 * WINDOW or values.shape[1] < 2:
            continue
        ratio = values / others(values)
        typical, above = np.median(ratio, axis=0), np.mean(ratio > 1, axis=0)
        low = (typical < 0.5) & (above <= 0.1) if values.shape[1] > 2 else np.zeros(values.shape[1], dtype=bool)
        for rank in np.flatnonzero((typical > 2) & (above >= 0.9) | low):
            side, share = ("above", above[rank]) if typical[rank] > 1 else ("below", 1 - above[rank])
            alone = (
                "" if values.shape[1] > 2 else " With two ranks, it may just as well be the other one that is unusual."
            )
            yield {
                "severity": WRONG,
                "page": field,
                "title": f"rank {rank} differs: its {what} is {typical[rank]:.2g} times that of the others",
                "words": f"The {what} on rank {rank} is {side} the median of the ranks at {share:.0%} of "
                f"{len(values)} tracked steps. Ranks differ by chance, but not always in the same direction: check "
                f"what data this rank reads, and how it is prepared.{alone}",
            }


@rule(
    "replicas that drift apart",
    "ranks",
    {"ReplicaDrift": {"replica_drift": STEP}},
    "Data parallelism keeps the same parameters on each rank, bit for bit (Li et al. 2020, section 2.2)",
    "https://arxiv.org/abs/2006.15704",
)
def _drift(run: xr.DataTree, group: xr.Dataset) -> Told:
    """Parameters are compared bit for bit.

    Cause: Something updates them differently: a seed that differs and no DDP around a part of the model, an optimizer
    step that one rank skips, parameters that are changed by hand on rank 0.

    Fix: Wrap the whole model in DDP, and take every decision that changes parameters on all ranks alike.
    """
    drift = group["replica_drift"].values
    rows = np.flatnonzero(drift > 0)
    if len(rows):
        yield {
            "severity": WRONG,
            "page": "differs",
            "title": f"ranks hold different parameters from step {int(group['step'][rows[0]])}",
            "words": f"At {len(rows)} of {len(drift)} tracked steps, parameters differ between ranks, "
            f"{int(drift.max())} at most. Something updates them differently on each rank.",
        }


@rule(
    "a rank that is slow",
    "ranks",
    {"RankHealth": {"forward_seconds": RANKS, "outside_seconds": RANKS}},
    "All ranks wait for the slowest: times before the first exchange are each rank's own (Ousterhout et al. 2015, "
    "blocked time analysis)",
    "https://www.usenix.org/conference/nsdi15/technical-sessions/presentation/ousterhout",
)
def _slow(run: xr.DataTree, group: xr.Dataset) -> Told:
    """The forward pass and what happens outside of `track` are a rank's own time; the backward pass waits for others.

    Cause: Its data loading, a throttled or shared device, another process on that machine.

    Fix: Look at the machine of this rank first. Then compare the time of its data loader with that of others.
    """
    own = few(group["forward_seconds"], MOST_ROWS).values + few(group["outside_seconds"], MOST_ROWS).values
    own = own[np.isfinite(own).all(axis=1)]
    if len(own) < 2 * WINDOW or own.shape[1] < 2:
        return
    ratio = own / others(own)
    typical = np.median(ratio, axis=0)
    for rank in np.flatnonzero((typical > 1.5) & (np.mean(ratio > 1, axis=0) >= 0.9)):
        yield {
            "severity": LOOK,
            "page": "forward_seconds",
            "title": f"rank {rank} is slow: {typical[rank]:.2g} times the time of the others",
            "words": f"The forward pass and everything outside of `track` take {np.median(own[:, rank]):.2g} s on rank "
            f"{rank}, and all ranks wait for it. Check its data loading, its device, and what else runs there.",
        }
