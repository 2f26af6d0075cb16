"""Rows of `launch/benches/pipeline.py`: a picture of a prompt by our own loop, by the adapter, and by diffusers.

All parts have their released sizes and random weights (`launch/baselines/flux_pipeline.py`), so no checkpoint is
needed. Encoders and decoder stay on the GPU in all rows. Our rows write the PNG as our command does, diffusers' rows as
users of diffusers do, by `image.save`.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from launch.baselines.flux_pipeline import SCHEDULER, Sizes, pipeline
from launch.baselines.transformers import Graphed, compile_blocks, device_mesh, engine, parallels, shared_copy
from launch.benches.released import Released
from seqpar.distributed import DistributedDiT
from seqpar.mesh import Mesh

GUIDANCE = 3.5
LAUNCHES = ("compiled blocks + graph", "compiled blocks", "eager")
Picture = Callable[[str], tuple[dict[str, float], Tensor]]
"""A prompt -> ms by part, and the picture's latents (N, C, h, w)."""


@dataclass(frozen=True)
class Pipeline:
    """Time whole pictures, from a prompt to a PNG."""

    model: str = "flux.1-dev"
    """The pipeline; its weights are random."""
    steps: int = 28
    """Number of denoising steps."""
    size: int = 1024
    """Height and width of the picture in pixels."""
    strategy: str = "auto"
    """Strategy of our rows."""
    transport: str = "auto"
    """Transport of our rows."""
    only: tuple[str, ...] = ()
    """Time only rows whose name contains one of these words (own, adapter, diffusers, Ulysses, graph ...)."""
    rounds: int = 3
    """Number of pictures of each row after its first."""
    minutes: float = 9.0
    """Nothing new is started after this time."""
    out: Path | None = None
    """Append JSON lines here."""


@dataclass(frozen=True)
class Case:
    """What all rows share. released: the transformer; sizes: the other parts."""

    args: Pipeline
    released: Released
    mesh: Mesh
    dtype: torch.dtype
    sizes: Sizes = field(default_factory=Sizes)

    @property
    def chosen(self) -> Mesh | None:
        """Return the mesh of our rows; None leaves it to the planner, whose choice a mesh's axes restrict."""
        return None if self.args.strategy == "auto" else self.mesh

    @cached_property
    def pipe(self) -> Any:
        """Return diffusers' pipeline; rows share its encoders and decoder."""
        return pipeline(self.released.build(self.dtype, self.mesh.device), self.dtype, self.mesh.device, self.sizes)

    def around(self, transformer: Any) -> Any:
        """Return diffusers' pipeline with the same parts around another transformer; `parallelize` changes decoders."""
        others = {"transformer": transformer, "vae": shared_copy(self.pipe.vae)}
        made = type(self.pipe)(**{**self.pipe.components, **others})
        made.set_progress_bar_config(disable=True)
        return made


@dataclass(frozen=True)
class Row:
    """A way to make a picture of a prompt; it returns ms by part, and the picture's latents."""

    kind: str
    name: str
    ready: Callable[[], AbstractContextManager[Picture]]

    @property
    def writer(self) -> str:
        """Return what writes the PNG."""
        return "image.save" if self.kind == "peer" else "seqpar"


