"""Loads the parts of a pipeline folder: models of diffusers once a host, everything else as diffusers does.

A model of diffusers is built without memory for its weights, as its own `from_pretrained` builds it, and its files are
read by `seqpar.weights.loading`: each tensor once a host, straight to the devices. The result is that of
`from_pretrained`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import diffusers
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.modeling_utils import ModelMixin, no_init_weights
from torch import Tensor

from seqpar.pipelines import _lora
from seqpar.pipelines._encoders import Begun, begin_encoders, encode_first, load_encoders, name_encoders
from seqpar.pipelines._naming import naming
from seqpar.pipelines._shared_encoder import SharedEncoder
from seqpar.ranks.mesh import Mesh
from seqpar.types.keys import KeyMap, Source
from seqpar.weights import vae_keys
from seqpar.weights.checkpoint import WEIGHTS, Checkpoint, find_checkpoint, open_checkpoint
from seqpar.weights.loading import Placing, Team, begin, put
from seqpar.weights.parts import parts_of
from seqpar.weights.reading import Reader
from seqpar.weights.single_file import load_transformer

SHARED = "diffusion_pytorch_model.safetensors"  # and its index: the files that ranks read together


@dataclass(frozen=True)
class Folder:
    """A pipeline's folder whose parts are checked (`seqpar.pipelines._folder`).

    kind: the pipeline's class. index: its model_index.json. file: that of the transformer, where it is not diffusers'
    (`seqpar.weights.single_file`). loras: adapters, with their scales.
    """

    path: Path
    kind: Any
    index: Mapping[str, Any]
    file: Path | None = None
    loras: tuple[_lora.Lora, ...] = ()


def load_pipeline(folder: Folder, dtype: torch.dtype, mesh: Mesh, encode: Callable[[Any], object] | None = None) -> Any:
    """Return the pipeline of a folder on this rank's device; every rank must call this at the same time.

    Text and image encoders are on rank 0 alone, unless a LoRA changes them. encode: calls the pipeline as it will be
    called; its encoders then work first, and have left memory before the transformers' weights are loaded. None keeps
    them for other texts. Raises the same ValueError on every rank if a part does not load.
    """
    what, team = f"got pipeline {folder.path}, which does not load", Team.of(mesh)
    with Reader(mesh.device, team.size) as reader:
        begun = _encoders(folder, dtype, mesh, reader, what)
        models = _models(folder, dtype, mesh, what)
        late = {name for name in models if encode and begun.kinds and name.startswith("transformer")}
        coming = _begun(models, models.keys() - late, reader, team, begun.size)
        encoders = load_encoders(folder.kind, folder.path, begun, mesh)
        pipe = mesh.together(lambda: _whole(folder, dtype, models, encoders, mesh.device, what))
        for name, placing in coming.items():
            models[name].end(placing, mesh)
    if encode and late:
        encode_first(pipe, encoders, encode, mesh)
        with Reader(mesh.device, team.size) as reader:
            for name, placing in _begun(models, late, reader, team, 0).items():
                models[name].end(placing, mesh)

    def rest() -> Any:
        _lora.load(pipe, folder.loras)
        name_encoders(pipe, encoders)
        return pipe.to(mesh.device)

    return mesh.together(rest)


def _whole(
    folder: Folder,
    dtype: torch.dtype,
    models: Mapping[str, Empty],
    encoders: Mapping[str, SharedEncoder],
    device: torch.device,
    what: str,
) -> Any:
    """Return the pipeline around its models, which lack their weights."""
    with naming(what):
        own = {name: each.module for name, each in encoders.items()}  # held by nothing that outlives them
        own |= {} if folder.file is None else {"transformer": load_transformer(folder.file, dtype)}
        own |= {name: each.standing_in(device) for name, each in models.items()}
        return folder.kind.from_pretrained(folder.path, dtype=dtype, **own)


def _begun(
    models: Mapping[str, Empty], names: Collection[str], reader: Reader, team: Team, encoders: int
) -> dict[str, Placing]:
    """Begin to read the weights of models, in their order. encoders: bytes that rank 0 of all reads before."""
    taken: Sequence[int] = [encoders if rank == 0 else 0 for rank in team.ranks]
    coming = dict[str, Placing]()
    for name in (name for name in models if name in names):
        coming[name] = models[name].begin(reader, team, taken)
        taken = coming[name].taken
    return coming


def _encoders(folder: Folder, dtype: torch.dtype, mesh: Mesh, reader: Reader, what: str) -> Begun:
    """Begin to read the encoders that rank 0 alone holds; none if a LoRA changes them, after a line that says so."""
    if not mesh.together(lambda: _lora.changes_encoders(folder.kind, folder.loras)):
        return begin_encoders(folder.path, folder.index, dtype, mesh, reader, what)
    if mesh.is_main and mesh.world.size > 1:
        print("seqpar: every rank loads the text encoders, because a LoRA changes them", flush=True)
    return Begun({}, 0, {}, what)


def _models(folder: Folder, dtype: torch.dtype, mesh: Mesh, what: str) -> dict[str, Empty]:
    """Return the models of diffusers in a folder by the names of their parts, without memory for their weights.

    Rank 0 prints why another part's weights are read by diffusers, on every rank. what: begins an error's message.
    """
    models = dict[str, Empty]()
    for name, (library, class_name) in parts_of(folder.index):
        kind = getattr(diffusers, class_name, None) if library == "diffusers" else None
        if not (isinstance(kind, type) and issubclass(kind, ModelMixin)):
            continue
        single = folder.file if name == "transformer" else None
        part, theirs = single or folder.path / name, "its keys are those of the model's authors"
        reason = theirs if single else mesh.of_rank_0(partial(why_not, kind, part), str | None)
        if reason is None:
            models[name] = empty_model(kind, part, dtype, mesh, what)
        elif mesh.is_main and mesh.world.size > 1:
            print(f"seqpar: every rank reads {part}, because {reason}", flush=True)
    return models


def why_not(kind: Any, folder: Path) -> str | None:
    """Return why the ranks cannot read a model's files together, or None. Reads headers."""
    if kind.from_pretrained.__func__ is not ModelMixin.from_pretrained.__func__:
        return f"{kind.__name__} has a loader of its own"
    if not folder.is_dir():
        return "it has no folder of its own"
    if programs := sorted(path.name for path in folder.glob("*.py")):
        return f"{programs[0]} lies beside it"
    path = find_checkpoint(folder)
    if not path.name.startswith(SHARED):
        return f"its weights are in {path.name}, expected {SHARED}"
    dtypes = open_checkpoint(path).dtypes
    odd = next((key for key, dtype in dtypes.items() if dtype.is_floating_point and dtype not in WEIGHTS), None)
    return None if odd is None else f"{odd} is of type {str(dtypes[odd]).removeprefix('torch.')}"


