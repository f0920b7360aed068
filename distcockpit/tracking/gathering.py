"""Whole rows of sharded parameters, or of what has their shapes, on all ranks: one bucket at a time."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from distcockpit.gradients.differences import ByRows
from distcockpit.gradients.factors import rows_of
from distcockpit.tracking.setup import Bucket, Setup


def gather(setup: Setup, bucket: Bucket, pieces: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Return the rows of a bucket; all ranks call it.

    Each rank puts its pieces where they belong among zeros, and an all-reduce adds these up. Unlike an all-gather, that
    needs no more memory than the bucket, however rows are dealt out: all rows of a bucket may be one rank's.

    Args:
        setup: What all ranks agreed on.
        bucket: The parameters, each with its rows.
        pieces: What this rank holds of each; ``None``, and NaN on all ranks, if it does not know.

    Raises:
        Exception: Whatever went wrong with a piece, once the others have what they wait for: NaN; or that there was no
            memory for that, so that this rank can exchange nothing more.
    """
    shards, whole = setup.shards, setup.every
    assert shards is not None  # else there is nothing to gather
    shapes = {name: rows_of(whole[name], rows).shape for name, rows in bucket.items()}
    in_double = any(p.dtype == torch.float64 for p in setup.parameters.values())  # the same on all ranks
    kind = torch.float64 if in_double else torch.float32
    size = sum(shape.numel() for shape in shapes.values())
    start = float("nan") if pieces is None else 0.0
    flat = setup.world.insist(lambda: torch.full((size,), start, dtype=kind, device=setup.device))
    parts = flat.split([shape.numel() for shape in shapes.values()])
    found = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
    problem: Exception | None = None
    try:
        for name, rows in bucket.items():
            piece = shards.pieces[name]
            own, place = piece.common(rows, found[name])
            if pieces is not None and piece.counts and place.numel():
                by_rows = pieces if isinstance(pieces, ByRows) else None
                place.copy_(rows_of(pieces[name], own) if by_rows is None else by_rows.rows(name, own))
    except Exception as error:
        problem = error
        flat.fill_(torch.nan)
    setup.world.all_reduce(flat)
    if problem is not None:
        raise problem
    return found
