"""Decoding a latent into a picture or a video: ours on all ranks beside diffusers' on one GPU, whole and tiled.

    torchrun --nproc_per_node=2 launch/bench.py decode --vae kl --size 1024 2048 --out lines.jsonl
    torchrun --nproc_per_node=2 launch/bench.py decode --vae wan --frames 81 --size 720x1280 --out lines.jsonl

Decoders have their released sizes and random weights, which keep the variance of their input from layer to layer, so
that rounding errors are of a usual size; latents are smooth, so that a seam stands out. diffusers' rows run on rank 0
while the other ranks wait on the host; its eager one is the reference of all rows. A line has the most memory beside
what was held before, and the distance to diffusers' picture. On a CPU decoders are tiny and in fp32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import diffusers
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from launch.baselines.pipelines import VAE
from launch.benches.rows import Flags, Line, Reference, Row, Timed, measure
from launch.benches.timing import graphed
from seqpar.mesh.mesh import Mesh, default_dtype
from seqpar.planner.plan import choose_transport, load_transport
from seqpar.vae.known import spatial_factor
from seqpar.vae.parallel import ParallelVAE
from seqpar.vae.pipeline import latent_shape

EAGER, TILING = "diffusers, eager", "diffusers, tiling"
DETAIL = 0.1  # standard deviation of the latents' noise beside their low frequencies
WAVE = 8  # latent pixels (and frames) between the random values of the low frequencies


@dataclass(frozen=True)
class Decoder:
    """A decoder of diffusers. narrow: what makes the config tiny, for a CPU. video: whether it has several frames."""

    kind: str
    config: Mapping[str, Any]
    narrow: Mapping[str, Any]
    video: bool = False

    def build(self, dtype: torch.dtype, device: torch.device, tiny: bool = False) -> Any:
        kind: Any = getattr(diffusers, self.kind)
        with torch.device(device):
            made = kind(**{**self.config, **(self.narrow if tiny else {})}).eval().requires_grad_(False)
        nn.Module.to(made, dtype)  # diffusers' own `to` warns about modules that stay in fp32, of which there are none
        randomise(made, 1)
        return made


NARROW = {"base_dim": 8, "dim_mult": [1, 1, 1, 1]}
DECODERS: Mapping[str, Decoder] = {
    "kl": Decoder("AutoencoderKL", VAE, {"block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4, "sample_size": 64}),
    "qwen": Decoder("AutoencoderKLQwenImage", {}, NARROW),
    "wan": Decoder("AutoencoderKLWan", {}, NARROW, video=True),
}


def randomise(model: nn.Module, seed: int) -> None:
    """Set matrices and kernels that keep the variance of their input, norm weights of one and zero biases."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    for name, weight in model.named_parameters():
        if name.endswith(".gamma") or weight.dim() == 1:  # Wan's and Qwen's norms have weights with several dims
            nn.init.constant_(weight, 0.0 if name.endswith("bias") else 1.0)
        else:
            nn.init.normal_(weight, std=math.prod(weight.shape[1:]) ** -0.5, generator=generator)


