"""distcockpit: exact per-sample gradient statistics of distributed training runs, pooled over ranks.

Importing the package is cheap: torch is loaded with the first name that needs it, so you can read a store on a
machine without torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

__version__ = version("distcockpit")

_HOMES = {
    "DistCockpit": "distcockpit.cockpit",
    "StoreOptions": "distcockpit.store.options",
    "every": "distcockpit.schedules",
    "logspaced": "distcockpit.schedules",
    "open_run": "distcockpit.run",
    "presets": "",
    "quantities": "",
}

__all__ = ["DistCockpit", "StoreOptions", "every", "logspaced", "open_run", "presets", "quantities"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'distcockpit' has no attribute {name!r}; public names are {__all__}")
    home = _HOMES[name]
    return getattr(import_module(home), name) if home else import_module(f"distcockpit.{name}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


if TYPE_CHECKING:
    from distcockpit import presets as presets
    from distcockpit import quantities as quantities
    from distcockpit.cockpit import DistCockpit as DistCockpit
    from distcockpit.run import open_run as open_run
    from distcockpit.schedules import every as every
    from distcockpit.schedules import logspaced as logspaced
    from distcockpit.store.options import StoreOptions as StoreOptions
