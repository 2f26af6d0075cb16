"""Says in one sentence what broke, when a version of diffusers arrives that this package was not tested with.

The package reaches into diffusers: it puts hooks on its modules, a backend into its dispatcher, and reads its classes.
A new minor version may move any of these. Then raise the bound in pyproject.toml after the whole suite has passed.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import tomllib
from collections.abc import Iterator
from typing import Any

import diffusers
from packaging.requirements import Requirement

from tests.support.structure import ROOT, files, parsed, relative


def imported() -> Iterator[tuple[str, str, str]]:
    for path in files("seqpar"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "diffusers":
                yield from ((relative(path), node.module or "", alias.name) for alias in node.names)


def requirement() -> Requirement:
    project: Any = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return next(bound for bound in map(Requirement, project["dependencies"]) if bound.name == "diffusers")


def test_the_installed_version_was_tested() -> None:
    bounds, version = requirement().specifier, diffusers.__version__
    assert any(bound.operator == "<" for bound in bounds), "diffusers has an upper bound: the last minor version tested"
    assert bounds.contains(version, prereleases=True), (
        f"diffusers {version} is outside of the tested versions {bounds}: run the whole suite with it, then change the "
        f"bound in pyproject.toml"
    )


def test_what_the_package_imports_from_diffusers_exists() -> None:
    names = sorted(set(imported()))
    assert len(names) > 20
    for file, module, name in names:
        assert hasattr(importlib.import_module(module), name), (
            f"diffusers {diffusers.__version__} has no {name} in {module}, which {file} imports"
        )


def test_the_dispatcher_takes_the_arguments_of_our_backend() -> None:
    dispatcher = importlib.import_module("diffusers.models.attention_dispatch")
    wanted = {"query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "backend", "parallel_config"}
    missing = wanted - set(inspect.signature(dispatcher.dispatch_attention_fn).parameters)
    assert not missing, f"diffusers {diffusers.__version__}'s dispatcher takes no {', '.join(sorted(missing))} any more"
