"""LoRA files merged into a pipeline's transformers, and switched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from seqpar.loading.errors import naming
from seqpar.loading.lora import Lora, _fitted, _name, changes_encoders, load
from seqpar.transformer.lora import base_of, layers
from seqpar.transformer.merging import Merging, terms_of


def check_switched(loras: Sequence[Lora], kind: Any, model_kind: Any, config: Mapping[str, Any]) -> dict[str, int]:
    """Return path -> number of weights of the layers that any of these files changes; ValueError as `check`.

    Raises ValueError also for a file that cannot be merged into weights of the transformer alone, which can be undone.
    """
    changed = dict[str, int]()
    for number, (lora, model) in enumerate(_fitted(loras, kind, model_kind, config), 1):
        if changes_encoders(kind, (lora,)):
            raise ValueError(f"got --lora {lora.path} that changes a text encoder, expected the transformer alone")
        with naming(f"got --lora {lora.path}, which cannot be merged"):
            terms_of(model, _name(number))
        changed |= {path: base_of(layer).weight.numel() for path, layer in layers(model)}  # pyright: ignore
    return changed


def merge(pipe: Any, loras: Sequence[Lora]) -> str | None:
    """Merge loaded files into the weights of a pipeline's transformer; return why they stay beside these, or None."""
    names = [_name(number) for number, _ in enumerate(loras, 1)]
    pipe.transformer.set_adapters(names, [1.0 for _ in names])
    try:
        every = {name: terms_of(pipe.transformer, name) for name in names}
    except ValueError as reason:
        pipe.transformer.set_adapters(names, [lora.scale for lora in loras])
        return str(reason)
    pipe.transformer.unload_lora()
    scales = (lora.scale for lora in loras)
    Merging(pipe.transformer, every, keeps=False).switch(tuple(zip(names, scales, strict=True)))
    return None


def switched(pipe: Any, loras: Mapping[str, Lora]) -> Merging:
    """Return the LoRAs that `check_switched` accepted, by their names, none of them merged into the transformer yet."""
    every = {}
    for name, lora in loras.items():
        load(pipe, (lora,))
        every[name] = terms_of(pipe.transformer, _name(1))
        pipe.transformer.unload_lora()
    return Merging(pipe.transformer, every, keeps=True)
