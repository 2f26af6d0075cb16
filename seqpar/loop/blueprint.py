"""Turns a name, folder, file, hub id or diffusers object into a model, and checks it before any weight is loaded."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

import seqpar.loop.models
from seqpar.loading.checkpoint import Checkpoint, check, check_layers, checkpoint_context, from_state_dict
from seqpar.loading.names import random_model_of, resolve
from seqpar.loading.placing import load
from seqpar.loading.random import WithoutValues, randomise
from seqpar.loading.single_file import open_model
from seqpar.loop.interface import SequenceModel
from seqpar.mesh.mesh import Mesh
from seqpar.types.keys import KeyMap
from seqpar.types.plugins import plugins


@dataclass(frozen=True)
class Blueprint:
    """A model that can be built: its module, its config and its checkpoint (None means random weights).

    path: the file or folder that a name stood for, or None for a random model and for a model in memory.
    """

    name: str
    module: ModuleType
    config: Any
    checkpoint: Checkpoint | None = None
    keys: KeyMap | None = None
    path: Path | None = None

    def meta(self) -> SequenceModel:
        """The model on the meta device, without memory for its weights: one object until it is built.

        Raises ValueError if the sizes in a config are too large for any tensor.
        """
        return self._without_weights

    @cached_property
    def _without_weights(self) -> SequenceModel:
        try:
            with torch.device("meta"), WithoutValues():
                return self.module.Model(self.config)
        except (RuntimeError, OverflowError) as error:
            raise ValueError(f"got {self.name} with sizes of which no model can be made: {error}") from error

    def build(self, dtype: torch.dtype, device: torch.device, seed: int = 0, mesh: Mesh | None = None) -> SequenceModel:
        """Build the model with its weights; random weights are equal on all ranks of one device type.

        mesh: the ranks that build the same model at the same time, which share the reading of its file. Raises the same
        ValueError on all of them.
        """
        model = self.meta()
        vars(self).pop("_without_weights")  # it is given its weights; whoever asks again gets another one
        if self.checkpoint is None or self.keys is None:
            randomise(model.to(dtype).to_empty(device=device), seed)
        else:
            load(model, self.checkpoint, self.keys, dtype, device, mesh)
        return model.requires_grad_(False).eval()


def locate(name: str | Path | Blueprint) -> Blueprint:
    """The blueprint for a name of `NAMES`, a random model, a folder or file of `open_model`, a hub id, or a blueprint.

    Raises ValueError if nothing has this name or its files do not fit, before any
    weight is read.
    """
    if isinstance(name, Blueprint):
        return name
    path = resolve(name)
    if path is not None:
        return replace(_blueprint(*open_model(path)), path=path)
    random, models = random_model_of(name), {known: module for module in _modules() for known in module.SIZES}
    if random is None or random not in models:
        raise ValueError(f"got {name}, a pipeline of diffusers; use it by seqpar plan, sample or serve")
    return Blueprint(random, models[random], models[random].SIZES[random])


def from_diffusers(model: nn.Module) -> Blueprint:
    """The blueprint for a diffusers transformer in memory."""
    config = getattr(model, "config", None)
    if config is None:
        raise ValueError(f"got a {type(model).__name__}, expected a seqpar model or a diffusers transformer")
    config = dict(config) | {"_class_name": type(model).__name__}
    return _blueprint(from_state_dict(type(model).__name__, model.state_dict()), config)


def _blueprint(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Blueprint:
    for module in _modules():
        with checkpoint_context(checkpoint):
            check_layers(config, checkpoint, "its config")
            recognised = module.recognise(checkpoint.shapes, config)
        if recognised is not None:
            keys = module.key_map(recognised)
            blueprint = Blueprint(checkpoint.name, module, recognised, checkpoint, keys)
            check(blueprint.meta(), checkpoint, keys)
            return blueprint
    raise ValueError(
        f"got {checkpoint.name} with a {config.get('_class_name')}, which no model of seqpar recognises "
        f"({', '.join(plugins(seqpar.loop.models))}); if diffusers has it, put it into the folder of its pipeline, "
        f"beside model_index.json with its text encoders and decoder, or name that folder"
    )


def _modules() -> list[ModuleType]:
    return [importlib.import_module(path) for path in plugins(seqpar.loop.models).values()]
