"""Models of a server before weights load: checked and planned, with the LoRAs that fit and the sizes they take."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import log2, sqrt
from pathlib import Path
from types import MappingProxyType
from typing import Any

import diffusers
import torch
from PIL import Image

from seqpar.families._modular import is_modular
from seqpar.loading.checkpoint import Fitted
from seqpar.loading.folder import open_controlnet
from seqpar.loading.lora import Lora
from seqpar.loading.names import errors_only, random_model_of
from seqpar.loading.schedulers import known
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.diffusers import Source as DiffusersSource
from seqpar.pipelines.find import find
from seqpar.pipelines.image_files import Picture
from seqpar.pipelines.pictures import check_encoder
from seqpar.pipelines.planning import grid_of
from seqpar.pipelines.protocol import GenerationRequest, Job, Source, inputs_of
from seqpar.planner.plan import Plan, make
from seqpar.planner.predict import Load, predict
from seqpar.planner.search import Preferences
from seqpar.serve.messages import CONTROL, IMAGE, MASK, MOST_STEPS, TEXT, ImageRequest, ServedModel, Takes, VideoFacts
from seqpar.serve.rules import SLOW_S
from seqpar.transformer.calibration import Precision

EXAMPLE = 256  # pixels along a side of the image that a model is planned with if it requires one
NOTHING: Mapping[str, Any] = MappingProxyType({})
EXAMPLE_MASK = Picture("an example", Image.new("L", (EXAMPLE, EXAMPLE), 255))
SHAPES = ((1, 1), (4, 3), (3, 4), (3, 2), (2, 3), (16, 9), (9, 16))  # width to height
LEAST_UNIT = 8  # pixels of which sides are multiples; 64 from 1024 x 1024 on, as models are trained
POWERS, HALVED = range(-6, 16), 5  # of the area of sizes that are predicted; the limit is within 2 % of it
FEW_STEPS = range(1, 6)  # some schedulers make no fewer than the last
TAKES_NO = re.compile(r"takes no \w+$")
TRIED = {"negative_prompt": "a", "guidance": 2.0, "true_guidance": 2.0, "strength": 0.5, "fps": 24}  # fields alone
GUIDED: Mapping[str, Mapping[str, Any]] = {  # names of `ServedModel.ratios`
    "guidance off": {"guidance": 1.0},
    "guidance on": {"guidance": 2.0},
    "true guidance": {"true_guidance": 2.0, "negative_prompt": "a"},
}
FLAG = re.compile(r"--([a-z][a-z-]*)")
FIELDS = {"negative": "negative_prompt", "classes": "prompt"}  # flags of `seqpar sample` with another name in the API
SUFFIX = ".safetensors"
LORA_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class CheckedModel:
    """A model without weights. name: in requests. example: the job of a request that leaves everything to the model.

    room: GiB per rank for this model and its run, None before it is known. alone: the same after the server
    has unloaded all other models for a request, None where it does not.
    """

    name: str
    source: Source
    dtype: torch.dtype
    example: Job
    plan: Plan
    loras: FittingLoras
    precision: Precision | None = None
    video: VideoFacts | None = None
    room: float | None = None
    alone: float | None = None

    @staticmethod
    def of(
        name: str,
        dtype: torch.dtype,
        ranks: Mesh,
        loras: Mapping[str, Lora],
        precision: Precision | None = None,
        min_psnr: float | None = None,
        cache: str | None = None,
        park: bool = False,
        controls: Mapping[str, Fitted] = NOTHING,
    ) -> CheckedModel:
        """Find, check and plan a model. loras: all of the server. Collective; the same ValueError on every rank."""
        source = ranks.on_all_ranks(lambda: find(name).having(controls))
        shown: Any = {"classes": ("0",)} if source.takes == "classes" else {"prompts": ("a",)}  # one image at a time
        images, mask = example_images(source.needs_image), EXAMPLE_MASK if source.needs_mask else None
        kept: Any = {"precision": precision, "min_psnr": min_psnr, "cache": cache, "park": park}
        request = GenerationRequest(name, dtype, **shown, images=images, mask=mask, **kept)
        ranks.on_all_ranks(lambda: request.check_precision(ranks.device))
        example = ranks.on_all_ranks(lambda: source.check(request))
        video = ranks.on_all_ranks(lambda: _video_facts(example))
        plan = make(example.work, example.load, dtype, ranks, Preferences())
        fitting = ranks.on_all_ranks(lambda: FittingLoras.of(example, loras))
        if ranks.is_main and random_model_of(name) is not None:
            print(f"seqpar: {name} has random weights", flush=True)
        return CheckedModel(name, source, dtype, example, plan, fitting, precision, video)

    @property
    def prompt(self) -> str:
        """A valid prompt, for runs whose result is dropped."""
        return "0" if self.source.takes == "classes" else "a"

    @property
    def input_images(self) -> tuple[Picture, ...]:
        """Input images for such runs."""
        return (*example_images(self.source.needs_image), *([EXAMPLE_MASK] if self.source.needs_mask else ()))

    @property
    def memory(self) -> int:
        """Predicted bytes per rank of the model, a run of the example, and the weights that LoRAs change."""
        ranking = self.plan.ranking
        run = predict(ranking.work, self.example.load, self.plan.layout, ranking.rates).memory.total
        return run + self.kept

    @property
    def kept(self) -> int:
        """Bytes of the weights without LoRAs that stay on the GPU."""
        return self.loras.weights * self.dtype.itemsize

    def job(self, request: ImageRequest, images: Sequence[Picture]) -> Job:
        """The checked job of a request; ValueError if it does not fit the model."""
        job = self.source.check(self._order(request, images))
        check_step(request, self.plan, job.load, self.room)
        return job

    def _order(self, request: ImageRequest, images: Sequence[Picture]) -> GenerationRequest:
        is_classes = self.source.takes == "classes"
        order = GenerationRequest(
            self.example.request.model,
            self.dtype,
            seed=request.seed,
            size=request.size,
            guidance=request.guidance,
            true_guidance=request.true_guidance,
            negative=request.negative_prompt,
            scheduler=request.scheduler,
            classes=(request.prompt,) if is_classes else (),
            prompts=() if is_classes else (request.prompt,),
            **inputs_of(images, request.controlnet, request.control_scale),
            strength=request.strength,
            frames=request.frames,
            fps=request.fps,
            precision=self.precision,
            cache=self.example.request.cache,
            park=self.example.request.park,
            preset=request.preset,
            sigmas=request.sigmas,
        )
        return order if request.steps is None else replace(order, steps=request.steps)

    def facts(self, size: tuple[int, int], takes_size: Fits = lambda size: True) -> ServedModel:
        """The model and the requests that it accepts, as the API describes them. size: of its images by default.

        takes_size: whether the loaded pipeline takes a size. What it takes is found by its own check of requests.
        """
        source, video, images = self.source, self.video, self.input_images

        def fits(other: tuple[int, int]) -> bool:
            return self.why_not({"size": other}, images) is None and takes_size(other)

        with errors_only(diffusers.utils.logging):  # of settings that schedulers change
            schedulers = schedulers_of(source)
        return ServedModel(
            self.name,
            "classes" if source.takes == "classes" else "texts",
            size,
            self.example.steps,
            str(self.plan.layout),
            self.plan.ms / 1e3,
            tuple(names[0] for _, names in sorted(source.class_labels.items()) if names),
            tuple(self.loras.by_name),
            video,
            sizes_near(size, fits) if video is None and not source.needs_image else (),
            unit := unit_of(size, fits),
            schedulers,
            (self._least_steps, MOST_STEPS),
            {number: tuple(names) for number, names in source.class_labels.items()},
            self.precision,
            self.example.request.cache,
            {
                name: preset.steps
                for name, preset in source.presets.items()
                if not self.why_not({"preset": name}, images)
            },
            self.controlnets,
            self._takes(),
            *self._loads(size, unit, self.room if self.alone is None else self.alone),
            beside=None if self.alone is None else self._loads(size, unit, self.room)[1],
            ratios=self._ratios(),
            min_psnr=self.example.request.min_psnr,
            latent_pixels=latent_pixels(source) if video is None else None,
        )

    def why_not(self, fields: Mapping[str, Any], images: Sequence[Picture]) -> str | None:
        """Why the model's own check refuses these fields of a request; None if it takes them."""
        try:
            self.job(ImageRequest("", self.name, self.prompt, **fields), images)
        except ValueError as error:
            return self.public(str(error))
        return None

    @property
    def _least_steps(self) -> int:
        return next((steps for steps in FEW_STEPS if not self.why_not({"steps": steps}, self.input_images)), 1)

    def public(self, text: str) -> str:
        """A message with the model's name in requests, in place of its path on the server, also in paths of files."""
        path = re.escape(self.example.request.model)
        return re.sub(rf"(?<![\w./-]){path}(?![\w-])", lambda match: self.name, text)

    def _takes(self) -> dict[str, Takes]:
        """What the model takes by what requests start from: each field is tried alone."""
        images = example_images(True)
        starts = {TEXT: (), IMAGE: images, f"{IMAGE}+{MASK}": (*images, EXAMPLE_MASK)}
        found = {name: self._fields(start) for name, start in starts.items() if self.why_not({}, start) is None}
        for net in self.controlnets[:1]:
            for name, start in starts.items():
                given, name = {"controlnet": net}, CONTROL if name == TEXT else f"{name}+{CONTROL}"
                if self.why_not(given, (*start, *images)) is None:
                    found[name] = self._fields((*start, *images), given)
        return found

    @cached_property
    def controlnets(self) -> tuple[str, ...]:
        """The names of the ControlNets that fit."""
        images = (*self.input_images, *example_images(True))
        return tuple(name for name in self.source.controls if self.why_not({"controlnet": name}, images) is None)

    def _fields(self, images: Sequence[Picture], given: Mapping[str, Any] = NOTHING) -> Takes:
        reasons = {name: self.why_not({**given, name: value}, images) for name, value in TRIED.items()}
        both = {**given, "negative_prompt": TRIED["negative_prompt"], "true_guidance": TRIED["true_guidance"]}
        beside = {"negative_prompt": "true_guidance"} if reasons["negative_prompt"] else {}
        beside = beside if beside and self.why_not(both, images) is None else {}
        refused = {name: self._reason(text) for name, text in reasons.items() if text and name not in beside}
        alone = not images or given or EXAMPLE_MASK in images
        return Takes(refused, not alone and self.why_not({}, (*images, *images)) is None, beside)

    def _reason(self, text: str) -> str:
        # without the flag before it and the advice after it; "" where it says nothing more
        reason = (text.partition(f"--model {self.name}: ")[2] or text).partition(";")[0]
        return "" if TAKES_NO.search(reason) else in_fields(reason)

    def _ratios(self) -> dict[str, float]:
        """`ServedModel.ratios`, at the example's size."""
        ranking = self.plan.ranking

        def step_ms(fields: Mapping[str, Any]) -> float | None:
            try:
                order = self._order(ImageRequest("", self.name, self.prompt, **fields), self.input_images)
                return predict(ranking.work, self.source.check(order).load, self.plan.layout, ranking.rates).ms
            except ValueError:  # the model does not take the fields
                return None

        known = self.example.why_not_planned is None
        if not (known and (own_ms := step_ms({}))):
            return {}
        found = {name: step_ms(fields) for name, fields in GUIDED.items()}
        found |= {name: step_ms({"preset": name}) for name in self.source.presets}
        return {name: ms / own_ms for name, ms in found.items() if ms}

    def _loads(
        self, size: tuple[int, int], unit: int, room: float | None
    ) -> tuple[tuple[tuple[int, float], ...], int | None]:
        """`ServedModel.loads` and `limit`, of sizes in the default's shape whose area doubles. room: GiB per rank."""
        ranking, frames = self.plan.ranking, 1 if self.video is None else self.video.frames

        def run(power: float) -> tuple[int, float, bool]:
            """Pixels, seconds of a step, and whether memory suffices, for the default's area times 2^power."""
            height, width = (max(unit, round(side * 2 ** (power / 2) / unit) * unit) for side in size)
            order = self._order(ImageRequest("", self.name, self.prompt, size=(height, width)), self.input_images)
            step = predict(ranking.work, self.source.check(order).load, self.plan.layout, ranking.rates)
            return height * width * frames, step.ms / 1e3, step.too_big(room) is None

        loads = list[tuple[int, float]]()
        if not all(size) or self.example.why_not_planned is not None:
            return (), None
        try:
            for power in POWERS:
                pixels, seconds, fits = run(power)
                if not fits:
                    low, high = float(power - 1), float(power)
                    for _ in range(HALVED):
                        middle = (low + high) / 2
                        low, high = (middle, high) if run(middle)[2] else (low, middle)
                    return tuple(loads), run(high)[0]
                loads.append((pixels, seconds))
        except ValueError:  # a size that the pipeline does not make; others are checked when their turn comes
            pass
        return tuple(loads), None


