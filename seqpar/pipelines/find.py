"""Finds the implementation that runs a model: `diffusers`, `classes` or `unidiffuser`.

Each exports `PIPELINES` (the class names in model_index.json that it runs), `MODELS` (the native models that it runs
without such a folder), `ASKED` (the field of a request that says what its pictures show, "classes" or "prompts") and
`check(request, model)`, which returns a `Job`; model: what the request's name stands for (`family_of`), or the `files`
of an earlier job.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

from seqpar.loading.layout import pipeline_folder
from seqpar.loading.names import PRESETS, Preset, preset_of, resolve
from seqpar.loading.parts import read_pipeline
from seqpar.loop.blueprint import Blueprint, locate

ANY = "diffusers"  # all pipelines that have no file of their own
FAMILIES = (ANY, "classes", "unidiffuser")


def family_of(name: str, heads: int | None = None) -> tuple[ModuleType | None, Path | Blueprint | Preset]:
    """Return the family of a model, and what its name stands for: a pipeline's folder, a file in one, or a preset.

    A hub id is downloaded. heads: see `seqpar.loop.blueprint.locate`. The family is None for a native model that none
    names: it can be planned (`planned`), but no pictures are made with it here. Raises ValueError if nothing has this
    name or no model of seqpar fits its files.
    """
    path = resolve(name)
    if path is None and (preset := preset_of(name)) in PRESETS:
        return _family(ANY), PRESETS[preset]
    families = [_family(name) for name in FAMILIES]
    folder = None if path is None else pipeline_folder(path)
    if path is None or folder is None:
        model = locate(name if path is None else path, heads)
        return next((family for family in families if issubclass(model.module.Model, family.MODELS)), None), model
    kind = read_pipeline(folder)["_class_name"]
    known = next((family for family in families if kind in family.PIPELINES), None)
    return known or _family(ANY), path


def _family(name: str) -> Any:
    return importlib.import_module(f"seqpar.pipelines.{name}")
