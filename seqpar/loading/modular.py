"""Folders of diffusers' modular pipelines (modular_model_index.json).

Their index names, for each part, where it lies: in the folder, or in another repository. Which parts there are depends
on the pipeline's blocks, and on the workflow that they are cut down to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import diffusers
from diffusers.utils import logging

from seqpar.loading.errors import context
from seqpar.loading.names import ID, OF_PART, download, errors_only
from seqpar.loading.parts import NAMES, PLACES, parts_of
from seqpar.types.arguments import shown

FIRST, OWN = NAMES[0], "transformer_ref"  # the latter is for one workflow alone, with half of MiniMax-H3's files
BLOCKS, SOURCE = "_blocks_class_name", "pretrained_model_name_or_path"


def without_parts(kind: Any, index: Mapping[str, Any], workflow: str | None, parts: Mapping[str, Any]) -> Any:
    """Return a modular pipeline with these parts, and those that its blocks make; ValueError for unknown blocks.

    index: of its folder. workflow: one of the blocks', or None for all.
    """
    name = index.get(BLOCKS)
    if kind.default_blocks_name is None or not (name is None or hasattr(diffusers, str(name))):
        raise ValueError(
            f"got a {kind.__name__} of blocks {shown(name)}, which diffusers {diffusers.__version__} does not have; "
            f"build it yourself and call seqpar.parallelize"
        )
    with context(f"got a {kind.__name__}, whose index describes none"), errors_only(logging):
        pipe = kind(modular_config_dict={**index, BLOCKS: name or kind.default_blocks_name})
        if workflow is not None:
            known = pipe.blocks.available_workflows
            if workflow not in known:
                raise ValueError(f"workflow={workflow!r} is none of {', '.join(known)}")
            pipe = kind(modular_config_dict={**index, BLOCKS: name or kind.default_blocks_name}, workflow=workflow)
        pipe.update_components(**parts)
    return pipe


class OtherWorkflows:
    """In the place of a transformer that only other workflows need: says so where they read it."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def __getattr__(self, attribute: str) -> NoReturn:
        names = " or ".join(f"workflow={name!r}" for name in self._names)
        raise AttributeError(f"{OWN} is not loaded; load the pipeline by seqpar.load(..., {names}) for these inputs")


def name_missing(pipe: Any) -> None:
    """Put an `OtherWorkflows` in the place of a transformer that was not loaded."""
    if OWN in pipe.components and getattr(pipe, OWN) is None:
        blocks = pipe.blocks
        names = [x for x in blocks.available_workflows if OWN in blocks.get_workflow(x).component_names]
        setattr(pipe, OWN, OtherWorkflows(names))


def of_workflow(kind: Any, index: Mapping[str, Any], workflow: str | None, folder: Path) -> dict[str, Any]:
    """Return a modular pipeline's index without parts that its blocks, or those of a workflow, do not use.

    folder: its own; a part that lies neither in it nor in a repository was never loaded, as a ControlNet.
    """
    used = set(without_parts(kind, index, workflow, {}).components)
    if FIRST in used:
        used -= {OWN}
    parts = {name for name, _ in parts_of(index)}
    used -= {name for name, place in index[PLACES].items() if not place.get(SOURCE) and not (folder / name).is_dir()}
    return {name: value for name, value in index.items() if name not in parts or name in used}


def place_of(folder: Path, name: str, index: Mapping[str, Any]) -> Path:
    """Return the folder of a part; one that a modular pipeline's index finds in another repository is downloaded."""
    place = index.get(PLACES, {}).get(name)
    if place is None:
        return folder / name
    inner, repository = place.get("subfolder") or "", place.get(SOURCE)
    if not isinstance(inner, str) or not re.fullmatch(r"([\w-][\w.-]*(/[\w-][\w.-]*)*)?", inner):
        raise ValueError(f"got {folder} with {name} in subfolder={shown(inner)}, expected the name of a folder")
    if (folder / (inner or name)).is_dir():
        return folder / (inner or name)
    if isinstance(repository, str) and (Path(repository) / inner).is_dir():
        return Path(repository) / inner
    if not isinstance(repository, str) or not re.fullmatch(ID, repository):
        raise ValueError(f"got {folder} without {name}, expected its folder; the index has {shown(repository)} for it")
    files = [f"{inner}/*"] if inner else OF_PART
    return download(repository, (), files=files, revision=place.get("revision")) / inner
