"""Makes pictures from prompts with FLUX.1: diffusers' parts encode and decode, our loop denoises with the native model.

The state stays sharded from the noise to the last step, a step is one CUDA graph, and modulation is a table that is
computed once for each step and prompt. Guidance is an input of the model (FLUX.1-dev), and may also be classifier-free
with a negative prompt, whose branch has ranks of its own on the `cfg` axis.
When it wins: against `seqpar.parallelize` and diffusers' pipeline, which gather the prediction and compute the
modulation at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from seqpar.engine.distributed import DistributedDiT
from seqpar.mesh import Mesh
from seqpar.pipelines import _family, _flux_text, _schedulers
from seqpar.pipelines._family import NO_VAE_FACTOR, Job, Order
from seqpar.pipelines._flux_text import TOKENS, Texts
from seqpar.pipelines._folder import check_files
from seqpar.pipelines._loaded import Loaded, drawn_in, placed
from seqpar.pipelines._pictures import to_pil
from seqpar.planner.plan import Plan, make, work_of
from seqpar.planner.predict import TABLE_BYTES, Load
from seqpar.planner.search import Wish
from seqpar.sampling.arguments import check_loading, check_pictures
from seqpar.sampling.guidance import Guidance
from seqpar.sampling.loop import draw_noise
from seqpar.sampling.request import Settings, set_timesteps
from seqpar.sampling.schedules import FAILURES
from seqpar.sampling.steppers import check_eta
from seqpar.vae.decoder import check_vae, load_vae, vae_factor
from seqpar.weights.find import Blueprint, from_diffusers, locate, resolve
from seqpar.weights.layout import pipeline_folder
from seqpar.weights.parts import read_pipeline, read_scheduler

PIPELINES = ("FluxPipeline",)
PROMPT = ("encoder_hidden_states", "pooled_projections")
GUIDANCE = 3.5  # embedded scale if the user names none, as in diffusers
# the scheduler of FLUX.1-dev, for models without a pipeline folder
DEFAULT = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0, "use_dynamic_shifting": True}
# prompts, steps, guidance, negative prompt, seed, size and scheduler of a run, as ranks share them
ASKED = tuple[list[str], int, Guidance, str | None, int, tuple[int, int] | None, str | None]


@dataclass(frozen=True)
class Files:
    """The checked parts of a FLUX.1 pipeline, before any weights are loaded.

    blueprint: the transformer. folder: the pipeline folder, or None for a preset. vae: the config of the decoder, or
    None. scheduling: the scheduler's config. text_tokens: the length to which T5 pads or cuts each prompt.
    """

    blueprint: Blueprint
    folder: Path | None
    vae: Any
    scheduling: Mapping[str, Any]
    text_tokens: int = TOKENS

    @staticmethod
    def locate(name: str | Path) -> Files:
        """Find and check a diffusers folder or hub id, or take a preset (random weights, no encoders).

        A transformer's file takes the other parts from the pipeline's folder in which it lies.

        Raises ValueError if a file does not fit; reads only configs and the headers of weight files.
        """
        path = resolve(name)
        blueprint = locate(name if path is None else path)
        if blueprint.module.Model.PROMPT != PROMPT:
            raise ValueError(f"got {blueprint.name}, which is no FLUX.1, expected one")
        if path is None:
            return Files(blueprint, None, None, DEFAULT)
        folder = pipeline_folder(path)
        if folder is None:
            beside, there = (" beside it", "the file in ") if path.is_file() else ("", "")
            raise ValueError(
                f"got {path} without model_index.json{beside}, expected {there}a pipeline's folder with its text "
                f"encoders and decoder"
            )
        index, channels = read_pipeline(folder), blueprint.config.in_channels
        vae = check_vae(folder / "vae")
        if vae.latent_channels != channels:
            raise ValueError(f"got a decoder of {vae.latent_channels} latent channels, expected the model's {channels}")
        _flux_text.check_encoders(folder, index, blueprint.config)
        return Files(blueprint, folder, vae, read_scheduler(folder / "scheduler"))

    @property
    def factor(self) -> int:
        """Return the number of pixels along each side of a latent pixel."""
        return NO_VAE_FACTOR if self.vae is None else vae_factor(self.vae)

    def latent_size(self, pixels: tuple[int, int] | None) -> tuple[int, int]:
        """Return (height, width) of the latent of a picture; None stands for 1024 x 1024 pixels."""
        return _family.latent_size(pixels, self.factor, self.blueprint.config)

    def tokens(self, pixels: tuple[int, int] | None) -> int:
        """Return the number of image tokens."""
        height, width = self.latent_size(pixels)
        return height * width // self.blueprint.config.patch_size**2

    def schedule(
        self, name: str | None, steps: int, size: tuple[int, int] | None, eta: float | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Return the scheduler with its timesteps set, and the keyword arguments of `set_timesteps`, as FluxPipeline's.

        name: the class of another scheduler; it must follow FLUX's sigmas. Raises ValueError if one does not fit.
        """
        scheduler, given = self.timed(name, steps, size)
        chosen = type(scheduler).__name__
        check_eta(scheduler, eta)
        try:
            set_timesteps(scheduler, steps, given)
        except FAILURES as error:
            raise ValueError(f"got {steps} steps, which {chosen} cannot do: {error}; try more or fewer") from error
        _schedulers.tried(scheduler, eta)
        return scheduler, given

    def timed(self, name: str | None, steps: int, size: tuple[int, int] | None) -> tuple[Any, dict[str, Any]]:
        """Return what `schedule` returns, without timesteps and without trying the scheduler's steps."""
        settings = _schedulers.flow_settings(self.scheduling, name)
        scheduler = _schedulers.build(self.scheduling, name, **settings)
        _schedulers.check_steps(scheduler, steps)
        return scheduler, _schedulers.flow_timing(scheduler, steps, self.tokens(size))

    def smallest(self, dtype: torch.dtype) -> Callable[[bool], Load]:
        """Return a function that returns the `Load` of one picture, with two branches or one."""
        return lambda guided: self.load_of(("",), guided, 1, dtype, None)

    def load_of(
        self, prompts: Sequence[str], guided: bool, evaluations: int, dtype: torch.dtype, size: tuple[int, int] | None
    ) -> Load:
        """Return the planner's `Load` for one picture of each prompt; guided: whether there are two branches."""
        config = self.blueprint.config
        return Load(
            images=len(prompts),
            tokens=self.tokens(size),
            guidance=guided,
            steps=evaluations,
            itemsize=dtype.itemsize,
            parameters=sum(x.numel() for x in self.blueprint.meta().parameters()),
            latent=config.in_channels * config.patch_size**2,
            labels=len(set(prompts)) + guided,
            table=TABLE_BYTES,
            others=(self.text_tokens,),
        )


