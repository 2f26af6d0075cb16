"""Checks the parts of a pipeline folder that diffusers and transformers read themselves, before they do.

Both build as many layers as a config says, give random values to weights that a file lacks, skip weights that the model
does not have, and then only warn. Here each of these is one message, and no part brings a program, an adapter or a
kernel of its own. Only configs and the headers of weight files are read.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.modeling_utils import ModelMixin
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from tokenizers import Tokenizer

from seqpar.loading.checkpoint import Checkpoint, check_keys, check_types, find_checkpoint, open_checkpoint
from seqpar.loading.encoders import open_encoder
from seqpar.loading.errors import context
from seqpar.loading.layout import open_model
from seqpar.loading.names import Preset, errors_only, importing_pipelines, no_bars
from seqpar.loading.parts import INDEX, NAMES, check_numbers, part_of, parts_of, read_json, read_scheduler
from seqpar.loading.random import WithoutValues
from seqpar.loading.vae import open_vae
from seqpar.types.arguments import shown

CONFIG, WHOLE, VOCABULARIES = "tokenizer_config.json", "tokenizer.json", ("vocab.json", "added_tokens.json")
MOST_TOKENS = 1 << 26  # of a text; pipelines pad texts to it, at 6 bytes a token
NO_LIMIT = 1e20  # transformers takes a larger model_max_length for none
IDS = 1 << 32


def check_named(folder: Path, index: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise ValueError if a pipeline's model_index.json lacks one of these parts."""
    for name in names:
        if part_of(index, name) is None:
            raise ValueError(f"got pipeline {folder} without {name}, expected one: prompts need it")


def check_tokenizer(folder: Path) -> None:
    """Raise ValueError if this is not the folder of a tokenizer, or if a file in it cannot be read or used."""
    if not (folder / CONFIG).is_file():
        raise ValueError(f"got {folder} without {CONFIG}, expected a tokenizer's folder")
    check_files(folder)
    most = read_json(folder / CONFIG, TOKENIZER_BYTES).get("model_max_length")
    number = isinstance(most, (int, float)) and not isinstance(most, bool)
    if most is not None and not (number and (1 <= most <= MOST_TOKENS or most > NO_LIMIT)):
        expected = f"1 to {MOST_TOKENS} tokens, or 1e30 for no limit"
        raise ValueError(f"got {folder / CONFIG} with model_max_length={shown(most)}, expected {expected}")
    for file in (folder / name for name in VOCABULARIES if (folder / name).is_file()):
        for token, place in read_json(file, TOKENIZER_BYTES).items():
            if type(place) is not int or not 0 <= place < IDS:
                raise ValueError(f"got {file} with token {token[:60]!a}={shown(place)}, expected a number below 2^32")
    if (folder / WHOLE).exists():
        _check_whole(folder / WHOLE)


def _check_whole(file: Path) -> None:
    if not file.is_file() or file.stat().st_size > TOKENIZER_BYTES:
        raise ValueError(f"got {file}, expected a regular file of at most {TOKENIZER_BYTES} bytes")
    try:
        Tokenizer.from_file(str(file))
    except Exception as error:
        if type(error) is not Exception:  # the library has no class of its own for a file that it does not understand
            raise
        raise ValueError(f"got {file}, which is no tokenizer: {error}") from error


LARGE = 1 << 28  # a tensor of at most this many elements is never refused
MORE = 1 << 24  # elements that an encoder may have besides twice those of its files
MANY = 1000  # tensors that a model may have besides twice those of its files
TOKENIZER_BYTES = 1 << 27  # of its config; those of published models have up to 40 MB
WITHOUT_WEIGHTS = re.compile("Token|Processor|FeatureExtractor")  # in the names of classes
LIBRARIES = ("diffusers", "transformers")  # whose classes a folder may name
PROGRAMS = ("config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json")
ADAPTER = "adapter_config.json"  # beside a model: transformers then loads peft's adapter into it
YOURSELF = "to use it, load the pipeline yourself and call seqpar.parallelize"
LAYERS = ("num_hidden_layers", "num_layers", "n_layer")


