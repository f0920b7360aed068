"""From which calls the individual gradients of each parameter are derived.

These are the calls of functions with the parameter, or with tensors made from it. If they do not separate the samples
(rows that are not samples), or do not explain the whole gradient (calls that no mode sees), a module is run as a whole
instead: the one that owns the parameter, then its parent, and so on. Running a parent again, with output gradients of
one sample at a time, is exact for everything inside it, and slow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import nn

from distcockpit.gradients.functions import Functions
from distcockpit.gradients.uses import CALLS, Layer, label

NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Cover:
    """Which modules or calls serve which parameters.

    Args:
        model: The bare module.
        own: The layers of :func:`distcockpit.capture.layers.find_layers`.
        raised: The modules that serve a parameter if calls of functions do not.
        reasons: Why, by parameter.
    """

    model: nn.Module
    own: Sequence[Layer]
    raised: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def scopes(self) -> dict[str, tuple[str, ...]]:
        """The modules that serve each tracked parameter."""
        return {full: (CALLS,) for full in self.owners} | dict(self.raised)

    @cached_property
    def _leaves(self) -> set[str]:
        return {layer.path for layer in self.own if layer.is_leaf}

    @cached_property
    def owners(self) -> dict[str, tuple[str, ...]]:
        """The modules that own each tracked parameter."""
        owners: dict[str, tuple[str, ...]] = {}
        for layer in self.own:
            for full in layer.parameters.values():
                owners[full] = (*owners.get(full, ()), layer.path)
        # One that is held by both a module and its parent is usually used by the module.
        return {full: tuple(p for p in at if not any(_is_below(q, p) for q in at)) for full, at in owners.items()}

    @cached_property
    def layers(self) -> list[Layer]:
        """All layers to hook, each with the parameters it serves."""
        modules = dict(self.model.named_modules())
        found = {layer.path: layer for layer in self.own}
        missing = {path for paths in self.scopes.values() for path in paths} - {CALLS, *found}
        every = {id(p): name for name, p in self.model.named_parameters()}
        for path in missing:
            module = modules[path]
            below = {n: every[id(p)] for n, p in module.named_parameters(remove_duplicate=False)}
            found[path] = Layer(path, module, {}, below, is_leaf=False)
        layers = [self._serving(found[path]) for path in modules if path in found]
        served = {full: self.owners[full][0] for full, paths in self.scopes.items() if CALLS in paths}
        if served:
            names = {full: full for full in served}
            layers.append(Layer(CALLS, Functions(self.model, served), names, names, is_leaf=True))
        return layers

    def _serving(self, layer: Layer) -> Layer:
        local = {full: name for name, full in reversed(list(layer.names.items()))}
        served = [full for full, paths in self.scopes.items() if layer.path in paths]
        own = {full: name for name, full in layer.parameters.items()}
        return replace(layer, parameters={own.get(full, local[full]): full for full in served})

    def is_slow(self, parameter: str) -> bool:
        """True if a module with tracked modules below it is run again for this parameter."""
        return any(path not in {CALLS, *self._leaves} for path in self.scopes[parameter])

    @property
    def slow(self) -> dict[str, str]:
        """The parameters that take a slow route, with the modules that are run again for them."""
        return {full: self._named(paths) for full, paths in self.scopes.items() if self.is_slow(full)}

    def _named(self, paths: Iterable[str]) -> str:
        modules = dict(self.model.named_modules())
        return " and ".join(f"'{label(path)}' ({type(modules[path]).__name__})" for path in paths)

    def why(self, parameter: str) -> str:
        """Return why a parameter takes a slow route."""
        return self.reasons[parameter]

    def check(self, slow_routes: bool) -> None:
        """Check whether the routes are allowed.

        Raises:
            ValueError: If there is a slow route, but slow routes are not allowed.
        """
        if slow_routes or not self.slow:
            return
        parameter, module = next(iter(self.slow.items()))
        raise ValueError(
            f"fallback='error': exact per-sample gradients of parameter '{parameter}' need a slow route, running "
            f"{module} again with one backward pass per sample, because {self.why(parameter)}. Allow it with "
            f"fallback='warn', or leave its layer out: exclude=['{parameter.rpartition('.')[0]}']. Parameters that "
            f"need a slow route: {list(self.slow)[:8]}."
        )

    def raise_for(self, reasons: Mapping[str, tuple[str, Iterable[str]]]) -> Cover:
        """Return the cover with modules in place of calls that do not serve, and parents in place of such modules.

        Args:
            reasons: By parameter: why, and the modules that do not serve it.

        Raises:
            ValueError: If there is no parent; names the parameter, the layer and a way out.
        """
        raised = dict(self.raised)
        for parameter, (why, failing) in reasons.items():
            before = self.scopes[parameter]
            if CALLS in before:
                before, failing = self.owners[parameter], ()
            scopes = {self._parent(path, parameter, why) if path in failing else path for path in before}
            raised[parameter] = _topmost(sorted(scopes))
        whys = {parameter: why for parameter, (why, _) in reasons.items()}
        return replace(self, raised=raised, reasons={**whys, **self.reasons})

    def _parent(self, path: str, parameter: str, why: str) -> str:
        modules = dict(self.model.named_modules())
        while path:
            path = path.rpartition(".")[0]
            if not isinstance(modules[path], NEVER_CALLED):
                return path
        owner = next(layer for layer in self.own if parameter in layer.parameters.values())
        why = self.reasons.get(parameter, why)
        raise ValueError(
            f"Parameter '{parameter}' of layer '{owner.path}' ({type(owner.module).__name__}): {why}. The outputs of "
            "the whole model would be the last resort for its per-sample gradients, but they do not separate the "
            f"samples or do not explain its gradient. Let the model ({type(self.model).__name__}) return predictions "
            "whose first axis is the batch and compute the loss from them alone, use the parameter inside a module "
            f"that does, or leave the layer out: exclude=['{owner.path}']. If the batch is not the first axis of the "
            "model's inputs, pass batch_dim=...; if their first tensor has no batch axis, track(step, batch_size=...)."
        )


def _topmost(paths: Iterable[str]) -> tuple[str, ...]:
    """Drop the paths that lie below others."""
    paths = tuple(paths)
    return tuple(path for path in paths if not any(_is_below(path, other) for other in paths))


def _is_below(path: str, ancestor: str) -> bool:
    return path != ancestor and (ancestor == "" or path.startswith(f"{ancestor}."))