def in_fields(text: str) -> str:
    """A message of `seqpar sample` for clients: on one line, with fields of the API in place of flags."""
    named = FLAG.sub(lambda flag: FIELDS.get(flag[1], flag[1].replace("-", "_")), text)
    return " ".join(named.split())


def schedulers_of(source: Source) -> dict[str, tuple[int, int]]:
    """The least and most steps of each scheduler that fits a model."""

    def made(name: str, steps: int) -> Any:
        try:
            return source.schedule(name, steps)
        except ValueError:
            return None

    found = dict[str, tuple[int, int]]()
    for name in known():
        if (scheduler := made(name, FEW_STEPS[-1])) is not None:
            limits = map(scheduler.config.get, ("num_train_timesteps", "original_inference_steps"))
            least = next(steps for steps in FEW_STEPS if made(name, steps) is not None)
            found[name] = least, min((MOST_STEPS, *filter(None, limits)))
    return found


def latent_pixels(source: Source) -> int | None:
    """Pixels along a side of a latent of a pipeline of diffusers; None for others, and where its files do not tell."""
    if not isinstance(source, DiffusersSource) or is_modular(source.parts.caller):
        return None
    grid = grid_of(source.parts.transformer.config, source.parts.vae)
    return None if grid is None else grid.factor


def example_images(needed: bool) -> tuple[Picture, ...]:
    """An image in place of a client's, if one is needed."""
    return (Picture("an example", Image.new("RGB", (EXAMPLE, EXAMPLE))),) if needed else ()