class Clock:
    """Takes the time of parts on this rank; every part ends when all ranks have ended it."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self.ms = mesh, {}
        self._before = self._now()

    def _now(self) -> float:
        if self._mesh.device.type == "cuda":
            torch.cuda.synchronize()
        self._mesh.collect(None, None)
        return time.perf_counter()

    def ends(self, part: str) -> None:
        """Note the ms since the last part ended."""
        now = self._now()
        self.ms[part] = 1e3 * (now - self._before)
        self._before = now


def own(case: Case) -> Iterator[Row]:
    """Yield our own loop."""
    yield Row("ours", "own loop", partial(_own, case))


@contextmanager
def _own(case: Case) -> Iterator[Picture]:
    from seqpar.pipelines import flux
    from seqpar.weights.find import from_diffusers

    pipe, text = case.pipe, case.released.text
    blueprint = from_diffusers(pipe.transformer)
    scheduling = {"_class_name": "FlowMatchEulerDiscreteScheduler", **SCHEDULER}
    files = flux.Files(blueprint, pipe, pipe.vae.config, scheduling, text)
    model = blueprint.build(case.dtype, case.mesh.device)
    dit = DistributedDiT(model, case.chosen, case.args.strategy, transport=case.args.transport)
    if case.mesh.is_main:
        print(f"own loop: {dit.plan}, transport {dit.transport}", flush=True)
    texts = flux.Pipeline.texts_of(files, case.mesh, case.dtype)
    with flux.Pipeline(dit, files, pipe.vae, texts) as maker:
        yield partial(_our_picture, case, maker)


def _our_picture(case: Case, maker: Any, prompt: str) -> tuple[dict[str, float], Tensor]:
    """Make a picture with our own loop; return ms by part, and its latents as (N, C, h, w)."""
    from seqpar.pipelines._pictures import to_pil, write_png
    from seqpar.sampling.guidance import Guidance

    args, clock = case.args, Clock(case.mesh)
    maker.texts.encode([prompt])
    clock.ends("encode")
    embedded = Guidance(1.0, embedded=GUIDANCE) if maker.dit.config.guidance_embeds else Guidance(1.0)
    latents = maker.latents([prompt], steps=args.steps, guidance=embedded, size=(args.size, args.size))
    clock.ends("steps")
    images = to_pil(maker.decode(latents))
    clock.ends("decode")
    if case.mesh.is_main:
        write_png(images[0], io.BytesIO())
    clock.ends("png")
    return clock.ms, latents


def adapters(case: Case) -> Iterator[Row]:
    """Yield diffusers' pipeline after `parallelize`, with our model and with diffusers' modules inside."""
    for native in (True, False):
        yield Row("ours", f"adapter, {'native' if native else 'generic'}", partial(_adapter, case, native))


@contextmanager
def _adapter(case: Case, native: bool) -> Iterator[Picture]:
    from seqpar.adapter.parallelize import parallelize, release
    from seqpar.pipelines._pictures import write_png

    # weights of its own, because ours join those of diffusers in place, and other rows' graphs read them
    pipe = case.around(deepcopy(case.pipe.transformer))
    parallelize(pipe, case.chosen, strategy=case.args.strategy, transport=case.args.transport, native=native)
    try:
        yield partial(_their_picture, case, pipe, write_png)
    finally:
        release(pipe)


def theirs(case: Case, launches: Sequence[str] = LAUNCHES) -> Iterator[Row]:
    """Yield diffusers' pipeline with its own engine, launched in these ways; on CPUs eager alone."""
    on_gpu, counts = case.mesh.device.type == "cuda", (case.released.tokens, *case.released.others)
    for parallel in parallels(case.mesh.world.size, counts, case.released.work.heads)[:1]:
        for launch in launches if on_gpu else ("eager",):
            yield Row("peer", f"{parallel.name}, {launch}", partial(_theirs, case, parallel, launch))


@contextmanager
def _theirs(case: Case, parallel: Any, launch: str) -> Iterator[Picture]:
    ranks = device_mesh(parallel, case.mesh)
    twin = engine(case.pipe.transformer, parallel, ranks, case.mesh.device, case.dtype)
    if "compiled" in launch:
        compile_blocks(twin)
    if "graph" in launch:
        twin.forward = Graphed(twin.forward)
    yield partial(_their_picture, case, case.around(twin), lambda image, file: image.save(file, format="PNG"))


@torch.no_grad()
def _their_picture(
    case: Case, pipe: Any, write: Callable[[Any, IO[bytes]], object], prompt: str
) -> tuple[dict[str, float], Tensor]:
    """Make a picture with diffusers' pipeline; return ms by part, and its latents as (N, C, h, w)."""
    args, device, clock = case.args, case.mesh.device, Clock(case.mesh)
    text, pooled, _ = pipe.encode_prompt(prompt, None, device=device, max_sequence_length=case.released.text)
    clock.ends("encode")
    packed = pipe(
        prompt_embeds=text,
        pooled_prompt_embeds=pooled,
        height=args.size,
        width=args.size,
        num_inference_steps=args.steps,
        guidance_scale=GUIDANCE,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
    ).images
    clock.ends("steps")
    latents = pipe._unpack_latents(packed, args.size, args.size, pipe.vae_scale_factor)
    config = pipe.vae.config
    decoded = pipe.vae.decode(latents / config.scaling_factor + config.shift_factor, return_dict=False)[0]
    (image,) = pipe.image_processor.postprocess(decoded, output_type="pil")
    clock.ends("decode")
    if case.mesh.is_main:
        write(image, io.BytesIO())
    clock.ends("png")
    return clock.ms, latents