@dataclass(frozen=True)
class Fitted:
    """A checkpoint that fits a model.

    model: on the meta device; None for an encoder of transformers, and for a file under its authors' keys.
    """

    checkpoint: Checkpoint
    model: Any

    @cached_property
    def state(self) -> Mapping[str, tuple[int, ...]]:
        """Return name -> shape of each tensor in the model's state."""
        return {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}

    @cached_property
    def parameters(self) -> frozenset[str]:
        """Return the names of those that are no buffers."""
        return frozenset(name for name, _ in self.model.named_parameters(remove_duplicate=False))


def kind_of(index: Mapping[str, Any], path: Path) -> Any:
    """Return the class of a folder's pipeline; ValueError if diffusers has none, or if it has no transformer."""
    name = str(index.get("_class_name"))
    with importing_pipelines():
        kind = getattr(diffusers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, DiffusionPipeline)):
        raise ValueError(
            f"got {path} with the pipeline {name}, expected one that diffusers {diffusers.__version__} has"
        )
    if part_of(index, "transformer") is None:
        raise ValueError(f"got a {name} without a transformer, expected a pipeline that has one")
    return kind


def model_of(index: Mapping[str, Any]) -> Any:
    """Return the class of the transformer that a model_index.json names, or None if diffusers has none."""
    _, name = part_of(index, "transformer") or ("", "")
    return getattr(diffusers, name, None)


def check_parts(
    folder: Path, index: Mapping[str, Any], file: Path | None = None
) -> tuple[Mapping[str, Any], Mapping[str, Fitted]]:
    """Return the config of a pipeline's transformer, and the checkpoints of its models by the names of their parts.

    index: the folder's model_index.json. A part without a folder of its own is left to diffusers. file: that of the
    transformer, if it is not in its folder. Raises ValueError for a part that cannot be loaded as its files say.
    """
    fitted = dict[str, Fitted]()
    for name, (library, kind) in parts_of(index):
        if library not in LIBRARIES and not hasattr(diffusers.pipelines, library):  # diffusers imports no other either
            part = f"{name[:60]}=[{library[:60]}, {kind[:60]}]"
            expected = f"classes of {' and '.join(LIBRARIES)} alone; {YOURSELF}"
            raise ValueError(f"got {folder / INDEX} with {part}, expected {expected}")
        if not (folder / name).is_dir() or (file and name == "transformer"):
            continue
        check_files(folder / name)
        _check_asks_nothing(folder / name, library, kind)
        if name == "scheduler":
            config = read_scheduler(folder / name)
            with context(f"got {folder / name}, which describes no {kind}"):
                getattr(diffusers, kind).from_config(config)
        elif (folder / name / "config.json").is_file() and not WITHOUT_WEIGHTS.search(kind):
            found = check_model(folder / name, library, kind)
            fitted |= {} if found is None else {name: found}
    if file is None:
        return read_json(folder / "transformer" / "config.json"), fitted
    checkpoint, config = check_single(file)
    return config, {**fitted, "transformer": Fitted(checkpoint, None)}


def check_single(file: Path) -> tuple[Checkpoint, Mapping[str, Any]]:
    """Return a transformer's file under diffusers' keys, and its config; ValueError if they do not fit each other."""
    checkpoint, config = open_model(file)
    assert config is not None
    check_numbers(config, file)
    check_types(checkpoint, checkpoint.dtypes)
    _check_shapes(file, getattr(diffusers, config["_class_name"]), config, checkpoint)
    return checkpoint, config


def _check_asks_nothing(folder: Path, library: str, kind: str) -> None:
    """Raise ValueError for a part of which transformers would ask at the terminal whether to run its own program."""
    if library != "transformers" or not ("Auto" in kind or kind.endswith("Processor")):
        return
    for name in PROGRAMS:
        if (folder / name).is_file() and "auto_map" in read_json(folder / name, TOKENIZER_BYTES):
            raise ValueError(f"got {folder / name} with auto_map, expected a class of {library}; {YOURSELF}")


