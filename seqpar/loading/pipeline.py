"""Loads a pipeline's folder: models of diffusers once per host, everything else as diffusers does.

A model of diffusers is built without memory for its weights, as its own `from_pretrained` builds it, and its files are
read by `seqpar.loading.placing`: each tensor once per host, straight to the devices. The result is that of
`from_pretrained`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import accelerate
import diffusers
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.modeling_utils import ModelMixin, no_init_weights
from diffusers.utils import logging as diffusers_logging
from torch import Tensor, nn
from transformers.utils import logging as transformers_logging

from seqpar.families._find import joined_weights, presets, reads_layers, stored_in_8_bits
from seqpar.families._modular import is_modular
from seqpar.kernels.weight8 import Weight8
from seqpar.loading import lora as _lora
from seqpar.loading.checkpoint import WEIGHTS, Checkpoint, Fitted
from seqpar.loading.encoders import begin_encoders, encode_first, name_encoders, no_collection
from seqpar.loading.errors import BROKEN, context
from seqpar.loading.folder import PipelineParts, class_of, vae_keys
from seqpar.loading.modular import name_missing, without_parts
from seqpar.loading.names import building, no_bars
from seqpar.loading.parking import Parking, WeightLayout
from seqpar.loading.parts import NAMES as TRANSFORMERS
from seqpar.loading.parts import UNCONDITIONAL, parts_of
from seqpar.loading.placing import Placing, Team, begin, put
from seqpar.loading.reading import Reader, check_finite
from seqpar.loading.scaled import SCALE, source_of
from seqpar.loading.shared_encoder import SharedEncoder
from seqpar.mesh.mesh import Mesh
from seqpar.types.keys import KeyMap, TensorSource
from seqpar.types.say import say

SHARING = "ZImageControlNetModel"  # its pipeline gives it layers of the transformer, which so is read before


@no_bars(diffusers_logging, transformers_logging)  # each counts parts that are loaded elsewhere, on every rank
def load_pipeline(
    parts: PipelineParts,
    kind: Any,
    dtype: torch.dtype,
    mesh: Mesh,
    loras: Sequence[_lora.Lora] = (),
    encode: Sequence[Callable[[Any], object]] = (),
    look: Callable[[Any], object] = id,
    eight: bool = False,
    park: bool = False,
    preset: str | None = None,
) -> Any:
    """Return the pipeline of a folder on this rank's device. Collective: call on all ranks.

    Text and image encoders are on rank 0 alone, unless a LoRA changes them.

    kind: the class of the pipeline, for which `parts` were checked. encode: each calls the pipeline as it will be
    called; its encoders then run first, and are freed before the transformers' weights load. Its constructor may then
    read no weight of a transformer. () keeps the encoders for other prompts. look: called with each transformer,
    without its weights, while files are read. eight: whether weights of transformers are kept in 8 bits (`Weight8`).
    park: whether transformers and encoders take turns in memory (`seqpar.loading.parking`); rank 0 prints which.
    preset: the name of the one with which it is sampled.
    Raises the same ValueError on every rank if a part does not load.
    """
    assert isinstance(parts.source, Path)
    fails, team = f"got pipeline {parts.source}, which does not load", Team.of(mesh)
    for remark in mesh.on_all_ranks(lambda: _lora.remarks(loras, presets(kind.__name__, parts.index), preset)):
        say(remark, mesh)
    everywhere = _why_everywhere(kind.__name__, loras)
    kinds = {kind for _, (_, kind) in parts_of(parts.index)}
    shared = "a ControlNet has layers of the transformer, too" if SHARING in kinds else None
    if everywhere is not None and mesh.world.size > 1:
        say(f"every rank loads the text encoders, because {everywhere}", mesh)

    with no_collection(), Reader(mesh.device, team.size) as reader:
        # rank 0 begins to read the encoders
        finish_encoders, size = begin_encoders({} if everywhere else parts.fitted, dtype, mesh, reader, fails)
        encoded = bool(encode) and finish_encoders is not None

        # all ranks begin to read the models of diffusers, but transformers that wait for the encoders to go
        weights = _weights(parts, dtype, mesh, eight)
        late = [name for name in weights if (encoded or park) and shared is None and name in TRANSFORMERS]
        coming = _begin({name: x for name, x in weights.items() if name not in late}, mesh, reader, team, size)

        # while weights come, models are built
        def build() -> dict[str, Any]:
            with context(fails):
                models = {name: part.empty(dtype) for name, part in weights.items()}
                for name in (name for name in models if name in TRANSFORMERS):
                    look(models[name])
            return models

        models = mesh.on_all_ranks(build)
        encoders = {} if finish_encoders is None else finish_encoders()
        for name, placing in coming.items():
            weights[name].finish(models[name], placing, mesh)

        # of them the pipeline, which may ask a transformer that comes late for the device of its parameters
        for name in late:
            first, parameter = next(iter(models[name].named_parameters()))
            put(models[name], first, torch.empty(0, dtype=parameter.dtype, device=mesh.device))
        pipe = mesh.on_all_ranks(lambda: _joined(parts, kind, dtype, models, encoders, fails))

    if encode and encoders:
        encode_first(pipe, encoders, encode, mesh)
    waiting = {name: weights[name] for name in late}
    parking = _parking(waiting, {} if encoded else encoders, encoded, everywhere or shared, mesh) if park else None
    for some in [waiting] if late and parking is None else [{name: part} for name, part in waiting.items()]:
        with no_collection(), Reader(mesh.device, team.size) as reader:
            _come(some, models, mesh, reader, team, parking)
    mesh.on_all_ranks(lambda: _complete(pipe, parts, loras, models.keys(), encoders, mesh.device))
    return pipe


def _why_everywhere(name: str, loras: Sequence[_lora.Lora]) -> str | None:
    # why every rank needs the text encoders, or None
    if reads_layers(name):
        return f"{name} reads their layers"
    return "a LoRA changes them" if any(lora.changes_encoders for lora in loras) else None


def _joined(
    parts: PipelineParts,
    kind: Any,
    dtype: torch.dtype,
    models: dict[str, Any],
    encoders: Mapping[str, SharedEncoder],
    fails: str,
) -> Any:
    # the pipeline of models and encoders, which compute alone while it is made
    for encoder in encoders.values():
        encoder.meets = False
    stubs = {name: encoder.module for name, encoder in encoders.items()}  # nothing else may keep these alive
    with context(fails):
        try:
            if is_modular(kind):
                pipe = _of_blocks(parts, kind, dtype, {**models, **stubs})
            else:
                pipe = kind.from_pretrained(parts.source, dtype=dtype, **models, **stubs)
        except BROKEN:
            _check_unchanged(parts)  # first: diffusers names the bytes of a file that has changed
            raise
    for encoder in encoders.values():
        encoder.meets = True
    return pipe


def _of_blocks(parts: PipelineParts, kind: Any, dtype: torch.dtype, models: dict[str, Any]) -> Any:
    # a modular pipeline; diffusers' own `load_components` only warns of a part that does not load
    loaded = dict(models)
    for name, part in parts_of(parts.index):
        if name not in loaded:
            of: Any = class_of(*part)
            options = {"dtype": dtype} if hasattr(of, "forward") else {}
            loaded[name] = of.from_pretrained(parts.places[name], **options)
    pipe = without_parts(kind, parts.index, parts.workflow, loaded)
    name_missing(pipe)
    return pipe


def _check_unchanged(parts: PipelineParts) -> None:
    for fitted in parts.fitted.values():
        fitted.checkpoint.check_unchanged()


def _weights(parts: PipelineParts, dtype: torch.dtype, mesh: Mesh, eight: bool) -> dict[str, Weights]:
    """Return the weights of the models of diffusers in a folder by the names of their parts.

    Rank 0 prints why diffusers reads another part's weights, on every rank.
    """
    kinds = dict[str, Any]()
    for name, (library, class_name) in parts_of(parts.index):
        kind = getattr(diffusers, class_name, None) if library == "diffusers" else None
        if isinstance(kind, type) and issubclass(kind, ModelMixin):
            kinds[name] = kind

    def reasons() -> dict[str, str | None]:
        return {name: why_not(kind, parts.fitted.get(name)) for name, kind in kinds.items()}

    shared = mesh.on_rank_0(reasons, dict[str, str | None])
    names = [name for name, reason in shared.items() if reason is None]
    for name, reason in shared.items():
        if reason is not None and mesh.world.size > 1:
            say(f"every rank reads {name}, because {reason}", mesh)

    def together() -> dict[str, Weights]:
        if lost := [name for name in names if name not in kinds or name not in parts.fitted]:
            raise ValueError(f"got {parts.source} without {lost[0]}, which rank 0 has; give all hosts the same files")
        return {name: Weights.of(parts.fitted[name], dtype, eight and name in TRANSFORMERS) for name in names}

    return mesh.on_all_ranks(together)


def why_not(kind: Any, fitted: Fitted | None) -> str | None:
    """Return why the ranks cannot read a model's files together, or None."""
    if kind.from_pretrained.__func__ is not ModelMixin.from_pretrained.__func__:
        return f"{kind.__name__} has its own loader"
    if fitted is None:
        return "it has no folder with its own config.json"
    if fitted.path.is_dir() and (programs := sorted(path.name for path in fitted.path.glob("*.py"))):
        return f"{programs[0]} lies beside it"
    dtypes = fitted.checkpoint.dtypes
    odd = next((key for key, dtype in dtypes.items() if dtype.is_floating_point and dtype not in WEIGHTS), None)
    return None if odd is None else f"{odd} is of type {str(dtypes[odd]).removeprefix('torch.')}"


