"""Decodes latents on all ranks, and loads the decoder.

Each rank decodes some pictures, one at a time, so that no bit depends on the mesh; with fewer pictures than ranks all
ranks decode each picture by strips (`seqpar.vae.parallel`).
When it wins: with several GPUs, always; strips also need less memory on each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor

from seqpar import exact
from seqpar.mesh import Axis, Mesh
from seqpar.shard import Shard
from seqpar.transports.collective.point_to_point import gather
from seqpar.types.keys import KeyMap
from seqpar.weights import vae_keys
from seqpar.weights.checkpoint import Checkpoint, check, find_checkpoint, open_checkpoint
from seqpar.weights.jsons import read_json
from seqpar.weights.loading import load
from seqpar.weights.parts import check_autoencoder

WISHES = ("auto", "strips", "pictures")  # how a caller may ask for pictures to be decoded
# what diffusers raises for a config that describes no decoder
FAILURES = (ValueError, TypeError, KeyError, IndexError, AttributeError, ZeroDivisionError, RuntimeError)


class Decoder(Protocol):
    """A VAE on the ranks of a mesh. Its methods take latents (1, C, h, w) that the VAE decodes as they are."""

    mesh: Mesh
    vae: Any

    def rank_0s(self, latents_NCHW: Tensor) -> Tensor:
        """Return rank 0's latents on this rank's device; every rank must call this at the same time."""
        ...

    def way(self, count: int, shape: Sequence[int], wish: str = "auto") -> Way:
        """Return how `count` latents of a shape, of which the last two sizes count, are decoded; see `way_of`."""
        ...

    def prepare(self, way: Way, shape: Sequence[int]) -> None:
        """Choose for latents of a shape (N, C, h, w) whether they are decoded in turns; every rank must call this."""
        ...

    def say(self, text: str | None) -> None:
        """Print a text on rank 0, if it is one and was not printed before."""
        ...

    def alone(self, latent_1Chw: Tensor) -> Tensor:
        """Return the picture (1, 3, H, W) that this rank decodes without the others."""
        ...

    def strips(self, latent_1Chw: Tensor) -> Tensor:
        """Return the picture (1, 3, H, W) on every rank that shares it; all of them must call this."""
        ...


@dataclass(frozen=True)
class Way:
    """How pictures are decoded: "pictures" (whole, some on each rank), "strips" (each on `ranks`) or "whole".

    axis: the one that divides the pictures. why: why there are no strips, where there would be.
    """

    name: str
    ranks: int
    axis: Axis
    why: str | None = None

    def shard(self, count: int) -> Shard:
        """Return the pictures of each rank of the axis."""
        return Shard(count, self.axis.size)

    @property
    def told(self) -> str | None:
        """Return the sentence that says why there are no strips, or None."""
        return None if self.why is None else f"the VAE computes {self}"

    def __str__(self) -> str:
        groups = f", in each of {self.axis.size} groups" if self.axis.size > 1 else ""
        shown = {
            "pictures": f"whole pictures, some on each of {self.ranks} ranks",
            "strips": f"strips on {self.ranks} ranks{groups}",
            "whole": "whole pictures on every rank" if self.ranks > 1 else "whole pictures",
        }[self.name]
        return shown if self.why is None else f"{shown}, because {self.why}"


def way_of(count: int, wish: str, world: Axis, groups: Axis, why_whole: Callable[[], str | None]) -> Way:
    """Return how `count` pictures are decoded on all ranks.

    wish: one of `WISHES`; "auto" decodes by pictures where each rank gets one, and in exact mode, because that has the
    bits of one rank, and otherwise by strips. groups: the axis of the groups of ranks that share a picture.
    why_whole: returns why a picture cannot be cut into strips, or None.
    """
    if world.size == 1:
        return Way("whole", 1, world)
    if wish == "pictures" or (wish == "auto" and (count >= world.size or exact.is_on())):
        return Way("pictures", world.size, world)
    reason = why_whole()
    if reason is None:
        return Way("strips", world.size // groups.size, groups)
    return Way("pictures", world.size, world, reason)


def decode(
    on: Decoder, latents_NCHW: Tensor, on_image: Callable[[int], None] = lambda index: None, wish: str = "auto"
) -> Tensor:
    """Decode rank 0's latents (N, C, h, w) into pictures (N, 3, H, W) in [0, 1], fp32, on every rank.

    on: the VAE, diffusers' AutoencoderKL, on the ranks of a mesh. on_image(index): called when this rank has queued
    the decoding of one of its images, or its part of one. wish: see `way_of`. Raises FloatingPointError on every rank
    if a picture is not finite.
    """
    latents_NCHW = on.rank_0s(latents_NCHW)
    way = on.way(len(latents_NCHW), latents_NCHW.shape, wish)
    on.say(way.told)
    on.prepare(way, (1, *latents_NCHW.shape[1:]))
    shard, one = way.shard(len(latents_NCHW)), on.strips if way.name == "strips" else on.alone
    images = _pictures(on.vae, latents_NCHW[shard.slice(way.axis.rank)], one, on_image)
    images = gather(images, way.axis, shard.sizes) if way.axis.size > 1 else images
    _check_finite(images, on.vae.dtype)
    return images


def _pictures(
    vae: Any, latents_NCHW: Tensor, one: Callable[[Tensor], Tensor], on_image: Callable[[int], None]
) -> Tensor:
    """Return pictures (N, 3, H, W) in [0, 1] of a model's latents. one: decodes a single one of the VAE's latents."""
    config, factor, shift = vae.config, vae_factor(vae.config), getattr(vae.config, "shift_factor", None) or 0.0
    shape = (3, latents_NCHW.shape[2] * factor, latents_NCHW.shape[3] * factor)
    images = torch.empty(len(latents_NCHW), *shape, device=latents_NCHW.device)
    with torch.inference_mode(False), torch.no_grad():  # exchanges that are made here outlive the caller's mode
        for index, (image, latent) in enumerate(zip(images, latents_NCHW.to(vae.dtype), strict=True)):
            decoded = one(latent[None] / config.scaling_factor + shift)[0]
            values = decoded.float()
            # where a value is infinite, the difference is NaN, which no clamp hides
            image.copy_((values / 2 + 0.5).clamp(0, 1) + (values - values))
            on_image(index)
    return images


def _check_finite(images_N3HW: Tensor, dtype: torch.dtype) -> None:
    """Raise FloatingPointError if pictures hold NaN, which a file would show as black. dtype: the decoder's."""
    bad = (~images_N3HW.isfinite().all(dim=3).all(dim=2).all(dim=1)).nonzero().flatten().tolist()
    if bad:
        raise FloatingPointError(
            f"the decoder made pixels that are not finite in {len(bad)} of {len(images_N3HW)} pictures (the first is "
            f"picture {bad[0] + 1}) in {str(dtype).removeprefix('torch.')}; try dtype fp32 or bf16, or check the "
            f"decoder's weights and scaling_factor"
        )


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
    check_autoencoder(config, told)
    try:
        with torch.device("meta"):
            model: Any = AutoencoderKL.from_config(config)
    except FAILURES as error:
        raise ValueError(f"got {told}, which describes no AutoencoderKL: {error}") from error
    keys = vae_keys.key_map(model.state_dict(), checkpoint.shapes)
    check(model, checkpoint, keys)
    return model, checkpoint, keys
