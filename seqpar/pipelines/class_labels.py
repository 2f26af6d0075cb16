"""Makes pictures from class names: labels, noise, sampling, decoding. It checks everything before it loads weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Required, TypedDict, Unpack

import torch
from PIL import Image
from torch import Tensor

from seqpar.engine.distributed import DistributedDiT
from seqpar.mesh import Mesh
from seqpar.pipelines import _family, _labels, _schedulers
from seqpar.pipelines._family import BUILTIN, NO_VAE_FACTOR, Job, Order, is_builtin
from seqpar.pipelines._loaded import Loaded
from seqpar.pipelines._pictures import to_pil
from seqpar.planner.plan import Plan, make, work_of
from seqpar.planner.predict import TABLE_BYTES, Load
from seqpar.planner.search import Wish
from seqpar.sampling.arguments import check_loading, check_pictures
from seqpar.sampling.ddpm import check_variances
from seqpar.sampling.guidance import Guidance
from seqpar.sampling.loop import draw_noise
from seqpar.sampling.request import Request
from seqpar.sampling.steppers import check_eta
from seqpar.vae.decoder import check_vae, load_vae, vae_factor
from seqpar.weights.find import Blueprint, locate, resolve
from seqpar.weights.parts import part_of, read_pipeline, read_scheduler

__all__ = ["BUILTIN", "Files", "Pipeline", "check", "generate"]

PIPELINES = ("DiTPipeline",)
PROMPT = ("class_labels",)
GUIDANCE = 4.0  # scale if the user names none
SHOWN_BY_DEFAULT = 12  # number of classes if the user names none
# the scheduler of the original DiT and Large-DiT, for models without a pipeline folder
DDIM_DEFAULT = {"beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear", "clip_sample": False}


@dataclass(frozen=True)
class Files:
    """The checked files of a pipeline, before any weights are loaded.

    blueprint: the transformer. folder: the pipeline folder with the other parts, or None. vae: the config of the
    decoder, or None. labels: class number -> its names, of which captions show the first.
    """

    blueprint: Blueprint
    folder: Path | None
    vae: Any
    labels: Mapping[int, tuple[str, ...]]

    @staticmethod
    def locate(name: str | Path, heads: int | None = None) -> Files:
        """Find and check the files of a model.

        name: "builtin", a diffusers pipeline folder or hub id, or any name that `seqpar.weights.find.locate` accepts,
        which then has no decoder. heads: see there. Raises ValueError if a file does not fit; reads only the headers of
        weight files.
        """
        path = BUILTIN if is_builtin(name) else resolve(name)
        blueprint = locate(name if path is None else path, heads)
        if path is None or not (path / "model_index.json").is_file():
            return Files(blueprint, None, None, {})
        index, channels = read_pipeline(path), blueprint.config.in_channels
        vae = check_vae(path / "vae") if part_of(index, "vae") else None
        if vae is not None and vae.latent_channels != channels:
            raise ValueError(f"got a decoder of {vae.latent_channels} latent channels, expected the model's {channels}")
        return Files(blueprint, path, vae, _labels.listed(index, blueprint.config.num_classes))

    @property
    def factor(self) -> int:
        """Return the number of pixels along each side of a latent pixel."""
        return NO_VAE_FACTOR if self.vae is None else vae_factor(self.vae)

    def class_ids(self, classes: Sequence[str | int]) -> list[int]:
        """Return the class number of each name, whole label ("tench, Tinca tinca") or number.

        Raises ValueError for an unknown class, with similar names, and for a name of several classes, with their
        numbers.
        """
        return _labels.class_ids(classes, self.labels, self.labels.keys() or range(self.blueprint.config.num_classes))

    def class_name(self, number: int) -> str:
        """Return the first name of a class, or its number if it has no name."""
        return self.labels.get(number, (str(number),))[0]

    def latent_size(self, pixels: tuple[int, int] | None) -> tuple[int, int]:
        """Return (height, width) of the latent of a picture; None stands for the size that the model was trained on."""
        size = _family.latent_size(pixels, self.factor, self.blueprint.config)
        if pixels is not None:
            self.blueprint.meta().check_size(*size)
        return size

    def load_of(
        self,
        classes: Sequence[str | int],
        guidance: Guidance,
        evaluations: int,
        dtype: torch.dtype,
        size: tuple[int, int] | None = None,
    ) -> Load:
        """Return the planner's `Load` for one picture of each class.

        evaluations: number of calls of the model. size: (height, width) in pixels, None for the model's own.
        """
        config, (height, width) = self.blueprint.config, self.latent_size(size)
        return Load(
            images=len(classes),
            tokens=height * width // config.patch_size**2,
            guidance=guidance.on,
            steps=evaluations,
            itemsize=dtype.itemsize,
            parameters=sum(x.numel() for x in self.blueprint.meta().parameters()),
            latent=config.in_channels * config.patch_size**2,
            labels=len(set(classes)) + guidance.on,
            table=TABLE_BYTES,
        )

    def scheduler(self, name: str | None = None) -> Any:
        """Return the folder's scheduler, or the diffusers class `name` with the same configuration.

        DDPM takes the variances that the model predicts, as the authors of DiT and Large-DiT sample, if the model
        predicts them and the configuration names no other variance_type.
        Raises ValueError, with the reason, if it cannot be built or the denoising loop cannot use it.
        """
        config = read_scheduler(self.folder / "scheduler") if self.folder else DDIM_DEFAULT
        changes = _schedulers.variance_settings(config, name, self.blueprint.config)
        return _schedulers.build(config, name, **changes, **_schedulers.flow_settings(config, name))

    def schedule(self, name: str | None, steps: int, eta: float | None = None, respacing: str | None = None) -> Any:
        """Return `scheduler(name)` with its timesteps set; ValueError if a setting does not fit it.

        eta: None stands for the scheduler's own default. respacing: see `Request`.
        """
        scheduler = self.scheduler(name)
        check_eta(scheduler, eta)
        _schedulers.set_steps(scheduler, steps, respacing)
        if _schedulers.tried(scheduler, eta).learned:
            check_variances(self.blueprint.config)
        return scheduler


class Sampling(TypedDict, total=False):
    """The settings of `Pipeline.latents` that are those of `Request`, with the same meaning."""

    steps: Required[int]
    guidance: Required[Guidance]
    eta: float | None
    respacing: str | None
    clip_denoised: bool


@dataclass(frozen=True)
class Pipeline(Loaded):
    """A loaded pipeline of a model of classes on a mesh; see `Loaded`."""

    @staticmethod
    def load(
        files: Files,
        mesh: Mesh | None = None,
        dtype: torch.dtype = torch.float32,
        strategy: str = "auto",
        local: str = "auto",
        transport: str = "auto",
        *,
        plan: Plan | None = None,
    ) -> Pipeline:
        """Load the weights, those of the decoder in the same dtype; see `DistributedDiT` for the other arguments."""
        dit = DistributedDiT.from_pretrained(files.blueprint, mesh, dtype, strategy, local, transport, plan=plan)
        mesh = dit.mesh
        folder = files.folder
        if folder is None or files.vae is None:
            return Pipeline(dit, files, None)
        vae = mesh.together(lambda: load_vae(folder / "vae", dtype, mesh.device))
        return Pipeline(dit, files, vae)

    def latents(
        self,
        classes: Sequence[str | int],
        *,
        seed: int = 0,
        size: tuple[int, int] | None = None,
        scheduler: Any = None,
        on_step: Callable[[int], None] = lambda index: None,
        **settings: Unpack[Sampling],
    ) -> Tensor:
        """Return sampled latents (N, C, h, w) for N classes, equal on every rank, from rank 0's arguments.

        scheduler: the name of a diffusers class, a scheduler (which is not changed), or None for the model's own.
        settings: steps, guidance, eta, respacing and clip_denoised; see `Request`.
        """
        made = self.request(classes, seed=seed, size=size, scheduler=scheduler, **settings)
        return self.sampler(
            made.scheduler, made.noise, made.prompt, generator=made.generator, on_step=on_step, **settings
        )

    def request(
        self,
        classes: Sequence[str | int],
        *,
        seed: int = 0,
        size: tuple[int, int] | None = None,
        scheduler: Any = None,
        **settings: Unpack[Sampling],
    ) -> Request:
        """Return the inputs of the run that `latents` makes of these arguments, from those of rank 0."""
        mesh = self.dit.mesh
        asked = settings.get("steps"), settings.get("guidance"), size, seed
        mesh.together(lambda: check_pictures("classes", classes, *asked))
        kind = tuple[list[str | int], tuple[int, int] | None, int]
        classes, size, seed = mesh.share((list(classes), size, seed), kind)
        asked_of_0 = (True, scheduler) if scheduler is None or isinstance(scheduler, str) else (False, None)
        named, name = mesh.share(asked_of_0, tuple[bool, str | None])
        scheduler = self.files.scheduler(name) if named else scheduler
        prompt = {"class_labels": torch.tensor(self.files.class_ids(classes))}
        height, width = self.files.latent_size(size)
        self.dit.check_size(height, width)
        load = partial(self.files.load_of, classes, settings["guidance"], settings["steps"], self.dit.dtype, size)
        self.check_decodable(len(classes), (height, width), load)
        generator = torch.Generator().manual_seed(seed)
        noise = draw_noise((len(classes), self.dit.config.in_channels, height, width), generator)
        return Request(scheduler, noise, prompt, generator=generator, **settings)


def generate(
    classes: Sequence[str | int],
    model: str | Path = "builtin",
    *,
    mesh: Mesh | None = None,
    steps: int = 25,
    guidance: float = 4.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> list[Image.Image]:
    """Return a picture of each class on every rank, from rank 0's arguments; this one call does everything."""
    ranks = mesh if isinstance(mesh, Mesh) else Mesh.joined()
    ranks.together(lambda: check_loading(mesh, model, dtype))
    ranks.together(lambda: check_pictures("classes", classes, steps, Guidance(guidance), None, seed))
    asked = list(classes), str(model), steps, guidance, seed, dtype
    kind = tuple[list[str | int], str, int, float, int, torch.dtype]
    classes, model, steps, guidance, seed, dtype = ranks.share(asked, kind)
    wanted = Guidance(guidance)
    files = ranks.together(lambda: Files.locate(model))
    scheduler, ids = ranks.together(lambda: (files.schedule(None, steps), files.class_ids(classes)))
    load = files.load_of(ids, wanted, len(scheduler.timesteps), dtype)
    plan = make(work_of(files.blueprint.config), load, dtype, ranks, Wish(), mesh)
    with Pipeline.load(files, mesh, dtype, plan=plan) as pipeline:
        made = pipeline.latents(ids, steps=steps, guidance=wanted, seed=seed, scheduler=scheduler)
        return to_pil(pipeline.decode(made))


