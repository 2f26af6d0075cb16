"""Checks the parts of a pipeline's folder before diffusers and transformers read them.

Both give random values to weights that a file lacks, skip weights that the model does not have, and only warn. Here
each of these is an error, and no part runs a program, or loads an adapter or a kernel. Only configs and the headers of
weight files are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.modeling_utils import ModelMixin
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from tokenizers import Tokenizer

from seqpar.families import Published
from seqpar.families._modular import is_modular
from seqpar.loading.checkpoint import (
    Checkpoint,
    Fitted,
    check,
    check_keys,
    check_layers,
    check_types,
    find_checkpoint,
    from_state_dict,
    open_checkpoint,
)
from seqpar.loading.encoders import open_encoder
from seqpar.loading.errors import context
from seqpar.loading.modular import of_workflow, place_of, without_parts
from seqpar.loading.names import RandomModel, building, errors_only, importing_pipelines, no_bars
from seqpar.loading.parts import (
    CONFIG,
    MOST_BYTES,
    NAMES,
    PLACES,
    UNCONDITIONAL,
    check_autoencoder,
    index_of,
    part_of,
    parts_of,
    read_json,
    read_pipeline,
    read_scheduler,
)
from seqpar.loading.placing import load
from seqpar.loading.random import WithoutValues
from seqpar.loading.scaled import MARK, as_numbers
from seqpar.loading.single_file import open_model
from seqpar.types.arguments import shown
from seqpar.types.keys import KeyMap, TensorSource

TOKENIZER, WHOLE, VOCABULARIES = "tokenizer_config.json", "tokenizer.json", ("vocab.json", "added_tokens.json")
MOST_TOKENS = 1 << 26  # of a prompt; pipelines pad prompts to it, at 6 bytes per token
NO_LIMIT = 1e20  # transformers treats a larger model_max_length as none
IDS = 1 << 32
WITHOUT_WEIGHTS = re.compile("Token|Processor|FeatureExtractor")  # in the names of classes
LIBRARIES = ("diffusers", "transformers")  # whose classes a folder may name
PROGRAMS = (CONFIG, TOKENIZER, "preprocessor_config.json", "processor_config.json")
QUANTIZATION = "quantization_config"
ADAPTER = "adapter_config.json"  # beside a model: transformers then loads peft's adapter into it
YOURSELF = "to use it, load the pipeline yourself and call seqpar.parallelize"


@dataclass(frozen=True)
class PipelineParts:
    """The checked parts of a pipeline. Any number of requests can be checked without reading its files again.

    source: its folder, or a random model. index: its model_index.json, of a modular one without the parts that the
    workflow leaves out. config: the transformer's. vae: without weights, or None. fitted: its models by the names of
    their parts. places: folders of parts. published: what stands for the files of a model that is only planned.
    """

    source: Path | RandomModel
    index: Mapping[str, Any]
    config: Mapping[str, Any]
    vae: Any
    scheduling: Mapping[str, Any] | None
    fitted: Mapping[str, Fitted] = field(default_factory=dict)
    places: Mapping[str, Path] = field(default_factory=dict)
    workflow: str | None = None
    published: Published | None = None

    @property
    def kind(self) -> Any:
        return kind_of(self.index, self.source if isinstance(self.source, Path) else Path(self.source.name))

    @cached_property
    def caller(self) -> Any:
        """Return the pipeline's class, or a modular pipeline without weights: what `parameters_of` takes."""
        if not is_modular(self.kind):
            return self.kind
        models = {name: part.model for name, part in self.fitted.items() if part.model is not None}
        return without_parts(self.kind, self.index, self.workflow, models)

    @property
    def main(self) -> str:
        """Return the name of the first transformer."""
        return next(name for name in NAMES if part_of(self.index, name) is not None)

    @property
    def models(self) -> dict[str, tuple[Any, Mapping[str, Any]]]:
        """Return class and config of each transformer, by their names."""
        others = {name: (type(model), model.config) for name, model in self._others.items()}
        return {self.main: (_transformer(self.index), self.config), **others}

    @property
    def transformers(self) -> dict[str, Any]:
        """Return all transformers, without memory for weights, by their names; the first is `transformer`."""
        return {self.main: self.transformer, **self._others}

    @property
    def _others(self) -> dict[str, Any]:
        return {name: self.fitted[name].model for name in NAMES if name in self.fitted and name != self.main}

    @property
    def take_turns(self) -> bool:
        """Whether there are several transformers, of which each step calls one, so that they can be parked."""
        return bool(self._others) and UNCONDITIONAL not in self._others

    @cached_property
    def transformer(self) -> Any:
        """Return the transformer without memory for weights; ValueError if its config describes none."""
        if self.main in self.fitted:
            return self.fitted[self.main].model
        return _built(_transformer(self.index), self.config, str(getattr(self.source, "name", self.source)))


