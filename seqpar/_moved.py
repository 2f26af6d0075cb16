"""Import paths of earlier versions: they still work, with one warning that names the new path."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# old path -> (module that has the names now, path to import them from); packages that hold old paths have none
MOVED = {
    "seqpar.adapter": None,
    "seqpar.adapter.cuts": ("seqpar.families._cuts", "seqpar.families"),
    "seqpar.adapter.passing": ("seqpar.transformer.parallelize", "seqpar.transformer.parallelize"),
    "seqpar.engine": None,
    "seqpar.engine.boundary": ("seqpar.mesh.boundary", "seqpar.mesh.boundary"),
    "seqpar.pipelines.class_labels": ("seqpar.pipelines.classes", "seqpar.pipelines.classes"),
}


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
