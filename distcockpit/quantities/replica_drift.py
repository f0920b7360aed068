"""Check whether all ranks still hold the same parameters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from distcockpit.quantities.base import Quantity, Sums, Totals
from distcockpit.quantities.batch import LocalBatch, Model
from distcockpit.store.schema import Field, Group, Row

BITS = 53  # that survive a sum in float64
BLOCK = 1 << 16
SHOWN = 3  # parameters that a notice names
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class ReplicaDrift(Quantity):
    """Which parameters are not bit-for-bit identical on all ranks; all parameters of the model, tracked or not.

    Each rank sends a 53-bit digest per parameter; ``differs`` marks the ranks whose digest differs from that of the
    majority (or of the lowest rank, if there is no majority). Data-parallel training keeps replicas identical, so drift
    means that something steps, initialises or overwrites parameters on one rank only. Two different tensors have the
    same digest with a probability of about 1e-16. If parameters are sharded, replicas of a piece are compared (HSDP).
    """

    source: ClassVar[str] = "distcockpit"

    def group(self, model: Model) -> Group:
        """How many parameters drifted, and where."""
        fields = {
            "replica_drift": Field((), "parameters that differ between ranks", "parameters", dtype="int64"),
            "differs": Field(("parameter", "rank"), "1 where a rank differs from the majority", dtype="int8"),
        }
        labels = list(model.every_parameter)
        return Group(fields, {"parameter": labels, "rank": model.world_size})

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """This rank's digests; a single rank cannot drift."""
        if batch.world_size == 1:
            return {"digests": batch.slot(torch.zeros(len(batch.every_parameter), device="cpu"))}
        sums = {"digests": batch.slot(batch.vector([digest(p) for p in batch.every_parameter.values()]))}
        if batch.pieces is not None:
            sums["pieces"] = batch.slot(batch.vector([float(piece.number) for piece in batch.pieces.values()]))
        return sums

    def finalize(self, totals: Totals, n: int) -> Row:
        """Compare each digest with the most frequent one of its parameter, or of its piece."""
        digests = totals["digests"].T
        pieces = totals["pieces"].T if "pieces" in totals else np.zeros_like(digests)
        differs = np.zeros(digests.shape, np.int8)
        for k in np.flatnonzero((digests != digests[:, :1]).any(1)):
            for piece in np.unique(pieces[k]):
                holds = pieces[k] == piece
                differs[k, holds] = digests[k, holds] != _majority(digests[k, holds])
        return {"replica_drift": int(differs.any(1).sum()), "differs": differs}

    def notice(self, row: Row, model: Model) -> str | None:
        """The first parameters that differ, and on which ranks."""
        differs = row["differs"]
        drifted = np.flatnonzero(differs.any(1))
        if not len(drifted):
            return None
        shown = [
            f"'{model.every_parameter[k]}' (ranks {', '.join(map(str, np.flatnonzero(differs[k])))})"
            for k in drifted[:SHOWN]
        ]
        more = f" and {len(drifted) - SHOWN} more" if len(drifted) > SHOWN else ""
        return f"the ranks hold different parameters: {', '.join(shown)}{more} differ from the majority."


def _majority(digests: np.ndarray) -> float:
    values, first, counts = np.unique(digests, return_index=True, return_counts=True)
    return values[min(range(len(values)), key=lambda k: (-counts[k], first[k]))]


def digest(tensor: Tensor) -> Tensor:
    """A number below 2^53, as float64, that differs where the bits of ``tensor`` do; on its device.

    The bit patterns of a block, each times its own odd number, are summed modulo 2^64, and then the blocks likewise:
    changing one element always changes the sum. The upper bits of the mixed sum are kept.
    """
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    bits = real.contiguous().view(-1).view(INTEGERS[real.element_size()])
    odd = _odd(tensor.device)
    blocks = [(block.to(torch.int64) * odd[: block.numel()]).sum() for block in bits.split(BLOCK)]
    sums = torch.stack(blocks) if blocks else odd[:0]
    total = (sums * (_mix(torch.arange(len(sums), device=tensor.device)) | 1)).sum()
    return ((_mix(total) >> (64 - BITS)) & ((1 << BITS) - 1)).double()


@cache
def _odd(device: torch.device) -> Tensor:
    return _mix(torch.arange(BLOCK, device=device)) | 1


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64, in wrapping int64 arithmetic."""
    x = x + -7046029254386353131
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * -4658895280553007687
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * -7723592293110705685
    return x ^ ((x >> 31) & ((1 << 33) - 1))