def _video_facts(job: Job) -> VideoFacts | None:
    """Defaults of a video model, None for images; ValueError where videos cannot be made."""
    if not job.video:
        return None
    check_encoder()
    frames = job.frames
    if frames is None:
        raise ValueError(f"the files of {job.request.model} do not state a number of frames; serve another model")
    return VideoFacts(job.fps, frames.usual, frames.unit, frames.least, frames.most)


# sizes ---------------------------------------------------------------------------------------------------------------


def check_step(request: ImageRequest, plan: Plan, load: Load, room: float | None) -> None:
    """Raise ValueError if one step is predicted to outlast the request's deadline or to need over `room` GiB per rank.

    Runs stop between steps only, so such a step would hold all ranks after its client has left.
    """
    step = predict(plan.ranking.work, load, plan.layout, plan.ranking.rates)
    if (reason := step.too_big(room)) is not None:
        raise ValueError(f"the request {reason}; request a smaller size or fewer frames")
    step_s, limit_s = step.ms / 1e3, request.deadline_s
    if limit_s is not None and step_s > max(limit_s, SLOW_S):
        raise ValueError(
            f"one step is predicted to take {step_s:.0f} s, but {limit_s:.0f} s remain before the deadline; request a "
            "smaller size or fewer frames"
        )


