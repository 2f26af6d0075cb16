"""Runs the pipelines of diffusers: their own loop, with a parallelized transformer.

It takes the flags of the command line to the arguments of the pipeline's call, as far as the pipeline has them, and
refuses the others. Every rank makes the same call; the pipeline's parts are loaded by `seqpar.loading.pipeline`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.image_processor import VaeImageProcessor

from seqpar.families._find import is_distilled, is_guided, is_known
from seqpar.loading import lora as _lora
from seqpar.loading import schedulers as _schedulers
from seqpar.loading.errors import loop_context
from seqpar.loading.folder import PipelineParts, kind_of, parts_of_folder, parts_of_preset
from seqpar.loading.names import Preset
from seqpar.loading.parts import read_pipeline
from seqpar.loading.pipeline import Folder, load_pipeline
from seqpar.loading.random import random_pipeline
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines import own_loop as timed_
from seqpar.pipelines.arguments import (
    FPS,
    RATE,
    Frames,
    arguments_of,
    check_flags,
    check_frames,
    draws_anew,
    frame_rate,
    frames_of,
    makes_videos,
    shown_image,
    taking_images,
)
from seqpar.pipelines.planning import Planned, grid_of, planned
from seqpar.pipelines.request import NO_LORA, GenerationRequest
from seqpar.planner.predict import Load
from seqpar.transformer import lora as lora_files
from seqpar.transformer.blocks import expected
from seqpar.types.facts import Work
from seqpar.types.guidance import Guidance
from seqpar.vae.shared import looked_at


def watched_vae(
    vae: Any, name: str, look: Callable[[Any], None], begin: Callable[[], None]
) -> AbstractContextManager[None]:
    """Call `begin` before each `decode` or `encode` of a pipeline's VAE, if it has one, and `look` with the result."""
    return looked_at(vae, name, look, begin) if hasattr(vae, name) else nullcontext()