def kind_of(index: Mapping[str, Any], path: Path) -> Any:
    """Return the class of a folder's pipeline; ValueError if diffusers has none, or if it has no transformer."""
    name = str(index.get("_class_name"))
    with importing_pipelines():
        kind = getattr(diffusers, name, None)
    if not (isinstance(kind, type) and (issubclass(kind, DiffusionPipeline) or is_modular(kind))):
        raise ValueError(
            f"got {path} with the pipeline {name}, expected a pipeline of diffusers {diffusers.__version__}"
        )
    if all(part_of(index, transformer) is None for transformer in NAMES):
        raise ValueError(f"got a {name} without a transformer, expected a pipeline that has one")
    return kind


def parts_of_random(random: RandomModel) -> PipelineParts:
    configs = {name: {**config, "_class_name": kind} for name, (kind, config) in random.parts.items()}
    vae = _built(getattr(diffusers, random.parts["vae"][0]), random.parts["vae"][1], random.name)
    return PipelineParts(random, random.index, configs["transformer"], vae, configs["scheduler"])


def parts_of_published(name: str, known: Published) -> PipelineParts:
    """Return the parts that a plan of a published model needs, from what its family's file says."""
    kind, index = known.transformer, {"_class_name": known.pipeline, PLACES: {}, **known.index}
    index["transformer"] = ("diffusers", kind)
    model = _built(getattr(diffusers, kind), known.config, name)
    names = [part for part in NAMES if part_of(index, part) is not None]
    fitted = {part: Fitted(Path(name), type(model), model.config, from_state_dict(name, {}), model) for part in names}
    vae = SimpleNamespace(config=known.vae)
    return PipelineParts(Path(name), index, model.config, vae, None, fitted, published=known)


def parts_of_folder(path: Path, workflow: str | None = None) -> PipelineParts:
    """Return the checked parts of a pipeline's folder, or of a transformer's file in one.

    A part without a folder is left to diffusers. workflow: one of a modular pipeline, of which the parts are then.
    Raises ValueError for a part that does not load as its files say.
    """
    folder, file = (path.parent, path) if path.is_file() else (path, None)
    index = read_pipeline(folder)
    pipeline = kind_of(index, folder)  # a class that diffusers does not have is named before its parts
    if is_modular(pipeline):
        index = of_workflow(pipeline, index, workflow, folder)
    elif workflow is not None:
        raise ValueError(f"got workflow={workflow!r} for a {pipeline.__name__}, which is not modular; leave it out")
    fitted, scheduling, places = dict[str, Fitted](), None, dict[str, Path]()
    for name, (library, kind) in parts_of(index):
        if library not in LIBRARIES and not hasattr(diffusers.pipelines, library):  # diffusers imports no other either
            part = f"{name[:60]}=[{library[:60]}, {kind[:60]}]"
            expected = f"classes of {' and '.join(LIBRARIES)} alone; {YOURSELF}"
            raise ValueError(f"got {index_of(folder)} with {part}, expected {expected}")
        place = places[name] = place_of(folder, name, index)
        if file is not None and name == "transformer":
            fitted[name] = check_single(file)
        elif place.is_dir():
            check_files(place)
            _check_asks_nothing(place, library, kind)
            if name == "scheduler":
                scheduling = read_scheduler(place)
                with context(f"got {place}, which describes no {kind}"):
                    getattr(diffusers, kind).from_config(scheduling)
            elif (place / CONFIG).is_file() and not WITHOUT_WEIGHTS.search(kind):
                model = check_model(place, library, kind)
                fitted |= {} if model is None else {name: model}
            if name.startswith("tokenizer"):
                check_named(folder, index, [name.replace("tokenizer", "text_encoder")])
            if name.startswith("tokenizer") or (place / TOKENIZER).is_file():  # a processor may hold one, too
                check_tokenizer(place)
    main = next(name for name in NAMES if part_of(index, name) is not None)
    config = fitted[main].config if main in fitted else read_json(folder / main / CONFIG)
    vae = fitted["vae"].model if "vae" in fitted else None
    return PipelineParts(folder, index, config, vae, scheduling, fitted, places, workflow)


