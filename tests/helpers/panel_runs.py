"""Runs of a panel on batches that are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import xarray as xr
from steps import run_steps
from torch import Tensor, nn

from distcockpit import quantities as q


def track_batches(
    path: Path, net: nn.Module, batches: list[tuple[Tensor, Tensor]], chosen: list[q.Quantity], **options: Any
) -> xr.DataTree:
    """Train for a step per batch, as a world of one."""
    options = {"loss_fn": nn.CrossEntropyLoss(), "optimizer": torch.optim.SGD(net.parameters(), lr=0.1), **options}
    return run_steps(path, net, batches.__getitem__, len(batches), quantities=chosen, **options).run


def meaning(array: xr.DataArray) -> list[str]:
    words = array.attrs["flag_meanings"].split()
    return [words[int(code)] for code in array.values.ravel()]
