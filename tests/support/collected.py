"""Imports the test files of a run as pytest does, once for all of its workers and ranks, which are forked afterwards.

A file that cannot be imported is tried again, and reported, by the workers.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re

import pytest

FILES = "SEQPAR_TESTED"  # the variable that has pytest's arguments


class OnlyImports:
    """A plugin that finds no tests in files, which takes a third of the time of the imports."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self) -> list[pytest.Item]:
        return []


def import_classes() -> None:
    """Import the parts of the tests' pipelines, which diffusers and transformers import when they are asked for."""
    importlib.import_module("functorch.compile")  # torch.compile's first call does so
    sources = (inspect.getsource(importlib.import_module(f"tests.support.{name}")) for name in ("modular", "pipelines"))
    names = {name for source in sources for name in re.findall(r"\b[A-Z]\w+", source)}
    for library in map(importlib.import_module, ("diffusers", "transformers")):
        for name in names:
            getattr(library, name, None)


if FILES in os.environ:
    paths = json.loads(os.environ.pop(FILES))
    flags = ("--collect-only", "-qq", "-s", "-n", "0", "-p", "no:cacheprovider", "-p", "no:faulthandler")
    pytest.main([*flags, *paths], [OnlyImports()])
    if any(map(os.path.isdir, paths)):
        import_classes()