Fits = Callable[[tuple[int, int]], bool]  # whether a model takes a size


def sizes_near(default: tuple[int, int], fits: Fits) -> tuple[tuple[int, int], ...]:
    """(height, width) of other shapes with about as many pixels, the default first; () where the pipeline chooses."""
    return tuple(dict.fromkeys([default, *filter(fits, _shapes(default))])) if all(default) else ()


def unit_of(default: tuple[int, int], fits: Fits) -> int:
    """The power of two of which sides are multiples; 1 where the pipeline chooses a size, or takes any."""
    height, width = default
    units = (2**power for power in range(9)) if all(default) else ()
    return next((unit for unit in units if fits((height + unit, width)) and fits((height, width + unit))), 1)


def _shapes(default: tuple[int, int]) -> Iterator[tuple[int, int]]:
    side = sqrt(default[0] * default[1])
    unit = max(LEAST_UNIT, 2 ** int(log2(side / 16)))
    for wide, high in SHAPES:
        height, width = side * sqrt(high / wide), side * sqrt(wide / high)
        yield max(unit, round(height / unit) * unit), max(unit, round(width / unit) * unit)


# LoRAs ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FittingLoras:
    """The LoRAs that fit a model. by_name: NAME, or NAME@TRANSFORMER for a model of several transformers.

    weights: number of weights in all layers that any of them changes, without those that wait in memory of the host.
    reasons: name of another LoRA -> why not.
    """

    by_name: Mapping[str, Lora]
    weights: int
    reasons: Mapping[str, str]

    @staticmethod
    def of(example: Job, loras: Mapping[str, Lora]) -> FittingLoras:
        """Which LoRAs fit the model of an example job. Reads headers of LoRA files, and no weights of a model."""
        fitting, layers, reasons = dict[str, Lora](), dict[str, int](), dict[str, str]()
        for name, lora in loras.items():
            try:
                changed = example.lora_layers(lora)
            except ValueError as reason:
                reasons[name] = str(reason)
                continue
            for placed, changed_layers in changed.items():
                fitting[f"{name}@{placed.transformer}" if placed.transformer else name] = placed
                layers |= changed_layers
        return FittingLoras(fitting, sum(layers.values()), reasons)


