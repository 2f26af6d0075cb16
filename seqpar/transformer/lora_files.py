"""LoRA files merged into a pipeline's transformers, and switched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from seqpar.loading.errors import naming
from seqpar.loading.lora import Lora, Models, _fitted, _name, changes_encoders, load
from seqpar.transformer.lora import base_of, layers
from seqpar.transformer.merging import Merging, terms_of


def check_switched(lora: Lora, kind: Any, models: Models) -> dict[Lora, dict[str, int]]:
    """Return the LoRA with each transformer that it can change -> path -> number of weights of the layers changed.

    Raises ValueError as `check`, and for a file that cannot be merged into weights of the transformer alone, which can
    be undone. A file that does not say its transformer must fit all of them.
    """
    changed = dict[Lora, dict[str, int]]()
    for number, (placed, model) in enumerate(_fitted((lora,), kind, models, anywhere=True), 1):
        if changes_encoders(kind, (lora,)):
            raise ValueError(f"got --lora {lora.path} that changes a text encoder, expected the transformer alone")
        with naming(f"got --lora {lora.path}, which cannot be merged"):
            terms_of(model, _name(number))
        sizes = {path: base_of(layer).weight.numel() for path, layer in layers(model)}  # pyright: ignore
        changed[placed] = {f"{placed.part}.{path}": size for path, size in sizes.items()}
    return changed


def merge(pipe: Any, loras: Sequence[Lora]) -> str | None:
    """Merge loaded files into the weights of a pipeline's transformers; return why they stay beside these, or None."""
    reasons = list[str]()
    for part in dict.fromkeys(lora.part for lora in loras):
        scales = {_name(number): lora.scale for number, lora in enumerate(loras, 1) if lora.part == part}
        model = getattr(pipe, part)
        model.set_adapters(list(scales), [1.0 for _ in scales])
        try:
            every = {name: terms_of(model, name) for name in scales}
        except ValueError as reason:
            model.set_adapters(list(scales), list(scales.values()))
            reasons.append(str(reason))
            continue
        model.unload_lora()
        Merging(model, every, keeps=False).switch(tuple(scales.items()))
    return "; ".join(reasons) or None


def switched(pipe: Any, loras: Mapping[str, Lora]) -> Merging:
    """Return the LoRAs that `check_switched` accepted, by their names, none of them merged into a transformer yet."""
    every = {}
    for name, lora in loras.items():
        load(pipe, (lora,))
        model = getattr(pipe, lora.part)
        every[name] = {f"{lora.part}.{path}": term for path, term in terms_of(model, _name(1)).items()}
        model.unload_lora()
    return Merging(pipe, every, keeps=True)
