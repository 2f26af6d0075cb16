"""Decodes latents on all ranks: each rank decodes some images, one at a time, so that no bit depends on the mesh.

When it wins: with several images, which the ranks decode in parallel.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import update_wrapper
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor

from seqpar.inputs import from_rank_0
from seqpar.mesh import Mesh
from seqpar.shard import Shard
from seqpar.transports.collective.point_to_point import gather
from seqpar.weights import vae_keys
from seqpar.weights.checkpoint import Checkpoint, KeyMap, check, find_checkpoint, open_checkpoint, read_json
from seqpar.weights.loading import load

# what diffusers raises for a config that describes no decoder
FAILURES = (ValueError, TypeError, KeyError, IndexError, AttributeError, ZeroDivisionError, RuntimeError)


def decode(vae: Any, latents_NCHW: Tensor, mesh: Mesh, on_image: Callable[[int], None] = lambda index: None) -> Tensor:
    """Decode rank 0's latents (N, C, h, w) into pictures (N, 3, H, W) in [0, 1], fp32, on every rank.

    vae: diffusers' AutoencoderKL. on_image(index): called when this rank has queued the decoding of one of its images.
    """
    latents_NCHW = from_rank_0(mesh, {"latents": latents_NCHW})["latents"]
    shard = Shard(len(latents_NCHW), mesh.world.size)
    mine = latents_NCHW[shard.slice(mesh.world.rank)].to(mesh.device, vae.dtype)
    factor = vae_factor(vae.config)
    shape = (3, latents_NCHW.shape[2] * factor, latents_NCHW.shape[3] * factor)
    images, alone = torch.empty(len(mine), *shape, device=mesh.device), _own_decode(vae)
    shift = getattr(vae.config, "shift_factor", None) or 0.0
    with torch.inference_mode():
        for index, (image, latent) in enumerate(zip(images, mine, strict=True)):
            decoded = alone(latent[None] / vae.config.scaling_factor + shift).sample[0]
            image.copy_((decoded.float() / 2 + 0.5).clamp(0, 1))
            on_image(index)
    return gather(images, mesh.world, shard.sizes) if mesh.world.size > 1 else images


def share_input(vae: Any, mesh: Mesh, check: Callable[[], None] = lambda: None) -> Callable[[], None]:
    """Change a decoder in place, so that `vae.decode` decodes rank 0's latents on every rank; return what ends that.

    A diffusers pipeline steps its own latents on every rank. If noise or generators differ between ranks, these latents
    differ, although the transformer (`DistributedDiT`) uses rank 0's. From now on every rank must call `vae.decode` at
    the same time. check: called before each decoding. Pipelines may share a decoder: its own `decode` is put back when
    the last of them ends it.
    """
    shared = vars(vae).get("decode")
    if not isinstance(shared, Shared):
        shared = vae.decode = Shared(vae)
    return shared.join(mesh, check)


class Shared:
    """The `decode` of a decoder whose input is shared among ranks.

    alone: the decoder's own, which decodes this rank's latents.
    """

    def __init__(self, vae: Any) -> None:
        self.alone: Callable[..., Any] = vae.decode
        self._vae, self._before = vae, {name: x for name, x in vars(vae).items() if name == "decode"}
        self._users: dict[object, tuple[Mesh, Callable[[], None]]] = {}
        update_wrapper(self, self.alone)

    def __call__(self, z: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return what the decoder makes of rank 0's latents."""
        users = [*self._users.values()]
        for _, before in users:
            before()
        shared = from_rank_0(users[0][0], {"latents": z})["latents"] if users else z
        return self.alone(shared, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """Return the own `decode` of the decoder's copy, which no mesh shares and which has weights of its own."""
        return copy.deepcopy(self.alone, memo)

    def join(self, mesh: Mesh, check: Callable[[], None]) -> Callable[[], None]:
        """Add a user; return what takes it away again."""
        key = object()
        self._users[key] = mesh, check

        def end() -> None:
            self._users.pop(key, None)
            if not self._users and vars(self._vae).get("decode") is self:
                del self._vae.decode
                vars(self._vae).update(self._before)

        return end


def _own_decode(vae: Any) -> Callable[..., Any]:
    """Return a decoder's own `decode`, which a rank may call alone, also while its input is shared elsewhere."""
    found = vae.decode
    return found.alone if isinstance(found, Shared) else found


def preview(latents_NCHW: Tensor, factor: int) -> Tensor:
    """Return pictures (N, 3, H, W) in [0, 1] of the first three latent channels, for models without a decoder."""
    colours = latents_NCHW[:, :3].float()
    colours = colours if colours.shape[1] == 3 else colours[:, :1].expand(-1, 3, -1, -1)
    low, high = colours.amin(dim=(1, 2, 3), keepdim=True), colours.amax(dim=(1, 2, 3), keepdim=True)
    scaled = (colours - low) / (high - low).clamp_min(1e-6)
    return scaled.repeat_interleave(factor, dim=2).repeat_interleave(factor, dim=3)


def vae_factor(config: Any) -> int:
    """Return the number of pixels along each side of a latent pixel."""
    return 2 ** (len(config.block_out_channels) - 1)


def check_vae(path: Path) -> Any:
    """Check the weights of a decoder against its config, and return the config.

    path: a folder of diffusers or ppdiffusers, or an original latent-diffusion file, whose shapes are its config. This
    reads only the file's header. Raises ValueError if a key is missing, unknown or of another shape.
    """
    return _opened(path)[0].config


def load_vae(path: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Load the decoder that `check_vae` accepted; the same file is checked and loaded."""
    vae, checkpoint, keys = _opened(path)
    load(vae, checkpoint, keys, dtype, device)
    return vae.eval()


def decoder_tensors(path: Path) -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
    """Return diffusers' config of a decoder, and its weights under diffusers' names, one at a time."""
    model, checkpoint, keys = _opened(path)
    config = {key: value for key, value in model.config.items() if not key.startswith("_")}
    sources = keys.sources.items()
    made = ((key, source.combine(*map(checkpoint.read, source.keys)).clone()) for key, source in sources)
    return {"_class_name": "AutoencoderKL", **config}, made


def _opened(path: Path) -> tuple[Any, Checkpoint, KeyMap]:
    """Return the decoder on the meta device, its checkpoint and the key map between the two, which fit together."""
    if path.is_dir():
        told, config = path / "config.json", read_json(path / "config.json")
        name = config.get("_class_name", "AutoencoderKL")
        if name != "AutoencoderKL":
            raise ValueError(f"got decoder {path} of class {name}, expected AutoencoderKL")
        checkpoint = open_checkpoint(find_checkpoint(path))
    else:
        told, checkpoint = path, open_checkpoint(path)
        config = vae_keys.config_of(checkpoint.shapes)
    try:
        with torch.device("meta"):
            model: Any = AutoencoderKL.from_config(config)
    except FAILURES as error:
        raise ValueError(f"got {told}, which describes no AutoencoderKL: {error}") from error
    keys = vae_keys.key_map(model.state_dict(), checkpoint.shapes)
    check(model, checkpoint, keys)
    return model, checkpoint, keys
