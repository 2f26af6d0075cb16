"""Loads the parts of a pipeline folder: models of diffusers once a host, everything else as diffusers does.

A model of diffusers is built without memory for its weights, as its own `from_pretrained` builds it, and its files are
read by `seqpar.loading.placing`: each tensor once a host, straight to the devices. The result is that of
`from_pretrained`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
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

from seqpar.loading import lora as _lora
from seqpar.loading import vae as vae_keys
from seqpar.loading.checkpoint import WEIGHTS, Checkpoint
from seqpar.loading.encoders import Begun, begin_encoders, encode_first, load_encoders, name_encoders, no_collection
from seqpar.loading.errors import context
from seqpar.loading.folder import Fitted
from seqpar.loading.keys import KeyMap, Source
from seqpar.loading.names import no_bars
from seqpar.loading.parts import parts_of
from seqpar.loading.placing import Placing, Team, begin, put
from seqpar.loading.reading import Reader, check_finite
from seqpar.loading.shared_encoder import SharedEncoder
from seqpar.loading.single_file import load_transformer
from seqpar.mesh.mesh import Mesh

SHARED = "diffusion_pytorch_model.safetensors"  # and its index: the files that ranks read together


@dataclass(frozen=True)
class Folder:
    """A pipeline's folder whose parts are checked (`seqpar.loading.folder`).

    kind: the pipeline's class. index: its model_index.json. fitted: the checkpoints of its models of diffusers, by the
    names of their parts. file: that of the transformer, where it is not diffusers' (`seqpar.loading.single_file`).
    loras: adapters, with their scales.
    """

    path: Path
    kind: Any
    index: Mapping[str, Any]
    fitted: Mapping[str, Fitted]
    file: Path | None = None
    loras: tuple[_lora.Lora, ...] = ()

    @property
    def fails(self) -> str:
        """Return how a message begins if diffusers or transformers fail on its files."""
        return f"got pipeline {self.path}, which does not load"


@no_bars(diffusers_logging, transformers_logging)  # each counts parts that are loaded elsewhere, on every rank
def load_pipeline(
    folder: Folder,
    dtype: torch.dtype,
    mesh: Mesh,
    encode: Callable[[Any], object] | None = None,
    look: Callable[[Any], object] = id,
) -> Any:
    """Return the pipeline of a folder on this rank's device; every rank must call this at the same time.

    Text and image encoders are on rank 0 alone, unless a LoRA changes them. encode: calls the pipeline as it will be
    called; its encoders then work first, and have left memory before the transformers' weights are loaded, unless
    diffusers reads these. Its constructor may then read no weight of a transformer. None keeps the encoders for other
    texts. Raises the same ValueError on every rank if a part does not load.
    """
    team = Team.of(mesh)
    remarks = mesh.on_all_ranks(lambda: _lora.remarks(folder.loras))
    if mesh.is_main:
        print(*(f"seqpar: {remark}\n" for remark in remarks), sep="", end="", flush=True)
    with no_collection(), Reader(mesh.device, team.size) as reader:
        begun = _encoders(folder, dtype, mesh, reader)
        weights = _weights(folder, dtype, mesh)
        late = {name for name in weights if encode and begun.kinds and name.startswith("transformer")}
        coming = _coming(weights, weights.keys() - late, mesh, reader, team, begun.size)
        models = mesh.on_all_ranks(lambda: _empty(weights, dtype, folder, look))  # while weights come
        encoders = load_encoders(folder.kind, folder.path, begun, mesh)
        if late and not encoders:
            coming |= _coming(weights, late, mesh, reader, team, 0)
            late = set[str]()
        _end(weights, models, coming, mesh)
        pipe = mesh.on_all_ranks(lambda: _whole(folder, dtype, models, encoders, late, mesh.device))
    if encode and encoders:
        encode_first(pipe, encoders, encode, mesh)
    if late:
        with no_collection(), Reader(mesh.device, team.size) as reader:
            _end(weights, models, _coming(weights, late, mesh, reader, team, 0), mesh)
    mesh.on_all_ranks(lambda: _finish(pipe, folder, models.keys(), encoders, mesh.device))
    return pipe


def _finish(
    pipe: Any, folder: Folder, checked: Collection[str], encoders: Mapping[str, SharedEncoder], device: torch.device
) -> None:
    """Load a pipeline's LoRAs, and move its other parts to the device. checked: the parts that `Reader` has read."""
    for name, part in pipe.components.items():
        if isinstance(part, nn.Module) and name not in checked and name not in encoders:
            part.to(device)  # copies what is mapped from a file
            check_finite(str(folder.path / name), part.state_dict())
    for fitted in folder.fitted.values():
        fitted.checkpoint.check_unchanged()
    _lora.load(pipe, folder.loras)
    name_encoders(pipe, encoders)
    for part in (part for part in pipe.components.values() if isinstance(part, nn.Module)):
        if any(x.device != device for x in (*part.parameters(), *part.buffers())):
            part.to(device)