def refuse_latents(finite: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
    """Raise FloatingPointError for the first step whose latents are not finite. finite: whether each step's are."""
    bad = [] if not finite else torch.stack([*finite]).logical_not().nonzero().flatten().tolist()
    if bad:
        raise FloatingPointError(
            f"latents stopped being finite at step {bad[0] + 1} of {len(finite)} in "
            f"{str(dtype).removeprefix('torch.')}; try dtype fp32 or bf16, or check the weights"
        )


def refuse_infinite(finite: Sequence[bool], dtype: torch.dtype) -> None:
    """Raise FloatingPointError if one of the results is not finite."""
    bad = [number for number, right in enumerate(finite, 1) if not right]
    if bad:
        raise FloatingPointError(
            f"the decoder made pixels that are not finite in {len(bad)} of {len(finite)} results (the first is number "
            f"{bad[0]}) in {str(dtype).removeprefix('torch.')}; try dtype fp32 or bf16, or check the weights"
        )


def counted(
    on_step: Callable[[int], None], finite: list[torch.Tensor], pipe: Any, index: int, timestep: Any, tensors: Any
) -> dict[str, Any]:
    """Tell of a step that diffusers' loop has made, and note whether its latents are finite; made for its callbacks."""
    if isinstance(latents := tensors.get("latents"), torch.Tensor):
        finite.append(latents.isfinite().all())
    on_step(index)
    return {}


PIPELINES = ()  # those of no other file
ASKED = "prompts"
MODELS = ()  # nor native models
SIGMAS = "np.linspace(1.0, 1 / num_inference_steps"  # in the code of pipelines that give their scheduler sigmas


@dataclass(frozen=True)
class Adapted:
    """Checked work of a pipeline with diffusers' own loop, before any weight is read.

    kind: the pipeline's class. files: its checked parts. request: what was asked for. arguments: those of its call,
    without generator and callback. guidance: classifier-free, with the pipeline's own scale where none is named.
    embedded: the scale that the transformer takes as an input, or None.
    """

    kind: Any
    files: PipelineParts
    request: GenerationRequest
    arguments: Mapping[str, Any]
    guidance: Guidance
    embedded: float | None
    planned: Planned

    @property
    def source(self) -> Path | Preset:
        """Return the pipeline's folder, or the preset."""
        return self.files.source

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the weights."""
        return self.request.dtype

    @property
    def video(self) -> bool:
        """Return whether it makes videos."""
        return makes_videos(self._parameters)

    @property
    def frames(self) -> Frames | None:
        """Return the numbers of frames that the decoder of its videos makes; None for pictures, or if no file tells."""
        return frames_of(self._parameters, self.files)

    @property
    def fps(self) -> float:
        """Return the frames a second of its videos."""
        return frame_rate(self.request, self._parameters)

    @property
    def notes(self) -> list[tuple[str, str]]:
        """Return (title, text) of the summary's lines about its pictures, and about texts of a known length."""
        parameters = self._parameters
        shown = [("image", shown_image(picture, self.arguments, parameters)) for picture in self.request.images]
        if self.video and self.request.fps is None and RATE not in parameters:
            shown.append(("fps", f"{FPS} frames a second, as most models: the files name no number; --fps does"))
        named, random = parameters.get("max_sequence_length"), isinstance(self.source, Preset)
        by = "of random numbers: no text encoder comes with this model" if random else "a prompt, encoded on rank 0"
        return shown if named is None else [*shown, ("text", f"{named.default} tokens {by}")]

    @property
    def strength(self) -> float:
        """Return which part of the steps is made: all, but where a picture is changed."""
        own = self._parameters.get("strength")
        return self.arguments.get("strength", own.default) if own and draws_anew(self._parameters) else 1.0

    @property
    def steps(self) -> int:
        """Return the number of denoising steps that are made."""
        count = self.arguments["num_inference_steps"]
        return count - int(count - count * self.strength)  # as diffusers rounds

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
        return "callback_on_step_end" in self._parameters

    @property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        """Return those of the pipeline's call."""
        return inspect.signature(self.kind.__call__).parameters

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

    def pipeline(self, mesh: Mesh, encode: Callable[[Any], object] | None = None) -> Any:
        """Return diffusers' pipeline on this rank's device; the same ValueError on every rank if it does not load.

        encode: calls `encode`, so that texts are encoded before the transformers' weights are loaded (`load_pipeline`).
        """
        if isinstance(self.source, Preset):
            preset = self.source
            pipe = mesh.on_all_ranks(lambda: random_pipeline(preset, self.kind, self.dtype, mesh.device))
        else:
            files = self.files
            folder = Folder(self.source, self.kind, files.index, files.fitted, files.file, self.request.loras)
            pipe = load_pipeline(folder, self.dtype, mesh, encode, expected)
            reason = lora_files.merge(pipe, self.request.loras) if self.request.loras else None
            if reason is not None and mesh.is_main:
                print(f"seqpar: LoRAs stay beside the weights, because of this: {reason}", flush=True)
        if self.request.scheduler is not None:
            pipe.scheduler = self.scheduler_of(pipe.scheduler)
        return pipe

    def scheduler_of(self, own: Any) -> Any:
        """Return the scheduler of this request's name with the settings of the pipeline's own; without a name that."""
        if self.request.scheduler is None:
            return own
        return _schedulers.taking_mu(_schedulers.build(dict(own.config), self.request.scheduler))

    def make(
        self,
        pipe: Any,
        on_step: Callable[[int], None],
        mesh: Mesh,
        on_decode: Callable[[int], None] = lambda count: None,
        on_encode: Callable[[int], None] = lambda count: None,
    ) -> list[Any]:
        """Return the pictures as PIL images, or the videos as arrays (frames, height, width, 3) in [0, 1].

        on_step(index): called after each step. on_decode(count): called with 0 when the VAE begins, and with the number
        of results when it has ended. on_encode(count): the same for input images, with 1 for each call of
        the VAE. Raises FloatingPointError if a result is not finite, and ValueError where diffusers fails in its loop,
        as a value in a file that no schema here knows can make it.
        """
        result, finite = self._run(pipe, on_step, mesh, on_decode, on_encode)
        results = list(result.frames if self.video else result.images)
        if mesh.is_main and getattr(result, "audio", None) is not None:
            print("seqpar: the sound of the video is not written; `seqpar.load` returns a pipeline that gives it")
        if self.arguments.get("output_type") == "np":
            refuse_latents(finite, self.dtype)
            refuse_infinite([bool(np.isfinite(each).all()) for each in results], self.dtype)
        if self.video or not isinstance(results[0], np.ndarray):
            return results
        return VaeImageProcessor.numpy_to_pil(np.stack(results))

    def _run(
        self,
        pipe: Any,
        on_step: Callable[[int], None],
        mesh: Mesh,
        on_decode: Callable[[int], None],
        on_encode: Callable[[int], None],
    ) -> tuple[Any, list[torch.Tensor]]:
        """Return what the pipeline returns, and whether the latents after each step were finite."""
        arguments, finite = self.called(mesh.device), list[torch.Tensor]()
        if self.counts_steps:
            arguments["callback_on_step_end"] = partial(counted, on_step, finite)

        def decoded(made: Any) -> None:
            refuse_latents(finite, self.dtype)
            refuse_infinite([bool(each.isfinite().all()) for each in made[0]], self.dtype)
            on_decode(len(made[0]))

        vae = getattr(pipe, "vae", None) if self.request.images else None
        with (
            watched_vae(vae, "encode", lambda encoded: on_encode(1), lambda: on_encode(0)),
            watched_vae(getattr(pipe, "vae", None), "decode", decoded, lambda: on_decode(0)),
        ):
            return self._call(pipe, arguments, mesh), finite

    def few(self, steps: int, device: torch.device) -> dict[str, Any]:
        """Return the arguments of a call that makes at most so many steps, and as many as the run at most."""
        arguments = {name: value for name, value in self.called(device).items() if name != "output_type"}
        asked = min(math.ceil(steps / self.strength), self.arguments["num_inference_steps"])
        return arguments | {"num_inference_steps": asked}

    def encode(self, pipe: Any, mesh: Mesh) -> None:
        """Call a pipeline for the work of its encoders."""
        pipe.set_progress_bar_config(disable=True)
        self._call(pipe, self.called(mesh.device), mesh)

    def _call(self, pipe: Any, arguments: Mapping[str, Any], mesh: Mesh) -> Any:
        name = self.source.name if isinstance(self.source, Preset) else self.source
        with loop_context(f"got pipeline {name}, which fails in its loop", mesh.world.size > 1):
            return pipe(**arguments, generator=torch.Generator().manual_seed(self.request.seed))

    def called(self, device: torch.device) -> dict[str, Any]:
        """Return the arguments of the call; of a preset, random numbers stand for the texts."""
        arguments = dict(self.arguments)
        if isinstance(self.source, Preset):
            for number, kind in enumerate(("", "negative_")):
                if texts := arguments.pop(f"{kind}prompt", None):
                    encoded = self.source.encoded(len(texts), self.request.seed + number)
                    arguments |= {f"{kind}{name}": x.to(device, self.dtype) for name, x in encoded.items()}
        return arguments


def check(request: GenerationRequest, source: Path | Preset | PipelineParts) -> Adapted:
    """Return the work that a request describes; ValueError for whatever does not fit. Reads configs, no weights.

    source: a pipeline's folder, or the file of a transformer in one, or a preset; or the parts of earlier work, which
    are not read again.
    """
    parts = source if isinstance(source, PipelineParts) else parts_of(source)
    if isinstance(parts.source, Preset):
        request.refuse(NO_LORA, lora=request.loras)
    kind = taking_images(request, parts.kind, parts.index)
    parameters = inspect.signature(kind.__call__).parameters
    check_flags(request, kind.__name__, parameters)
    check_frames(request, kind.__name__, frames_of(parameters, parts))
    arguments = arguments_of(request, kind.__name__, parameters, bool(parts.config.get("guidance_embeds")))
    request = replace(request, loras=_lora.check(request.loras, kind, parts.models))
    (guidance, embedded), run = _planned(request, parts, parameters)
    if run.pixels is not None and "height" in parameters:
        arguments |= {"height": run.pixels[0], "width": run.pixels[1]}
    _check_schedule(request, kind, parts, run)
    return Adapted(kind, parts, request, arguments, guidance, embedded, run)


def parts_of(source: Path | Preset) -> PipelineParts:
    """Return the checked parts of a pipeline's folder, or of a file in one, or of a preset."""
    if isinstance(source, Preset):
        return parts_of_preset(source)
    file = source if source.is_file() else None
    folder = source if file is None else file.parent
    index = read_pipeline(folder)
    kind_of(index, folder)  # a class that diffusers does not have is named before its parts
    return parts_of_folder(folder, index, file)


def _planned(
    request: GenerationRequest, parts: PipelineParts, parameters: Mapping[str, inspect.Parameter]
) -> tuple[tuple[Guidance, float | None], Planned]:
    """Return the guidance of a run, beside the scale that is an input, and what the planner needs."""
    transformer = parts.transformer
    named = parameters.get("guidance_scale")
    scale = named.default if request.guidance is None and named is not None else request.guidance
    distilled = is_distilled(str(parts.index["_class_name"]), parts.index)
    if distilled:
        request.refuse("expected none: this model is distilled, and makes one branch", guidance=request.guidance)
    scale = float(scale) if isinstance(scale, (int, float)) and not distilled else 1.0
    if "true_cfg_scale" in parameters:
        embeds = bool(parts.config.get("guidance_embeds"))
        guidance = Guidance(request.true_guidance or 1.0), scale if embeds else None
    else:
        guidance = (Guidance(scale), None) if is_guided(transformer) else (Guidance(1.0), scale)
    grid = None if makes_videos(parameters) else grid_of(transformer.config, parts.vae)
    if grid is not None and request.size is not None and "use_resolution_binning" not in parameters:
        grid.check(request.size)
    # processors of PAG read the rows of all branches; a transformer of no known family may be called once per step
    guided = guidance[0].on and "pag_scale" not in parameters and is_known(transformer)
    if not request.images or draws_anew(parameters):
        return guidance, planned(transformer, grid, request, guided)
    # a picture's tokens stand beside those of the result, which may take its size
    run = planned(transformer, None if grid is None else replace(grid, trained=None), request, guided)
    return guidance, replace(run, exact=False)


def _check_schedule(request: GenerationRequest, kind: Any, parts: PipelineParts, run: Planned) -> None:
    """Raise ValueError for a scheduler that does not fit, or that cannot make so many steps."""
    if parts.scheduling is None:
        return
    takes_sigmas = SIGMAS in inspect.getsource(inspect.getmodule(kind))  # pyright: ignore[reportArgumentType]
    if request.scheduler is None and not takes_sigmas:
        return
    scheduler = _schedulers.build(parts.scheduling, request.scheduler)
    if takes_sigmas:
        _schedulers.check_steps(scheduler, request.steps)
        timing = _schedulers.flow_timing(scheduler, request.steps, run.load.tokens)
        timed_.timed(scheduler, request.steps, timing=timing)