def open_controlnet(folder: Path, weights: bool = True) -> Fitted:
    """Return a ControlNet of diffusers without its weights, whose headers are read; ValueError for another folder.

    weights: False reads config.json alone, as for a folder whose weights are not downloaded yet.
    """
    if not (folder / CONFIG).is_file():
        raise ValueError(f"got ControlNet {folder}, which has no {CONFIG}; name the folder of one model")
    check_files(folder)
    config = read_json(folder / CONFIG)
    name = str(config.get("_class_name"))
    kind = class_of("diffusers", name) if "ControlNet" in name else None
    fitted = None
    if isinstance(kind, type) and issubclass(kind, ModelMixin):
        fitted = check_class(folder, kind) if weights else _described(folder, kind, config)
    if fitted is None:
        raise ValueError(f"got ControlNet {folder} of the class {name}, expected a ControlNet of diffusers")
    if config.get("num_mode"):
        raise ValueError(f"got ControlNet {folder} of several modes (union), which is not supported; name another")
    return fitted


def _described(folder: Path, kind: Any, config: Mapping[str, Any]) -> Fitted:
    """Return a model of which config.json alone is known."""
    empty = from_state_dict(str(folder), {})
    return Fitted(folder, kind, config, empty, _built(kind, config, str(folder / CONFIG)))


