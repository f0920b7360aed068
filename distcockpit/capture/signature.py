"""A few random-sign sums of a vector: enough to see whether two vectors are equal, without keeping either.

With independent signs, the square of ``sum_d s_d v_d`` is |v|^2 on average, so sixteen of them tell how far apart two
vectors are within a factor of about two, whatever the difference is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from distcockpit.replay.devices import sent

COUNT, WIDTH, HEIGHT = 16, 1 << 12, 1 << 14


def signature(values: Tensor, start: int = 0) -> Tensor:
    """Return sixteen sums of the elements with random signs, float64 ``[16]``; those of parts of a vector add up.

    Args:
        values: A vector or a part of it, of any shape.
        start: The index of its first element in the vector.
    """
    flat = values.detach().reshape(-1)
    kind = torch.promote_types(flat.dtype, torch.float32)
    columns, rows = _signs(flat.device)
    total = torch.zeros(COUNT, dtype=torch.float64, device=flat.device)
    head = min(-start % WIDTH, flat.numel())  # up to the next whole row
    body = (flat.numel() - head) // WIDTH * WIDTH
    at = start
    for piece in flat.split([head, body, flat.numel() - head - body]):
        if piece.numel():
            width = min(WIDTH, piece.numel())
            sums = piece.view(-1, width).to(kind) @ columns[at % WIDTH : at % WIDTH + width].to(kind)
            places = torch.arange(at // WIDTH, at // WIDTH + len(sums), device=flat.device) % HEIGHT
            total += (sums.double() * rows[places]).sum(0)
            at += piece.numel()
    return total


def norm_of(signatures: Mapping[str, Tensor]) -> float:
    """Return the joint norm of vectors, as estimated from their signatures."""
    return sum(square for (square,) in squared_norms([[each] for each in signatures.values()])) ** 0.5


def squared_norms(signatures: Sequence[Sequence[Tensor]]) -> list[list[float]]:
    """Estimated squared norms of vectors, for which the host waits once."""
    flat = [each for several in signatures for each in several]
    if not flat:
        return []
    squares = iter(torch.stack([each.to(flat[0].device) for each in flat]).square().mean(1).tolist())
    return [[next(squares) for _ in several] for several in signatures]


@cache
def _signs(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return signs by place in a row and by row, which are multiplied: ``[WIDTH, COUNT]``, ``[HEIGHT, COUNT]``."""
    generator = torch.Generator().manual_seed(0)
    columns, rows = (2 * torch.randint(2, (n, COUNT), generator=generator, device="cpu") - 1 for n in (WIDTH, HEIGHT))
    return sent(columns, device, torch.float32), sent(rows, device)