def loras_in(folder: Path | None) -> dict[str, Lora]:
    """Name -> LoRA of the files NAME.safetensors in a folder; ValueError for a bad folder or name."""
    if folder is None:
        return {}
    files = sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []
    if not files:
        raise ValueError(f"--loras {folder} has no files NAME{SUFFIX}")
    names = {path.name.removesuffix(SUFFIX): Lora(str(path)) for path in files}
    if bad := next((name for name in names if not LORA_NAME.fullmatch(name)), None):
        allowed = "at most 100 letters, digits, dots, _ and -, beginning with a letter or digit"
        raise ValueError(f"LoRA {bad!r} in --loras {folder}: names must be {allowed}; rename the file")
    return names


def controls_in(words: Iterable[str]) -> dict[str, Fitted]:
    """Name -> ControlNet of words NAME=FOLDER; ValueError for a bad name or folder. Reads headers."""
    found = dict[str, Fitted]()
    for word in words:
        name, equals, folder = word.partition("=")
        if not (equals and folder and LORA_NAME.fullmatch(name)) or name in found:
            raise ValueError(f"got --controlnet {word}, expected NAME=FOLDER with a new name of letters and digits")
        found[name] = open_controlnet(Path(folder))
    return found


def check_all_fit(loras: Iterable[str], models: Sequence[FittingLoras]) -> None:
    """Raise ValueError for a LoRA that fits none of the models."""
    fitting = {name.partition("@")[0] for model in models for name in model.by_name}
    for name in loras:
        if name not in fitting:
            reasons = "; ".join(dict.fromkeys(model.reasons[name] for model in models))
            raise ValueError(f"LoRA {name} fits no served model: {reasons}")
