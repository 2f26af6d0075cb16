"""LoRA files: which files and scales are named, whether they fit a pipeline, loading by diffusers, and merging.

diffusers leaves out keys that it does not know, and only warns. Here each key of a file must be held by a layer
afterwards. What is wrong with a file is found before any weight loads, on a transformer without memory for its weights.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import logging
from diffusers.utils.state_dict_utils import convert_unet_state_dict_to_peft
from torch import Tensor

from seqpar.loading.checkpoint import open_checkpoint
from seqpar.loading.errors import naming
from seqpar.loading.meta import WithoutValues
from seqpar.loading.names import LORAS

TRANSFORMER, ENCODER = "transformer", "text_encoder"  # how keys of a file begin in diffusers' format
MOST_WARNINGS = 1 << 20  # that are kept of one call


@dataclass(frozen=True)
class Lora:
    """A LoRA's file, and the factor by which its change of the weights is multiplied (1: as it was trained)."""

    file: str
    scale: float = 1.0

    @property
    def path(self) -> Path:
        """Return the path of the file; a name of `seqpar.loading.names.LORAS` stands for one of the package's."""
        return LORAS.get(self.file, Path(self.file))

    def __str__(self) -> str:
        return f"{self.file}:{self.scale:g}"


def parse(text: str) -> Lora:
    """Return the LoRA of FILE or FILE:scale; ValueError for a scale that is not finite.

    What follows the last colon belongs to the file's name where it is no number.
    """
    path, colon, scale = text.rpartition(":")
    try:
        lora = Lora(path, float(scale)) if colon else Lora(text)
    except ValueError:
        return Lora(text)
    if not math.isfinite(lora.scale):
        raise ValueError(f"got --lora {text}, expected a finite scale, such as 0.8")
    return lora


def check(loras: Sequence[Lora], kind: Any, model_kind: Any, config: Mapping[str, Any]) -> None:
    """Raise ValueError for a file that diffusers cannot load whole into a transformer of this class and config.

    kind: the class of the pipeline. This reads the LoRA files, and no weights of the pipeline.
    """
    for _ in _fitted(loras, kind, model_kind, config):
        pass


def _fitted(loras: Sequence[Lora], kind: Any, model_kind: Any, config: Mapping[str, Any]) -> Iterator[tuple[Lora, Any]]:
    """Yield each file with a transformer without memory for its weights that holds it; see `check`."""
    if loras and getattr(kind, "transformer_name", None) != TRANSFORMER:
        files = " ".join(map(str, loras))
        raise ValueError(
            f"got --lora {files}, expected none: diffusers' {kind.__name__} loads no LoRA of a transformer"
        )
    for number, lora in enumerate(loras, 1):
        if lora.path.suffix != ".safetensors" or not lora.path.is_file():
            expected = "a .safetensors file that exists, or one with its scale, as style.safetensors:0.8"
            raise ValueError(f"got --lora {lora.path}, expected {expected}")
        open_checkpoint(lora.path)
        state = _state(kind, lora)
        own = {key: x for key, x in state.items() if key.startswith(f"{TRANSFORMER}.")}
        others = [key for key in state if key not in own and not key.startswith(ENCODER)]
        if others or not own:
            got = f"the key {others[0]:.200}" if others else "no key of the transformer"
            raise ValueError(f"got --lora {lora.path} with {got}, expected a LoRA of a {model_kind.__name__}")
        with naming(_unfit(lora, model_kind)), torch.device("meta"), WithoutValues():
            model = model_kind.from_config(config)
            with _listening():
                model.load_lora_adapter(own, prefix=TRANSFORMER, adapter_name=_name(number), low_cpu_mem_usage=True)
        _check_whole(lora, model, own, number)
        yield lora, model


def changes_encoders(kind: Any, loras: Sequence[Lora]) -> bool:
    """Return whether a file that `check` accepted has keys of a text encoder. kind: the class of the pipeline."""
    return any(key.startswith(ENCODER) for lora in loras for key in _state(kind, lora))


def load(pipe: Any, loras: Sequence[Lora]) -> None:
    """Load the files that `check` accepted into a pipeline, and set their scales.

    Raises ValueError if diffusers fails, or if a key of a file is in no layer afterwards.
    """
    for number, lora in enumerate(loras, 1):
        folder, name = str(lora.path.parent), lora.path.name
        with naming(_unfit(lora, type(pipe))), _listening():
            pipe.load_lora_weights(folder, weight_name=name, adapter_name=_name(number), use_safetensors=True)
        state = _state(type(pipe), lora)
        for part, count in Counter(key.partition(".")[0] for key in state).items():
            model = getattr(pipe, part, None)
            if part == TRANSFORMER:
                _check_whole(lora, model, {key: x for key, x in state.items() if key.startswith(f"{part}.")}, number)
            elif len(_held(model, number)) != count:  # diffusers renames keys of encoders
                got = f"{count} keys of {part}, of which {type(pipe).__name__} takes {len(_held(model, number))}"
                raise ValueError(f"got --lora {lora.path} with {got}, expected a LoRA that it takes whole")
    if loras:
        pipe.set_adapters([_name(number) for number, _ in enumerate(loras, 1)], [lora.scale for lora in loras])


def _state(kind: Any, lora: Lora) -> dict[str, Tensor]:
    """Return the tensors of a file under diffusers' keys; ValueError where diffusers would leave one out."""
    what = f"got --lora {lora.path}, which {kind.__name__} cannot read"
    with naming(what), _listening() as records:
        state = kind.lora_state_dict(str(lora.path.parent), weight_name=lora.path.name, use_safetensors=True)
        if records:
            raise ValueError(records[0].getMessage())
    return state


def _check_whole(lora: Lora, model: Any, state: Mapping[str, Tensor], number: int) -> None:
    """Raise ValueError if the adapter in a transformer has not the keys of a file, one for one.

    state: the tensors of the file for the transformer, by diffusers' keys.
    """
    named = {key.partition(".")[2]: x for key, x in state.items()}
    if not any("lora_A" in key or "lokr_" in key for key in named):  # an older format, which diffusers converts, too
        named = convert_unet_state_dict_to_peft(named)
    if odd := sorted(_held(model, number) ^ set(named)):
        expected = f"each of its {len(named)} keys in a {type(model).__name__} and no others"
        raise ValueError(f"got --lora {lora.path} with {odd[0]:.200}, which does not fit: expected {expected}")


def _held(model: Any, number: int) -> set[str]:
    """Return the keys of the adapter of a file in a model, without the adapter's name."""
    from peft.utils import get_peft_model_state_dict  # takes seconds to import

    if _name(number) not in getattr(model, "peft_config", {}):
        return set()
    return set(get_peft_model_state_dict(model, adapter_name=_name(number), save_embedding_layers=False))


def _name(number: int) -> str:
    """Return the name under which diffusers holds the adapter of a file, counted from 1."""
    return f"file{number}"


def _unfit(lora: Lora, kind: Any) -> str:
    return f"got --lora {lora.path}, which does not fit the {kind.__name__}"


@contextmanager
def _listening() -> Iterator[list[Any]]:
    """Yield the warnings that diffusers logs meanwhile, and show none of them: what is wrong becomes an error here."""
    handler, before = BufferingHandler(MOST_WARNINGS), logging.get_verbosity()
    logging.disable_default_handler()
    logging.add_handler(handler)
    logging.set_verbosity_warning()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield handler.buffer
    finally:
        logging.set_verbosity(before)
        logging.remove_handler(handler)
        logging.enable_default_handler()