@dataclass(frozen=True)
class Empty:
    """A model of diffusers without memory for its weights. like: what each becomes, on the meta device."""

    model: Any
    checkpoint: Checkpoint
    keys: KeyMap
    like: Mapping[str, Tensor]
    folder: Path

    def standing_in(self, device: torch.device) -> Any:
        """Return the model for a pipeline that asks it for its device, which is that of its first parameter."""
        name, parameter = next(iter(self.model.named_parameters()))
        put(self.model, name, torch.empty(0, dtype=parameter.dtype, device=device))
        return self.model

    def begin(self, reader: Reader, team: Team, taken: Sequence[int]) -> Placing:
        """Begin to read the weights; see `loading.begin`."""
        return begin(self.model, self.like, self.checkpoint, self.keys, reader, team, taken)

    def end(self, placing: Placing, mesh: Mesh) -> None:
        """Give the model its weights on this rank's device; every rank must call this at the same time."""
        placing.finish(mesh)
        self.model.register_to_config(_name_or_path=str(self.folder))
        self.model.to(mesh.device).eval()  # buffers that no file holds are moved


def empty_model(kind: Any, folder: Path, dtype: torch.dtype, mesh: Mesh, what: str) -> Empty:
    """Return a model that is, placed, that of `kind.from_pretrained(folder, torch_dtype=dtype)`.

    what: begins the message of an error in diffusers. Every rank must call this at the same time.
    """

    def empty() -> Empty:
        with naming(what):
            model = without_weights(kind, folder, dtype)
        checkpoint = open_checkpoint(find_checkpoint(folder))
        keys = _keys(model, checkpoint)
        return Empty(model, checkpoint, keys, _like(model, checkpoint, keys, dtype), folder)

    return mesh.together(empty)


def without_weights(kind: Any, folder: Path, dtype: torch.dtype) -> Any:
    """Return a model with its parameters on the meta device, and its buffers as diffusers computes them."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # in which diffusers builds a model, and so computes buffers
    try:
        with no_init_weights(), accelerate.init_empty_weights():
            return kind.from_config(kind.load_config(folder))
    finally:
        torch.set_default_dtype(before)


def _keys(model: Any, checkpoint: Checkpoint) -> KeyMap:
    """Return which key of a checkpoint gives each parameter and buffer; buffers that it lacks are not among them."""
    names = model.state_dict()
    if isinstance(model, AutoencoderKL):
        return vae_keys.key_map(names, checkpoint.shapes)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return KeyMap({name: Source((name,)) for name in names if name in checkpoint.shapes or name in parameters})


def _like(model: Any, checkpoint: Checkpoint, keys: KeyMap, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a tensor of the meta device for each key: numbers get the dtype, other than those diffusers keeps."""
    kept = model._keep_in_fp32_modules or ()
    kept, state = [kept] if isinstance(kept, str) else kept, model.state_dict()

    def wanted(name: str) -> torch.dtype:
        own = checkpoint.dtypes[keys.sources[name].keys[0]]
        if not own.is_floating_point:
            return own
        return torch.float32 if any(part in kept for part in name.split(".")) else dtype

    return {name: torch.empty(state[name].shape, dtype=wanted(name), device="meta") for name in keys.sources}
