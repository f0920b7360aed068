"""The same run on each kind of store."""

from __future__ import annotations

from functools import partial
from typing import Any

import cases
from steps import run_steps
from stores import Place
from torch import nn

from distcockpit.quantities import Alpha, GradHist1d, MeanGSNR

KINDS = ("disk", "memory", "s3")


def train_at(where: Place, steps: range, **options: Any) -> None:
    run_steps(
        net=cases.initialised("mlp"),
        data=partial(cases.data, "mlp", "mean"),
        steps=steps,
        loss_fn=nn.CrossEntropyLoss(),
        then=lambda step, cockpit: cockpit.log(step, value=step / 2),
        **where.for_cockpit,
        **{"quantities": [Alpha(), MeanGSNR(), GradHist1d(bins=9)], **options},
    )
