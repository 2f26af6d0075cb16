"""Decoding a latent into a picture or a video: ours on all ranks beside diffusers' on one GPU, whole and tiled.

    torchrun --nproc_per_node=2 launch/bench.py decode --vae kl --size 1024 2048 --out lines.jsonl
    torchrun --nproc_per_node=2 launch/bench.py decode --vae wan --frames 81 --size 720x1280 --out lines.jsonl

Decoders have their released sizes and random weights (`launch/baselines/decoders.py`). diffusers' rows run on rank 0
while the other ranks wait on the host; its eager one is the reference of all rows. A line has the most memory beside
what was held before, and the distance to diffusers' picture. On a CPU decoders are tiny and in fp32.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from launch.baselines.decoders import DECODERS, Decoder, latents
from launch.benches.rows import Flags, Line, Reference, Row, Timed, measure
from launch.benches.timing import graphed
from seqpar.mesh.mesh import Mesh, default_dtype
from seqpar.planner.plan import choose_transport, load_transport
from seqpar.vae.parallel import ParallelVAE

EAGER, TILING = "diffusers, eager", "diffusers, tiling"


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
        shape = self.decoder.shape(self.size, self.args.frames)
        return latents(shape).to(self.mesh.device, next(self.vae.parameters()).dtype)

    @cached_property
    def truth(self) -> Tensor:
        with torch.no_grad():
            return self.vae.decode(self.z, return_dict=False)[0]


def main(args: Decode) -> None:
    """Measure all decoders and sizes; rank 0 prints and appends the lines."""
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
    """Return the sizes as (height, width); `ValueError` for flags that cannot be measured."""
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
    side = getattr(vae, "tile_latent_min_size", 0) or vae.tile_sample_min_height // case.decoder.factor
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
    """Decodes latents, and keeps the result."""

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
    """Return the relative distance of a picture to another one, and the largest difference."""
    difference = x.double() - truth.double()
    return {"difference": float(difference.norm() / truth.double().norm()), "most": float(difference.abs().max())}
