"""Named selections of quantities; each is a function that returns a list, to be extended with ``+``."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable

from distcockpit import quantities as q
from distcockpit.schedules import Schedule, every

Preset = Callable[[Schedule | None], list[q.Quantity]]


def _distributed(schedule: Schedule | None) -> list[q.Quantity]:
    """The quantities that compare ranks; cheap."""
    kinds = (q.GradientNoiseScale, q.RankDisagreement, q.RankHealth, q.ReplicaDrift)
    return [kind(schedule=schedule) for kind in kinds]


def _wished(preset: Preset) -> Preset:
    """Make the quantities of a preset optional: they are tracked where possible."""

    @functools.wraps(preset)
    def wished(schedule: Schedule | None = None) -> list[q.Quantity]:
        return [dataclasses.replace(quantity, required=False) for quantity in preset(schedule)]

    return wished


@_wished
def economy(schedule: Schedule | None = None) -> list[q.Quantity]:
    """Cockpit's economy preset (first order, a few sums per layer), plus quantities that compare ranks."""
    return [
        q.Alpha(schedule=schedule),
        q.Distance(schedule=schedule),
        q.GradHist1d(schedule=schedule),
        q.GradNorm(schedule=schedule),
        q.InnerTest(schedule=schedule),
        q.Loss(schedule=schedule),
        q.NormTest(schedule=schedule),
        q.OrthoTest(schedule=schedule),
        q.UpdateSize(schedule=schedule),
        *_distributed(schedule),
    ]


@_wished
def business(schedule: Schedule | None = None) -> list[q.Quantity]:
    """Economy plus the diagonal of the curvature."""
    return [*economy(schedule), q.TICDiag(schedule=schedule), q.HessTrace(schedule=schedule)]


@_wished
def full(schedule: Schedule | None = None) -> list[q.Quantity]:
    """Business plus the largest eigenvalue of the Hessian and the two-dimensional histogram."""
    return [*business(schedule), q.HessMaxEV(schedule=schedule), q.GradHist2d(schedule=schedule)]


@_wished
def layers(schedule: Schedule | None = None) -> list[q.Quantity]:
    """Layer by layer: outputs, parameters, gradients, updates; condition numbers every 100th step by default."""
    return [
        q.OutputNorm(schedule=schedule),
        q.OutputActivation(schedule=schedule),
        q.OutputGradientGeometry(schedule=schedule),
        q.ParameterNorm(schedule=schedule),
        q.ParameterCondition(schedule=schedule or every(100)),
        q.GradientGeometry(schedule=schedule),
        q.GradientActivation(schedule=schedule),
        q.UpdateGeometry(schedule=schedule),
    ]


PRESETS = {"economy": economy, "business": business, "full": full, "layers": layers}


def preset(name: str) -> list[q.Quantity]:
    """The preset of that name.

    Raises:
        ValueError: If there is none.
    """
    if name not in PRESETS:
        kinds = {each.lower(): each for each in q.__all__ if issubclass(getattr(q, each), q.Quantity)}
        meant = difflib.get_close_matches(name.lower().replace("_", ""), [*PRESETS, *kinds], 1)
        meant = [kinds.get(each, each) for each in meant]
        hint = f" Did you mean {meant[0]!r}?" if meant else ""
        if meant and meant[0] not in PRESETS:
            hint = f" Did you mean the quantity {meant[0]}? Pass [{meant[0]}()], from distcockpit.quantities."
        raise ValueError(
            f"quantities={name!r}: must be one of {list(PRESETS)}, or a list of these and of quantities.{hint}"
        )
    return PRESETS[name](None)
