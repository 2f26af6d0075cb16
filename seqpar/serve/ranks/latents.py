"""Latents in place of images: those that a model's VAE would encode, and those that it would decode.

They enter and leave at the VAE itself, so that it does not matter how a pipeline scales, packs or shifts them. Their
shape is that of the VAE: (1, channels, height, width), with a dimension of frames where it has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from torch import Tensor

from seqpar.mesh.inputs import streams_of_rank_0
from seqpar.mesh.mesh import Mesh
from seqpar.serve.messages import ImageRequest


def read(request: ImageRequest, mesh: Mesh) -> Tensor | None:
    """The input latents of a request on every rank; rank 0 reads the file with their values."""
    given = request.latents
    if given is None:
        return None

    def values() -> dict[str, Tensor]:
        try:
            with open(request.pixels or "", "rb") as file:
                content = bytearray(file.read(given.nbytes))
        except OSError as error:  # its text has a path of the server
            raise ValueError("the server cannot read the latents of the request; retry later") from error
        if len(content) != given.nbytes:
            raise ValueError("the file with the latents of the request is too short; retry later")
        latents = torch.frombuffer(content, dtype=torch.float32).reshape(given.shape)
        if not latents.isfinite().all():
            raise ValueError("the latents have values that are not finite; send finite ones")
        return {"latents": latents}

    return streams_of_rank_0(mesh, values)["latents"]


def check_shape(latents: Tensor, vae: Any) -> None:
    """Raise ValueError for latents of other channels than the VAE's, or of a frame that it does not know."""
    channels = vae.config.get("latent_channels") or vae.config.get("z_dim")
    if latents.shape[1] != channels:
        raise ValueError(f"the latents have {latents.shape[1]} channels, but the model's have {channels}")
    if latents.dim() > _dims(vae):
        raise ValueError("the latents have a dimension of frames, which the model's have not; leave it out")


def _dims(vae: Any) -> int:
    """Dimensions of a VAE's latents: 5 with frames, over which it convolves."""
    return max(weight.dim() for weight in vae.parameters())


@contextmanager
def encoding_to(latents: Tensor | None, vae: Any) -> Iterator[None]:
    """Let a VAE encode any image to these latents; None changes nothing."""
    if latents is None:
        yield
        return
    check_shape(latents, vae)

    def encode(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        mean = latents.to(x.device, x.dtype)
        mean = mean.unsqueeze(2) if x.dim() > mean.dim() else mean
        posterior = SimpleNamespace(sample=lambda generator=None: mean, mode=lambda: mean)
        return SimpleNamespace(latent_dist=posterior) if kwargs.get("return_dict", True) else (posterior,)

    with _replaced(vae, "encode", encode):
        yield


@contextmanager
def not_decoded(vae: Any) -> Iterator[list[Tensor]]:
    """Collect the latents that a VAE is to decode, in fp32, and decode nothing."""
    taken = list[Tensor]()

    def decode(z: Tensor, *args: Any, **kwargs: Any) -> Any:
        taken.append(z.float().cpu())
        nothing = z.new_zeros(len(z), 3, *(1 for _ in z.shape[2:]))
        return SimpleNamespace(sample=nothing) if kwargs.get("return_dict", True) else (nothing,)

    with _replaced(vae, "decode", decode):
        yield taken


def decoded(latents: Tensor, pipe: Any, device: torch.device) -> Image.Image:
    """The image of latents, as a pipeline decodes it. Collective."""
    check_shape(latents, pipe.vae)
    latents = latents.unsqueeze(2) if latents.dim() < _dims(pipe.vae) else latents
    dtype = next(pipe.vae.parameters()).dtype
    with torch.no_grad():
        pixels = pipe.vae.decode(latents.to(device, dtype), return_dict=False)[0]
    pixels = pixels[:, :, 0] if pixels.dim() > 4 else pixels
    values = pipe.image_processor.postprocess(pixels, output_type="np")
    return VaeImageProcessor.numpy_to_pil(values)[0]


@contextmanager
def _replaced(vae: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    before = {key: x for key, x in vars(vae).items() if key == name}  # that of a VAE that ranks share
    setattr(vae, name, function)
    try:
        yield
    finally:
        delattr(vae, name)
        vars(vae).update(before)
