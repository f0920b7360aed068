"""Modules around modules."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def wrappers(module: nn.Module) -> list[nn.Module]:
    """Return a module and what it wraps, outermost first: DistributedDataParallel, torch.compile."""
    found = [module]
    while True:
        outer = found[-1]
        if isinstance(outer, DistributedDataParallel):
            found.append(outer.module)
        elif type(outer).__name__ == "OptimizedModule":  # of torch.compile, which is slow to import
            found.append(outer.get_submodule("_orig_mod"))
        else:
            return found


def has_children(module: nn.Module) -> bool:
    """True if there are modules below it. Their truth value is their length, which some do not define."""
    return next(module.children(), None) is not None