def check_files(folder: Path) -> None:
    """Raise ValueError if a part's folder would load more than the part: an adapter, a hub's kernel, other weights."""
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


def check_model(folder: Path, library: str, name: str) -> Fitted | None:
    """Raise ValueError if the weights in a folder do not fit its config.json.

    name: the model's class, of diffusers, of one of its pipelines' packages, or of transformers; a class that none has
    is left to diffusers, which refuses it.
    """
    if library == "transformers":
        import transformers as package  # takes seconds, which models without text encoders do not need
    else:
        package = diffusers if library == "diffusers" else getattr(diffusers.pipelines, library, None)
    return check_class(folder, getattr(package, name, None))


def check_class(folder: Path, kind: Any) -> Fitted | None:
    """Do what `check_model` does, for a class itself."""
    if kind is AutoencoderKL:
        model, checkpoint, _ = open_vae(folder)
        return Fitted(checkpoint, model)
    if isinstance(kind, type) and issubclass(kind, ModelMixin):
        config = read_json(folder / "config.json")
        check_numbers(config, folder / "config.json")
        return _check_shapes(folder / "config.json", kind, config, open_checkpoint(find_checkpoint(folder)))
    return _check_encoder(folder, kind) if hasattr(kind, "config_class") else None


def _check_encoder(folder: Path, kind: Any) -> Fitted:
    """Compare an encoder of transformers with its files.

    transformers itself does so, because it knows which names of weights differ between its versions, which are tied,
    and which a class may lack or does not read.
    """
    file = folder / "config.json"
    config = read_json(file)
    check_numbers(config, file)
    if "transformers_weights" in config:  # transformers would read another file than is checked here
        raise ValueError(f"{file} names a file by transformers_weights; remove it, and name the file as usual")
    checkpoint = open_encoder(folder)
    sizes, counts = config.get("text_config") or config, layers_in(checkpoint)
    field = next((field for field in LAYERS if isinstance(sizes.get(field), int)), None)
    if field is not None and counts and sizes[field] not in counts:
        expected = f"{' or '.join(map(str, sorted(counts)))}, as {Path(checkpoint.name).name} has"
        raise ValueError(f"got {file} with {field}={sizes[field]}, expected {expected}")
    model, compared = _compared(folder, kind, checkpoint)
    # a file may hold all of the model that its config names, of which the class is a part: of CLIP its text encoder
    unknown = compared["unexpected_keys"]
    for whole in _saved_as(config, kind) if unknown else ():
        unknown = _compared(folder, whole, checkpoint)[1]["unexpected_keys"]
    check_keys(checkpoint.name, compared["missing_keys"], unknown)
    for key, got, expected in sorted(compared["mismatched_keys"]):
        shapes = f"shape {tuple(got)}, expected {tuple(expected)}"
        raise ValueError(f"{checkpoint.name}: got {key} of {shapes} as config.json says")
    buffers = {key.rpartition(".")[2] for key, _ in model.named_buffers()}  # such as position_ids, in older files
    weights = [key for key in sorted(checkpoint.shapes) if key.rpartition(".")[2] not in buffers]
    check_types(checkpoint, weights, lambda dtype: dtype.is_floating_point)
    return Fitted(checkpoint, None)


def _compared(folder: Path, kind: Any, checkpoint: Checkpoint) -> tuple[Any, Mapping[str, Any]]:
    """Return an encoder on the meta device, and what transformers finds when it loads a checkpoint's header into it.

    Raises ValueError, before transformers is given the header, for a config that describes far more than it holds.
    """
    file, held = folder / "config.json", sum(map(math.prod, checkpoint.shapes.values()))
    with context(f"got {file}, which describes no {kind.__name__}"), _quiet():
        config = kind.config_class.from_pretrained(folder)
        with torch.device("meta"), BoundedModules(checkpoint):
            described = sum(parameter.numel() for parameter in kind(config).parameters())
    if described > 2 * held + MORE:  # tied weights may count twice
        raise ValueError(f"got {file}, which describes {described:,} parameters, expected the {held:,} of its files")
    header = {
        key: torch.empty(shape, dtype=checkpoint.dtypes[key], device="meta") for key, shape in checkpoint.shapes.items()
    }
    options = {"output_loading_info": True, "ignore_mismatched_sizes": True, "device_map": {"": "meta"}}
    with context(f"{checkpoint.name} does not fit a {kind.__name__}"), _quiet():
        return kind.from_pretrained(None, config=config, state_dict=header, **options)


