"""The rows of decode.py: diffusers' own decoding on one GPU (whole, in a CUDA graph, tiled), and ours on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from launch.baselines.decoders import Decoder, latents
from launch.benches.decode_table import EAGER, TILING
from seqpar.mesh import Mesh
from seqpar.planner.plan import choose_transport, load_transport
from seqpar.vae.on_mesh import MeshVAE
from seqpar.vae.parallel import ParallelVAE

SMALL = 10.0  # megapixels; larger works are decoded by `parallelize` just as in the other rows
Decoding = Callable[[Tensor], Tensor]
"""Decodes whole latents, which are equal on all ranks, into the whole picture or video."""


@dataclass(frozen=True)
class Case:
    """A decoder, the pixels of what it decodes, and the ranks. vae: the decoder with random weights, to be reused."""

    name: str
    decoder: Decoder
    vae: Any
    size: tuple[int, int]
    frames: int
    mesh: Mesh
    transport: str = "auto"

    @cached_property
    def z(self) -> Tensor:
        """Return the latents, in the decoder's dtype."""
        return latents(self.decoder.shape(self.size, self.frames)).to(self.mesh.device, self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the decoder."""
        return next(self.vae.parameters()).dtype

    @property
    def megapixels(self) -> float:
        """Return the millions of pixels of all frames."""
        return megapixels(self.decoder, self.z)

    def __str__(self) -> str:
        height, width = (side // self.decoder.factor * self.decoder.factor for side in self.size)
        return f"{self.name} {f'{self.frames} x ' if self.decoder.video else ''}{height} x {width}"


def megapixels(decoder: Decoder, z: Tensor) -> float:
    """Return the millions of pixels of all frames of a decoded latent."""
    frames = 1 + (z.shape[2] - 1) * (decoder.frames or 0) if z.dim() == 5 else 1
    return frames * z.shape[-2] * z.shape[-1] * decoder.factor**2 / 1e6


@dataclass(frozen=True)
class Way:
    """A way to decode. everywhere: all ranks decode together, else rank 0 decodes and the others wait on the host.

    graph: the decoding is replayed as a CUDA graph.
    """

    name: str
    ready: Callable[[], AbstractContextManager[Decoding]]
    everywhere: bool = True
    graph: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Return whose row it is."""
        return self.name.split(",", 1)[0]


def ways(case: Case) -> Iterator[Way]:
    """Yield all rows of a case. Rows of one GPU other than diffusers' are there on one rank only."""
    ranks, on_gpu = case.mesh.world.size, case.mesh.device.type == "cuda"
    yield Way(EAGER, partial(_theirs, case), everywhere=False)
    if on_gpu and ranks == 1:
        yield Way("diffusers, graph", partial(_theirs, case), everywhere=False, graph=True)
    yield Way(TILING, partial(_tiled, case), everywhere=False)
    name = f"ours, {ranks} GPU{'s' * (ranks > 1)}" if on_gpu else f"ours, {ranks} rank{'s' * (ranks > 1)}"
    for last in (False, True) if on_gpu else (False,):
        layout, facts = ", channels-last" * last, {"channels_last": last}
        yield Way(name + layout, partial(_ours, case, last), facts=facts)
        if on_gpu:
            yield Way(f"{name}{layout}, graph", partial(_ours, case, last), graph=True, facts=facts)
    if case.megapixels < SMALL:
        yield Way(f"{name}, parallelize", partial(_parallelized, case))
    yield Way("diffusers, eager, again", partial(_theirs, case), everywhere=False)


@contextmanager
def _theirs(case: Case) -> Iterator[Decoding]:
    """Decode by diffusers, unchanged."""
    yield lambda z: case.vae.decode(z, return_dict=False)[0]


@contextmanager
def _tiled(case: Case) -> Iterator[Decoding]:
    """Decode by diffusers in overlapping tiles, which are blended."""
    vae = case.vae
    side = getattr(vae, "tile_latent_min_size", 0) or vae.tile_sample_min_height // case.decoder.factor
    if max(case.z.shape[-2:]) <= side:
        raise ValueError(f"got a latent of {case.z.shape[-2]} x {case.z.shape[-1]}, which is one tile of {side}")
    vae.enable_tiling()
    try:
        yield lambda z: vae.decode(z, return_dict=False)[0]
    finally:
        vae.disable_tiling()


@contextmanager
def _ours(case: Case, channels_last: bool) -> Iterator[Decoding]:
    """Decode by strips on all ranks; on one rank the same functions decode the whole."""
    mesh = case.mesh
    transport = load_transport(choose_transport(case.transport, mesh).name)
    vae = ParallelVAE(case.vae, mesh, transport, channels_last)
    try:
        if mesh.world.size > 1 and (why := vae.why_whole(tuple(case.z.shape))):
            raise ValueError(f"got a latent that is decoded whole on every rank: {why}")
        yield lambda z: vae.decode(z, return_dict=False)[0]
    finally:
        vae.release()  # and its transport


@contextmanager
def _parallelized(case: Case) -> Iterator[Decoding]:
    """Decode as a pipeline does after `seqpar.parallelize`: small pictures by a CUDA graph from the second call on."""
    made = MeshVAE.of(case.vae, case.mesh, choose_transport(case.transport, case.mesh).name)

    def decode(z: Tensor) -> Tensor:
        return made.decode(z, return_dict=False)[0]

    try:
        for _ in range(2):  # the first call runs eagerly and the second one is captured
            decode(case.z)
        yield decode
    finally:
        made.release()
