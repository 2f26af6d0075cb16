"""Runs the pipelines of diffusers: their own loop, with a parallelized transformer.

It takes the flags of the command line to the arguments of the pipeline's call, as far as the pipeline has them, and
refuses the others. Every rank makes the same call; the pipeline's parts are loaded by `seqpar.pipelines._parts`.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers.image_processor import VaeImageProcessor

from seqpar.adapter.estimate import is_guided
from seqpar.pipelines import _lora, _schedulers
from seqpar.pipelines._family import FOR_CLASSES, NO_LORA, Order
from seqpar.pipelines._folder import check_parts, kind_of, model_of
from seqpar.pipelines._naming import naming_loop
from seqpar.pipelines._parts import Folder, load_pipeline
from seqpar.pipelines._planned import Planned, built, grid_of, planned
from seqpar.pipelines._random import random_pipeline
from seqpar.pipelines._texts import check_named, check_tokenizer
from seqpar.planner.predict import Load
from seqpar.ranks.mesh import Mesh
from seqpar.sampling.guidance import Guidance
from seqpar.types.facts import Work
from seqpar.vae.shared import looked_at
from seqpar.weights.jsons import read_json
from seqpar.weights.parts import part_of, parts_of, read_pipeline, read_scheduler
from seqpar.weights.presets import Preset

PIPELINES = ()  # those of no other file
MODELS = ()  # nor native models
SIGMAS = "np.linspace(1.0, 1 / num_inference_steps"  # in the code of pipelines that give their scheduler sigmas


@dataclass(frozen=True)
class Adapted:
    """Checked work of a pipeline with diffusers' own loop, before any weight is read.

    kind: the pipeline's class. source: its folder, or a preset. arguments: those of its call, without generator and
    callback. scheduler: the class name of another scheduler, or None. video: whether it makes videos. guidance:
    classifier-free, with the pipeline's own scale where none is named. embedded: the scale that the transformer takes
    as an input, or None. file: that of the transformer, where it is not diffusers'
    (`seqpar.weights.single_file`). loras: adapters, with their scales. notes: (title, text) of lines of the summary.
    """

    kind: Any
    source: Path | Preset
    dtype: torch.dtype
    arguments: Mapping[str, Any]
    seed: int
    scheduler: str | None
    video: bool
    guidance: Guidance
    embedded: float | None
    planned: Planned
    file: Path | None = None
    loras: tuple[_lora.Lora, ...] = ()
    notes: Sequence[tuple[str, str]] = field(default_factory=tuple)

    @property
    def steps(self) -> int:
        """Return the number of denoising steps."""
        return self.arguments["num_inference_steps"]

    @property
    def prompts(self) -> list[str]:
        """Return the prompt of each picture or video."""
        return self.arguments["prompt"]

    @property
    def texts(self) -> int:
        """Return how many different texts are encoded."""
        others = self.arguments.get("negative_prompt") or ()
        return 0 if isinstance(self.source, Preset) else len({*self.prompts, *others})

    @property
    def counts_steps(self) -> bool:
        """Return whether the pipeline tells of every step."""
        return "callback_on_step_end" in inspect.signature(self.kind.__call__).parameters

    @property
    def work(self) -> Work:
        """Return what the planner needs of the transformer."""
        return self.planned.work

    @property
    def load(self) -> Load:
        """Return what the planner needs of the run."""
        return self.planned.load

    @property
    def pixels(self) -> tuple[int, int] | None:
        """Return height and width of the pictures; None where the pipeline chooses them."""
        return self.planned.pixels

    @property
    def decodes(self) -> bool:
        """Return whether latents are decoded: a pipeline of diffusers does so itself."""
        return True

    def pipeline(self, mesh: Mesh, encode: Callable[[Any], object]) -> Any:
        """Return diffusers' pipeline on this rank's device; the same ValueError on every rank if it does not load.

        encode: calls `encode`; the texts are encoded before the transformers' weights are loaded, see `load_pipeline`.
        """
        if isinstance(self.source, Preset):
            preset = self.source
            pipe = mesh.together(lambda: random_pipeline(preset, self.dtype, mesh.device))
        else:
            folder = Folder(self.source, self.kind, read_pipeline(self.source), self.file, self.loras)
            pipe = load_pipeline(folder, self.dtype, mesh, encode)
        if self.scheduler is not None:
            own = _schedulers.build(dict(pipe.scheduler.config), self.scheduler)
            pipe.scheduler = _schedulers.taking_mu(own)
        return pipe

    def make(
        self, pipe: Any, on_step: Callable[[int], None], on_decode: Callable[[int], None], mesh: Mesh
    ) -> list[Any]:
        """Return the pictures as PIL images, or the videos as arrays (frames, height, width, 3) in [0, 1].

        on_step(index): called after each step. on_decode(count): called with 0 when the VAE begins, and with the number
        of results when it has ended. Raises FloatingPointError if one of them is not finite, and ValueError where
        diffusers fails in its loop, as a value in a file that no schema here knows can make it.
        """
        arguments, finite = self.called(), list[torch.Tensor]()
        if self.counts_steps:
            arguments["callback_on_step_end"] = partial(_counted, on_step, finite)

        def decoded(made: Any) -> None:
            _refuse_latents(finite, self.dtype)
            _refuse_infinite([bool(each.isfinite().all()) for each in made[0]], self.dtype)
            on_decode(len(made[0]))

        with _checked_vae(getattr(pipe, "vae", None), decoded, lambda: on_decode(0)):
            result = self._call(pipe, arguments, mesh)
        results = list(result.frames if self.video else result.images)
        if self.arguments.get("output_type") == "np":
            _refuse_latents(finite, self.dtype)
            _refuse_infinite([bool(np.isfinite(each).all()) for each in results], self.dtype)
        if self.video or not isinstance(results[0], np.ndarray):
            return results
        return VaeImageProcessor.numpy_to_pil(np.stack(results))

    def encode(self, pipe: Any, mesh: Mesh) -> None:
        """Call a pipeline for the work of its encoders."""
        pipe.set_progress_bar_config(disable=True)
        self._call(pipe, self.called(), mesh)

    def _call(self, pipe: Any, arguments: Mapping[str, Any], mesh: Mesh) -> Any:
        name = self.source.name if isinstance(self.source, Preset) else self.source
        with naming_loop(f"got pipeline {name}, which fails in its loop", mesh.world.size > 1):
            return pipe(**arguments, generator=torch.Generator().manual_seed(self.seed))

    def called(self) -> dict[str, Any]:
        """Return the arguments of the call; of a preset, random numbers stand for the texts."""
        arguments = dict(self.arguments)
        if isinstance(self.source, Preset):
            arguments |= self.source.encoded(arguments.pop("prompt"), self.seed, self.dtype)
            if others := arguments.pop("negative_prompt", None):
                encoded = self.source.encoded(others, self.seed + 1, self.dtype)
                arguments |= {f"negative_{name}": x for name, x in encoded.items()}
        return arguments


@dataclass(frozen=True)
class _Parts:
    """What is known of a pipeline's parts. index: its model_index.json. config: the transformer's. vae: or None."""

    index: Mapping[str, Any]
    config: Mapping[str, Any]
    vae: Any
    scheduling: Mapping[str, Any] | None


def check(order: Order, source: Path | Preset) -> Adapted:
    """Return the work that an order describes; ValueError for whatever does not fit. Reads configs, no weights.

    source: a pipeline's folder, or the file of a transformer in one, or a preset.
    """
    file = source if isinstance(source, Path) and source.is_file() else None
    source = file.parent if file is not None else source
    index = source.index if isinstance(source, Preset) else read_pipeline(source)
    kind = kind_of(index, source if isinstance(source, Path) else Path(source.name))
    parameters = inspect.signature(kind.__call__).parameters
    video = "num_frames" in parameters
    _check_flags(order, kind.__name__, parameters)
    if video:
        _check_exporter(kind.__name__)
    parts = _of_preset(order, source) if isinstance(source, Preset) else _of_folder(source, index, file)
    arguments = _arguments(order, kind.__name__, parameters, bool(parts.config.get("guidance_embeds")))
    _lora.check(order.loras, kind, model_of(index), parts.config)
    (guidance, embedded), run = _planned(order, parts, parameters, video)
    if run.pixels is not None and "height" in parameters:
        arguments |= {"height": run.pixels[0], "width": run.pixels[1]}
    _check_schedule(order, kind, parts, run)
    notes = _notes(parameters, isinstance(source, Preset))
    return Adapted(
        kind,
        source,
        order.dtype,
        arguments,
        order.seed,
        order.scheduler,
        video,
        guidance,
        embedded,
        run,
        file,
        order.loras,
        notes,
    )


def _of_folder(folder: Path, index: Mapping[str, Any], file: Path | None) -> _Parts:
    """Return the checked parts of a pipeline's folder; ValueError for one that cannot be loaded."""
    config = check_parts(folder, index, file)
    _check_tokenizers(folder, index)
    library, name = part_of(index, "vae") or ("", "")
    kind, path = getattr(diffusers, name, None), folder / "vae" / "config.json"
    vae = built(kind, read_json(path), str(path)) if library == "diffusers" and kind and path.is_file() else None
    scheduling = read_scheduler(folder / "scheduler") if (folder / "scheduler").is_dir() else None
    return _Parts(index, config, vae, scheduling)


