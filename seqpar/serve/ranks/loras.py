"""The LoRAs of a server: files of a folder, each named by its file, for the models that they fit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seqpar.loading.lora import Lora
from seqpar.loading.names import Preset
from seqpar.pipelines.diffusers import Adapted
from seqpar.transformer import lora as lora_files

SUFFIX = ".safetensors"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class FittingLoras:
    """The LoRAs that fit a model, by their names: NAME, or NAME@TRANSFORMER for a model of several transformers.

    weights: number of weights of all layers that any of them changes. reasons: name of another -> why it does not fit.
    """

    every: Mapping[str, Lora]
    weights: int
    reasons: Mapping[str, str]

    @staticmethod
    def of(example: Any, loras: Mapping[str, Lora]) -> FittingLoras:
        """Return the LoRAs that fit the model of an order. This reads the files of LoRAs, and no weights of a model."""
        fitting, layers, reasons = dict[str, Lora](), dict[str, int](), dict[str, str]()
        for name, lora in loras.items():
            try:
                changed = _changed(example, lora)
            except ValueError as reason:
                reasons[name] = str(reason)
                continue
            for placed, its_layers in changed.items():
                fitting[f"{name}@{placed.transformer}" if placed.transformer else name] = placed
                layers |= its_layers
        return FittingLoras(fitting, sum(layers.values()), reasons)


def _changed(example: Any, lora: Lora) -> dict[Lora, dict[str, int]]:
    """Return what a LoRA changes, as `check_switched`; ValueError if it does not fit the model."""
    if not isinstance(example, Adapted) or isinstance(example.source, Preset):
        raise ValueError(f"got --lora {lora.path}, expected a model of a diffusers pipeline's folder for it")
    return lora_files.check_switched(lora, example.kind, example.files.models)


def loras_in(folder: Path | None) -> dict[str, Lora]:
    """Return name -> LoRA of the files NAME.safetensors in a folder; ValueError for a folder or a name that is none."""
    if folder is None:
        return {}
    files = sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []
    if not files:
        raise ValueError(f"got --loras {folder}, expected a folder with files NAME{SUFFIX}")
    names = {path.name.removesuffix(SUFFIX): Lora(str(path)) for path in files}
    if odd := next((name for name in names if not NAME.fullmatch(name)), None):
        expected = "letters, digits, dots, _ and -, at most 100, with a letter or digit first"
        raise ValueError(f"got the LoRA {odd!r} in --loras {folder}, expected a name of {expected}")
    return names


def check_all_fit(loras: Iterable[str], every: Iterable[FittingLoras]) -> None:
    """Raise ValueError for a LoRA that fits no model. every: of each model."""
    models = list(every)
    fitting = {name.partition("@")[0] for each in models for name in each.every}
    for name in loras:
        if name not in fitting:
            reasons = "; ".join(dict.fromkeys(each.reasons[name] for each in models))
            raise ValueError(f"got the LoRA {name}, which fits no model that is served: {reasons}")
