"""Old import paths work, old arguments and flags name their successors, and rooms hide no public function."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import seqpar
from seqpar.families import Cuts
from seqpar.pipelines.unidiffuser import Pipeline

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


@pytest.mark.parametrize(
    ("function", "argument", "successor"),
    [
        (seqpar.parallelize, "plan", "use cuts="),
        *((Cuts, name, "use prepare= and keys=") for name in ("kept", "weighed", "padding", "key_masks", "passed")),
        *((Cuts, name, "use prepare= and keys=") for name in ("bools", "at_end")),
        (seqpar.sample, "segments", "use seqpar.parallelize"),
        (seqpar.DistributedDiT.from_pretrained, "heads", "use seqpar convert FILE FOLDER --heads N"),
        (Pipeline.load, "wish", "use preferences="),
        (Pipeline.of, "wish", "use preferences="),
    ],
)
def test_an_old_argument_names_its_successor(function: Any, argument: str, successor: str) -> None:
    with pytest.raises(TypeError, match=f"has no argument {argument}= any more; {successor}"):
        function(**{argument: None})


@pytest.mark.parametrize("command", ["sample", "plan", "profile"])
def test_an_old_flag_names_its_successor(command: str) -> None:
    ended = subprocess.run([sys.executable, "-m", "seqpar.cli", command, "--heads=4"], capture_output=True, text=True)
    assert ended.stderr.startswith("error: --heads was removed; use seqpar convert FILE FOLDER --heads N")


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
