"""LoRA files: which files, scales and transformers are named, whether they fit, loading by diffusers, and merging.

diffusers leaves out keys that it does not know, and only warns. Here each key of a file must be held by a layer
afterwards. What is wrong with a file is found before any weight loads, on a transformer without memory for its weights,
and wrong numbers before diffusers converts the file, as some of its conversions never end on them.
"""

from __future__ import annotations

import ctypes
import math
import re
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers.utils import logging
from diffusers.utils.state_dict_utils import convert_unet_state_dict_to_peft

from seqpar.families import Preset, _find
from seqpar.loading.checkpoint import Checkpoint, open_checkpoint
from seqpar.loading.errors import context
from seqpar.loading.names import LORAS
from seqpar.loading.random import WithoutValues

T = TypeVar("T")
TRANSFORMER, ENCODER = "transformer", "text_encoder"  # how keys of a file begin in diffusers' format
FORM = "FILE[:SCALE][@TRANSFORMER], as style.safetensors:0.8 or high.safetensors@transformer"
MOST_WARNINGS = 1 << 20  # that are kept of one call
CONVERSION_S = 120.0  # diffusers needs about 2 s for a file of 1 GB

# the two matrices of a LoRA, in the formats of diffusers, kohya and others, which may name an adapter after them
DOWN = re.compile(r"(.*[._])(lora_A|lora_down|down)((?:\.[^.]+)?\.weight)")
UP = {"lora_A": "lora_B", "lora_down": "lora_up", "down": "up"}

Models = Mapping[str, tuple[Any, Mapping[str, Any]]]
"""Class and config of a pipeline's transformers, by their names."""


@dataclass(frozen=True)
class Lora:
    """A LoRA's file, and the factor by which its change of the weights is multiplied (1: as it was trained).

    transformer: the name of the one that it changes, for a pipeline of several; None if that is not said, or for the
    only one. keys: of its tensors, as diffusers converts them; known once `check` has read the file.
    """

    file: str
    scale: float = 1.0
    transformer: str | None = None
    keys: tuple[str, ...] = field(default=(), compare=False, repr=False)

    @property
    def path(self) -> Path:
        return LORAS.get(self.file, Path(self.file))

    @property
    def part(self) -> str:
        """The name of the transformer that it changes."""
        return self.transformer or TRANSFORMER

    @property
    def changes_encoders(self) -> bool:
        return any(key.startswith(ENCODER) for key in self.keys)

    def __str__(self) -> str:
        return f"{self.file}:{self.scale:g}" + (f"@{self.transformer}" if self.transformer else "")


def parse(text: str) -> Lora:
    """Return the LoRA of FILE[:SCALE][@TRANSFORMER]; ValueError for a scale that is not finite.

    What follows the last @ belongs to the file's name where it is no identifier, and what follows the last colon where
    it is no number.
    """
    left, at, name = text.rpartition("@")
    rest, transformer = (left, name) if at and name.isidentifier() else (text, None)
    path, colon, scale = rest.rpartition(":")
    try:
        lora = Lora(path, float(scale), transformer) if colon else Lora(rest, transformer=transformer)
    except ValueError:
        return Lora(rest, transformer=transformer)
    if not math.isfinite(lora.scale):
        raise ValueError(f"got --lora {text}, expected a finite scale, such as 0.8")
    return lora


def check(loras: Sequence[Lora], kind: Any, models: Models) -> tuple[Lora, ...]:
    """Return the LoRAs with their keys and the transformers that they change, of which a pipeline may have several.

    kind: the class of the pipeline. This reads the LoRA files, and no weights of the pipeline. Raises ValueError for a
    file that diffusers cannot load whole into its transformer, and where nothing says which transformer that is.
    """
    return tuple(lora for lora, _ in fitted(loras, kind, models))


def fitted(loras: Sequence[Lora], kind: Any, models: Models, anywhere: bool = False) -> Iterator[tuple[Lora, Any]]:
    """Yield what `check` returns, each with a transformer without memory for its weights that holds it.

    The nth adapter is named `adapter(n)`. anywhere: try a file that does not say its transformer with all of them.
    """
    if loras and getattr(kind, "transformer_name", None) != TRANSFORMER:
        files = " ".join(map(str, loras))
        raise ValueError(f"--lora {files} is not supported: diffusers' {kind.__name__} loads no LoRA of a transformer")
    number = 0
    for lora in loras:
        if lora.transformer is not None and lora.transformer not in models:
            names = ", ".join(models)
            raise ValueError(f"--lora {lora}: {kind.__name__} has no {lora.transformer}; its transformers: {names}")
        if lora.path.suffix != ".safetensors" or not lora.path.is_file():
            raise ValueError(f"got --lora {lora.path}, expected a .safetensors file that exists: {FORM}")
        check_values(open_checkpoint(lora.path))
        with context(f"got --lora {lora.path}, which {kind.__name__} cannot read"), _listening() as records:
            state = _within(CONVERSION_S, partial(kind.lora_state_dict, **_file(lora)))
            if records:
                raise ValueError(records[0].getMessage())
        for part in _parts(lora, state, models, anywhere):
            number += 1
            model_kind, config = models[part]
            placed = replace(lora, transformer=part if len(models) > 1 else None, keys=tuple(state))
            with context(_unfit(lora, model_kind)), torch.device("meta"), WithoutValues():
                model = model_kind.from_config(config)
                with _listening():
                    options = {"prefix": TRANSFORMER, "adapter_name": adapter(number), "low_cpu_mem_usage": True}
                    model.load_lora_adapter(_of_part(state, part), **options)
            _check_whole(placed, model, number)
            yield placed, model