@dataclass(frozen=True)
class Weights:
    """The weights of a model of diffusers. like: the tensors that they become, on the meta device.

    checkpoint: that which is read. eight: the names of those that are kept in 8 bits.
    """

    fitted: Fitted
    keys: KeyMap
    like: dict[str, Tensor]
    checkpoint: Checkpoint
    eight: tuple[str, ...] = ()

    @staticmethod
    def of(fitted: Fitted, dtype: torch.dtype, eight: bool = False) -> Weights:
        """Return the weights for a model that is then that of `from_pretrained(torch_dtype=dtype)`.

        eight: keep those of linear layers in blocks that compute in 8 bits as `Weight8`.
        """
        kind, shapes = fitted.kind, fitted.checkpoint.shapes
        if kind is AutoencoderKL:
            keys = vae_keys(fitted.state, shapes)
        else:  # buffers that the checkpoint lacks are computed
            names = (name for name in fitted.state if name in shapes or name in fitted.parameters)
            keys = KeyMap({name: TensorSource((name,)) for name in names})
        fp32 = kind._keep_in_fp32_modules or ()
        fp32 = [fp32] if isinstance(fp32, str) else fp32

        def dtype_of(name: str) -> torch.dtype:
            stored = fitted.checkpoint.dtypes[keys.sources[name].keys[0]]
            if not stored.is_floating_point:
                return stored
            return torch.float32 if any(part in fp32 for part in name.split(".")) else dtype

        like = {name: torch.empty(fitted.state[name], dtype=dtype_of(name), device="meta") for name in keys.sources}
        stored = tuple(stored_in_8_bits(fitted.model)) if eight else ()
        stored = tuple(name for name in stored if like[name].dtype == dtype)
        like |= {name: Weight8.empty(like[name].shape, dtype, "meta") for name in stored}
        checkpoint = fitted.checkpoint
        if eight and checkpoint.raw is not None:  # what lies in 8 bits is read so
            checkpoint = checkpoint.raw
            scaled = [name for name in keys.sources if name + SCALE in checkpoint.shapes]
            keys = KeyMap({**keys.sources, **{x: source_of(x, like[x].dtype, x in stored) for x in scaled}})
        return Weights(fitted, keys, like, checkpoint, stored)

    @cached_property
    def layout(self) -> WeightLayout:
        """Where its parameters lie, if it is parked."""
        parameters = {name: x for name, x in self.like.items() if name in self.fitted.parameters}
        return WeightLayout.of(parameters, joined_weights(self.fitted.model))

    def original(self, name: str) -> Tensor:
        """Return a weight as it is in its files, on the host; ValueError if these have changed."""
        checkpoint, source = self.checkpoint, self.keys.sources[name]
        tensor = source.combine(*map(checkpoint.tensor, source.keys)).to(self.like[name].dtype)
        checkpoint.check_unchanged()
        return tensor

    def empty(self, dtype: torch.dtype) -> Any:
        """Return the model with its parameters on the meta device, and its buffers as diffusers computes them."""
        with no_init_weights(), accelerate.init_empty_weights(), building(dtype):
            return self.fitted.kind.from_config(dict(self.fitted.config))

    def begin(self, reader: Reader, team: Team, taken: Sequence[int]) -> Placing:
        """Begin to read the weights; see `placing.begin`."""
        return begin(self.like, self.checkpoint, self.keys, reader, team, taken)

    def finish(self, model: Any, placing: Placing, mesh: Mesh) -> None:
        """Give a model its weights on this rank's device. Collective: call on all ranks."""
        placing.finish(model, mesh)
        for name in (name for name in self.eight if not self.keys.sources[name].raw):
            model.get_parameter(name).came_from(partial(self.original, name), loaded=True)
        model.register_to_config(_name_or_path=str(self.fitted.path))
        model.to(mesh.device).eval()  # moves buffers that no file holds