def check_named(folder: Path, index: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise ValueError if a pipeline's model_index.json lacks one of these parts."""
    for name in names:
        if part_of(index, name) is None:
            raise ValueError(f"pipeline {folder} has no {name}, which prompts need")


def check_tokenizer(folder: Path) -> None:
    """Raise ValueError if this is not the folder of a tokenizer, or if a file in it cannot be read or used."""
    if not (folder / TOKENIZER).is_file():
        raise ValueError(f"{folder} has no {TOKENIZER}; it is no tokenizer's folder")
    check_files(folder)
    most = read_json(folder / TOKENIZER).get("model_max_length")
    number = isinstance(most, (int, float)) and not isinstance(most, bool)
    if most is not None and not (number and (1 <= most <= MOST_TOKENS or most > NO_LIMIT)):
        expected = f"1 to {MOST_TOKENS} tokens, or 1e30 for no limit"
        raise ValueError(f"got {folder / TOKENIZER} with model_max_length={shown(most)}, expected {expected}")
    for file in (folder / name for name in VOCABULARIES if (folder / name).is_file()):
        for token, place in read_json(file).items():
            if type(place) is not int or not 0 <= place < IDS:
                raise ValueError(f"got {file} with token {token[:60]!a}={shown(place)}, expected a number below 2^32")
    file = folder / WHOLE
    if file.exists():
        if not file.is_file() or file.stat().st_size > MOST_BYTES:
            raise ValueError(f"got {file}, expected a regular file of at most {MOST_BYTES} bytes")
        try:
            Tokenizer.from_file(str(file))
        except Exception as error:
            if type(error) is not Exception:  # the library has no error class for a file that it cannot parse
                raise
            raise ValueError(f"got {file}, which is no tokenizer: {error}") from error


def check_files(folder: Path) -> None:
    """Raise ValueError if a part's folder would load more than the part: an adapter, a hub's kernel, other weights."""
    if (folder / ADAPTER).exists():
        raise ValueError(f"{folder / ADAPTER} would change the weights; {YOURSELF}")
    if (folder / CONFIG).is_file():
        _check_plain(read_json(folder / CONFIG), folder / CONFIG)


def _check_plain(config: Mapping[str, Any], where: Path) -> None:
    for key, value in config.items():
        names = value.values() if isinstance(value, Mapping) else (value,)
        if "attn_implementation" in key and any(isinstance(name, str) and "/" in name for name in names):
            raise ValueError(f"{where} loads a kernel of a hub ({key[:60]}={shown(value)}); {YOURSELF}")
        if key == QUANTIZATION and value not in (None, MARK):
            raise ValueError(f"{where} has {key}: quantized weights cannot be checked here; {YOURSELF}")
        if isinstance(value, Mapping):
            _check_plain(value, where)


def _check_asks_nothing(folder: Path, library: str, kind: str) -> None:
    # transformers would ask at the terminal whether to run the part's own program
    if library != "transformers" or not ("Auto" in kind or kind.endswith("Processor")):
        return
    for name in PROGRAMS:
        if (folder / name).is_file() and "auto_map" in read_json(folder / name):
            raise ValueError(f"{folder / name} names a program (auto_map), which is not run; {YOURSELF}")


def class_of(library: str, name: str) -> Any:
    """Return the class of a part: of diffusers, of one of its pipelines' packages, or of transformers; or None."""
    if library == "transformers":
        import transformers as package  # takes seconds, which models without text encoders do not need
    else:
        package = diffusers if library == "diffusers" else getattr(diffusers.pipelines, library, None)
    return getattr(package, name, None)


def check_model(folder: Path, library: str, name: str) -> Fitted | None:
    """Return a part's model, which fits its config.json; None for a class that is left to diffusers, which raises.

    ValueError if weights do not fit.
    """
    return check_class(folder, class_of(library, name))


def check_class(folder: Path, kind: Any) -> Fitted | None:
    if kind is AutoencoderKL:
        return open_vae(folder)
    if isinstance(kind, type) and issubclass(kind, ModelMixin):
        config = {key: x for key, x in read_json(folder / CONFIG).items() if key != QUANTIZATION}  # `MARK`, if any
        checkpoint = as_numbers(open_checkpoint(find_checkpoint(folder)))
        return _check_shapes(folder, folder / CONFIG, kind, config, checkpoint)
    return _check_encoder(folder, kind) if hasattr(kind, "config_class") else None


def check_single(file: Path) -> Fitted:
    """Return a transformer's file under diffusers' keys; ValueError if it does not fit its config."""
    checkpoint, config = open_model(file)
    check_types(checkpoint, checkpoint.dtypes)
    return _check_shapes(file, file, getattr(diffusers, config["_class_name"]), config, checkpoint)


def _check_shapes(path: Path, where: Path, kind: Any, config: Mapping[str, Any], checkpoint: Checkpoint) -> Fitted:
    """Raise ValueError if a parameter of diffusers' model is missing in the checkpoint or has another shape."""
    check_layers(config, checkpoint, where)
    fitted = Fitted(path, kind, config, checkpoint, _built(kind, config, str(where)))
    ignored = re.compile("|".join(kind._keys_to_ignore_on_load_unexpected or ("$^",)))
    unknown = checkpoint.shapes.keys() - fitted.state.keys() - {name for name, _ in fitted.model.named_buffers()}
    for name, shape in fitted.state.items():
        if name not in checkpoint.shapes:
            if name not in fitted.parameters:
                continue  # diffusers computes it
            raise ValueError(f"{checkpoint.name}: wrong keys. Missing {name}, which a {kind.__name__} has")
        if checkpoint.shapes[name] != shape:
            got = f"{name} of shape {checkpoint.shapes[name]}"
            raise ValueError(f"{checkpoint.name}: got {got}, expected {shape} as config.json says")
    # a ControlNet that shares the transformer's layers has None for them until its pipeline is built, which saves them
    shared = [name for name, x in vars(fitted.model).items() if x is None and hasattr(kind, "from_transformer")]
    unknown = [name for name in unknown if not ignored.search(name) and name.partition(".")[0] not in shared]
    check_keys(checkpoint.name, (), unknown)
    check_types(checkpoint, sorted(fitted.parameters), lambda dtype: dtype.is_floating_point)  # 8 bits are diffusers'
    return fitted


def _check_encoder(folder: Path, kind: Any) -> Fitted:
    """Compare an encoder with its files, as transformers does itself when it loads.

    It knows which names of weights differ between its versions, are tied, may lack, or are not read.
    """
    file = folder / CONFIG
    config, checkpoint = read_json(file), open_encoder(folder)
    if "transformers_weights" in config:  # transformers would read another file than is checked here
        raise ValueError(f"{file} names a file by transformers_weights; remove it, and name the file as usual")
    check_layers(config, checkpoint, file)
    model, compared = _compared(folder, kind, checkpoint)
    # a file may hold all of the model that its config names, of which the class is a part: of CLIP its text encoder
    unknown = compared["unexpected_keys"]
    if unknown and (whole := _saved_as(config, kind)) is not None:
        unknown = _compared(folder, whole, checkpoint)[1]["unexpected_keys"]
    check_keys(checkpoint.name, compared["missing_keys"], unknown)
    for key, got, expected in sorted(compared["mismatched_keys"]):
        shapes = f"shape {tuple(got)}, expected {tuple(expected)}"
        raise ValueError(f"{checkpoint.name}: got {key} of {shapes} as config.json says")
    buffers = {key.rpartition(".")[2] for key, _ in model.named_buffers()}  # such as position_ids, in older files
    weights = [key for key in sorted(checkpoint.shapes) if key.rpartition(".")[2] not in buffers]
    check_types(checkpoint, weights, lambda dtype: dtype.is_floating_point)
    return Fitted(folder, kind, config, checkpoint, None)


def _compared(folder: Path, kind: Any, checkpoint: Checkpoint) -> tuple[Any, Mapping[str, Any]]:
    """Return an encoder on the meta device, and what transformers reports when it loads the header into it."""
    from transformers.utils import logging

    dtypes = checkpoint.dtypes
    header = {key: torch.empty(x, dtype=dtypes[key], device="meta") for key, x in checkpoint.shapes.items()}
    options = {"output_loading_info": True, "ignore_mismatched_sizes": True, "device_map": {"": "meta"}}
    with errors_only(logging), no_bars(logging):
        with context(f"got {folder / CONFIG}, which describes no {kind.__name__}"):
            config = kind.config_class.from_pretrained(folder)
        with context(f"{checkpoint.name} does not fit a {kind.__name__}"):
            return kind.from_pretrained(None, config=config, state_dict=header, **options)


def _saved_as(config: Mapping[str, Any], kind: Any) -> Any:
    """Return the class of transformers whose weights a folder holds as its config says, if it is another one."""
    import transformers

    match config.get("architectures"):
        case [str(name)]:
            whole = getattr(transformers, name, None)
            is_model = isinstance(whole, type) and issubclass(whole, transformers.PreTrainedModel)
            return whole if is_model and whole is not kind else None
        case _:
            return None


def _transformer(index: Mapping[str, Any]) -> Any:
    _, name = next(part for name in NAMES if (part := part_of(index, name)) is not None)
    return getattr(diffusers, name, None)


def _built(kind: Any, config: Mapping[str, Any], what: str) -> Any:
    if kind is None:
        raise ValueError(f"got {what} with a part of a class that diffusers {diffusers.__version__} does not have")
    with context(f"got {what}, which describes no {kind.__name__}"), torch.device("meta"), WithoutValues(), building():
        return kind.from_config(dict(config))


# AutoencoderKL ------------------------------------------------------------------------------------------------

OLD = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}  # names of diffusers before 0.15


