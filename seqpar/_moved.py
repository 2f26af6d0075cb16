"""Names of earlier versions: import paths, arguments and flags raise, with the successor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any, TypeVar

# import path of earlier versions -> where its names are
MOVED = {
    "seqpar.adapter": "seqpar.families (Cuts) and seqpar.transformer.parallelize (passing)",
    "seqpar.engine": "seqpar.mesh.boundary (StepBoundary)",
    "seqpar.pipelines.class_labels": "seqpar.pipelines.classes",
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


class MovedModules(MetaPathFinder):
    """Raises ModuleNotFoundError, with the successor, where a path of `MOVED` is imported."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname in MOVED:
            raise ModuleNotFoundError(f"{fullname} has moved; import from {MOVED[fullname]}", name=fullname)


def install() -> None:
    """Let `import` name the successors of `MOVED`."""
    sys.meta_path.append(MovedModules())