@dataclass(frozen=True)
class Pipeline(Loaded):
    """A loaded pipeline of FLUX.1 on a mesh; see `Loaded`."""

    texts: Texts

    @staticmethod
    def load(
        files: Files,
        mesh: Mesh | None = None,
        dtype: torch.dtype = torch.float32,
        *,
        wish: Wish | None = None,
        plan: Plan | None = None,
        prompts: Sequence[str] = (),
        on_prompt: Callable[[int], None] = lambda index: None,
    ) -> Pipeline:
        """Load the weights of transformer and decoder; every rank must call this at the same time.

        wish: the caller's choice of strategy, local attention and transport; the planner chooses the rest for one
        picture with one branch. plan: a plan that was made before. prompts: texts that rank 0 encodes first, so that
        the encoders are gone before the transformer's weights load; later calls of `latents` may name others.
        on_prompt(index): called on rank 0 when a prompt is encoded.
        """
        plan, mesh = placed(files.blueprint.config, files.smallest(dtype), dtype, mesh, wish, plan)
        texts = Texts(files.folder, files.blueprint.config, files.text_tokens, mesh, dtype)

        def read() -> Any:
            texts.encode(prompts, on_prompt)
            return load_vae(files.folder / "vae", dtype, mesh.device) if files.folder else None

        vae = mesh.together(read)
        model = files.blueprint.build(dtype, mesh.device, 0, mesh)  # each rank reads a share of the file
        return Pipeline(DistributedDiT(model, mesh, plan=plan), files, vae, texts)

    @staticmethod
    def of(
        pipe: Any,
        mesh: Mesh | None = None,
        *,
        wish: Wish | None = None,
        plan: Plan | None = None,
        text_tokens: int = TOKENS,
    ) -> Pipeline:
        """Return a pipeline of the parts of diffusers' FluxPipeline in memory; its text encoders stay with it.

        The transformer's weights are copied. See `load` for the other arguments; dtype is that of the transformer.
        """
        dtype, scheduling = pipe.transformer.dtype, {**pipe.scheduler.config}
        scheduling["_class_name"] = type(pipe.scheduler).__name__
        files = Files(from_diffusers(pipe.transformer), None, pipe.vae.config, scheduling, text_tokens)
        plan, mesh = placed(files.blueprint.config, files.smallest(dtype), dtype, mesh, wish, plan)
        texts = Texts(pipe, files.blueprint.config, text_tokens, mesh, dtype)
        model = files.blueprint.build(dtype, mesh.device)
        return Pipeline(DistributedDiT(model, mesh, plan=plan), files, pipe.vae.to(mesh.device), texts)

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
        self.dit.mesh.together(lambda: check_pictures("prompts", prompts, steps, guidance, size, seed))
        asked = list(prompts), steps, guidance, negative, seed, size, scheduler
        prompts, steps, guidance, negative, seed, size, scheduler = self.dit.mesh.share(asked, ASKED)
        latent = self._checked(prompts, guidance, steps, size)
        others = [negative or ""] if guidance.on else []
        self.dit.mesh.together(lambda: self.texts.encode([*prompts, *others]))
        (stepping, given), generator = self.files.timed(scheduler, steps, size), torch.Generator().manual_seed(seed)
        settings: Settings = {"steps": steps, "guidance": guidance, "schedule": given, "generator": generator}
        if others:
            settings["negative"] = self.texts.rows(others * len(prompts))
        noise = draw_noise((len(prompts), self.dit.config.in_channels, *latent), generator, drawn_in(self.dit.dtype))
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
    ranks = mesh if isinstance(mesh, Mesh) else Mesh.joined()
    ranks.together(lambda: check_loading(mesh, model, dtype))
    ranks.together(lambda: check_pictures("prompts", prompts, steps, guidance or Guidance(), size, seed))
    asked = list(prompts), str(model), steps, guidance, size, seed, dtype
    kind = tuple[list[str], str, int, Guidance | None, tuple[int, int] | None, int, torch.dtype]
    prompts, model, steps, guidance, size, seed, dtype = ranks.share(asked, kind)
    files = ranks.together(lambda: Files.locate(model))
    wanted = guidance or embedded(files, None)
    scheduler, _ = ranks.together(lambda: files.schedule(None, steps, size))
    load = files.load_of(prompts, wanted.on, len(scheduler.timesteps), dtype, size)
    plan = make(work_of(files.blueprint.config), load, dtype, ranks, Wish(), mesh)
    with Pipeline.load(files, mesh, dtype, plan=plan, prompts=prompts) as pipeline:
        made = pipeline.latents(prompts, steps=steps, guidance=wanted, seed=seed, size=size)
        return to_pil(pipeline.decode(made))


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