def vae_keys(expected: Iterable[str], shapes: Mapping[str, tuple[int, ...]]) -> KeyMap:
    """Return the key map of an AutoencoderKL, whose keys are `expected`; attention layers may have their old names."""
    sources = dict[str, TensorSource]()
    for key in expected:
        match = re.fullmatch(r"(.*\.attentions\.\d+\.)(to_q|to_k|to_v|to_out\.0)(\.\w+)", key)
        old = f"{match[1]}{OLD[match[2]]}{match[3]}" if match and key not in shapes else key
        sources[key] = TensorSource((old if old in shapes else key,))
    return KeyMap(sources)


def load_vae(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the VAE in a folder on a device. Raises ValueError as `open_vae`."""
    fitted = open_vae(folder)
    load(fitted.model, fitted.checkpoint, vae_keys(fitted.state, fitted.checkpoint.shapes), dtype, device)
    return fitted.model.eval()


def open_vae(folder: Path) -> Fitted:
    """Return the VAE in a folder, without its weights, whose headers are read.

    Raises ValueError if the folder holds no AutoencoderKL, or if a key is missing, unknown or of another shape.
    """
    file = folder / CONFIG
    config = read_json(file)
    name = config.get("_class_name", "AutoencoderKL")
    if name != "AutoencoderKL":
        raise ValueError(f"VAE {folder} is a {name}; only AutoencoderKL is supported here")
    checkpoint = open_checkpoint(find_checkpoint(folder))
    check_autoencoder(config, file)
    check_layers(config, checkpoint, file)
    with context(f"got {file}, which describes no AutoencoderKL"), torch.device("meta"):
        model: Any = AutoencoderKL.from_config(config)
    fitted = Fitted(folder, AutoencoderKL, config, checkpoint, model)
    check(model, checkpoint, vae_keys(fitted.state, checkpoint.shapes))
    return fitted