def _check_tokenizers(folder: Path, index: Mapping[str, Any]) -> None:
    """Raise ValueError for a tokenizer without its files, or without the encoder that reads its tokens."""
    for name in (name for name, _ in parts_of(index) if name.startswith("tokenizer") and (folder / name).is_dir()):
        check_named(folder, index, [name.replace("tokenizer", "text_encoder")])
        check_tokenizer(folder / name)


def _of_preset(order: Order, preset: Preset) -> _Parts:
    """Return the parts of a preset; ValueError for flags that need files."""
    order.refuse(NO_LORA, lora=order.loras)
    configs = {name: {**config, "_class_name": kind} for name, (kind, config) in preset.parts.items()}
    vae = built(getattr(diffusers, preset.parts["vae"][0]), preset.parts["vae"][1], preset.name)
    return _Parts(preset.index, configs["transformer"], vae, configs["scheduler"])


def _planned(
    order: Order, parts: _Parts, parameters: Mapping[str, inspect.Parameter], video: bool
) -> tuple[tuple[Guidance, float | None], Planned]:
    """Return the guidance of a run, beside the scale that is an input, and what the planner needs."""
    transformer = built(model_of(parts.index), parts.config, str(order.model))
    named = parameters.get("guidance_scale")
    scale = named.default if order.guidance is None and named is not None else order.guidance
    scale = float(scale) if isinstance(scale, (int, float)) else 1.0
    if "true_cfg_scale" in parameters:
        embeds = bool(parts.config.get("guidance_embeds"))
        guidance = Guidance(order.true_guidance or 1.0), scale if embeds else None
    else:
        guidance = (Guidance(scale), None) if is_guided(transformer) else (Guidance(1.0), scale)
    grid = None if video else grid_of(transformer.config, parts.vae)
    count = len(order.pictures)
    return guidance, planned(transformer, grid, order.size, count, order.steps, guidance[0].on, order.dtype)


