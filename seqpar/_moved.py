"""Names of earlier versions: import paths still work, with a warning; arguments and flags raise, with the successor."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

# old path -> (module that has the names now, path to import them from); packages that hold old paths have none
MOVED = {
    "seqpar.adapter": None,
    "seqpar.adapter.cuts": ("seqpar.families._cuts", "seqpar.families"),
    "seqpar.adapter.passing": ("seqpar.transformer.parallelize", "seqpar.transformer.parallelize"),
    "seqpar.engine": None,
    "seqpar.engine.boundary": ("seqpar.mesh.boundary", "seqpar.mesh.boundary"),
    "seqpar.pipelines.class_labels": ("seqpar.pipelines.classes", "seqpar.pipelines.classes"),
}

# function or class -> argument of earlier versions -> what to use
HEADS = "seqpar convert FILE FOLDER --heads N: the folder stores them"
DROPPED = {
    "parallelize": {"plan": "cuts="},
    "Cuts": dict.fromkeys(
        ("kept", "weighed", "padding", "key_masks", "passed", "bools", "at_end"),
        "prepare= and keys= (docs/families.md)",
    ),
    "sample": {"segments": "seqpar.parallelize, which runs pipelines with two transformers"},
    "DistributedDiT.from_pretrained": {"heads": HEADS},
    "Pipeline.load": {"wish": "preferences="},
    "Pipeline.of": {"wish": "preferences="},
}
FLAGS = {"--heads": HEADS}
T = TypeVar("T", bound=Callable[..., Any])


def successors(target: T) -> T:
    """Let a function or class name the successor of an argument in `DROPPED`: a decorator."""
    dropped, function = DROPPED[target.__qualname__], target.__init__ if isinstance(target, type) else target

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name in dropped.keys() & kwargs.keys():
            raise TypeError(f"{target.__name__}() has no argument {name}= any more; use {dropped[name]}")
        return function(*args, **kwargs)

    if isinstance(target, type):
        target.__init__ = checked
    result: Any = target if isinstance(target, type) else checked
    return result


class MovedModules(MetaPathFinder, Loader):
    """Finds the modules of `MOVED` and fills them with the names of their successors."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MOVED:
            return None
        return ModuleSpec(fullname, self, is_package=MOVED[fullname] is None)

    def exec_module(self, module: ModuleType) -> None:
        if (moved := MOVED[module.__name__]) is None:
            return
        successor, public = moved
        warnings.warn(f"{module.__name__} moved to {public}; the old path will go", FutureWarning, stacklevel=2)
        names = vars(importlib.import_module(successor))
        vars(module).update(
            {name: x for name, x in names.items() if not name.startswith("__") or name == "__getattr__"}
        )


def install() -> None:
    """Let `import` find the modules of `MOVED`."""
    sys.meta_path.append(MovedModules())
