"""A run with a row of everything, and stores made by hand."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import cases
from steps import run_steps
from torch import nn

from distcockpit.presets import full
from distcockpit.store.keys import FolderKeys
from distcockpit.store.run_store import RunStore
from distcockpit.store.schema import Group

AT = {"wall_time": 0.0, "epoch": 0.0, "batch_size": 1}


NOTHING = {"parameters": {}, "config": {}}


def run_store(path: Path | str, groups: dict[str, Group], attributes: dict[str, Any], **options: Any) -> RunStore:
    return RunStore(FolderKeys(Path(path)), options.pop("mode", "w-"), groups, NOTHING | attributes, **options)


def record(path: Path, steps: int = 4, **options: Any) -> None:
    run_steps(
        path,
        cases.initialised("mlp"),
        partial(cases.data, "mlp", "mean"),
        steps,
        loss_fn=nn.CrossEntropyLoss(),
        track=lambda step: {"epoch": step // 2},
        then=lambda step, cockpit: cockpit.log(step, accuracy=step / 10),
        **{"quantities": full(), **options},
    )
