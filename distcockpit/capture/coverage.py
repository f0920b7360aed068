"""How each parameter of a model is tracked: a table."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from distcockpit.capture.cover import Cover
from distcockpit.capture.selfcheck import SelfCheck
from distcockpit.gradients.uses import CALLS, label

if TYPE_CHECKING:
    import pandas as pd

AT_THE_END, EARLY = "at the end", "in backward"
CLOSED, WHOLE, SLOW, NOT_TRACKED = "closed form", "module run again", "slow exact fallback", "not tracked"


@dataclass(frozen=True)
class Route:
    """How one parameter is tracked.

    Args:
        parameter: Its name.
        shape: Its shape.
        route: "closed form" (every function called with it has one), "calls of functions" (some are run again on their
            own, or no tracked step has called them yet), "module run again" (the module that owns it, as a whole),
            "slow exact fallback" (a part of the model, with output gradients of one sample at a time), or "not
            tracked".
        layers: The modules that own it, or that are run again for it.
        checked: Whether its individual gradients were found to add up to the gradient from autograd. False until a
            tracked step gives it a gradient.
        when: When its individual gradients are formed: "at the end" of a step, or "in backward", where they take much
            less memory than what they follow from. Steps that check themselves form all at the end.
        why: Why it takes a slow route, or none, or is no longer exact.
    """

    parameter: str
    shape: tuple[int, ...]
    route: str
    layers: tuple[str, ...]
    checked: bool
    when: str = ""
    why: str = ""


@dataclass(frozen=True)
class Coverage:
    """A table with a row for every parameter of the model; it prints as one."""

    routes: tuple[Route, ...] = ()

    def __iter__(self) -> Iterator[Route]:
        return iter(self.routes)

    def __len__(self) -> int:
        return len(self.routes)

    def __getitem__(self, parameter: str) -> Route:
        """Return the route of a parameter.

        Raises:
            KeyError: If the model has no such parameter.
        """
        for route in self.routes:
            if route.parameter == parameter:
                return route
        raise KeyError(f"The model has no parameter {parameter!r}; it has {[r.parameter for r in self.routes][:8]}.")

    def to_dataframe(self) -> pd.DataFrame:
        """Return the table as a pandas data frame, indexed by parameter."""
        import pandas as pd  # noqa: PLC0415 - slow to import

        rows = [
            {**asdict(route), "shape": "x".join(map(str, route.shape)), "layers": ", ".join(route.layers)}
            for route in self.routes
        ]
        return pd.DataFrame(rows, columns=list(Route.__dataclass_fields__)).set_index("parameter")

    def __str__(self) -> str:
        frame = self.to_dataframe().reset_index().astype(str)
        columns = {name: [name, *frame[name]] for name in frame}
        widths = {name: max(map(len, cells)) for name, cells in columns.items()}
        lines = zip(*([cell.ljust(widths[name]) for cell in cells] for name, cells in columns.items()), strict=True)
        return "\n".join("  ".join(line).rstrip() for line in lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.to_dataframe().to_html()

    def attributes(self) -> dict[str, dict[str, Any]]:
        """Return the table in the form it is stored: by parameter."""
        return {
            r.parameter: {
                "route": r.route,
                "layers": list(r.layers),
                "checked": r.checked,
                "when": r.when,
                "why": r.why,
            }
            for r in self
        }


def coverage(model: nn.Module, cover: Cover, check: SelfCheck, early: Collection[str] = ()) -> Coverage:
    """Build the table.

    Args:
        model: The bare module.
        cover: Which modules or calls serve which parameters.
        check: What has been verified so far.
        early: The parameters whose individual gradients are formed in the backward pass.
    """
    return Coverage(tuple(_route(name, p, cover, check, early) for name, p in model.named_parameters()))


def _route(name: str, p: nn.Parameter, cover: Cover, check: SelfCheck, early: Collection[str]) -> Route:
    shape, scopes = tuple(p.shape), cover.scopes.get(name, ())
    if not scopes:
        why = "left out by include or exclude" if p.requires_grad else "frozen: requires_grad is False"
        return Route(name, shape, NOT_TRACKED, (), False, why=why)
    why = ""
    if cover.is_slow(name):
        route, why = SLOW, cover.why(name)
    elif CALLS in scopes:
        route, scopes = (CLOSED if name in check.closed else CALLS), cover.owners[name]
    else:
        route = WHOLE
    if name in check.broken:
        why = f"found not to be exact at step {check.broken[name]}"
    when = EARLY if name in early else AT_THE_END
    return Route(name, shape, route, tuple(map(label, scopes)), name not in check.not_checked, when, why)