def _check_schedule(order: Order, kind: Any, parts: _Parts, run: Planned) -> None:
    """Raise ValueError for a scheduler that does not fit, or that cannot make so many steps."""
    if parts.scheduling is None:
        return
    takes_sigmas = SIGMAS in inspect.getsource(inspect.getmodule(kind))  # pyright: ignore[reportArgumentType]
    if order.scheduler is None and not takes_sigmas:
        return
    scheduler = _schedulers.build(parts.scheduling, order.scheduler)
    if takes_sigmas:
        _schedulers.check_steps(scheduler, order.steps)
        timing = _schedulers.flow_timing(scheduler, order.steps, run.load.tokens)
        _schedulers.timed(scheduler, order.steps, timing=timing)


def _notes(parameters: Mapping[str, inspect.Parameter], random: bool) -> list[tuple[str, str]]:
    """Return the summary's line about texts, where the pipeline pads them to a known length."""
    named = parameters.get("max_sequence_length")
    if named is None:
        return []
    by = "of random numbers: no text encoder comes with this model" if random else "a prompt, encoded on rank 0"
    return [("text", f"{named.default} tokens {by}")]


def _check_flags(order: Order, name: str, parameters: Mapping[str, inspect.Parameter]) -> None:
    """Raise ValueError for flags that no pipeline takes this way, and for a pipeline that needs more than a prompt."""
    order.refuse(f"expected none: {name} takes texts", classes=order.classes)
    order.refuse(FOR_CLASSES, respacing=order.respacing)
    order.refuse("expected none: its files say the number", heads=order.heads)
    order.refuse("expected none: diffusers' loop has none", eta=order.eta, guidance_channels=order.guidance_channels)
    if "num_frames" not in parameters:
        order.refuse(f"expected none: {name} makes no videos", frames=order.frames, fps=order.fps)
    if not order.prompts:
        raise ValueError(f"got --model {order.model} without --prompt, expected one: {name} takes texts")
    known, plain = ("self", "prompt"), inspect.Parameter.POSITIONAL_OR_KEYWORD
    needed = [key for key, each in parameters.items() if each.default is each.empty and each.kind is plain]
    needed = [key for key in needed if key not in known]
    if "prompt" not in parameters or needed:
        takes = ", ".join(needed) or "no prompt"
        raise ValueError(f"got a {name}, which takes {takes}, expected one that needs nothing but a prompt")