def _parking(
    transformers: dict[str, Weights],
    encoders: Mapping[str, SharedEncoder],
    encoded: bool,
    everywhere: str | None,
    mesh: Mesh,
) -> Parking | None:
    """Park encoders, and return where transformers take turns with them; None if nothing can. Rank 0 prints it.

    encoded: whether encoders leave memory before. everywhere: why all ranks have them, or None.
    """
    sizes = {name: part.layout.size for name, part in transformers.items()}
    turns = [name for name, size in sizes.items() if size == max(sizes.values()) and name != UNCONDITIONAL]
    encoders = encoders if turns else {}  # they lie in a transformer's place
    parts, left = [*(turns if len(turns) > 1 else ()), *encoders], list[str]()
    if len(turns) < 2:
        why = "each step calls both" if UNCONDITIONAL in sizes else "there are no two of one size that ranks read"
        left.append(f"{' and '.join(sizes) or 'transformers'}, because {why}")
    if not encoders:
        none = "ranks read none" if turns else "ranks read no transformer in whose place they could be"
        why = "they leave memory before transformers come" if encoded else everywhere or none
        left.append(f"text encoders, because {why}")
    said = [f"parked while not in use: {', '.join(parts)}"] if parts else []
    say("; ".join([*said, *([f"not parked: {'; '.join(left)}"] if left else [])]), mesh)
    if not parts:
        return None
    modules = [encoder.module for encoder in encoders.values()]
    return mesh.on_all_ranks(lambda: Parking(mesh.device, max(sizes.values()), modules))


