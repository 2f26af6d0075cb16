"""Import paths of earlier versions work, and public functions are not hidden by rooms of their name."""

from __future__ import annotations

import subprocess
import sys

import pytest

OLD = {
    "seqpar.pipelines.class_labels": ("generate", "seqpar.pipelines.classes"),
    "seqpar.adapter.cuts": ("Cuts", "seqpar.families"),
    "seqpar.adapter.passing": ("passing", "seqpar.transformer.parallelize"),
    "seqpar.engine.boundary": ("StepBoundary", "seqpar.mesh.boundary"),
}


@pytest.mark.parametrize("old", OLD)
def test_an_old_path_gives_the_same_object_with_one_warning(old: str) -> None:
    name, new = OLD[old]
    code = (
        "import warnings; warnings.simplefilter('always')\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        f"    from {old} import {name} as old\n    from {old} import {name}\n"
        f"from {new} import {name} as new\n"
        "print([str(w.message) for w in caught if 'moved' in str(w.message)], old is new)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.startswith(f"['{old} moved to {new}; the old path will go'] True"), ended.stdout


def test_an_unknown_old_path_is_no_module() -> None:
    code = "import seqpar.adapter.body"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "No module named 'seqpar.adapter.body'" in ended.stderr


def test_public_names_are_functions_after_all_modules_were_imported() -> None:
    code = (
        "import importlib, pkgutil, seqpar\n"
        "for module in pkgutil.walk_packages(seqpar.__path__, 'seqpar.'):\n"
        "    if not module.name.endswith(('_epilogues', '__main__')):\n"
        "        importlib.import_module(module.name)\n"
        "print([name for name in seqpar.__all__ if not callable(getattr(seqpar, name))])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"
