"""Finds the files of a folder by their names."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from types import ModuleType


def plugins(package: ModuleType) -> dict[str, str]:
    """Return name -> module path of every file in a folder of plugins; a new file needs no other registration."""
    return {name: f"{package.__name__}.{name}" for name in _files(*package.__path__)}


@cache  # every block asks for its attention's, and listing a folder takes longer than launching a kernel
def _files(*folders: str) -> tuple[str, ...]:
    names = (module.name for module in pkgutil.iter_modules(folders))
    return tuple(name for name in sorted(names) if not name.startswith("_"))


def plugin(package: ModuleType, name: str, kind: str) -> ModuleType:
    """Import and return the plugin of that name; `ValueError` names its `kind` and lists the known names."""
    known = plugins(package)
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"got {kind} {name!r}, expected one of {', '.join(known)}")
    return importlib.import_module(known[name])
