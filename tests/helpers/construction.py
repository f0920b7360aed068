"""A cockpit constructed with one argument changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
from torch import nn

from distcockpit import DistCockpit
from distcockpit.quantities import MeanGSNR

CE = nn.CrossEntropyLoss


DEFAULT_LOSS = CE()


def construct(path: Path, model: Any = None, loss_fn: Any = DEFAULT_LOSS, **options: Any) -> DistCockpit:
    return DistCockpit(cases.initialised("mlp") if model is None else model, loss_fn, store=path / "run", **options)


first_order = [MeanGSNR()]
