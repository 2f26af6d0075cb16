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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from seqpar.loading import schedulers as _schedulers
from seqpar.loading.folder import check_named
from seqpar.loading.parts import read_pipeline, read_scheduler
from seqpar.loading.schedulers import set_timesteps
from seqpar.loop.blueprint import Blueprint, from_diffusers, locate
from seqpar.loop.loop import draw_noise, draw_steps
from seqpar.loop.models.uvit import Config, Mode, Model
from seqpar.mesh.inputs import streams_of_rank_0
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines import own_loop
from seqpar.pipelines.own_loop import Encode, FromTexts, OwnJob, checked_vae, described, drawn_in, generated
from seqpar.pipelines.request import NO_LORA, GenerationRequest
from seqpar.pipelines.unidiffuser_parts import DEFAULT, NEEDED, captions, check_encoders, image_streams, text_encoder
from seqpar.types.guidance import Guidance, check_pictures

PIPELINES = ("UniDiffuserPipeline",)
MODELS = (Model,)
GUIDANCE = 8.0  # of diffusers; the original's scale s is this one minus 1
DATA_TYPE = 1  # of version 1's two kinds of training data the one with good pictures, as both implementations take


@dataclass(frozen=True)
class Files(own_loop.Files):
    """The checked files of a UniDiffuser.

    blueprint: the U-ViT, whose config has the mode. source: the pipeline's folder, diffusers' pipeline in memory, or
    None for a preset.
    """

    scheduling: Mapping[str, Any] = field(default_factory=lambda: DEFAULT, kw_only=True)

    @staticmethod
    def locate(name: str | Path | Blueprint, mode: Mode = "text2img") -> Files:
        """Find and check a diffusers folder or hub id, or take a preset (random weights, no encoders).

        mode: see `uvit.Config`. Raises ValueError if a file does not fit; reads only configs and the headers of weight
        files.
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

    @property
    def decoder(self) -> Path:
        """Return the folder of the VAE."""
        return self.source / "vae"

    def conditions(self, asked: Sequence[object]) -> int:
        """Return 1: the prompt is a stream, so modulation depends on the branch alone."""
        return 1

    def check(self, request: GenerationRequest) -> OwnJob:
        """Return the job of a request; ValueError for whatever does not fit. Reads headers, no weights."""
        request.needs_prompts()
        noise = "the unconditional branch takes noise as its text"
        request.refuse(noise, negative_prompt=request.negative)
        request.refuse("--guidance is classifier-free for this model", true_guidance=request.true_guidance)
        request.refuse(NO_LORA, lora=request.loras)
        prompts, guidance = request.pictures, request.free_guidance(GUIDANCE)
        return self.job(
            Pipeline,
            request,
            guidance,
            self.schedule(request.scheduler, request.steps, request.eta),
            prompts,
            loading={"prompts": prompts},
            settings={"prompts": prompts, "scheduler": request.scheduler, "eta": request.eta},
            named={"prompts": request.prompts},
            more_notes=[described(self.blueprint.config.text_tokens, self.source, "other weights load")],
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


@dataclass(frozen=True)
class Pipeline(FromTexts):
    """A loaded UniDiffuser on a mesh; see `FromTexts`."""

    @classmethod
    def files_of(cls, pipe: Any, *, mode: Mode = "text2img") -> tuple[Files, torch.dtype]:  # pyright: ignore
        """Return the files of diffusers' UniDiffuserPipeline in memory, and the dtype of its U-ViT."""
        blueprint = from_diffusers(pipe.unet)
        blueprint = replace(blueprint, config=replace(blueprint.config, mode=mode))
        scheduling = _schedulers.config_of(pipe.scheduler)
        return Files(blueprint, pipe, pipe.vae.config, scheduling=scheduling), pipe.unet.dtype

    @staticmethod
    def text_shapes(files: Files) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of CLIP's hidden states, made narrower."""
        return {"text": (files.blueprint.config.text_tokens, files.blueprint.config.text_width)}

    @staticmethod
    def encoder(files: Files, device: torch.device, dtype: torch.dtype) -> Encode:
        """Return a function that encodes one prompt, and holds the encoders."""
        return text_encoder(files.source, files.blueprint.config.text_tokens, device, dtype)

    def latents(
        self,
        prompts: Sequence[str],
        *,
        steps: int,
        guidance: Guidance,
        seed: int = 0,
        size: tuple[int, int] | None = None,
        eta: float | None = None,
        scheduler: str | None = None,
        on_step: Callable[[int], None] = lambda index: None,
    ) -> Tensor:
        """Return sampled latents (N, C, h, w) for N prompts, equal on every rank, from rank 0's arguments.

        See `Asked` for the arguments. Prompts that are not encoded yet take the encoder's memory for the time of this
        call. Raises ValueError in a mode without prompts.
        """
        if self.dit.config.mode != "text2img":
            raise ValueError(f"got prompts in mode {self.dit.config.mode}, expected text2img; see `streams`")

        def encoded() -> list[str]:
            check_pictures("prompts", prompts, steps, guidance, size, seed)
            self.texts.encode(prompts)
            return [*prompts]

        prompts = self.dit.mesh.on_rank_0(encoded, list[str])
        asked = Asked(len(prompts), steps, guidance, seed, size, eta, scheduler)
        return self.streams(asked, given=self.texts.rows(prompts), on_step=on_step)["image"]

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
        mesh, model = self.dit.mesh, self.dit.model
        asked = mesh.share(asked, Asked)  # only rank 0 may have any streams, and all must check the same
        given, noise = (streams_of_rank_0(mesh, lambda x=x: _on_host(x)) for x in (given, noise))
        self._check(asked)
        scheduler, evaluations = self._scheduler(asked.scheduler), self._evaluations(asked.scheduler, asked.steps)
        shapes, generator = self._shapes(asked), torch.Generator().manual_seed(asked.seed)
        start = noise or {name: self._draw(shapes[name], generator) for name in model.STATE}
        others = {name: shape for name, shape in shapes.items() if name not in model.STATE}
        drawn = self._others(given, others, generator, evaluations)
        negative = self._fresh(others, generator, evaluations) if asked.guidance.on else {}
        settings = {**_settings(asked, generator), "drawn": drawn, "negative_drawn": negative}
        self.sampler(scheduler, start, _prompt(model.PROMPT, asked.count), on_step=on_step, **settings)
        return self.sampler.streams()

    def captions(self, text_NLC: Tensor) -> list[str]:
        """Return the caption of each row of rank 0's text tokens, on every rank; ValueError for a preset."""
        mesh, source = self.dit.mesh, self.files.source
        if source is None:
            raise ValueError("got a model without a caption decoder, expected a pipeline's folder")
        return mesh.on_rank_0(lambda: captions(source, text_NLC), list[str])

    def image_streams(self, pictures: Sequence[Image.Image], seed: int = 0) -> dict[str, Tensor]:
        """Return the streams of rank 0's pictures (of one size), for `streams` in mode img2text, on every rank.

        seed: of the sample that is drawn from the autoencoder's distribution.
        """
        mesh, source, vae = self.dit.mesh, self.files.source, self.vae
        if source is None:
            raise ValueError("got a model without image encoders, expected a pipeline's folder")
        drawn = torch.Generator().manual_seed(seed)
        return streams_of_rank_0(mesh, lambda: _on_host(image_streams(source, vae, pictures, drawn)))

    @cached_property
    def _scheduler(self) -> Callable[[str | None], Any]:
        """`Files.scheduler`, cached: finding a class takes 6 ms."""
        return cache(self.files.scheduler)

    @cached_property
    def _evaluations(self) -> Callable[[str | None, int], int]:
        """Number of model evaluations of a scheduler in so many steps, cached."""
        return cache(lambda name, steps: _evaluations(self._scheduler(name), steps))

    def _check(self, asked: Asked) -> None:
        """Raise ValueError for guidance in a mode without it, and for pictures that cannot be decoded here."""
        if asked.guidance.on and "other_timestep" not in self.dit.model.PROMPT:
            raise ValueError(f"got guidance in mode {self.dit.config.mode}, expected text2img or img2text; use scale 1")
        if "image" in self.dit.model.STATE:
            self.check_decodable(asked.count, self.files.latent_size(asked.size))

    def _shapes(self, asked: Asked) -> dict[str, tuple[int, ...]]:
        """Return the shape of each stream, in the order in which noise is drawn."""
        config, count = self.dit.config, asked.count
        return {
            "image": (count, config.in_channels, *self.files.latent_size(asked.size)),
            "clip": (count, 1, config.clip_width),
            "text": (count, config.text_tokens, config.text_width),
        }

    def _draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return draw_noise(shape, generator, drawn_in(self.dit.dtype))

    def _tokens(self, x: Tensor) -> Tensor:
        """Return a stream as tokens (N, L, C)."""
        return x if x.dim() == 3 else self.dit.model.patchify(x)

    def _others(
        self,
        given: Mapping[str, Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        generator: torch.Generator,
        evaluations: int,
    ) -> dict[str, Tensor]:
        """Return the streams that are not denoised, (S, N, L, C) each: as given, or noise where the mode takes it."""
        if given:
            got = {name: tuple(x.shape) for name, x in given.items()}
            if got != dict(shapes):
                raise ValueError(f"got the given streams {got}, expected {dict(shapes)}")
            return {name: self._tokens(x).expand(evaluations, -1, -1, -1) for name, x in given.items()}
        if "other_timestep" in self.dit.model.PROMPT:
            raise ValueError(f"got mode {self.dit.config.mode} without {', '.join(shapes)}, which `given` must have")
        return self._fresh(shapes, generator, evaluations)

    def _fresh(
        self, shapes: Mapping[str, tuple[int, ...]], generator: torch.Generator, evaluations: int
    ) -> dict[str, Tensor]:
        """Return noise that is new at every evaluation, (S, N, L, C) each.

        It is drawn evaluation by evaluation, because diffusers' pipeline draws it within its loop.
        """
        noise = draw_steps(shapes, evaluations, generator, drawn_in(self.dit.dtype))
        return {name: x if x.dim() == 4 else torch.stack([*map(self._tokens, x)]) for name, x in noise.items()}


def _on_host(streams: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Return streams on the CPU; ValueError if one is no tensor."""
    for name, x in (streams or {}).items():
        if not torch.is_tensor(x):
            raise ValueError(f"got {name} of type {type(x).__name__}, expected a tensor")
    return {name: x.detach().cpu() for name, x in (streams or {}).items()}


def _settings(asked: Asked, generator: torch.Generator) -> dict[str, Any]:
    return {"steps": asked.steps, "guidance": asked.guidance, "eta": asked.eta, "generator": generator}


def _evaluations(scheduler: Any, steps: int) -> int:
    """Return how often a scheduler, which is not changed, calls the model."""
    timed = copy.deepcopy(scheduler)
    set_timesteps(timed, steps, {})
    return len(timed.timesteps)


def _prompt(names: Sequence[str], count: int) -> dict[str, Tensor]:
    """Return the prompt of `count` rows; a given modality is no noise, so its timestep is 0."""
    values = {"other_timestep": 0, "data_type": DATA_TYPE}
    return {name: torch.full((count,), values[name]) for name in names}


def generate(
    prompts: Sequence[str],
    model: str | Path,
    *,
    mesh: Mesh | str | None = None,
    steps: int = 50,
    guidance: float = GUIDANCE,
    size: tuple[int, int] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> list[Image.Image]:
    """Return a picture of each prompt on every rank, from rank 0's arguments; this one call does everything."""
    given: Any = {"prompts": prompts, "steps": steps, "guidance": guidance, "seed": seed, "size": size}
    return generated(GenerationRequest(model, dtype, **given), mesh, "prompts", Files.locate)  # pyright: ignore
