"""Makes pictures from prompts with FLUX.1: diffusers' parts encode and decode, our loop denoises with the native model.

The state stays sharded from the noise to the last step, a step is one CUDA graph, and modulation is a table that is
computed once for each step and prompt. Guidance is an input of the model (FLUX.1-dev), and may also be classifier-free
with a negative prompt, whose branch has ranks of its own on the `cfg` axis.
When it wins: against `seqpar.parallelize` and diffusers' pipeline, which gather the prediction and compute the
modulation at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from seqpar.models.flux import Model
from seqpar.pipelines import _files, _flux_text, _schedulers, adapted
from seqpar.pipelines._family import NO_LORA, Job, Order, generated
from seqpar.pipelines._flux_text import TOKENS
from seqpar.pipelines._folder import check_files
from seqpar.pipelines._loaded import FromTexts, drawn_in
from seqpar.pipelines._texts import Encode, described
from seqpar.pipelines.adapted import Adapted
from seqpar.ranks.mesh import Mesh
from seqpar.sampling.arguments import check_pictures
from seqpar.sampling.guidance import Guidance
from seqpar.sampling.loop import draw_noise
from seqpar.sampling.request import Settings
from seqpar.vae.decoder import vae_size
from seqpar.weights.find import Blueprint, from_diffusers, locate
from seqpar.weights.layout import pipeline_folder
from seqpar.weights.parts import read_pipeline, read_scheduler

PIPELINES = ("FluxPipeline",)
MODELS = (Model,)
GUIDANCE = 3.5  # embedded scale if the user names none, as in diffusers
# the scheduler of FLUX.1-dev, for models without a pipeline folder
DEFAULT = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0, "use_dynamic_shifting": True}
# prompts, steps, guidance, negative prompt, seed, size and scheduler of a run, as ranks share them
ASKED = tuple[list[str], int, Guidance, str | None, int, tuple[int, int] | None, str | None]


@dataclass(frozen=True)
class Files(_files.Files):
    """The checked parts of a FLUX.1 pipeline; see `seqpar.pipelines._files.Files`.

    text_tokens: the length to which T5 pads or cuts each prompt.
    """

    scheduling: Mapping[str, Any] = field(default_factory=lambda: DEFAULT, kw_only=True)
    text_tokens: int = TOKENS

    @staticmethod
    def locate(name: str | Path | Blueprint) -> Files:
        """Find and check a diffusers folder or hub id, or take a preset (random weights, no encoders).

        A transformer's file takes the other parts from the pipeline's folder in which it lies.

        Raises ValueError if a file does not fit; reads only configs and the headers of weight files.
        """
        blueprint = locate(name)
        path = blueprint.path
        if not issubclass(blueprint.module.Model, MODELS):
            raise ValueError(f"got {blueprint.name}, which is no FLUX.1, expected one")
        if path is None:
            return Files(blueprint)
        folder = pipeline_folder(path)
        if folder is None:
            beside, there = (" beside it", "the file in ") if path.is_file() else ("", "")
            raise ValueError(
                f"got {path} without model_index.json{beside}, expected {there}a pipeline's folder with its text "
                f"encoders and decoder"
            )
        index, vae = read_pipeline(folder), _files.checked_vae(folder / "vae", blueprint)
        _flux_text.check_encoders(folder, index, blueprint.config)
        return Files(blueprint, folder, vae, scheduling=read_scheduler(folder / "scheduler"))

    def latent_size(self, pixels: tuple[int, int] | None) -> tuple[int, int]:
        """Return (height, width) of the latent of a picture; see `seqpar.pipelines._files.Files`.

        The size that a FLUX.1 was trained for is that of its decoder, because the transformer's config has none.
        """
        return super().latent_size(vae_size(self.vae) if pixels is None and self.vae is not None else pixels)

    @property
    def decoder(self) -> Path:
        """Return the folder of the decoder."""
        return self.source / "vae"

    @property
    def others(self) -> tuple[int, ...]:
        """Return the number of text tokens, which are a stream of their own."""
        return (self.text_tokens,)

    def timing(self, scheduler: Any, steps: int, size: tuple[int, int] | None) -> dict[str, Any]:
        """Return the keyword arguments of `set_timesteps`, as FluxPipeline's; ValueError for sigmas unlike FLUX's."""
        _schedulers.check_steps(scheduler, steps)
        return _schedulers.flow_timing(scheduler, steps, self.tokens(size))


@dataclass(frozen=True)
class Pipeline(FromTexts):
    """A loaded pipeline of FLUX.1 on a mesh; see `FromTexts`."""

    @classmethod
    def files_of(cls, pipe: Any, *, text_tokens: int = TOKENS) -> tuple[Files, torch.dtype]:  # pyright: ignore
        """Return the files of diffusers' FluxPipeline in memory, and the dtype of its transformer."""
        blueprint, scheduling = from_diffusers(pipe.transformer), _schedulers.config_of(pipe.scheduler)
        files = Files(blueprint, pipe, pipe.vae.config, text_tokens, scheduling=scheduling)
        return files, pipe.transformer.dtype

    @staticmethod
    def text_shapes(files: Files) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of T5's text tokens and of CLIP's pooled vector."""
        config = files.blueprint.config
        tokens = files.text_tokens, config.joint_attention_dim
        return {"encoder_hidden_states": tokens, "pooled_projections": (config.pooled_projection_dim,)}

    @staticmethod
    def encoder(files: Files, device: torch.device, dtype: torch.dtype) -> Encode:
        """Return a function that encodes one prompt, and holds the encoders."""
        return _flux_text.encoder(files.source, files.text_tokens, device, dtype)

    def latents(
        self,
        prompts: Sequence[str],
        *,
        steps: int,
        guidance: Guidance,
        negative: str | None = None,
        seed: int = 0,
        size: tuple[int, int] | None = None,
        scheduler: str | None = None,
        on_step: Callable[[int], None] = lambda index: None,
    ) -> Tensor:
        """Return sampled latents (N, C, h, w) for N prompts, equal on every rank, from rank 0's arguments.

        guidance: Guidance(1.0, embedded=3.5) for a model that takes the scale as an input, Guidance(1.0) for one that
        does not; a scale over 1 adds the branch of the negative prompt (None stands for an empty text). Prompts that
        are not encoded yet take the encoders' memory for the time of this call. scheduler: the class name of another.
        """
        mesh, config = self.dit.mesh, self.dit.config
        mesh.together(lambda: check_pictures("prompts", prompts, steps, guidance, size, seed))
        asked = list(prompts), steps, guidance, negative, seed, size, scheduler
        prompts, steps, guidance, negative, seed, size, scheduler = mesh.share(asked, ASKED)
        latent, others = self._checked(prompts, guidance, steps, size), [negative or ""] if guidance.on else []
        mesh.together(lambda: self.texts.encode([*prompts, *others]))
        stepping, settings = self.files.scheduler(scheduler), Settings(steps=steps, guidance=guidance)
        generator = settings["generator"] = torch.Generator().manual_seed(seed)
        settings["schedule"] = self.files.timing(stepping, steps, size)
        settings["negative"] = self.texts.rows(others * len(prompts)) if others else None
        noise = draw_noise((len(prompts), config.in_channels, *latent), generator, drawn_in(self.dit.dtype))
        return self.sampler(stepping, noise, self.texts.rows(prompts), on_step=on_step, **settings)

    def _checked(
        self, prompts: Sequence[str], guidance: Guidance, steps: int, size: tuple[int, int] | None
    ) -> tuple[int, int]:
        """Return (height, width) of the latents; ValueError if they cannot be decoded here."""
        latent = self.files.latent_size(size)
        load = partial(self.files.load_of, prompts, guidance.on, steps, self.dit.dtype, size)
        self.check_decodable(len(prompts), latent, load)
        return latent


def generate(
    prompts: Sequence[str],
    model: str | Path,
    *,
    mesh: Mesh | None = None,
    steps: int = 28,
    guidance: Guidance | None = None,
    size: tuple[int, int] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> list[Image.Image]:
    """Return a picture of each prompt on every rank, from rank 0's arguments; this one call does everything.

    guidance: see `Pipeline.latents`; None takes the default of the model, without a negative prompt.
    """
    order: Any = Order(model, dtype, prompts=prompts, steps=steps, seed=seed, size=size)  # pyright: ignore
    return generated(order, mesh, "prompts", lambda: guidance, _job)


def embedded(files: Files, scale: float | None, beside: Guidance | None = None) -> Guidance:
    """Return guidance with this embedded scale (None: the default), if the model takes one; ValueError if it does not.

    beside: classifier-free guidance, which is off without it.
    """
    beside = beside or Guidance(1.0)
    if files.blueprint.config.guidance_embeds:
        return replace(beside, embedded=GUIDANCE if scale is None else scale)
    if scale is not None:
        raise ValueError(
            f"got --guidance {scale:g} for a model without the scale as an input, expected none; --true-guidance sets "
            f"that of classifier-free guidance"
        )
    return beside


def check(order: Order, model: Path | Blueprint) -> Job | Adapted:
    """Return the work that an order describes; ValueError for whatever does not fit. Reads headers, no weights.

    Our own loop takes no LoRA: with one, diffusers' loop makes a picture of the same size.
    """
    order.needs_prompts()
    if not isinstance(model, Path):
        order.refuse(NO_LORA, lora=order.loras)
    if (order.true_guidance or 1.0) <= 1:
        off = "expected --true-guidance over 1, too: without it there is one branch, and the flag has no effect"
        order.refuse(off, negative_prompt=order.negative, guidance_channels=order.guidance_channels)
    if isinstance(model, Path):
        check_files(model / "transformer")
    job = _job(order, None, model)
    if isinstance(model, Path) and order.loras:
        return adapted.check(replace(order, size=job.pixels), model, "seqpar's own loop takes no --lora")
    return job


def _job(order: Order, guidance: Guidance | None, model: str | Path | Blueprint) -> Job:
    """Return the work of an order whose flags are checked. guidance: None stands for that of the flags."""
    files = Files.locate(model)
    beside = Guidance(1.0 if order.true_guidance is None else order.true_guidance, order.guidance_channels)
    guidance = guidance or embedded(files, order.guidance, beside)
    prompts, others = order.pictures, [order.negative or ""] if guidance.on else []
    return Job.of(
        Pipeline,
        files,
        order,
        guidance,
        files.schedule(order.scheduler, order.steps, order.eta, size=order.size),
        prompts,
        loading={"prompts": [*prompts, *others]},
        settings={"prompts": prompts, "negative": order.negative, "scheduler": order.scheduler},
        captions=prompts,
        named={"prompts": order.prompts},
        notes=[described(files.text_tokens, files.source, "the transformer's weights load")],
    )