def check(order: Order, path: Path | None) -> Job:
    """Return the job that an order describes; ValueError for whatever does not fit. Reads headers, no weights."""
    guidance = _guidance(order)
    files = Files.locate(order.model if path is None else path, order.heads)
    classes = order.classes or tuple(map(str, sorted(files.labels)[:SHOWN_BY_DEFAULT])) or ("0",)
    pictures = [number for number in files.class_ids(classes) for _ in range(order.repeat)]
    scheduler = files.schedule(order.scheduler, order.steps, order.eta, order.respacing)
    height, width = files.latent_size(order.size)
    settings = {name: getattr(order, name) for name in ("steps", "seed", "eta", "size", "respacing")}
    return Job(
        pipeline=Pipeline,
        blueprint=files.blueprint,
        loading={"files": files, "dtype": order.dtype},
        settings={"classes": pictures, "guidance": guidance, "scheduler": scheduler, **settings},
        load=files.load_of(pictures, guidance, len(scheduler.timesteps), order.dtype, order.size),
        guidance=guidance,
        scheduler=scheduler,
        dtype=order.dtype,
        pixels=(height * files.factor, width * files.factor),
        captions=[files.class_name(number) for number in pictures],
        named={"classes": classes},
        sheet=True,
    )


def _guidance(order: Order) -> Guidance:
    """Return the guidance that is asked for; ValueError for it, or for a flag that no model of this family takes."""
    reason = "expected none: this model makes pictures of classes (--classes)"
    order.refuse(reason, prompt=order.prompts, negative_prompt=order.negative, true_guidance=order.true_guidance)
    order.refuse("expected none: this model makes no videos", frames=order.frames, fps=order.fps)
    guidance = Guidance(GUIDANCE if order.guidance is None else order.guidance, order.guidance_channels)
    if order.guidance_channels is not None and not guidance.on:
        raise ValueError(
            f"got --guidance-channels {order.guidance_channels} with --guidance {guidance.scale:g}, expected guidance "
            f"over 1: without it there is nothing to guide"
        )
    return guidance
