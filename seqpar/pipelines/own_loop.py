"""What `classes` and `unidiffuser` share: checked files, jobs, and loaded models with our own denoising loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from seqpar.families import Preset
from seqpar.kernels import _quack
from seqpar.loading import schedulers as _schedulers
from seqpar.loading.errors import FAILURES
from seqpar.loading.folder import open_vae
from seqpar.loading.lora import Lora
from seqpar.loading.schedulers import check_eta, check_steps, check_variances, respace, set_timesteps
from seqpar.loop import eight
from seqpar.loop.blueprint import Blueprint, locate
from seqpar.loop.distributed import DistributedDiT
from seqpar.loop.loop import Sampler, digest
from seqpar.loop.request import Request, why_not_captured
from seqpar.loop.steppers import Decision, decide
from seqpar.mesh.inputs import from_rank_0
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.pictures import to_pil
from seqpar.pipelines.planning import Grid
from seqpar.pipelines.protocol import (
    NO_CACHE,
    NO_EIGHT,
    NO_LORA,
    Events,
    GenerationRequest,
    Result,
    as_text,
    no_event,
    scales,
)
from seqpar.planner.plan import Plan, make, named_mesh, preferred_images, settled, work_of
from seqpar.planner.predict import TABLE_BYTES, Load
from seqpar.planner.search import Preferences
from seqpar.types.arguments import check_floats
from seqpar.types.facts import Work
from seqpar.types.guidance import Guidance
from seqpar.types.say import say
from seqpar.vae.on_mesh import MeshVAE, preview
from seqpar.vae.strips import MODES, DecodeMode, Spread


def native(name: str | Path, families: Sequence[Any]) -> Files:
    """Return the files of a model without a pipeline's folder, by the family that runs it; ValueError without one.

    families: modules with `MODELS` and `Files`.
    """
    blueprint = locate(name)
    family = next((family for family in families if issubclass(blueprint.module.Model, family.MODELS)), None)
    if family is None:
        raise ValueError(f"no pipeline here runs {blueprint.name}; add its family (CONTRIBUTING.md)")
    return family.Files.locate(blueprint)


def timed(
    scheduler: Any,
    steps: int,
    eta: float | None = None,
    respacing: str | None = None,
    timing: Mapping[str, Any] | None = None,
) -> Decision:
    """Set a scheduler's timesteps, and return how it steps; ValueError if a setting or one of its steps fails.

    eta: None takes the scheduler's default. respacing: as in the original DiT, replaces `steps`. timing: further
    keyword arguments of `set_timesteps`.
    """
    name = type(scheduler).__name__
    check_eta(scheduler, eta)
    if respacing is not None:
        respace(scheduler, respacing)
    else:
        check_steps(scheduler, steps)
        try:
            scheduler.set_timesteps(steps) if timing is None else set_timesteps(scheduler, steps, timing)
        except FAILURES as error:
            raise ValueError(f"got {steps} steps, which {name} cannot do: {error}; try more or fewer") from error
    return decide(scheduler, {"eta": eta})


# the scheduler of the original DiT and Large-DiT, for models without a pipeline folder
DDIM_DEFAULT = {"beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear", "clip_sample": False}
NO_VAE_FACTOR = 8  # pixels along each side of a latent pixel, for models that come without a decoder


@dataclass(frozen=True)
class Files:
    """The checked files of a pipeline, before any weights are loaded; a family adds what only it has.

    blueprint: the transformer. source: the folder of the pipeline with the other parts, or None without any. vae: the
    config of the decoder, or None. scheduling: the scheduler's config.
    """

    blueprint: Blueprint
    source: Any = None
    vae: Any = None
    scheduling: Mapping[str, Any] = field(default_factory=lambda: DDIM_DEFAULT, kw_only=True)
    takes: ClassVar[Literal["classes", "prompts"]] = "prompts"
    needs_image = needs_mask = False

    @property
    def controls(self) -> dict[str, Any]:
        return {}

    def having(self, controls: Mapping[str, Any], all_fit: bool = False) -> Self:
        if all_fit and controls:
            raise ValueError(f"ControlNet {next(iter(controls))} does not fit: this model takes none")
        return self

    @property
    def class_labels(self) -> Mapping[int, tuple[str, ...]]:
        return {}

    @property
    def presets(self) -> dict[str, Preset]:
        return {}

    @property
    def factor(self) -> int:
        """Pixels along each side of a latent pixel."""
        return NO_VAE_FACTOR if self.vae is None else 2 ** (len(self.vae.block_out_channels) - 1)

    def latent_size(self, pixels: tuple[int, int] | None) -> tuple[int, int]:
        """Return (height, width) of a latent, None: as trained. ValueError for sizes that are no whole patches."""
        config = self.blueprint.config
        if pixels is None:
            return config.sample_size, config.sample_size
        Grid(self.factor, config.patch_size, None).check(pixels)
        return pixels[0] // self.factor, pixels[1] // self.factor

    def scheduler(self, name: str | None = None) -> Any:
        """Return the folder's scheduler, or class `name` with its settings; ValueError if the loop cannot use it."""
        return _schedulers.build(self.scheduling, name, self.blueprint.config)

    def schedule(self, name: str | None, steps: int, eta: float | None = None, respacing: str | None = None) -> Any:
        """Return `scheduler(name)` with its timesteps set; ValueError if a setting does not fit it.

        respacing: see `seqpar.loop.request.Request`.
        """
        scheduler = self.scheduler(name)
        if timed(scheduler, steps, eta, respacing).learned:
            check_variances(self.blueprint.config)
        return scheduler

    def check(self, request: GenerationRequest) -> OwnJob:
        """Return the job of a request, by `job`; ValueError for flags that do not fit. Of a family."""
        raise NotImplementedError

    def job(
        self,
        pipeline: Any,
        request: GenerationRequest,
        guidance: Guidance,
        scheduler: Any,
        asked: Sequence[Any],
        *,
        loading: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> OwnJob:
        """Return the job of these files for one image of each of `asked`, the classes or prompts.

        scheduler: with its timesteps set. loading, settings: in addition to those of every model. more: further fields
        of `OwnJob`.
        """
        if not eight.blocks_of(self.blueprint.meta()):
            request.refuse(NO_EIGHT, precision=request.precision)
        request.refuse("errors are measured for pipelines of diffusers alone", min_psnr=request.min_psnr)
        request.refuse(NO_CACHE, cache=request.cache)
        self.latent_size(request.size)
        shared = {"steps": request.steps, "seed": request.seed, "size": request.size, "guidance": guidance}
        load = self.load_of(asked, guidance.on, len(scheduler.timesteps), request.dtype, request.size)
        return OwnJob(
            source=self,
            request=request,
            pipeline=pipeline,
            loading={"files": self, "dtype": request.dtype, **(loading or {})},
            settings={**shared, **(settings or {})},
            load=replace(load, eight=request.precision is not None),
            guidance=guidance,
            scheduler=scheduler,
            **more,
        )

    def conditions(self, asked: Sequence[object]) -> int:
        """Number of these classes or prompts whose modulation differs."""
        return len(set(asked))

    def load_of(
        self,
        asked: Sequence[object],
        guided: bool,
        evaluations: int,
        dtype: torch.dtype,
        size: tuple[int, int] | None = None,
    ) -> Load:
        """Return the planner's `Load` for one image of each of the classes or prompts `asked`.

        guided: whether there are two branches. evaluations: number of calls of the model.
        """
        config = self.blueprint.config
        return Load(
            images=len(asked),
            tokens=math.prod(self.latent_size(size)) // config.patch_size**2,
            guidance=guided,
            steps=evaluations,
            itemsize=dtype.itemsize,
            parameters=sum(x.numel() for x in self.blueprint.meta().parameters()),
            latent=config.in_channels * config.patch_size**2,
            labels=self.conditions(asked) + guided,
            table=TABLE_BYTES,
            others=work_of(config).joined,
        )


def checked_vae(path: Any, blueprint: Blueprint) -> Any:
    """Return the config of the decoder in a folder; ValueError if it does not decode the model's latents."""
    vae, channels = open_vae(path).model.config, blueprint.config.in_channels
    if vae.latent_channels != channels:
        raise ValueError(f"got a decoder of {vae.latent_channels} latent channels, expected the model's {channels}")
    return vae


@dataclass(frozen=True)
class OwnJob:
    """A checked request for a model with our own loop: `seqpar.pipelines.protocol.Job`.

    pipeline: the class whose `load(**loading, plan=plan)` returns the `Loaded` model. settings: arguments of
    `Loaded.latents`. named: classes or prompts as the user named them, for metadata. labels: of the images of one
    sheet. more_notes: (title, text) of further lines of the summary.
    """

    source: Files
    request: GenerationRequest
    pipeline: Any
    loading: Mapping[str, Any]
    settings: Mapping[str, Any]
    load: Load
    guidance: Guidance
    scheduler: Any
    named: Mapping[str, Sequence[str]]
    labels: Sequence[str] | None = None
    more_notes: Sequence[tuple[str, str]] = ()
    embedded = None
    why_not_planned = None
    why_no_steps = None
    video = False
    fps = 0.0
    frames = None

    @property
    def work(self) -> Work:
        return work_of(self.source.blueprint.config)

    @property
    def channels(self) -> int:
        return self.source.blueprint.config.in_channels

    @property
    def pixels(self) -> tuple[int, int]:
        height, width = self.source.latent_size(self.request.size)
        return height * self.source.factor, width * self.source.factor

    default_pixels = pixels

    @property
    def steps(self) -> int:
        return self.load.steps

    @property
    def texts(self) -> int:
        return len(set(self.loading.get("prompts", ())))

    @property
    def decodes(self) -> bool:
        return self.source.vae is not None

    def lora_layers(self, lora: Lora) -> dict[Lora, dict[str, int]]:
        raise ValueError(NO_LORA)

    def load_model(
        self,
        mesh: Mesh,
        plan: Plan,
        *,
        vae: DecodeMode = "auto",
        on_encode: Callable[[int], None] | None = None,
        loras: Mapping[str, Lora] | None = None,
    ) -> Loaded:
        hooks: dict[str, Any] = {}
        if on_encode is not None and "prompts" in self.loading:
            hooks["on_prompt"] = lambda index: on_encode(1)
        if self.request.park and mesh.is_main:
            say(f"not parked: {self.request.model}, which has one transformer")
        model = self.pipeline.load(**self.loading, **hooks, plan=plan)
        model.set_vae(vae)
        return model


@dataclass(frozen=True)
class Loaded:
    """A loaded model on a mesh, with the methods of `seqpar.pipelines.protocol.Model`. A family adds `request`.

    vae: diffusers' AutoencoderKL; without one, images are previews of latents. The last run's CUDA graph stays for the
    next compatible call: use the model in a `with` block, or call `release` before the process group ends.
    """

    dit: DistributedDiT
    files: Any
    vae: Any

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        self.sampler.release()
        if "on_mesh" in vars(self):
            self.on_mesh.release()

    @property
    def mesh(self) -> Mesh:
        return self.dit.mesh

    @property
    def plan(self) -> Plan:
        return self.dit.plan

    @cached_property
    def sampler(self) -> Sampler:
        return Sampler(self.dit)

    def notes(self, job: OwnJob) -> list[tuple[str, str]]:
        mesh, request, decision = self.mesh, job.request, decide(job.scheduler, {"eta": job.request.eta})
        steps = request.steps if request.respacing is None else job.steps
        precision = "" if request.precision is None else f" and {request.precision}"
        work = (
            f"{job.load.images} pictures, {job.load.tokens} tokens, {as_text(request.dtype)}{precision}, "
            f"{steps} steps of {type(job.scheduler).__name__} {decision}, {scales(job)}"
        )
        if job.steps != steps:
            work += f"; the scheduler calls the model {job.steps} times"
        notes = [("work", work), *job.more_notes]
        preferences = self.plan.ranking.preferences
        whole = mesh.sequence.size == mesh.world.size > mesh.cfg.size == 1
        if job.guidance.on and whole and preferences.strategy != "auto" and "cfg" not in preferences.axes:
            notes.append(("branches", "both on all ranks, for the strategy that is named; --mesh cfg=2 splits them"))
        if self.dit.matrices8 is not None:
            notes.append(("GEMMs", str(self.dit.matrices8)))
        elif mesh.device.type == "cuda" and hasattr(self.dit.config, "feed_forward"):
            missing = _quack.why_not()
            fused = "fused into its product (quack) where that was faster"
            notes.append(("SwiGLU", fused if missing is None else f"a kernel after cuBLAS: {missing}"))
        reason = why_not_captured(self.dit, decision)
        notes.append(("graph", "a step is one CUDA graph" if reason is None else f"none: {reason}"))
        none = "none comes with this model: pictures show the first three latent channels"
        way = self._way(job)
        return [*notes, ("decoder", none if way is None else str(way))]

    def facts(self, job: OwnJob) -> dict[str, Any]:
        way = self._way(job)
        named = {name: list(values) for name, values in job.named.items()}
        return {"scheduler": type(job.scheduler).__name__, "vae": None if way is None else way.name, **named}

    def verified(self, job: OwnJob, evaluations: int) -> tuple[Any, dict[str, Any]]:
        return self, dict(job.settings)

    def takes(self, job: OwnJob) -> bool:
        return True  # its check knows the sizes

    def switch_loras(self, loras: Sequence[tuple[str, float]]) -> bool:
        return False

    def request(self, *asked: Any, **settings: Any) -> Request:
        """Return the inputs of a run of these classes or prompts, from rank 0's arguments. Collective."""
        raise NotImplementedError

    def latents(self, *asked: Any, on_step: Callable[[int], None] = no_event, **settings: Any) -> Tensor:
        """Return sampled latents (N, C, h, w), equal on every rank; see `request` for the arguments."""
        return self.sampler(**vars(self.request(*asked, **settings)), on_step=on_step)

    def generate(self, job: OwnJob, events: Events) -> Result:
        def step(index: int) -> None:
            events.step(index)
            events.boundary()

        events.boundary()
        estimates = nullcontext() if events.estimates is None else self.sampler.estimating(*events.estimates(job.steps))
        with estimates:
            latents = self.latents(**job.settings, on_step=step)
        way, total = self._way(job), 0
        if way is not None:
            total = way.shard(len(latents)).sizes[way.axis.rank]
        events.decode(0, total)
        images = self.decode(latents, lambda index: events.decode(1, total))
        return Result(to_pil(images), "latents", partial(digest, latents))

    def _way(self, job: OwnJob) -> Spread | None:
        if self.vae is None:
            return None
        size = [side // self.files.factor for side in job.pixels]
        return self.on_mesh.spread(job.load.images, size, self.on_mesh.mode)

    @cached_property
    def on_mesh(self) -> MeshVAE:
        """Return the VAE on the ranks of the mesh, which keeps exchanges and CUDA graphs between pictures."""
        return MeshVAE.of(self.vae, self.dit.mesh, self.dit.transport.name, lambda: (self.dit.model, self.vae))

    def set_vae(self, mode: str) -> None:
        """Decode by "auto", "strips", "pictures" or "tiled" (diffusers', with seams) from now on. Collective."""
        if mode not in MODES:
            raise ValueError(f"got decoding mode {mode!r}, expected {', '.join(MODES)}")
        if self.vae is not None:
            self.on_mesh.mode = mode

    def decode(self, latents_NCHW: Tensor, on_image: Callable[[int], None] = no_event) -> Tensor:
        """Return images (N, 3, H, W) in [0, 1] on every rank, from rank 0's latents; see `MeshVAE.pictures`."""

        def check() -> None:
            check_floats("latents", latents_NCHW)
            channels, shape = None if self.vae is None else self.vae.config.latent_channels, tuple(latents_NCHW.shape)
            if len(shape) != 4 or 0 in shape or channels not in (None, shape[1]):
                raise ValueError(f"got latents of shape {shape}, expected (N, {channels or 'C'}, H, W)")

        self.dit.mesh.on_all_ranks(check)
        if self.vae is None:
            return preview(from_rank_0(self.dit.mesh, {"latents": latents_NCHW})["latents"], self.files.factor)
        return self.on_mesh.pictures(latents_NCHW, on_image)

    def check_decodable(self, count: int, latent: tuple[int, int]) -> None:
        """Raise ValueError if `count` latents (height, width) cannot be decoded. Collective."""
        if self.vae is not None:
            self.on_mesh.check(count, (self.vae.config.latent_channels, *latent))


def placed(
    files: Files, dtype: torch.dtype, mesh: Mesh | str | None, preferences: Preferences | None, plan: Plan | None
) -> tuple[Plan, Mesh]:
    """Return the caller's plan, or a new one for one image (two branches on a cfg axis), and its mesh. Collective."""
    ranks = mesh if isinstance(mesh, Mesh) else Mesh.joined()
    own, names = ranks.on_all_ranks(lambda: named_mesh(mesh, preferences or Preferences()))
    if plan is None:
        branches = own.cfg.size if own is not None else names.axes.get("cfg", 1)
        load = replace(files.load_of(("",), branches > 1, 1, dtype), images=preferred_images(names, ranks))
        plan = make(work_of(files.blueprint.config), load, dtype, ranks, names, own)
    return plan, settled(plan, own)


def drawn_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which diffusers' pipelines draw the noise of a model of this dtype."""
    return dtype if dtype.itemsize < torch.float32.itemsize else torch.float32