def check(order: Order, path: Path | None) -> Job:
    """Return the work that an order describes; ValueError for whatever does not fit. Reads headers, no weights."""
    _check_flags(order)
    if path is not None and (path / "transformer").is_dir():
        check_files(path / "transformer")
    files = Files.locate(order.model if path is None else path)
    beside = Guidance(1.0 if order.true_guidance is None else order.true_guidance, order.guidance_channels)
    guidance = embedded(files, order.guidance, beside)
    prompts = [text for text in order.prompts for _ in range(order.repeat)]
    scheduler, _ = files.schedule(order.scheduler, order.steps, order.size, order.eta)
    height, width = files.latent_size(order.size)
    others = [order.negative or ""] if guidance.on else []
    settings = {"steps": order.steps, "seed": order.seed, "size": order.size, "scheduler": order.scheduler}
    return Job(
        pipeline=Pipeline,
        blueprint=files.blueprint,
        loading={"files": files, "dtype": order.dtype, "prompts": [*prompts, *others]},
        settings={"prompts": prompts, "negative": order.negative, "guidance": guidance, **settings},
        load=files.load_of(prompts, guidance.on, len(scheduler.timesteps), order.dtype, order.size),
        guidance=guidance,
        scheduler=scheduler,
        dtype=order.dtype,
        pixels=(height * files.factor, width * files.factor),
        captions=prompts,
        named={"prompts": order.prompts},
        notes=_notes(files),
    )


def _notes(files: Files) -> list[tuple[str, str]]:
    if files.folder is None:
        return [("text", f"{files.text_tokens} tokens of random numbers: no text encoder comes with this model")]
    return [("text", f"{files.text_tokens} tokens a prompt, encoded on rank 0 before the transformer's weights load")]


def _check_flags(order: Order) -> None:
    """Raise ValueError for flags that FLUX does not take, and for missing ones."""
    order.refuse("expected none: this model makes pictures of texts (--prompt)", classes=order.classes)
    order.refuse("expected none: this model makes no videos", frames=order.frames, fps=order.fps)
    if not order.prompts:
        raise ValueError(f"got --model {order.model} without --prompt, expected one: it makes pictures of texts")
    if (order.true_guidance or 1.0) <= 1:
        off = "expected --true-guidance over 1, too: without it there is one branch, and the flag has no effect"
        order.refuse(off, negative_prompt=order.negative, guidance_channels=order.guidance_channels)