def _come(
    transformers: dict[str, Weights],
    models: Mapping[str, Any],
    mesh: Mesh,
    reader: Reader,
    team: Team,
    parking: Parking | None,
) -> None:
    """Read transformers that have waited; one that is parked into its place, from which another one leaves."""

    def placed(part: Weights) -> Weights:
        if parking is None or part.layout.size != parking.size:
            return part
        return replace(part, like=part.like | parking.room(part.layout, part.like))

    parts = mesh.on_all_ranks(lambda: {name: placed(part) for name, part in transformers.items()})
    for name, placing in _begin(parts, mesh, reader, team, 0).items():
        parts[name].finish(models[name], placing, mesh)
        if parking is not None and parts[name] is not transformers[name]:
            parking.enter(name, models[name], parts[name].original)


def _begin(weights: dict[str, Weights], mesh: Mesh, reader: Reader, team: Team, encoders: int) -> dict[str, Placing]:
    """Begin to read the weights of models, in their order. encoders: bytes that rank 0 reads before."""

    def begun() -> dict[str, Placing]:
        busy = encoders + encoders // 4  # rank 0 builds encoders meanwhile, which slows its reading
        taken: Sequence[int] = [busy if rank == 0 else 0 for rank in team.ranks]
        coming = dict[str, Placing]()
        for name, part in weights.items():
            coming[name] = part.begin(reader, team, taken)
            taken = coming[name].taken
        return coming

    coming = mesh.on_all_ranks(begun)
    reader.start()
    return coming


def _complete(
    pipe: Any,
    parts: PipelineParts,
    loras: Sequence[_lora.Lora],
    read: Collection[str],
    encoders: Collection[str],
    device: torch.device,
) -> None:
    """Load a pipeline's LoRAs, check and move its other parts. read: parts that `Reader` has read and checked."""
    for name, part in pipe.components.items():
        if isinstance(part, nn.Module) and name not in read and name not in encoders:
            part.to(device)  # copies what is mapped from a file
            check_finite(f"{parts.source}/{name}", part.state_dict())
    _check_unchanged(parts)
    _lora.load(pipe, loras)
    name_encoders(pipe, encoders)
    for part in (part for part in pipe.components.values() if isinstance(part, nn.Module)):
        if any(x.device != device for x in (*part.parameters(), *part.buffers())):
            part.to(device)