def _arguments(order: Order, name: str, parameters: Mapping[str, Any], embeds: bool) -> dict[str, Any]:
    """Return the arguments of the pipeline's call that the flags name.

    parameters: those of the call. embeds: whether the transformer takes the guidance scale as an input.
    """
    prompts = order.pictures
    arguments: dict[str, Any] = {"prompt": prompts, "num_inference_steps": order.steps}
    flags: dict[str, tuple[str, Any]] = {
        "negative_prompt": ("negative_prompt", None if order.negative is None else [order.negative] * len(prompts)),
        "guidance_scale": ("guidance", order.guidance),
        "true_cfg_scale": ("true_guidance", order.true_guidance),
        "num_frames": ("frames", order.frames),
        "height": ("size", None if order.size is None else order.size[0]),
        "width": ("size", None if order.size is None else order.size[1]),
    }
    for argument, (flag, value) in flags.items():
        if argument not in parameters:
            order.refuse(f"expected none: {name} takes no {argument}", **{flag: value})
        elif value is not None:
            arguments[argument] = value
    if "true_cfg_scale" in parameters:
        arguments |= _distilled(order, name, embeds, len(prompts))
    if "output_type" in parameters:  # arrays show NaN, which pictures hide as black
        arguments["output_type"] = "np"
    return arguments


def _distilled(order: Order, name: str, embeds: bool, count: int) -> dict[str, Any]:
    """Return further arguments of a pipeline with both guidances; ValueError for a flag that would have no effect."""
    if not embeds:
        without = f"expected --true-guidance: the transformer of this {name} takes no scale as an input"
        order.refuse(without, guidance=order.guidance)
    if (order.true_guidance or 1.0) <= 1:
        order.refuse(
            "expected --true-guidance over 1, too: without it there is one branch", negative_prompt=order.negative
        )
        return {}
    return {} if order.negative is not None else {"negative_prompt": [""] * count}


def _check_exporter(name: str) -> None:
    """Raise ValueError if diffusers cannot write a video here, so that a long run does not fail at its end."""
    if importlib.util.find_spec("imageio") and importlib.util.find_spec("imageio_ffmpeg"):
        return
    raise ValueError(
        f"got a {name}, whose videos diffusers writes by other packages; pip install imageio imageio-ffmpeg"
    )


def _checked_vae(vae: Any, look: Callable[[Any], None], begin: Callable[[], None]) -> AbstractContextManager[None]:
    """Look at what a VAE decodes: pipelines clamp infinity to black or white."""
    return looked_at(vae, "decode", look, begin) if hasattr(vae, "decode") else nullcontext()


def _refuse_latents(finite: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
    """Raise FloatingPointError for the first step whose latents are not finite. finite: whether each step's are."""
    bad = [] if not finite else torch.stack([*finite]).logical_not().nonzero().flatten().tolist()
    if bad:
        raise FloatingPointError(
            f"latents stopped being finite at step {bad[0] + 1} of {len(finite)} in "
            f"{str(dtype).removeprefix('torch.')}; try dtype fp32 or bf16, or check the weights"
        )


def _refuse_infinite(finite: Sequence[bool], dtype: torch.dtype) -> None:
    """Raise FloatingPointError if one of the results is not finite."""
    bad = [number for number, right in enumerate(finite, 1) if not right]
    if bad:
        raise FloatingPointError(
            f"the decoder made pixels that are not finite in {len(bad)} of {len(finite)} results (the first is number "
            f"{bad[0]}) in {str(dtype).removeprefix('torch.')}; try dtype fp32 or bf16, or check the weights"
        )


def _counted(
    on_step: Callable[[int], None], finite: list[torch.Tensor], pipe: Any, index: int, timestep: Any, tensors: Any
) -> dict[str, Any]:
    """Tell of a step that diffusers' loop has made, and note whether its latents are finite; made for its callbacks."""
    if isinstance(latents := tensors.get("latents"), torch.Tensor):
        finite.append(latents.isfinite().all())
    on_step(index)
    return {}
