"""Checks the parts of a pipeline folder that diffusers and transformers read themselves, before they do.

Both wait for a pipe and build as many layers as a config says. Both give random values to weights that a file
lacks, and then only warn. Here each of these is one message.
When it wins: always; it reads configs and the headers of weight files.
"""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.modeling_utils import ModelMixin
from huggingface_hub.errors import StrictDataclassError

from seqpar.sampling.schedules import FAILURES
from seqpar.vae.decoder import check_vae
from seqpar.weights.checkpoint import SUFFIXES, Checkpoint, find_checkpoint, open_checkpoint
from seqpar.weights.find import WithoutValues
from seqpar.weights.jsons import check_regular, read_json
from seqpar.weights.parts import check_numbers, part_of, read_scheduler

TEXT_BYTES = 1 << 27  # of tokenizers; those of published models have up to 40 MB
# what loaders of diffusers and transformers raise; NameError for a name that no branch on a config has set
BROKEN = (OSError, NameError, StrictDataclassError, *FAILURES)
THEIRS = ("diffusers", "transformers")
STEMS = ("model", "pytorch_model")  # of the names of transformers' weight files
WITHOUT_WEIGHTS = re.compile("Token|Processor|FeatureExtractor")  # in the names of classes
LAYERS = ("num_hidden_layers", "num_layers", "n_layer")


@contextmanager
def naming(what: str, theirs: bool = False) -> Iterator[None]:
    """Raise ValueError, with `what` before the reason, where diffusers or transformers fail on the files of a model.

    theirs: leave errors that come from this package as they are, and name the line of theirs that fails.
    """
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except BROKEN as error:
        package, line = _origin(error)
        if theirs and package not in THEIRS:
            raise
        reason = " ".join(str(error).split())[:400] or type(error).__name__
        raise ValueError(f"{what}{f' ({line})' if theirs else ''}: {reason}") from error


def _origin(error: BaseException) -> tuple[str, str]:
    """Return the package of the innermost call in ours or theirs that an error came through, and its file and line."""
    found = ("", "")
    for frame, line in traceback.walk_tb(error.__traceback__):
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package in ("seqpar", *THEIRS):
            found = package, f"{Path(frame.f_code.co_filename).name}, line {line}"
    return found


def check_parts(folder: Path, index: Mapping[str, Any]) -> None:
    """Raise ValueError for a part of a pipeline that cannot be loaded as its files say.

    index: the folder's model_index.json. A part without a folder of its own is left to diffusers.
    """
    for name, value in index.items():
        part = part_of(index, name) if isinstance(value, list) else None
        if part is None or name.startswith("_") or not (folder / name).is_dir():
            continue
        check_files(folder / name)
        library, kind = part
        if name == "scheduler":
            read_scheduler(folder / name)
        elif (folder / name / "config.json").is_file() and not WITHOUT_WEIGHTS.search(kind):
            check_model(folder / name, getattr(diffusers, kind, None) if library == "diffusers" else None)


def check_files(folder: Path) -> None:
    """Raise ValueError if something in a folder is no regular file and no folder, or if a text in it is too long."""
    for file in sorted(folder.iterdir()):
        if file.is_dir():
            continue
        text = file.suffix in (".json", ".txt", ".model")
        try:
            check_regular(file, TEXT_BYTES if text else None)
        except ValueError as error:
            raise ValueError(f"got {file}, expected a readable file: {error}") from error


def check_model(folder: Path, kind: Any) -> None:
    """Raise ValueError if the weights in a folder do not fit its config.json.

    kind: diffusers' class of the model, or None for a model of transformers, of which sizes and layers are compared.
    """
    config = read_json(folder / "config.json")
    check_numbers(config, folder / "config.json")
    if "quantization_config" in config:
        return  # its tensors have other names and shapes
    if kind is AutoencoderKL:
        check_vae(folder)
    elif isinstance(kind, type) and issubclass(kind, ModelMixin):
        _check_shapes(folder, kind, config, open_checkpoint(find_checkpoint(folder)))
    elif kind is None:
        check_encoder(folder)


def check_encoder(folder: Path) -> None:
    """Raise ValueError if the weights of an encoder of transformers are missing, truncated or of other layers.

    Reads the config and headers.
    """
    config = read_json(folder / "config.json")
    check_numbers(config, folder / "config.json")
    stems = [stem for stem in STEMS if any((folder / (stem + suffix)).is_file() for suffix in SUFFIXES)]
    checkpoint = open_checkpoint(find_checkpoint(folder, (stems or STEMS)[0]))
    counted = config.get("text_config") or config
    named = next((name for name in LAYERS if isinstance(counted.get(name), int)), None)
    counts = layers_in(checkpoint)
    if named is not None and counts and counted[named] not in counts:
        expected = f"{' or '.join(map(str, sorted(counts)))}, as {Path(checkpoint.name).name} has"
        raise ValueError(f"got {folder / 'config.json'} with {named}={counted[named]}, expected {expected}")


def layers_in(checkpoint: Checkpoint) -> set[int]:
    """Return the numbers of layers that keys of the form `prefix.N.name` count, one for each prefix."""
    found = {match.groups() for key in checkpoint.shapes if (match := re.match(r"(.*?)\.(\d{1,9})\.", key))}
    return set(Counter(prefix for prefix, _ in found).values())


def _check_shapes(folder: Path, kind: Any, config: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """Raise ValueError if a parameter of diffusers' model is missing in the checkpoint or has another shape."""
    told = f"got {folder / 'config.json'}, which describes no {kind.__name__}"
    with naming(told), torch.device("meta"), WithoutValues():
        model = kind.from_config(config)
    for name, parameter in model.named_parameters():
        if name not in checkpoint.shapes:
            raise ValueError(f"{checkpoint.name}: wrong keys. Missing {name}, which a {kind.__name__} has")
        if checkpoint.shapes[name] != tuple(parameter.shape):
            got = f"{name} of shape {checkpoint.shapes[name]}"
            raise ValueError(f"{checkpoint.name}: got {got}, expected {tuple(parameter.shape)} as config.json says")
