"""Images from class names: labels, noise, sampling, decoding. Everything is checked before weights load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Required, TypedDict, Unpack

import torch

from seqpar.loading.folder import load_vae
from seqpar.loading.names import BUILTIN
from seqpar.loading.parts import part_of, read_pipeline, read_scheduler
from seqpar.loop.blueprint import Blueprint, locate
from seqpar.loop.distributed import DistributedDiT
from seqpar.loop.loop import draw_noise
from seqpar.loop.models._label_dit import LabelDiT
from seqpar.loop.request import Request
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines import own_loop as _files
from seqpar.pipelines.own_loop import DDIM_DEFAULT, Loaded, OwnJob
from seqpar.pipelines.protocol import NO_IMAGES, NO_LORA, NO_PRESET, NO_VIDEOS, GenerationRequest
from seqpar.planner.plan import Plan
from seqpar.transformer.calibration import Precision
from seqpar.types.guidance import Guidance, check_pictures
from seqpar.types.names import class_number, parts


def listed(index: Mapping[str, Any], classes: int) -> dict[int, tuple[str, ...]]:
    """Return class number -> its names, from a folder's model_index.json; ValueError for a class beyond `classes`."""
    labels = index.get("id2label") or {}
    odd = [key for key in labels if not key.isdecimal() or int(key) >= classes]
    if odd:
        raise ValueError(f"got a label for class {odd[0]!r} in model_index.json, expected numbers 0 to {classes - 1}")
    return {int(key): parts(str(names)) for key, names in labels.items()}


__all__ = ["BUILTIN", "DDIM_DEFAULT", "Files", "Pipeline"]

PIPELINES = ("DiTPipeline",)
MODELS = (LabelDiT,)
GUIDANCE = 4.0  # scale if the user names none
SHOWN_BY_DEFAULT = 12  # number of classes if the user names none


@dataclass(frozen=True)
class Files(_files.Files):
    """The checked files of a pipeline of classes. labels: class number -> its names; captions show the first."""

    labels: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    takes = "classes"

    @staticmethod
    def locate(name: str | Path | Blueprint) -> Files:
        """Find and check the files of a model, reading only headers. ValueError if a file does not fit.

        name: see `seqpar.loop.blueprint.locate`; only a pipeline's folder has a decoder.
        """
        blueprint = locate(name)
        path = blueprint.path
        if path is None or not (path / "model_index.json").is_file():
            return Files(blueprint)
        index = read_pipeline(path)
        vae = _files.checked_vae(path / "vae", blueprint) if part_of(index, "vae") else None
        labels = listed(index, blueprint.config.num_classes)
        return Files(blueprint, path, vae, labels, scheduling=read_scheduler(path / "scheduler"))

    def class_ids(self, classes: Sequence[str | int]) -> list[int]:
        """Return the class number of each name, whole label ("tench, Tinca tinca") or number.

        ValueError for an unknown class, with similar names, and for a name of several classes, with their numbers.
        """
        labels = self.class_labels
        if all(isinstance(label, int) and label in labels for label in classes):
            return list(map(int, classes))
        return [class_number(str(label), labels) for label in classes]

    @property
    def class_labels(self) -> Mapping[int, tuple[str, ...]]:
        """The names of each class, by number; () for one without a name."""
        return self.labels or dict.fromkeys(range(self.blueprint.config.num_classes), ())

    def check(self, request: GenerationRequest) -> OwnJob:
        reason = "this model generates images of classes (--classes)"
        texts = {"prompt": request.prompts, "negative_prompt": request.negative}
        request.refuse(reason, **texts, true_guidance=request.true_guidance)
        request.refuse(NO_VIDEOS, frames=request.frames, fps=request.fps)
        request.refuse(NO_IMAGES, image=request.images, strength=request.strength)
        request.refuse(NO_LORA, lora=request.loras)
        request.refuse(NO_PRESET, preset=request.preset, sigmas=request.sigmas)
        guidance = request.free_guidance(GUIDANCE)
        classes = request.classes or tuple(map(str, sorted(self.labels)[:SHOWN_BY_DEFAULT])) or ("0",)
        numbers = [number for number in self.class_ids(classes) for _ in range(request.repeat)]
        scheduler = self.schedule(request.scheduler, request.steps, request.eta, request.respacing)
        settings = {"classes": numbers, "scheduler": scheduler, "eta": request.eta, "respacing": request.respacing}
        return self.job(
            Pipeline,
            request,
            guidance,
            scheduler,
            numbers,
            loading={"precision": request.precision},
            settings=settings,
            named={"classes": classes},
            labels=[self.class_name(number) for number in numbers],
        )

    def class_name(self, number: int) -> str:
        return self.labels.get(number, (str(number),))[0]

    def latent_size(self, pixels: tuple[int, int] | None) -> tuple[int, int]:
        """Return (height, width) of the latent of a picture; ValueError also for sizes that the model does not have."""
        size = super().latent_size(pixels)
        if pixels is not None:
            self.blueprint.meta().check_size(*size)
        return size


class Asked(TypedDict, total=False):
    """The settings of `Pipeline.request`; see `Request` for fields that are not described here.

    size: (height, width) in pixels, None for the model's own. scheduler: the name of a diffusers class, a scheduler
    (which is not changed), or None for the model's own.
    """

    seed: int
    size: tuple[int, int] | None
    scheduler: Any
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
        mesh: Mesh | str | None = None,
        dtype: torch.dtype = torch.float32,
        strategy: str = "auto",
        local: str = "auto",
        transport: str = "auto",
        *,
        plan: Plan | None = None,
        precision: Precision | None = None,
    ) -> Pipeline:
        """Load the weights, those of the decoder in the same dtype; see `DistributedDiT` for the other arguments."""
        names = strategy, local, transport
        dit = DistributedDiT.from_pretrained(files.blueprint, mesh, dtype, *names, plan=plan, precision=precision)
        if files.source is None or files.vae is None:
            return Pipeline(dit, files, None)
        vae = dit.mesh.on_all_ranks(lambda: load_vae(files.source / "vae", dtype, dit.mesh.device))
        return Pipeline(dit, files, vae)

    def request(self, classes: Sequence[str | int], **asked: Unpack[Asked]) -> Request:
        mesh, settings = self.dit.mesh, dict[str, Any](asked)
        seed, size, scheduler = settings.pop("seed", 0), settings.pop("size", None), settings.pop("scheduler", None)
        run = settings.get("steps"), settings.get("guidance"), size, seed
        mesh.on_all_ranks(lambda: check_pictures("classes", classes, *run))
        kind = tuple[list[str | int], tuple[int, int] | None, int]
        classes, size, seed = mesh.share((list(classes), size, seed), kind)
        asked_of_0 = (True, scheduler) if scheduler is None or isinstance(scheduler, str) else (False, None)
        named, name = mesh.share(asked_of_0, tuple[bool, str | None])
        scheduler = self.files.scheduler(name) if named else scheduler
        prompt = {"class_labels": torch.tensor(self.files.class_ids(classes))}
        height, width = self.files.latent_size(size)
        self.dit.check_size(height, width)
        self.check_decodable(len(classes), (height, width))
        generator = torch.Generator().manual_seed(seed)
        noise = draw_noise((len(classes), self.dit.config.in_channels, height, width), generator)
        return Request(scheduler, noise, prompt, generator=generator, **settings)