def _file(lora: Lora) -> dict[str, Any]:
    path = {"pretrained_model_name_or_path_or_dict": str(lora.path.parent), "weight_name": lora.path.name}
    return {**path, "use_safetensors": True}


def _parts(lora: Lora, keys: Iterable[str], models: Models, anywhere: bool) -> tuple[str, ...]:
    """Return the transformers that a file changes: by its keys, by the name after its @, or by the file's name.

    keys: diffusers', which begin with "transformer" whatever transformer they are for.
    """
    kinds = " or ".join(dict.fromkeys(kind.__name__ for kind, _ in models.values()))
    by_keys = {key.partition(".")[0] for key in keys if not key.startswith(ENCODER)}
    if odd := next((key for key in keys if key.partition(".")[0] in by_keys - models.keys()), None):
        raise ValueError(f"got --lora {lora.path} with the key {odd:.200}, expected a LoRA of a {kinds}")
    if not by_keys:
        raise ValueError(f"got --lora {lora.path} with no key of the transformer, expected a LoRA of a {kinds}")
    if by_keys != {TRANSFORMER}:
        if lora.transformer is not None and by_keys != {lora.transformer}:
            raise ValueError(f"--lora {lora}: its keys are those of {', '.join(sorted(by_keys))}; leave the @ out")
        return tuple(name for name in models if name in by_keys)
    if lora.transformer is not None or len(models) == 1:
        return (lora.part,)
    experts = {name: what for name, what in _find.experts().items() if name in models}
    named = [name for name, (_, files) in experts.items() if files.search(lora.path.stem.lower())]
    if len(named) == 1 or anywhere:
        return tuple(named) if len(named) == 1 else tuple(models)
    ways = " or ".join(f"@{name} ({what})" for name, (what, _) in experts.items())
    raise ValueError(f"--lora {lora.file} does not say which of {len(models)} transformers it is for; add {ways}")


def _of_part(named: Mapping[str, T], part: str) -> dict[str, T]:
    """Return what belongs to one transformer, under names that begin with "transformer", as diffusers expects them."""
    begin = f"{part}." if any(name.startswith(f"{part}.") for name in named) else f"{TRANSFORMER}."
    return {f"{TRANSFORMER}.{name.removeprefix(begin)}": x for name, x in named.items() if name.startswith(begin)}


def check_values(file: Checkpoint) -> None:
    """Raise ValueError for tensors that no LoRA has; this reads the whole file.

    Weights must be real, finite and not empty, alphas also positive, and the two matrices of a layer agree in rank.
    """
    for key, shape in file.shapes.items():
        tensor, what = file.tensor(key), f"--lora {file.name}: {key:.200}"
        if key.endswith("alpha"):
            if tensor.numel() != 1 or tensor.is_complex() or not 0 < float(tensor) < math.inf:
                value = f"{tensor.item():g}" if tensor.numel() == 1 and not tensor.is_complex() else tensor.dtype
                raise ValueError(f"{what} is {value} of shape {shape}; an alpha must be one positive, finite number")
            continue
        if not tensor.is_floating_point():
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(f"{what} is of type {dtype}; LoRA weights must be real floating-point numbers")
        if not tensor.numel():
            raise ValueError(f"{what} is empty, of shape {shape}; a LoRA needs a rank of at least 1")
        if not (tensor.float() if tensor.itemsize == 1 else tensor).isfinite().all():
            raise ValueError(f"{what} has values that are not finite; the file is damaged or its training failed")
        up = f"{match[1]}{UP[match[2]]}{match[3]}" if (match := DOWN.fullmatch(key)) else ""
        if up in file.shapes and (len(shape) < 2 or shape[:1] != file.shapes[up][1:2]):
            raise ValueError(f"{what} of shape {shape} and {up:.200} of shape {file.shapes[up]} differ in rank")


