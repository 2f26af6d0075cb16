"""The parts of a pipeline folder or preset, built without weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import diffusers
import torch

from seqpar.loading.errors import naming
from seqpar.loading.folder import Fitted, check_parts, kind_of, model_of
from seqpar.loading.meta import WithoutValues
from seqpar.loading.parts import parts_of, read_scheduler
from seqpar.loading.presets import Preset
from seqpar.loading.tokenizers import CONFIG, check_named, check_tokenizer
from seqpar.loading.transformers import NAMES


def built(kind: Any, config: Mapping[str, Any], what: str) -> Any:
    """Return a model of diffusers without memory for its weights; ValueError if its config describes none."""
    if kind is None:
        raise ValueError(f"got {what} with a part of a class that diffusers {diffusers.__version__} does not have")
    with naming(f"got {what}, which describes no {kind.__name__}"), torch.device("meta"), WithoutValues():
        return kind.from_config(dict(config))


@dataclass(frozen=True)
class PipelineParts:
    """The checked parts of a pipeline, of which any number of orders can be checked without another look at its files.

    source: its folder, or a preset. index: its model_index.json. config: the transformer's. vae: without memory for
    weights, or None. file: that of the transformer, where it is not diffusers' (`seqpar.loading.single_file`). fitted:
    the checkpoints of its models of diffusers, by the names of their parts.
    """

    source: Path | Preset
    index: Mapping[str, Any]
    config: Mapping[str, Any]
    vae: Any
    scheduling: Mapping[str, Any] | None
    file: Path | None = None
    fitted: Mapping[str, Fitted] = field(default_factory=dict)

    @property
    def kind(self) -> Any:
        """Return the class of the pipeline, as its index names it."""
        return kind_of(self.index, self.source if isinstance(self.source, Path) else Path(self.source.name))

    @property
    def models(self) -> dict[str, tuple[Any, Mapping[str, Any]]]:
        """Return class and config of each transformer, by their names."""
        others = {name: self.fitted[name].model for name in NAMES if name in self.fitted and name != "transformer"}
        configs = {name: (type(model), model.config) for name, model in others.items()}
        return {"transformer": (model_of(self.index), self.config), **configs}

    @cached_property
    def transformer(self) -> Any:
        """Return the transformer without memory for weights; ValueError if its config describes none."""
        fitted = self.fitted.get("transformer")
        if fitted is not None and fitted.model is not None:
            return fitted.model
        name = self.source.name if isinstance(self.source, Preset) else str(self.source)
        return built(model_of(self.index), self.config, name)


def parts_of_folder(folder: Path, index: Mapping[str, Any], file: Path | None) -> PipelineParts:
    """Return the checked parts of a pipeline's folder; ValueError for one that cannot be loaded."""
    config, fitted = check_parts(folder, index, file)
    _check_tokenizers(folder, index)
    vae = fitted["vae"].model if "vae" in fitted else None
    scheduling = read_scheduler(folder / "scheduler") if (folder / "scheduler").is_dir() else None
    return PipelineParts(folder, index, config, vae, scheduling, file, fitted)


def _check_tokenizers(folder: Path, index: Mapping[str, Any]) -> None:
    """Raise ValueError for a tokenizer without its files, or without the encoder that reads its tokens."""
    for name in (name for name, _ in parts_of(index) if (folder / name).is_dir()):
        if name.startswith("tokenizer"):
            check_named(folder, index, [name.replace("tokenizer", "text_encoder")])
        if name.startswith("tokenizer") or (folder / name / CONFIG).is_file():  # a processor may hold one, too
            check_tokenizer(folder / name)


def parts_of_preset(preset: Preset) -> PipelineParts:
    """Return the parts of a preset."""
    configs = {name: {**config, "_class_name": kind} for name, (kind, config) in preset.parts.items()}
    vae = built(getattr(diffusers, preset.parts["vae"][0]), preset.parts["vae"][1], preset.name)
    return PipelineParts(preset, preset.index, configs["transformer"], vae, configs["scheduler"])
