"""Finds the source of a model's name: which implementation runs it, with its checked files.

An implementation is a module that exports `PIPELINES` (the class names in a pipeline's index that it runs), `MODELS`
(the native models that it runs without such a folder) and `Files` with `locate`; `diffusers` takes all others.
"""

from __future__ import annotations

import importlib

from seqpar.families import Published
from seqpar.loading.folder import parts_of_published
from seqpar.loading.names import RANDOM_MODELS, random_model_of, resolve
from seqpar.loading.parts import index_of, read_pipeline
from seqpar.pipelines import diffusers, own_loop
from seqpar.pipelines.protocol import Source

FAMILIES = ("classes", "unidiffuser")  # modules of this folder


def find(name: str) -> Source:
    """Return the source of a model. A hub id is downloaded.

    name: a folder, file, hub id or random model. Raises ValueError if nothing has this name or no model of seqpar fits
    its files.
    """
    path = resolve(name)
    if path is None and (random := random_model_of(name)) in RANDOM_MODELS:
        return diffusers.Source.locate(RANDOM_MODELS[random])
    families = [importlib.import_module(f"seqpar.pipelines.{family}") for family in FAMILIES]
    folder = path.parent if path is not None and path.is_file() else path  # of a transformer's file in a pipeline's
    if path is None or folder is None or index_of(folder) is None:
        return own_loop.native(name if path is None else path, families)
    kind = read_pipeline(folder)["_class_name"]
    family = next((family for family in families if kind in family.PIPELINES), None)
    return diffusers.Source.locate(path) if family is None else family.Files.locate(path)


def published(name: str, known: Published) -> Source:
    """Return the source of a published model that can be planned alone: it has no files."""
    return diffusers.Source(parts_of_published(name, known))