def why_preset(lora: Lora, known: Mapping[str, Preset], used: str | None) -> str | None:
    """Return how a LoRA of few steps is meant, None if it is used so. known: the pipeline's presets; used: a name."""
    path = str(lora.path).lower()
    preset = next((x for x in known.values() if x.loras is not None and re.search(x.loras, path)), None)
    if preset is None or (used == preset.name and preset.scale in (1, lora.scale)):
        return None
    scale = "" if preset.scale == 1 else f", with the LoRA scaled by {preset.scale:g}"
    return f"LoRA {lora.file} is distilled; its results need preset {preset.name} ({preset}{scale})"


def remarks(loras: Sequence[Lora], known: Mapping[str, Preset], preset: str | None) -> list[str]:
    """Return which transformer each LoRA of `check` changes if there are several, and what diffusers leaves out.

    known: the pipeline's presets; preset: the one that is used. The remark on a LoRA of few steps names its own.
    """
    found = [f"LoRA {lora.file} changes {lora.transformer}" for lora in loras if lora.transformer is not None]
    found += [reason for lora in loras if (reason := why_preset(lora, known, preset)) is not None]
    for lora in loras:
        file = open_checkpoint(lora.path)
        dropped = (file.tensor(key) for key in file.shapes if _find.leaves_out(key))
        if left := sum(bool(x.float().count_nonzero()) for x in dropped):  # torch counts no float8
            found.append(f"LoRA {lora.file}: {left} differences of norms are left out, as diffusers leaves them out")
    return found


def load(pipe: Any, loras: Sequence[Lora]) -> None:
    """Load the files that `check` accepted into a pipeline, and set their scales.

    Raises ValueError if diffusers fails, or if a key of a file is in no layer afterwards.
    """
    for number, lora in enumerate(loras, 1):
        name, model = adapter(number), getattr(pipe, lora.part)
        with context(_unfit(lora, type(pipe))), _listening():
            # for a transformer that reads image features, Wan's loader adds zero layers which the file does not have
            if lora.part == TRANSFORMER and model.config.get("image_dim") is None:
                pipe.load_lora_weights(**_file(lora), adapter_name=name)
            else:  # as diffusers does with load_into_transformer_2=True, for keys that name the transformer, too
                state, facts = pipe.lora_state_dict(**_file(lora), return_lora_metadata=True)
                options = {"metadata": facts and _of_part(facts, lora.part), "low_cpu_mem_usage": True}
                own = _of_part(state, lora.part)
                pipe.load_lora_into_transformer(own, model, adapter_name=name, _pipeline=pipe, **options)
        _check_whole(lora, model, number)
        for part, count in Counter(key.partition(".")[0] for key in lora.keys if key.startswith(ENCODER)).items():
            held = len(_held(getattr(pipe, part, None), number))
            if held != count:  # diffusers renames keys of encoders
                got = f"{count} keys of {part}, of which {type(pipe).__name__} takes {held}"
                raise ValueError(f"got --lora {lora.path} with {got}, expected a LoRA that it takes whole")
    if loras:
        pipe.set_adapters([adapter(number) for number, _ in enumerate(loras, 1)], [lora.scale for lora in loras])


def _check_whole(lora: Lora, model: Any, number: int) -> None:
    """Raise ValueError if the adapter in a transformer has not the keys of its file, one for one."""
    named: dict[str, Any] = {key.partition(".")[2]: key for key in _of_part(dict.fromkeys(lora.keys), lora.part)}
    if not any("lora_A" in key or "lokr_" in key for key in named):  # an older format, which diffusers converts, too
        named = convert_unet_state_dict_to_peft(named)
    if odd := sorted(_held(model, number) ^ set(named)):
        expected = f"each of its {len(named)} keys in a {type(model).__name__} and no others"
        raise ValueError(f"got --lora {lora.path} with {odd[0]:.200}, which does not fit: expected {expected}")


def _held(model: Any, number: int) -> set[str]:
    """Return the keys of the adapter of a file in a model, without the adapter's name."""
    from peft.utils import get_peft_model_state_dict  # takes seconds to import

    if adapter(number) not in getattr(model, "peft_config", {}):
        return set()
    return set(get_peft_model_state_dict(model, adapter_name=adapter(number), save_embedding_layers=False))


def adapter(number: int) -> str:
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


def _within(seconds: float, call: Callable[[], T]) -> T:
    """Return what a call of plain Python returns; ValueError if it takes longer. No thread stays.

    It runs in its own thread, so that this works on any thread; torch's settings there are the defaults.
    """
    thread = list[int]()

    def run() -> T:
        thread.append(threading.get_ident())
        return call()

    pool = ThreadPoolExecutor(1)
    future = pool.submit(run)
    pool.shutdown(wait=False)
    try:
        if not wait([future], seconds).done:
            raise ValueError(f"its conversion did not end within {seconds:g} s")
        return future.result()
    finally:
        if not (future.done() or future.cancel()):  # late, or Ctrl-C: the call ends at its next line of Python
            for ident in thread:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(SystemExit))