def _saved_as(config: Mapping[str, Any], kind: Any) -> Iterator[Any]:
    """Yield the class of transformers whose weights a folder holds as its config says, if it is another one."""
    import transformers

    match config.get("architectures"):
        case [str(name)]:
            whole = getattr(transformers, name, None)
            if isinstance(whole, type) and issubclass(whole, transformers.PreTrainedModel) and whole is not kind:
                yield whole


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings and bars of transformers."""
    from transformers.utils import logging

    with errors_only(logging), no_bars(logging):
        yield


class BoundedModules(WithoutValues):
    """Refuses tensors far larger than those of a checkpoint, as a table of positions may be, and far more of them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self._largest = max(LARGE, *(2 * math.prod(shape) for shape in checkpoint.shapes.values()))
        self._most, self._made = 2 * len(checkpoint.shapes) + MANY, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return what a function of torch returns; ValueError for a tensor that is too large or one too many."""
        output = super().__torch_function__(func, types, args, kwargs)
        if isinstance(output, torch.Tensor) and output.numel() > self._largest:
            raise ValueError(f"a tensor of {output.numel():,} elements, expected at most {self._largest:,}")
        self._made += func is torch.empty  # by which layers make their weights
        if self._made > self._most:
            raise ValueError(f"more than {self._most:,} weights, about twice as many as its files have")
        return output


def layers_in(checkpoint: Checkpoint) -> set[int]:
    """Return the numbers of layers that keys of the form `prefix.N.name` count, one for each prefix."""
    layers = {match.groups() for key in checkpoint.shapes if (match := re.match(r"(.*?)\.(\d{1,9})\.", key))}
    return set(Counter(prefix for prefix, _ in layers).values())


def _check_shapes(file: Path, kind: Any, config: Mapping[str, Any], checkpoint: Checkpoint) -> Fitted:
    """Raise ValueError if a parameter of diffusers' model is missing in the checkpoint or has another shape.

    file: where the config was read, for the message.
    """
    what = f"got {file}, which describes no {kind.__name__}"
    with context(what), torch.device("meta"), BoundedModules(checkpoint):
        model = kind.from_config(config)
    fitted = Fitted(checkpoint, model)
    ignored = re.compile("|".join(kind._keys_to_ignore_on_load_unexpected or ("$^",)))
    unknown = checkpoint.shapes.keys() - fitted.state.keys() - {name for name, _ in model.named_buffers()}
    for name, shape in fitted.state.items():
        if name not in checkpoint.shapes:
            if name not in fitted.parameters:
                continue  # diffusers computes it
            raise ValueError(f"{checkpoint.name}: wrong keys. Missing {name}, which a {kind.__name__} has")
        if checkpoint.shapes[name] != shape:
            got = f"{name} of shape {checkpoint.shapes[name]}"
            raise ValueError(f"{checkpoint.name}: got {got}, expected {shape} as config.json says")
    check_keys(checkpoint.name, (), [name for name in unknown if not ignored.search(name)])
    check_types(checkpoint, sorted(fitted.parameters), lambda dtype: dtype.is_floating_point)  # 8 bits are diffusers'
    return fitted


def built(kind: Any, config: Mapping[str, Any], what: str) -> Any:
    """Return a model of diffusers without memory for its weights; ValueError if its config describes none."""
    if kind is None:
        raise ValueError(f"got {what} with a part of a class that diffusers {diffusers.__version__} does not have")
    with context(f"got {what}, which describes no {kind.__name__}"), torch.device("meta"), WithoutValues():
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
