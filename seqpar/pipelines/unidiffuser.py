"""Images from prompts with UniDiffuser: CLIP encodes, our loop denoises with the U-ViT, and the VAE decodes.

One model knows images and texts, so the same loop also generates images without a prompt, captions of images, texts,
and pairs of both (see `uvit.Config`). Images are denoised as two streams: the latent and a CLIP image embedding, which
is one token. In the unconditional branch of guidance the other modality is noise that is new at every evaluation; it is
drawn before the loop, in the order of diffusers' pipeline, and sent from rank 0 to all ranks. The state stays sharded
from the noise to the last step, and a step, with both branches, is one CUDA graph.
Source: UniDiffuser (arXiv 2303.06555).
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, Self

import torch
from PIL import Image
from torch import Tensor

from seqpar._moved import successors
from seqpar.loading.encoders import collect
from seqpar.loading.folder import check_named, load_vae
from seqpar.loading.parts import read_pipeline, read_scheduler
from seqpar.loading.schedulers import set_timesteps
from seqpar.loop.blueprint import Blueprint, locate
from seqpar.loop.distributed import DistributedDiT
from seqpar.loop.loop import draw_noise, draw_steps
from seqpar.loop.models.uvit import Config, Mode, Model
from seqpar.loop.request import Request
from seqpar.mesh.inputs import streams_of_rank_0
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines import own_loop
from seqpar.pipelines.own_loop import Loaded, OwnJob, checked_vae, drawn_in, placed
from seqpar.pipelines.protocol import NO_LORA, NO_PRESET, GenerationRequest, no_event
from seqpar.pipelines.unidiffuser_parts import (
    DEFAULT,
    NEEDED,
    Encode,
    captions,
    check_encoders,
    image_streams,
    text_encoder,
)
from seqpar.planner.plan import Plan
from seqpar.planner.search import Preferences
from seqpar.types.guidance import Guidance, check_pictures

PIPELINES = ("UniDiffuserPipeline",)
MODELS = (Model,)
GUIDANCE = 8.0  # of diffusers; the original's scale s is this one minus 1
DATA_TYPE = 1  # of version 1's two kinds of training data the one with good pictures, as both implementations take


@dataclass(frozen=True)
class Files(own_loop.Files):
    """The checked files of a UniDiffuser. source: its folder, or None for a random model."""

    scheduling: Mapping[str, Any] = field(default_factory=lambda: DEFAULT, kw_only=True)

    @staticmethod
    def locate(name: str | Path | Blueprint, mode: Mode = "text2img") -> Files:
        """Find and check a diffusers folder or hub id, or take a random model (without encoders).

        mode: see `uvit.Config`. Raises ValueError if a file does not fit; reads only configs and headers.
        """
        blueprint = locate(name)
        if not isinstance(blueprint.config, Config):
            raise ValueError(f"{blueprint.name} is no UniDiffuser")
        blueprint, folder = replace(blueprint, config=replace(blueprint.config, mode=mode)), blueprint.path
        if folder is None:
            return Files(blueprint)
        check_named(folder, read_pipeline(folder), NEEDED)
        vae = checked_vae(folder / "vae", blueprint)
        check_encoders(folder, blueprint.config)
        return Files(blueprint, folder, vae, scheduling=read_scheduler(folder / "scheduler"))

    def conditions(self, asked: Sequence[object]) -> int:
        return 1  # the prompt is a stream, so modulation depends on the branch alone

    def check(self, request: GenerationRequest) -> OwnJob:
        request.needs_prompts()
        noise = "the unconditional branch takes noise as its text"
        request.refuse(noise, negative_prompt=request.negative)
        request.refuse("--guidance is classifier-free for this model", true_guidance=request.true_guidance)
        request.refuse(NO_LORA, lora=request.loras)
        request.refuse(NO_PRESET, preset=request.preset, sigmas=request.sigmas)
        prompts, guidance = request.pictures, request.free_guidance(GUIDANCE)
        encoded = "per prompt, encoded on rank 0 before other weights load"
        if self.source is None:
            encoded = "of random numbers: no text encoder comes with this model"
        return self.job(
            Pipeline,
            request,
            guidance,
            self.schedule(request.scheduler, request.steps, request.eta),
            prompts,
            loading={"prompts": prompts},
            settings={"prompts": prompts, "scheduler": request.scheduler, "eta": request.eta},
            named={"prompts": request.prompts},
            more_notes=[("text", f"{self.blueprint.config.text_tokens} tokens {encoded}")],
        )


@dataclass(frozen=True)
class Asked:
    """A run, without the texts and images that it starts from.

    count: number of pictures or texts. guidance: diffusers' scale, which is the original's plus 1. size: (height,
    width) of the picture in pixels, None for 512 x 512. scheduler: the class name of another.
    """

    count: int
    steps: int
    guidance: Guidance
    seed: int = 0
    size: tuple[int, int] | None = None
    eta: float | None = None
    scheduler: str | None = None


class Texts:
    """Encoded prompts of one model; those of the last call stay cached.

    shapes: name -> shape of each tensor of a prompt. ready: returns a function that encodes one prompt and holds the
    encoders; None for random weights: prompts become random numbers. Their memory is freed after each call.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], ready: Callable[[], Encode] | None, mesh: Mesh, dtype: torch.dtype
    ) -> None:
        self.shapes = dict(shapes)
        self._ready, self._mesh, self._dtype = ready, mesh, dtype
        self._cached: dict[str, tuple[Tensor, ...]] = {}

    def encode(self, prompts: Sequence[str], on_prompt: Callable[[int], None] = no_event) -> None:
        """Encode prompts on rank 0, and drop all others; ValueError on rank 0 if the encoders do not load.

        on_prompt(index): called when a prompt is encoded.
        """
        if not self._mesh.is_main:
            return
        encoded = {text: self._cached[text] for text in prompts if text in self._cached}
        missing = [text for text in dict.fromkeys(prompts) if text not in encoded]
        if missing:
            encoder = self._random if self._ready is None else self._ready()
            for index, text in enumerate(missing):
                with torch.no_grad():
                    encoded[text] = tuple(x.to(self._mesh.device, self._dtype) for x in encoder(text))
                on_prompt(index)
            del encoder
            collect()
        self._cached = encoded

    def rows(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Return the tensors by name, with a row for each of these encoded prompts. Only rank 0's values count."""
        if self._mesh.is_main:
            texts = (torch.stack(rows) for rows in zip(*(self._cached[text] for text in prompts), strict=True))
        else:
            shapes = ((len(prompts), *shape) for shape in self.shapes.values())
            texts = (torch.zeros(shape, dtype=self._dtype, device=self._mesh.device) for shape in shapes)
        return dict(zip(self.shapes, texts, strict=True))

    def _random(self, text: str) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(zlib.crc32(text.encode()))
        return tuple(torch.randn(shape, generator=generator) for shape in self.shapes.values())


@dataclass(frozen=True)
class Pipeline(Loaded):
    """A loaded UniDiffuser on a mesh; see `Loaded`."""

    texts: Texts

    @classmethod
    @successors
    def load(
        cls,
        files: Any,
        mesh: Mesh | str | None = None,
        dtype: torch.dtype = torch.float32,
        *,
        preferences: Preferences | None = None,
        plan: Plan | None = None,
        prompts: Sequence[str] = (),
        on_prompt: Callable[[int], None] = no_event,
    ) -> Self:
        """Load the weights of transformer and decoder. Collective: call on all ranks.

        preferences: strategy, local attention and transport; the planner chooses the rest for one image with one
        branch. plan: in place of a new one. prompts: encoded first on rank 0, so that encoders leave memory before
        other weights load; later calls of `latents` may take others. on_prompt(index): called for each of them.
        """
        plan, mesh = placed(files, dtype, mesh, preferences, plan)
        texts = cls._texts(files, mesh, dtype)

        def read() -> Any:
            texts.encode(prompts, on_prompt)
            return None if files.source is None else load_vae(files.source / "vae", dtype, mesh.device)

        vae = mesh.on_all_ranks(read)
        model = files.blueprint.build(dtype, mesh.device, 0, mesh)  # each rank reads a share of the file
        return cls(DistributedDiT(model, mesh, plan=plan), files, vae, texts)

    @staticmethod
    def text_shapes(files: Any) -> Mapping[str, tuple[int, ...]]:
        """Return name -> shape of each tensor of a prompt: CLIP's hidden states, made narrower."""
        return {"text": (files.blueprint.config.text_tokens, files.blueprint.config.text_width)}

    @classmethod
    def _texts(cls, files: Any, mesh: Mesh, dtype: torch.dtype) -> Texts:
        ready = None
        if files.source is not None:
            ready = partial(text_encoder, files.source, files.blueprint.config.text_tokens, mesh.device, dtype)
        return Texts(cls.text_shapes(files), ready, mesh, dtype)

    def request(
        self,
        prompts: Sequence[str],
        *,
        steps: int,
        guidance: Guidance,
        seed: int = 0,
        size: tuple[int, int] | None = None,
        eta: float | None = None,
        scheduler: str | None = None,
    ) -> Request:
        """Return the inputs of a run of these prompts, from rank 0's arguments; see `Asked` for them. Collective.

        Prompts that are not encoded yet take the encoder's memory for the time of this call. Raises ValueError in a
        mode without prompts.
        """
        if self.dit.config.mode != "text2img":
            raise ValueError(f"got prompts in mode {self.dit.config.mode}, expected text2img; see `streams`")

        def encoded() -> list[str]:
            check_pictures("prompts", prompts, steps, guidance, size, seed)
            self.texts.encode(prompts)
            return [*prompts]

        prompts = self.dit.mesh.on_rank_0(encoded, list[str])
        asked = Asked(len(prompts), steps, guidance, seed, size, eta, scheduler)
        return self._request(asked, self.texts.rows(prompts), None)

    def streams(
        self,
        asked: Asked,
        *,
        given: Mapping[str, Tensor] | None = None,
        noise: Mapping[str, Tensor] | None = None,
        on_step: Callable[[int], None] = lambda index: None,
    ) -> dict[str, Tensor]:
        """Return the streams that the mode denoises, equal on every rank, from rank 0's arguments.

        They are {"image": (N, C, h, w), "clip": (N, 1, width)} in modes text2img and image, {"text": (N, 77, width)} in
        img2text and text, and all three in joint, which takes no guidance. given: the other streams, in the same
        shapes; without them modes image and text draw noise at each evaluation. noise: None draws it, too.
        """
        self.sampler(**vars(self._request(asked, given, noise)), on_step=on_step)
        return self.sampler.streams()

    def _request(self, asked: Asked, given: Mapping[str, Tensor] | None, noise: Mapping[str, Tensor] | None) -> Request:
        mesh, model, config = self.dit.mesh, self.dit.model, self.dit.config
        asked = mesh.share(asked, Asked)  # only rank 0 may have any streams, and all must check the same
        given, noise = (streams_of_rank_0(mesh, lambda x=x: _on_host(x)) for x in (given, noise))
        if asked.guidance.on and "other_timestep" not in model.PROMPT:
            raise ValueError(f"got guidance in mode {config.mode}, expected text2img or img2text; use scale 1")
        size = self.files.latent_size(asked.size)
        if "image" in model.STATE:
            self.check_decodable(asked.count, size)
        scheduler, evaluations = self._scheduler(asked.scheduler, asked.steps)

        # the streams that are denoised, in the order in which noise is drawn
        shapes = {
            "image": (asked.count, config.in_channels, *size),
            "clip": (asked.count, 1, config.clip_width),
            "text": (asked.count, config.text_tokens, config.text_width),
        }
        generator, dtype = torch.Generator().manual_seed(asked.seed), drawn_in(self.dit.dtype)
        start = noise or {name: draw_noise(shapes[name], generator, dtype) for name in model.STATE}

        # the others, (S, N, L, C) each: as given, or noise where the mode takes it
        others = {name: shape for name, shape in shapes.items() if name not in model.STATE}
        if given:
            got = {name: tuple(x.shape) for name, x in given.items()}
            if got != others:
                raise ValueError(f"got the given streams {got}, expected {others}")
            drawn = {name: self._tokens(x).expand(evaluations, -1, -1, -1) for name, x in given.items()}
        elif "other_timestep" in model.PROMPT:
            raise ValueError(f"got mode {config.mode} without {', '.join(others)}, which `given` must have")
        else:
            drawn = self._fresh(others, generator, evaluations)
        negative = self._fresh(others, generator, evaluations) if asked.guidance.on else {}
        return Request(
            scheduler,
            start,
            _prompt(model.PROMPT, asked.count),
            asked.steps,
            asked.guidance,
            asked.eta,
            generator,
            drawn=drawn,
            negative_drawn=negative,
        )

    def captions(self, text_NLC: Tensor) -> list[str]:
        """Return the caption of each row of rank 0's text tokens, on every rank; ValueError for a random model."""
        if (source := self.files.source) is None:
            raise ValueError("got a model without a caption decoder, expected a pipeline's folder")
        return self.dit.mesh.on_rank_0(lambda: captions(source, text_NLC), list[str])

    def image_streams(self, pictures: Sequence[Image.Image], seed: int = 0) -> dict[str, Tensor]:
        """Return the streams of rank 0's images (of one size), for `streams` in mode img2text, on every rank.

        seed: of the sample that is drawn from the autoencoder's distribution. ValueError for a random model.
        """
        source, drawn = self.files.source, torch.Generator().manual_seed(seed)
        if source is None:
            raise ValueError("got a model without image encoders, expected a pipeline's folder")
        return streams_of_rank_0(self.dit.mesh, lambda: _on_host(image_streams(source, self.vae, pictures, drawn)))

    @cached_property
    def _scheduler(self) -> Callable[[str | None, int], tuple[Any, int]]:
        def found(name: str | None, steps: int) -> tuple[Any, int]:
            scheduler = self.files.scheduler(name)
            timed = copy.deepcopy(scheduler)
            set_timesteps(timed, steps, {})
            return scheduler, len(timed.timesteps)  # the evaluations of the model

        return cache(found)  # finding a class takes 6 ms

    def _tokens(self, x: Tensor) -> Tensor:
        return x if x.dim() == 3 else self.dit.model.patchify(x)

    def _fresh(
        self, shapes: Mapping[str, tuple[int, ...]], generator: torch.Generator, evaluations: int
    ) -> dict[str, Tensor]:
        """Return noise that is new at every evaluation, (S, N, L, C) each, in the order of diffusers' loop."""
        noise = draw_steps(shapes, evaluations, generator, drawn_in(self.dit.dtype))
        return {name: x if x.dim() == 4 else torch.stack([*map(self._tokens, x)]) for name, x in noise.items()}


def _on_host(streams: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    for name, x in (streams or {}).items():
        if not torch.is_tensor(x):
            raise ValueError(f"got {name} of type {type(x).__name__}, expected a tensor")
    return {name: x.detach().cpu() for name, x in (streams or {}).items()}


def _prompt(names: Sequence[str], count: int) -> dict[str, Tensor]:
    """Return the prompt of `count` rows; a given modality is no noise, so its timestep is 0."""
    values = {"other_timestep": 0, "data_type": DATA_TYPE}
    return {name: torch.full((count,), values[name]) for name in names}