def latents(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Smooth random latents of variance one in fp32 in host memory, the same on every rank.

    shape: (1, C, h, w) or (1, C, T, h, w).
    """
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(*shape[:2], *(side // WAVE + 2 for side in shape[2:]), generator=generator)
    smooth = F.interpolate(coarse, shape[2:], mode="bilinear" if len(shape) == 4 else "trilinear", align_corners=True)
    return smooth / smooth.std() + DETAIL * torch.randn(shape, generator=generator)


@dataclass(frozen=True)
class Decode(Flags):
    """Time decoding on all ranks, beside diffusers' on one GPU."""

    vae: tuple[str, ...] = ("kl",)
    """Decoders: kl, qwen (pictures), wan (videos)."""
    size: tuple[str, ...] = ("1024", "2048")
    """Pixels of a side, or height x width (720x1280)."""
    frames: int = 81
    """Frames of videos."""
    transport: str = "auto"
    """Transport of our rows."""


@dataclass(frozen=True)
class Case:
    """A decoder with random weights, the pixels of what it decodes, and the ranks."""

    args: Decode
    decoder: Decoder
    vae: Any
    size: tuple[int, int]
    mesh: Mesh

    @cached_property
    def z(self) -> Tensor:
        height, width = self.size
        asked = {"height": height, "width": width, "num_frames": self.args.frames if self.decoder.video else 1}
        shape = latent_shape(self.vae, asked)
        assert shape is not None
        return latents(shape).to(self.mesh.device, next(self.vae.parameters()).dtype)

    @cached_property
    def truth(self) -> Tensor:
        with torch.no_grad():
            return self.vae.decode(self.z, return_dict=False)[0]


def main(args: Decode) -> None:
    sizes, device = check(args), Mesh.joined().device
    mesh = Mesh.from_env(cfg=1, device=device)
    for name in args.vae:
        decoder = DECODERS[name]
        vae = decoder.build(default_dtype(device), device, tiny=device.type != "cuda")
        for size in sizes:
            case = Case(args, decoder, vae, size, mesh)
            about = {"vae": name, "size": list(size), "frames": args.frames if decoder.video else 1}
            measure("decode", about, rows(case), mesh, args)


def check(args: Decode) -> list[tuple[int, int]]:
    """The sizes as (height, width); `ValueError` for flags that cannot be measured."""
    if unknown := [name for name in args.vae if name not in DECODERS]:
        raise ValueError(f"got the decoder {unknown[0]}, expected one of {', '.join(DECODERS)}")
    args.check()
    if args.frames < 1:
        raise ValueError(f"got --frames {args.frames}, expected at least 1")
    for text in args.size:
        if not re.fullmatch(r"[1-9][0-9]*(x[1-9][0-9]*)?", text):
            raise ValueError(f"got --size {text}, expected a number of pixels, or two as in 720x1280")
    sides = [[int(side) for side in text.split("x")] for text in args.size]
    return [(each[0], each[-1]) for each in sides]


def rows(case: Case) -> Iterator[Row]:
    """Yield diffusers' rows on one GPU and ours on all ranks, on GPUs also as CUDA graphs."""
    on_gpu, ranks = case.mesh.device.type == "cuda", case.mesh.world.size
    reference = Reference(EAGER, partial(_alone, case, False))
    yield Row("peer", TILING, partial(_alone, case, True), reference)
    for graph in (False, True) if on_gpu else (False,):
        name = f"ours, {ranks} rank{'s' * (ranks > 1)}{', graph' * graph}"
        yield Row("ours", name, partial(_ours, case, graph), reference)
    yield Row("peer", f"{EAGER}, again", partial(_alone, case, False), reference)


@contextmanager
def _alone(case: Case, tiled: bool) -> Iterator[Timed]:
    """Decode by diffusers on rank 0, whole or in overlapping tiles, which are blended."""
    vae = case.vae
    side = getattr(vae, "tile_latent_min_size", 0) or vae.tile_sample_min_height // spatial_factor(vae)
    if tiled and max(case.z.shape[-2:]) <= side:
        raise ValueError(f"got a latent of {case.z.shape[-2]} x {case.z.shape[-1]}, which is one tile of {side}")
    work = _Work(vae.decode, case.z)

    def decode() -> None:
        if case.mesh.is_main:
            (vae.enable_tiling if tiled else vae.disable_tiling)()
            work()

    try:
        yield Timed.of(decode, case.mesh.device, lambda: _facts(case, work.out))
    finally:
        vae.disable_tiling()


@contextmanager
def _ours(case: Case, graph: bool) -> Iterator[Timed]:
    """Decode by strips on all ranks; on one rank the same functions decode the whole."""
    mesh, device = case.mesh, case.mesh.device
    transport = load_transport(choose_transport(case.args.transport, mesh).name)
    vae = ParallelVAE(case.vae, mesh, transport, channels_last=device.type == "cuda")
    try:
        work = _Work(vae.decode, case.z)
        work()
        step = graphed(work) if graph else work
        yield Timed.of(step, device, lambda: _facts(case, work.out))
    finally:
        vae.release()  # and its transport


class _Work:
    def __init__(self, decode: Callable[..., Any], z: Tensor) -> None:
        self._decode, self._z = decode, z
        self.out: Tensor | None = None

    @torch.no_grad()
    def __call__(self) -> None:
        self.out = None  # its memory is free before the next one is made
        self.out = self._decode(self._z, return_dict=False)[0]


def _facts(case: Case, out: Tensor | None) -> Line:
    return far(out, case.truth) if out is not None and case.mesh.is_main else {}


def far(x: Tensor, truth: Tensor) -> dict[str, float]:
    difference = x.double() - truth.double()
    return {"difference": float(difference.norm() / truth.double().norm()), "most": float(difference.abs().max())}
