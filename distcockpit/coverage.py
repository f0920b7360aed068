"""How each parameter of a model is tracked: a table."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from distcockpit.cover import Cover
from distcockpit.gradients.functions import CALLS
from distcockpit.quantities.batch import label

if TYPE_CHECKING:
    import pandas as pd

SLOW, NOT_TRACKED = "slow exact fallback", "not tracked"


@dataclass(frozen=True)
class Route:
    """How one parameter is tracked.

    Args:
        parameter: Its name.
        shape: Its shape.
        route: "closed form", "BackPACK blocks", "calls of functions" (by closed forms, or run again by themselves),
            "generic blocks" (its module is run again as a whole), "slow exact fallback" (a part of the model is, with
            output gradients of one sample at a time), or "not tracked".
        layers: The modules whose calls tell its individual gradients; or "calls of functions".
        checked: Whether they were found to add up to the gradient that autograd gave the parameter. Not yet, as long as
            no tracked step gave it one.
        why: Why it takes a slow route, or none, or is not exact any more.
    """

    parameter: str
    shape: tuple[int, ...]
    route: str
    layers: tuple[str, ...]
    checked: bool
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
        """The route of a parameter.

        Raises:
            KeyError: If the model has no such parameter.
        """
        for route in self.routes:
            if route.parameter == parameter:
                return route
        raise KeyError(f"The model has no parameter {parameter!r}; it has {[r.parameter for r in self.routes][:8]}.")

    def to_dataframe(self) -> pd.DataFrame:
        """The table as a pandas data frame, indexed by parameter."""
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
        """The table for the store: by parameter."""
        return {
            r.parameter: {"route": r.route, "layers": list(r.layers), "checked": r.checked, "why": r.why} for r in self
        }


def coverage(
    model: nn.Module,
    cover: Cover,
    unchecked: Collection[str] | None = None,
    broken: Mapping[str, int] | None = None,
) -> Coverage:
    """The table.

    Args:
        model: The bare module.
        cover: Which modules serve which parameters.
        unchecked: The parameters whose gradients were not explained yet; ``None`` for all.
        broken: Those that are not explained any more, with the step at which that was seen.
    """
    rules = {layer.path: SLOW if not layer.is_leaf else layer.rule.description for layer in cover.layers}
    rules[CALLS] = CALLS
    routes = []
    for name, p in model.named_parameters():
        shape, scopes = tuple(p.shape), cover.scopes.get(name, ())
        if not scopes:
            why = "left out by include or exclude" if p.requires_grad else "frozen: requires_grad is False"
            routes.append(Route(name, shape, NOT_TRACKED, (), False, why))
            continue
        kinds = sorted({rules[path] for path in scopes}, key=lambda kind: kind != SLOW)
        route = SLOW if SLOW in kinds else ", ".join(kinds)
        why = cover.why(name) if SLOW in kinds else ""
        if broken and name in broken:
            why = f"not exact any more, as was seen at step {broken[name]}"
        routes.append(
            Route(name, shape, route, tuple(map(label, scopes)), unchecked is not None and name not in unchecked, why)
        )
    return Coverage(tuple(routes))