def _empty(
    weights: Mapping[str, Weights], dtype: torch.dtype, folder: Folder, look: Callable[[Any], object]
) -> dict[str, Any]:
    """Return models without their weights by the names of their parts.

    look: called with each transformer, while the files are read.
    """
    models = dict[str, Any]()
    with context(folder.fails):
        for name, each in weights.items():
            models[name] = without_weights(each.kind, each.folder, dtype)
            if name.startswith("transformer"):
                look(models[name])
    return models


def _whole(
    folder: Folder,
    dtype: torch.dtype,
    models: Mapping[str, Any],
    encoders: Mapping[str, SharedEncoder],
    late: Collection[str],
    device: torch.device,
) -> Any:
    """Return the pipeline around its models.

    late: those that have no weights yet. They get an empty parameter on the device first, for a pipeline that asks its
    transformer for its device.
    """
    for name in late:
        first, parameter = next(iter(models[name].named_parameters()))
        put(models[name], first, torch.empty(0, dtype=parameter.dtype, device=device))
    for encoder in encoders.values():
        encoder.meets = False
    with context(folder.fails):
        own = {name: each.module for name, each in encoders.items()}  # held by nothing that outlives them
        own |= {} if folder.file is None else {"transformer": load_transformer(folder.file, dtype)}
        pipe = folder.kind.from_pretrained(folder.path, dtype=dtype, **models, **own)
    for encoder in encoders.values():
        encoder.meets = True
    return pipe


def _coming(
    weights: Mapping[str, Weights], names: Collection[str], mesh: Mesh, reader: Reader, team: Team, encoders: int
) -> dict[str, Placing]:
    """Let the weights of models come, in their order. encoders: bytes that rank 0 of all reads before."""

    def begun() -> dict[str, Placing]:
        busy = encoders + encoders // 4  # rank 0 makes encoders of them meanwhile, which slows its reading
        taken: Sequence[int] = [busy if rank == 0 else 0 for rank in team.ranks]
        coming = dict[str, Placing]()
        for name in (name for name in weights if name in names):
            coming[name] = weights[name].begin(reader, team, taken)
            taken = coming[name].taken
        return coming

    coming = mesh.on_all_ranks(begun)
    reader.start()
    return coming


def _end(weights: Mapping[str, Weights], models: Mapping[str, Any], coming: Mapping[str, Placing], mesh: Mesh) -> None:
    for name, placing in coming.items():
        weights[name].end(models[name], placing, mesh)


def _encoders(folder: Folder, dtype: torch.dtype, mesh: Mesh, reader: Reader) -> Begun:
    """Begin to read the encoders that rank 0 alone holds; none if a LoRA changes them, after a line that says so."""
    if not mesh.on_all_ranks(lambda: _lora.changes_encoders(folder.kind, folder.loras)):
        return begin_encoders(folder.path, folder.index, dtype, mesh, reader, folder.fails)
    if mesh.is_main and mesh.world.size > 1:
        print("seqpar: every rank loads the text encoders, because a LoRA changes them", flush=True)
    return Begun({}, 0, {}, folder.fails)


