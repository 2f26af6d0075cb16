"""Old import paths, arguments and flags name their successors, and rooms hide no public function."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest

import seqpar
from seqpar._moved import HEADS
from seqpar.cli.main import command
from seqpar.families import Cuts
from seqpar.pipelines.unidiffuser import Pipeline


@pytest.mark.parametrize(
    ("old", "successor"),
    [
        ("seqpar.pipelines.class_labels", "seqpar.pipelines.classes"),
        *((f"seqpar.adapter.{name}", "seqpar.families") for name in ("cuts", "passing")),
        ("seqpar.engine.boundary", "seqpar.mesh.boundary"),
    ],
)
def test_an_old_import_path_names_its_successor(old: str, successor: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"has moved; import from {successor}"):
        importlib.import_module(old)


@pytest.mark.parametrize(
    ("function", "argument", "successor"),
    [
        (seqpar.parallelize, "plan", "use cuts="),
        *((Cuts, name, "use prepare= and keys=") for name in ("kept", "weighed", "padding", "key_masks", "passed")),
        *((Cuts, name, "use prepare= and keys=") for name in ("bools", "at_end")),
        (seqpar.sample, "segments", "use seqpar.parallelize"),
        (seqpar.DistributedDiT.from_pretrained, "heads", "use seqpar convert FILE FOLDER --heads N"),
        (Pipeline.load, "wish", "use preferences="),
    ],
)
def test_an_old_argument_names_its_successor(function: Any, argument: str, successor: str) -> None:
    with pytest.raises(TypeError, match=f"has no argument {argument}= any more; {successor}"):
        function(**{argument: None})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *((f"{name} --heads=4", f"--heads was removed; use {HEADS}") for name in ("sample", "plan", "profile")),
        ("convert a b --heads 16 --dtyp fp16", "--dtyp is not a flag of seqpar convert; did you mean --dtype?"),
    ],
)
def test_an_old_flag_names_its_successor(words: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        command(words.split())
    assert str(caught.value) == message


def test_public_names_are_functions_after_all_modules_were_imported() -> None:
    for module in pkgutil.walk_packages(seqpar.__path__, "seqpar."):
        if not module.name.endswith(("_epilogues", "__main__")):
            importlib.import_module(module.name)
    assert [name for name in seqpar.__all__ if not callable(getattr(seqpar, name))] == []
