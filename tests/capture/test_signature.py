"""Random-sign sums: those of parts add up, and their squares estimate the norm of what differs."""

from __future__ import annotations

import pytest
import torch

from distcockpit.capture.signature import COUNT, WIDTH, norm_of, signature


@pytest.mark.parametrize("cuts", [[1], [100, 5000], [WIDTH, 2 * WIDTH], [7, WIDTH + 3, 200_000]], ids=str)
def test_parts_add_up(cuts: list[int]) -> None:
    values = torch.randn(1000, 333, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parts = zip(values.flatten().tensor_split(cuts), [0, *cuts], strict=True)
    torch.testing.assert_close(sum(signature(part, start) for part, start in parts), signature(values))


@pytest.mark.parametrize("shape", [(), (1,), (50,), (3, WIDTH), (600, 700)], ids=str)
def test_it_estimates_the_norm(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    ratios = []
    for _ in range(20):
        values = torch.randn(shape, generator=generator)
        ratios.append(norm_of({"v": signature(values)}) / float(values.norm()))
    assert 0.3 < min(ratios) and max(ratios) < 2.5
    assert 0.8 < sum(ratio**2 for ratio in ratios) / len(ratios) < 1.25


def test_a_single_element_shows() -> None:
    values = torch.randn(3 * WIDTH + 5)
    other = values.clone()
    other[WIDTH + 2] += 3.0
    apart = signature(values) - signature(other)
    assert apart.shape == (COUNT,) and norm_of({"v": apart}) == pytest.approx(3.0, rel=1e-4)
