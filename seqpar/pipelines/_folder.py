"""Checks the parts of a pipeline folder that diffusers and transformers read themselves, before they do.

Both wait for a pipe and build as many layers as a config says. Both give random values to weights that a file
lacks, and then only warn. Here each of these is one message.
When it wins: always; it reads configs and the headers of weight files.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.modeling_utils import ModelMixin

from seqpar.pipelines._naming import naming
from seqpar.vae.decoder import check_vae
from seqpar.weights.checkpoint import SUFFIXES, Checkpoint, find_checkpoint, open_checkpoint
from seqpar.weights.find import WithoutValues
from seqpar.weights.hub import errors_only
from seqpar.weights.jsons import check_regular, read_json
from seqpar.weights.layout import open_model
from seqpar.weights.parts import INDEX, check_numbers, part_of, read_scheduler
from seqpar.weights.schemas import shown

LARGE = 1 << 28  # a tensor of at most this many elements is never refused
MORE = 1 << 24  # elements that an encoder may have besides twice those of its files
MANY = 1000  # tensors that a model may have besides twice those of its files
TEXT_BYTES = 1 << 27  # of tokenizers; those of published models have up to 40 MB
STEMS = ("model", "pytorch_model")  # of the names of transformers' weight files
WITHOUT_WEIGHTS = re.compile("Token|Processor|FeatureExtractor")  # in the names of classes
LIBRARIES = ("diffusers", "transformers")  # whose classes a folder may name
ADAPTER = "adapter_config.json"  # beside a model: transformers then loads peft's adapter into it
YOURSELF = "to use it, load the pipeline yourself and call seqpar.parallelize"
LAYERS = ("num_hidden_layers", "num_layers", "n_layer")


def check_parts(folder: Path, index: Mapping[str, Any], file: Path | None = None) -> Mapping[str, Any]:
    """Return the config of a pipeline's transformer; ValueError for a part that cannot be loaded as its files say.

    index: the folder's model_index.json. A part without a folder of its own is left to diffusers. file: that of the
    transformer, if it is not in its folder.
    """
    check_libraries(folder, index)
    for name, (library, kind) in _parts(index):
        if not (folder / name).is_dir() or (file and name == "transformer"):
            continue
        check_files(folder / name)
        _check_asks_nothing(folder / name, library, kind)
        if name == "scheduler":
            read_scheduler(folder / name)
        elif (folder / name / "config.json").is_file() and not WITHOUT_WEIGHTS.search(kind):
            check_model(folder / name, library, kind)
    return read_json(folder / "transformer" / "config.json") if file is None else check_single(file)[1]


def check_single(file: Path) -> tuple[Checkpoint, Mapping[str, Any]]:
    """Return a transformer's file under diffusers' keys, and its config; ValueError if they do not fit each other."""
    checkpoint, config = open_model(file)
    assert config is not None
    check_numbers(config, file)
    _check_shapes(file, getattr(diffusers, config["_class_name"]), config, checkpoint)
    return checkpoint, config


def _parts(index: Mapping[str, Any]) -> list[tuple[str, tuple[str, str]]]:
    """Return (name, (library, class)) of each part that a model_index.json names."""
    names = [name for name, value in index.items() if isinstance(value, list) and not name.startswith("_")]
    return [(name, part) for name in names if (part := part_of(index, name)) is not None]


def check_libraries(folder: Path, index: Mapping[str, Any]) -> None:
    """Raise ValueError if a part's class is not one of diffusers or transformers; nothing is imported for it.

    diffusers before 0.42.1 imports any library that a model_index.json names, and runs a file of its name in the
    part's folder. It names the folders of its own pipelines as libraries, too.
    """
    own = Path(diffusers.__file__).parent / "pipelines"
    for name, (library, kind) in _parts(index):
        known = library in LIBRARIES or (library.isidentifier() and (own / library / "__init__.py").is_file())
        if not known or (folder / name / f"{library}.py").exists():
            raise ValueError(
                f"got {folder / INDEX} with {name[:60]}=[{library[:60]}, {kind[:60]}], expected classes of "
                f"{' and '.join(LIBRARIES)} alone; {YOURSELF}"
            )


def _check_asks_nothing(folder: Path, library: str, kind: str) -> None:
    """Raise ValueError for a part of which transformers would ask at the terminal whether to run its own program."""
    if library != "transformers" or not ("Auto" in kind or kind.endswith("Processor")):
        return
    for name in ("config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json"):
        if (folder / name).is_file() and "auto_map" in read_json(folder / name, TEXT_BYTES):
            raise ValueError(f"got {folder / name} with auto_map, expected a class of {library}; {YOURSELF}")


def check_files(folder: Path) -> None:
    """Raise ValueError if something in a folder is no regular file and no folder, or if a text in it is too long.

    Also if it would load more than the part itself: an adapter, a kernel from a hub, or weights of other shapes.
    """
    for file in sorted(folder.iterdir()):
        if file.is_dir():
            continue
        text = file.suffix in (".json", ".txt", ".model")
        try:
            check_regular(file, TEXT_BYTES if text else None)
        except ValueError as error:
            raise ValueError(f"got {file}, expected a readable file: {error}") from error
    if (folder / ADAPTER).exists():
        raise ValueError(f"got {folder / ADAPTER}, expected no adapter, which would change the weights; {YOURSELF}")
    if (folder / "config.json").is_file():
        _check_plain(read_json(folder / "config.json"), folder / "config.json")


def _check_plain(config: Mapping[str, Any], where: Path) -> None:
    """Raise ValueError if a config, or one within it, asks for attention from a hub or for quantised weights."""
    for key, value in config.items():
        named = value.values() if isinstance(value, Mapping) else (value,)
        if "attn_implementation" in key and any(isinstance(each, str) and "/" in each for each in named):
            raise ValueError(f"got {where} with {key[:60]}={shown(value)}, expected no kernel of a hub; {YOURSELF}")
        if key == "quantization_config" and value is not None:
            raise ValueError(f"got {where} with {key}, expected plain weights, whose shapes can be checked; {YOURSELF}")
        if isinstance(value, Mapping):
            _check_plain(value, where)


def check_model(folder: Path, library: str, name: str) -> None:
    """Raise ValueError if the weights in a folder do not fit its config.json.

    name: the model's class, of diffusers or of transformers; others are left to their own package.
    """
    config = read_json(folder / "config.json")
    check_numbers(config, folder / "config.json")
    kind = getattr(diffusers, name, None) if library == "diffusers" else None
    if kind is AutoencoderKL:
        check_vae(folder)
    elif isinstance(kind, type) and issubclass(kind, ModelMixin):
        _check_shapes(folder / "config.json", kind, config, open_checkpoint(find_checkpoint(folder)))
    elif library == "transformers":
        check_encoder(folder, name)


def check_encoder(folder: Path, name: str) -> None:
    """Raise ValueError if the weights of an encoder of transformers are missing, truncated or do not fit its config.

    name: its class. Reads the config and headers; layers and the number of all weights are compared.
    """
    file = folder / "config.json"
    config = read_json(file)
    check_numbers(config, file)
    stems = [stem for stem in STEMS if any((folder / (stem + suffix)).is_file() for suffix in SUFFIXES)]
    checkpoint = open_checkpoint(find_checkpoint(folder, (stems or STEMS)[0]))
    counted = config.get("text_config") or config
    named = next((name for name in LAYERS if isinstance(counted.get(name), int)), None)
    counts = layers_in(checkpoint)
    if named is not None and counts and counted[named] not in counts:
        expected = f"{' or '.join(map(str, sorted(counts)))}, as {Path(checkpoint.name).name} has"
        raise ValueError(f"got {file} with {named}={counted[named]}, expected {expected}")
    _check_amount(folder, name, checkpoint)


def _check_amount(folder: Path, name: str, checkpoint: Checkpoint) -> None:
    """Raise ValueError if a model of transformers has far more weights than its files, which would all be random."""
    import transformers  # not installed where no model needs it

    kind: Any = getattr(transformers, name, None)
    if not hasattr(kind, "config_class"):
        return
    file = folder / "config.json"
    told = f"got {file}, which describes no {name}"
    with naming(told), errors_only(transformers.utils.logging), torch.device("meta"), Bounded(checkpoint):
        model = kind(kind.config_class.from_pretrained(folder))
    described, held = sum(each.numel() for each in model.parameters()), sum(map(math.prod, checkpoint.shapes.values()))
    if described > 2 * held + MORE:  # tied weights may count twice
        raise ValueError(f"got {file}, which describes {described:,} parameters, expected the {held:,} of its files")


class Bounded(WithoutValues):
    """Refuses tensors far larger than those of a checkpoint, as a table of positions may be, and far more of them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self._largest = max(LARGE, *(2 * math.prod(shape) for shape in checkpoint.shapes.values()))
        self._most, self._made = 2 * len(checkpoint.shapes) + MANY, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return what a function of torch returns; ValueError for a tensor that is too large or one too many."""
        made = super().__torch_function__(func, types, args, kwargs)
        if isinstance(made, torch.Tensor) and made.numel() > self._largest:
            raise ValueError(f"a tensor of {made.numel():,} elements, expected at most {self._largest:,}")
        self._made += func is torch.empty  # by which layers make their weights
        if self._made > self._most:
            raise ValueError(f"more than {self._most:,} weights, about twice as many as its files have")
        return made


def layers_in(checkpoint: Checkpoint) -> set[int]:
    """Return the numbers of layers that keys of the form `prefix.N.name` count, one for each prefix."""
    found = {match.groups() for key in checkpoint.shapes if (match := re.match(r"(.*?)\.(\d{1,9})\.", key))}
    return set(Counter(prefix for prefix, _ in found).values())


def _check_shapes(file: Path, kind: Any, config: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """Raise ValueError if a parameter of diffusers' model is missing in the checkpoint or has another shape.

    file: where the config was read, for the message.
    """
    told = f"got {file}, which describes no {kind.__name__}"
    with naming(told), torch.device("meta"), Bounded(checkpoint):
        model = kind.from_config(config)
    parameters = dict(model.named_parameters())
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name not in checkpoint.shapes:
            if name not in parameters:
                continue  # diffusers computes it
            raise ValueError(f"{checkpoint.name}: wrong keys. Missing {name}, which a {kind.__name__} has")
        if checkpoint.shapes[name] != tuple(tensor.shape):
            got = f"{name} of shape {checkpoint.shapes[name]}"
            raise ValueError(f"{checkpoint.name}: got {got}, expected {tuple(tensor.shape)} as config.json says")