def _weights(folder: Folder, dtype: torch.dtype, mesh: Mesh) -> dict[str, Weights]:
    """Return the weights of the models of diffusers in a folder by the names of their parts.

    Rank 0 prints why another part's weights are read by diffusers, on every rank.
    """
    kinds = dict[str, Any]()
    for name, (library, class_name) in parts_of(folder.index):
        kind = getattr(diffusers, class_name, None) if library == "diffusers" else None
        if isinstance(kind, type) and issubclass(kind, ModelMixin):
            kinds[name] = kind
    single = (
        {"transformer": "its keys are those of the model's authors"} if folder.file and "transformer" in kinds else {}
    )

    def reasons() -> dict[str, str | None]:
        own = {name: kind for name, kind in kinds.items() if name not in single}
        return {name: why_not(kind, folder.path / name, folder.fitted.get(name)) for name, kind in own.items()} | single

    def together() -> dict[str, Weights]:
        if each := next((each for each in wanted if each not in kinds or each not in folder.fitted), None):
            raise ValueError(f"got {folder.path} without {each}, which rank 0 has; give all hosts the same files")
        return {name: Weights.of(kinds[name], folder.path / name, folder.fitted[name], dtype) for name in wanted}

    told = mesh.on_rank_0(reasons, dict[str, str | None])
    wanted = [name for name, reason in told.items() if reason is None]
    for name, reason in told.items():
        if reason is not None and mesh.is_main and mesh.world.size > 1:
            part = folder.file if name in single else folder.path / name
            print(f"seqpar: every rank reads {part}, because {reason}", flush=True)
    return mesh.on_all_ranks(together)


def why_not(kind: Any, folder: Path, fitted: Fitted | None) -> str | None:
    """Return why the ranks cannot read a model's files together, or None."""
    if kind.from_pretrained.__func__ is not ModelMixin.from_pretrained.__func__:
        return f"{kind.__name__} has a loader of its own"
    if fitted is None:
        return "it has no folder with a config.json of its own"
    if programs := sorted(path.name for path in folder.glob("*.py")):
        return f"{programs[0]} lies beside it"
    file, dtypes = Path(fitted.checkpoint.name).name, fitted.checkpoint.dtypes
    if not file.startswith(SHARED):
        return f"its weights are in {file}, expected {SHARED}"
    odd = next((key for key, dtype in dtypes.items() if dtype.is_floating_point and dtype not in WEIGHTS), None)
    return None if odd is None else f"{odd} is of type {str(dtypes[odd]).removeprefix('torch.')}"


@dataclass(frozen=True)
class Weights:
    """The weights of a model of diffusers in a folder. like: what each becomes, on the meta device."""

    kind: Any
    folder: Path
    checkpoint: Checkpoint
    keys: KeyMap
    like: Mapping[str, Tensor]

    @staticmethod
    def of(kind: Any, folder: Path, fitted: Fitted, dtype: torch.dtype) -> Weights:
        """Return the weights for a model that is then that of `kind.from_pretrained(folder, torch_dtype=dtype)`."""
        keys = _keys(kind, fitted)
        return Weights(kind, folder, fitted.checkpoint, keys, _like(kind, fitted, keys, dtype))

    def begin(self, reader: Reader, team: Team, taken: Sequence[int]) -> Placing:
        """Begin to read the weights; see `loading.begin`."""
        return begin(self.like, self.checkpoint, self.keys, reader, team, taken)

    def end(self, model: Any, placing: Placing, mesh: Mesh) -> None:
        """Give a model its weights on this rank's device; every rank must call this at the same time."""
        placing.finish(model, mesh)
        model.register_to_config(_name_or_path=str(self.folder))
        model.to(mesh.device).eval()  # buffers that no file holds are moved


def without_weights(kind: Any, folder: Path, dtype: torch.dtype) -> Any:
    """Return a model with its parameters on the meta device, and its buffers as diffusers computes them."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # in which diffusers builds a model, and so computes buffers
    try:
        with no_init_weights(), accelerate.init_empty_weights():
            return kind.from_config(kind.load_config(folder))
    finally:
        torch.set_default_dtype(before)


def _keys(kind: Any, fitted: Fitted) -> KeyMap:
    """Return which key of a checkpoint gives each parameter and buffer; buffers that it lacks are not among them."""
    shapes = fitted.checkpoint.shapes
    if kind is AutoencoderKL:
        return vae_keys.key_map(fitted.state, shapes)
    return KeyMap({name: Source((name,)) for name in fitted.state if name in shapes or name in fitted.parameters})


def _like(kind: Any, fitted: Fitted, keys: KeyMap, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a tensor of the meta device for each key: numbers get the dtype, other than those diffusers keeps."""
    kept = kind._keep_in_fp32_modules or ()
    kept = [kept] if isinstance(kept, str) else kept

    def wanted(name: str) -> torch.dtype:
        own = fitted.checkpoint.dtypes[keys.sources[name].keys[0]]
        if not own.is_floating_point:
            return own
        return torch.float32 if any(part in kept for part in name.split(".")) else dtype

    return {name: torch.empty(fitted.state[name], dtype=wanted(name), device="meta") for name in keys.sources}
