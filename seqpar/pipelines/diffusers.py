"""Any pipeline of diffusers: its own loop, with a parallelized transformer.

Flags become arguments of the pipeline's call; flags that it does not take are refused. Every rank makes the same call;
`seqpar.loading.pipeline` loads the pipeline's parts.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from diffusers.image_processor import VaeImageProcessor
from torch import Tensor

from seqpar.families import Preset
from seqpar.families._find import gives_sigmas, needs_picture, pairs_calls, presets, stored_in_8_bits
from seqpar.families._modular import called, hide_bars, is_modular, parameters_of, set_scale, stepping
from seqpar.loading import lora as _lora
from seqpar.loading import schedulers as _schedulers
from seqpar.loading.checkpoint import Fitted
from seqpar.loading.encoders import at_first_call, forget_encoders
from seqpar.loading.errors import loop_context
from seqpar.loading.folder import PipelineParts, parts_of_folder, parts_of_random
from seqpar.loading.lora import Lora
from seqpar.loading.names import RandomModel
from seqpar.loading.parts import transformers_of
from seqpar.loading.pipeline import load_pipeline
from seqpar.loading.random import random_pipeline
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.arguments import (
    FPS,
    MASK,
    RATE,
    arguments_of,
    check_blocks,
    check_cache,
    check_control,
    check_flags,
    check_frames,
    check_guidance,
    check_limits,
    controlled,
    draws_anew,
    frame_rate,
    frames_of,
    guidance_of,
    length_of,
    makes_videos,
    own_rate,
    preset_of,
    shown_image,
    taking_images,
    with_preset,
)
from seqpar.pipelines.calls import (
    accepts,
    estimated,
    loaded_control,
    refuse_latents,
    sounds_of,
    watched_vae,
    with_parts_of,
)
from seqpar.pipelines.load import keep_fp32
from seqpar.pipelines.loss import check_searched, fixed_run_of, settled_loss
from seqpar.pipelines.own_loop import timed
from seqpar.pipelines.pictures import Sound, digest
from seqpar.pipelines.planning import Planned, grid_of, planned
from seqpar.pipelines.protocol import NO_LORA, Events, Frames, GenerationRequest, Result, as_text, no_event, scales
from seqpar.planner.plan import Plan, is_lossy, settled
from seqpar.planner.predict import Load
from seqpar.transformer import lora as lora_files
from seqpar.transformer.attention8 import check_counts
from seqpar.transformer.blocks import expected
from seqpar.transformer.calibration import Calibration, FixedRun, why_no_blocks, why_not
from seqpar.transformer.lossy import computed_steps
from seqpar.transformer.parallelize import call_of, calls_of, parallelize, passing
from seqpar.transformer.step_cache import step_cache
from seqpar.types.facts import Work
from seqpar.types.guidance import Guidance
from seqpar.types.say import say
from seqpar.vae.on_mesh import refuse_infinite
from seqpar.vae.pipeline import VaeMode
from seqpar.vae.strips import DecodeMode

SIDES = ("height", "width")
VAE: dict[DecodeMode, VaeMode] = {"auto": "auto", "strips": True, "pictures": False, "tiled": "tiled"}


@dataclass(frozen=True)
class Source:
    """The checked parts of a pipeline: `seqpar.pipelines.protocol.Source`. controls: ControlNets by name."""

    parts: PipelineParts
    controls: Mapping[str, Fitted] = field(default_factory=dict[str, Fitted])
    takes: ClassVar[Literal["classes", "prompts"]] = "prompts"

    @staticmethod
    def locate(source: Path | RandomModel) -> Source:
        """Return the source of a pipeline's folder, of a transformer's file in one, or of a model of random weights."""
        return Source(parts_of_random(source) if isinstance(source, RandomModel) else parts_of_folder(source))

    @property
    def class_labels(self) -> dict[int, tuple[str, ...]]:
        return {}

    @property
    def needs_image(self) -> bool:
        return needs_picture(self.parts.caller) or self.needs_mask

    @property
    def needs_mask(self) -> bool:
        return MASK in parameters_of(self.parts.caller)

    @property
    def presets(self) -> dict[str, Preset]:
        return presets(self.parts.kind.__name__, self.parts.index)

    def check(self, request: GenerationRequest) -> DiffusersJob:
        parts = self.parts
        if isinstance(parts.source, RandomModel):
            request.refuse(NO_LORA, lora=request.loras)
            request.refuse("errors are measured with trained weights", min_psnr=request.min_psnr)

        # what the call of the pipeline's class takes
        kind = taking_images(request, parts.caller, parts.index)
        if request.control is not None:
            check_control(kind, self.controls.get(request.control.name), parts.config)
        modular = is_modular(kind)
        parameters = parameters_of(parts.caller if modular else kind, bool(request.images))
        check_flags(request, kind.__name__, parameters)
        if modular:
            check_limits(request, parts.caller)
        check_frames(request, kind.__name__, frames_of(parameters, parts))
        embeds = bool(parts.config.get("guidance_embeds"))
        preset = preset_of(request, kind.__name__, parts.index)
        arguments = dict[str, Any]()
        if preset is not None:
            check_guidance(request, preset, parameters, embeds)
            request, arguments = with_preset(request, preset), dict(preset.arguments)
        arguments |= arguments_of(request, kind.__name__, parameters, embeds)

        # what its transformers compute
        check_blocks(request, parts, why_no_blocks)
        check_cache(request, parts)
        request = replace(request, loras=_lora.check(request.loras, kind, parts.models))
        guidance, embedded = guidance_of(request, parts, parameters)

        # the planner's view, and steps that it does not see
        run = self._planned(request, parameters, guidance)
        if run.pixels is not None and "height" in parameters and not makes_videos(parameters):
            arguments |= dict(zip(SIDES, run.pixels, strict=True))
        self._check_steps(request, kind.__name__, preset, run.load.tokens)
        return DiffusersJob(kind, self, request, arguments, guidance, embedded, preset, **vars(run))

    def _planned(
        self, request: GenerationRequest, parameters: Mapping[str, inspect.Parameter], guidance: Guidance
    ) -> Planned:
        parts, grid = self.parts, grid_of(self.parts.transformer.config, self.parts.vae)
        rounds = "use_resolution_binning" in parameters or makes_videos(parameters)
        if grid is not None and request.size is not None and not rounds:
            grid.check(request.size)
        # processors of PAG read the rows of all branches; a transformer of no known family may be called once per step
        guided = guidance.on and "pag_scale" not in parameters and pairs_calls(parts.transformer)
        run = planned(parts, grid, request, parameters, guidance.on, guided)
        waiting = request.park and parts.take_turns
        held = [parts.transformer] if waiting else [*parts.transformers.values()]
        whole = (*held, *(fitted.model for fitted in self.controls.values()))
        load = replace(run.load, parameters=sum(x.numel() for part in whole for x in part.parameters()))
        if request.precision is not None and not isinstance(parts.source, RandomModel):
            stored = (part.get_parameter(name) for part in held for name in stored_in_8_bits(part))
            load = replace(load, stored=sum(x.numel() for x in stored))
        return replace(run, load=load)

    def _check_steps(self, request: GenerationRequest, name: str, preset: Preset | None, tokens: int) -> None:
        scheduling = self.parts.scheduling
        if request.steps < 2 and _schedulers.counts_the_end(scheduling):
            raise ValueError(f"got --steps {request.steps}, expected 2 or more: {name} counts the end as a step")
        if request.sigmas and (scheduling is None or not _schedulers.is_flow(scheduling)):
            raise ValueError(f"sigmas are those of flow matching, which {name} does not use; leave them out")
        takes_sigmas = gives_sigmas(name) and not (preset is not None and preset.sigmas)
        if scheduling is not None and (request.scheduler is not None or takes_sigmas):
            scheduler = self.schedule(request.scheduler, request.steps, tokens, takes_sigmas)
            if request.attention_steps is not None:
                check_counts(scheduler)

    def having(self, controls: Mapping[str, Fitted], all_fit: bool = False) -> Source:
        fitting = dict[str, Fitted]()
        for name, net in controls.items():
            try:
                check_control(controlled(self.parts.kind), net, self.parts.config)
            except ValueError as error:
                if all_fit:
                    raise ValueError(f"ControlNet {name} does not fit: {error}") from None
                continue
            fitting[name] = net
        return replace(self, controls=fitting)

    def schedule(self, name: str | None, steps: int, tokens: int = 1024, sigmas: bool | None = None) -> Any:
        """Return the scheduler of this name, or the pipeline's own; ValueError if it does not fit, or for such steps.

        tokens: of the state. sigmas: whether the pipeline gives them to it; None for the folder's class.
        """
        scheduler = _schedulers.build(self.parts.scheduling or {}, name)
        if gives_sigmas(self.parts.kind.__name__) if sigmas is None else sigmas:
            _schedulers.check_steps(scheduler, steps)
            timed(scheduler, steps, timing=_schedulers.flow_timing(scheduler, steps, tokens))
        return scheduler


@dataclass(frozen=True)
class DiffusersJob:
    """A checked request for a pipeline of diffusers: `seqpar.pipelines.protocol.Job`.

    kind: the pipeline's class. arguments: those of its call, without generator and callback. preset: that of the
    request. work, load, channels, pixels, exact: `Planned`.
    """

    kind: Any
    source: Source
    request: GenerationRequest
    arguments: Mapping[str, Any]
    guidance: Guidance
    embedded: float | None
    preset: Preset | None
    work: Work
    load: Load
    channels: int
    pixels: tuple[int, int] | None
    exact: bool
    decodes = True
    labels = None

    @property
    def default_pixels(self) -> tuple[int, int]:
        default = [self.parameters[side].default for side in SIDES if side in self.parameters]
        known = len(default) == 2 and all(isinstance(side, int) for side in default)
        return self.pixels or ((default[0], default[1]) if known else (0, 0))

    @property
    def why_not_planned(self) -> str | None:
        name = self.kind.__name__
        return None if self.exact else f"the files of {name} do not state its number of tokens; add --size and --frames"

    @property
    def why_no_steps(self) -> str | None:
        known = is_modular(self.kind) or "callback_on_step_end" in self.parameters
        return None if known else f"{self.kind.__name__} reports no steps (callback_on_step_end)"

    @property
    def steps(self) -> int:
        count = self.arguments["num_inference_steps"]
        if _schedulers.counts_the_end(self.source.parts.scheduling):
            return count - 1
        return count - int(count - count * self.strength)  # as diffusers rounds

    @property
    def strength(self) -> float:
        """Share of the steps that is made: all, except for image-to-image."""
        own = self.parameters.get("strength")
        return self.arguments.get("strength", own.default) if own and draws_anew(self.parameters) else 1.0

    @property
    def texts(self) -> int:
        negative = self.arguments.get("negative_prompt") or ()
        return 0 if self.random is not None else len({*self.request.prompts, *negative})

    @property
    def video(self) -> bool:
        return makes_videos(self.parameters)

    @property
    def frames(self) -> Frames | None:
        frames, length = frames_of(self.parameters, self.source.parts), length_of(self.caller)
        return frames if frames is None or length is None else Frames(frames.usual, frames.unit, *length)

    @property
    def fps(self) -> float:
        return frame_rate(self.request, self.parameters, self.caller)

    @property
    def caller(self) -> Any:
        """The class of the pipeline, or a modular pipeline without weights."""
        return self.source.parts.caller if is_modular(self.kind) else self.kind

    @cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return parameters_of(self.caller, bool(self.request.images))

    @property
    def random(self) -> RandomModel | None:
        """The model of random weights, or None."""
        source = self.source.parts.source
        return source if isinstance(source, RandomModel) else None

    def scheduler_of(self, own: Any) -> Any:
        """Return the scheduler of the preset or the name that the request has, or the pipeline's own."""
        if self.preset is not None and self.preset.sigmas:
            return _schedulers.FlowMatchFixedSigmas(self.preset.sigmas)
        if self.request.scheduler is None:
            return own
        return _schedulers.taking_mu(_schedulers.build(dict(own.config), self.request.scheduler))

    def lora_layers(self, lora: Lora) -> dict[Lora, dict[str, int]]:
        if self.random is not None:
            raise ValueError(NO_LORA)
        parts = self.source.parts
        changed = lora_files.check_switched(lora, self.kind, parts.models)
        if self.request.park and parts.take_turns:
            return {placed: dict.fromkeys(layers, 0) for placed, layers in changed.items()}
        eight = set[str]()
        if self.request.precision is not None:
            for name, model in parts.transformers.items():
                eight |= {f"{name}.{path}" for path in stored_in_8_bits(model)}
        return {
            placed: {path: 0 if f"{path}.weight" in eight else size for path, size in layers.items()}
            for placed, layers in changed.items()
        }

    @property
    def folder_kind(self) -> Any:
        """The class that loads, whose parts the folder has: a ControlNet is none of them."""
        return self.kind if self.request.control is None else self.source.parts.kind

    def joined(self, pipe: Any, controls: Mapping[str, Any]) -> Any:
        """Return the pipeline of this job's class with the parts of another one, and its ControlNet."""
        control = self.request.control
        return with_parts_of(pipe, self.kind, **({} if control is None else {"controlnet": controls[control.name]}))

    def load_pipeline(
        self, mesh: Mesh, encode: Sequence[Callable[[Any], object]] = (), look: Callable[[Any], object] = id
    ) -> Any:
        """Return diffusers' pipeline on this rank's device; the same ValueError on every rank if it does not load.

        encode: each calls the pipeline, so that texts are encoded before the transformers' weights are loaded. look:
        called with the pipeline before LoRAs change its weights.
        """
        parts, loras, dtype = self.source.parts, self.request.loras, self.request.dtype
        if isinstance(random := parts.source, RandomModel):
            if self.request.park and mesh.is_main:
                say(f"not parked: {random.name}, whose weights are read from no file")
            pipe = mesh.on_all_ranks(lambda: random_pipeline(random, self.folder_kind, dtype, mesh.device))
            look(pipe)
            return pipe
        eight = self.request.precision is not None
        more: Any = {"park": self.request.park, "preset": self.request.preset}
        pipe = load_pipeline(parts, self.folder_kind, dtype, mesh, loras, encode, expected, eight, **more)
        look(pipe)
        reason = lora_files.merge(pipe, loras) if loras else None
        if reason is not None and mesh.is_main:
            say(f"LoRAs not merged: {reason}")
        return pipe

    def load_model(
        self,
        mesh: Mesh,
        plan: Plan,
        *,
        vae: DecodeMode = "auto",
        on_encode: Callable[[int], None] | None = None,
        loras: Mapping[str, Lora] | None = None,
    ) -> DiffusersModel:
        def why_not_on_mesh(module: Any) -> str | None:
            return why_not(module, mesh.device, self.request.dtype)

        mesh.on_all_ranks(lambda: check_blocks(self.request, self.source.parts, why_not_on_mesh))
        precision, calibrations = self.request.precision, dict[str, Calibration]()
        attention, cache = is_lossy(plan.local.name), step_cache(self.request.cache)
        check_searched(mesh, self.request)

        def encode(pipe: Any) -> None:
            report = on_encode or no_event
            report(0)
            pipe = pipe if self.request.control is None else self.joined(pipe, controls)
            at_first_call(pipe, lambda: report(self.texts))
            hide_bars(pipe)
            self.call(pipe, self.call_arguments(mesh.device), mesh)

        def run_of(pipe: Any) -> FixedRun | None:
            return fixed_run_of(pipe, self.folder_kind, self.source.parts, self.request.dtype, mesh.device)

        def encode_fixed(pipe: Any) -> None:
            if (run := run_of(pipe)) is not None:
                run()

        def look(pipe: Any) -> None:  # nothing of the request takes part, also no LoRA
            nonlocal cache
            run = run_of(pipe) if precision is not None or attention else None
            made, cache = settled_loss(mesh, pipe, self.request, attention, run, self.scheduler_of(pipe.scheduler))
            calibrations.update(made)

        controls = dict[str, Any]()
        for control, fitted in self.source.controls.items():
            controls[control] = mesh.on_all_ranks(partial(loaded_control, fitted, self.request.dtype, mesh.device))
        runs = () if on_encode is None else (encode, *((encode_fixed,) if precision is not None or attention else ()))
        pipe = self.load_pipeline(mesh, runs, look)
        merging = lora_files.switched(pipe, loras, mesh) if loras else None
        mesh = settled(plan, None)
        sequence = plan.layout.sequence > 1
        strategy = plan.strategy.name if sequence else "auto"
        transport = plan.transport.name if sequence or plan.layout.cfg > 1 else "auto"
        names: Any = {"strategy": strategy, "transport": transport, "local": plan.local.name, "vae": VAE[vae]}
        how: Any = {"attention_steps": self.request.attention_steps, "cache": cache}
        parallelize(pipe, mesh, **names, precision=precision, calibrate=calibrations or None, **how)
        reason, own = keep_fp32(pipe), pipe.scheduler
        once = on_encode is not None
        hide_bars(pipe, not once or self.why_no_steps is None or not mesh.is_main)
        pipe.scheduler = self.scheduler_of(own)
        return DiffusersModel(mesh, plan, {self.folder_kind: pipe}, own, vae, merging, reason, once, controls)

    def call_arguments(self, device: torch.device) -> dict[str, Any]:
        """Return the arguments of the call; of random weights, random numbers in place of the texts."""
        arguments = dict(self.arguments)
        if self.random is not None:
            for number, kind in enumerate(("", "negative_")):
                if texts := arguments.pop(f"{kind}prompt", None):
                    encoded = self.random.encoded(len(texts), self.request.seed + number)
                    arguments |= {f"{kind}{name}": x.to(device, self.request.dtype) for name, x in encoded.items()}
        return arguments

    def call(self, pipe: Any, arguments: Mapping[str, Any], mesh: Mesh) -> Any:
        """Call the pipeline; ValueError where diffusers fails in its loop, as values in files can make it."""
        name = self.source.parts.source if self.random is None else self.random.name
        fails = f"got pipeline {name}, which fails in its loop"
        devices = [mesh.device] if mesh.device.type == "cuda" else []
        with torch.random.fork_rng(devices), loop_context(fails, mesh.world.size > 1):
            torch.manual_seed(self.request.seed)  # some pipelines encode images by numbers of no generator
            arguments = {**arguments, "generator": torch.Generator().manual_seed(self.request.seed)}
            return called(pipe, arguments) if is_modular(pipe) else pipe(**arguments)

    def make(self, pipe: Any, events: Events, mesh: Mesh) -> tuple[list[Any], list[Sound]]:
        """Return PIL images, or videos as arrays (frames, height, width, 3) in [0, 1], and the sound of each video.

        Raises FloatingPointError if latents or results are not finite.
        """
        arguments, finite, dtype = self.call_arguments(mesh.device), list[Tensor](), self.request.dtype

        def step(index: int, latents: Any) -> None:
            if isinstance(latents, Tensor):
                finite.append(latents.isfinite().all())  # read after the loop: reading waits for the GPU
            events.step(index)

        def stepped(pipe: Any, index: int, timestep: Any, tensors: Any) -> dict[str, Any]:
            step(index, tensors.get("latents"))
            return {}

        def decoded(result: Any) -> None:
            refuse_latents(finite, dtype)
            refuse_infinite([bool(x.isfinite().all()) for x in result[0]], dtype)
            events.decode(len(result[0]), self.load.images)

        modular = is_modular(pipe)
        if self.why_no_steps is None and not modular:
            arguments["callback_on_step_end"] = stepped
        vae = getattr(pipe, "vae", None)
        encodes = vae if self.request.images or self.request.control is not None else None
        with (
            stepping(pipe, step) if modular else nullcontext(),
            watched_vae(encodes, "encode", lambda _: events.encode(1), lambda: events.encode(0)),
            watched_vae(vae, "decode", decoded, lambda: events.decode(0, self.load.images)),
        ):
            result = self.call(pipe, arguments, mesh)
        results = list(result.frames if self.video else result.images)
        sounds = sounds_of(pipe, result)
        refuse_infinite([bool(np.isfinite(sound.samples_CT).all()) for sound in sounds], dtype)
        if self.arguments.get("output_type") == "np":
            refuse_latents(finite, dtype)
            refuse_infinite([bool(np.isfinite(x).all()) for x in results], dtype)
        if self.video or not isinstance(results[0], np.ndarray):
            return results, sounds
        return VaeImageProcessor.numpy_to_pil(np.stack(results)), []


@dataclass(frozen=True)
class DiffusersModel:
    """A parallelized pipeline on all ranks: `seqpar.pipelines.protocol.Model`.

    pipes: by class and ControlNet; they share all other parts. controls: ControlNets by name. scheduler: the pipeline's
    own. why_rounded: why the loop's state is not fp32, or None. once: whether it generates for one job alone, so that
    its text encoders leave memory at the first step.
    """

    mesh: Mesh
    plan: Plan
    pipes: dict[Any, Any]
    scheduler: Any
    vae: DecodeMode
    merging: Any
    why_rounded: str | None
    once: bool
    controls: Mapping[str, Any]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def notes(self, job: DiffusersJob) -> list[tuple[str, str]]:
        parameters, pipe = job.parameters, self._pipe(job)
        tokens = f"{job.load.tokens} tokens, " if job.exact else ""
        count = f"{job.load.images} {'videos' if job.video else 'pictures'}"
        steps = f"{job.steps} steps of {type(pipe.scheduler).__name__} in {job.kind.__name__}"
        eight = "" if job.request.precision is None else f" and {job.request.precision}"
        notes = [("work", f"{count}, {tokens}{as_text(job.request.dtype)}{eight}, {steps}, {scales(job)}")]
        notes += [] if job.preset is None else [("preset", f"{job.preset.name}: {job.preset}")]
        notes += [("lora", str(lora)) for lora in job.request.loras]
        notes += [("image", shown_image(image, job.arguments, parameters)) for image in job.request.images]
        notes += [] if job.request.mask is None else [("mask", str(job.request.mask))]
        if (control := job.request.control) is not None:
            size = "x".join(map(str, control.picture.size))
            notes.append(("control", f"{control.name} at {control.scale:g}: {control.picture}, {size} pixels"))
        if job.video and job.request.fps is None and RATE not in parameters and own_rate(job.caller) is None:
            notes.append(("fps", f"{FPS} frames per second, as most models: the files name no number; use --fps"))
        if (length := parameters.get("max_sequence_length")) is not None:
            by = "per prompt, encoded on rank 0"
            if job.random is not None:
                by = "of random numbers: no text encoder comes with this model"
            notes.append(("text", f"{length.default} tokens {by}"))
        rounded = "fp32, unless the pipeline itself rounds it"
        notes.append(
            ("state", rounded if self.why_rounded is None else f"as the pipeline keeps it: {self.why_rounded}")
        )
        call: Any = call_of(next(iter(transformers_of(pipe).values())))
        why_eager = "no GPU" if self.mesh.device.type == "cpu" else call.sharded.why_eager()
        graph = "a call of the transformer is one CUDA graph" if why_eager is None else f"none: {why_eager}"
        return [*notes, ("graph", graph)]

    def facts(self, job: DiffusersJob) -> dict[str, Any]:
        facts = {
            "scheduler": type(self._pipe(job).scheduler).__name__,
            "vae": self.vae,
            "prompts": job.request.pictures,
        }
        if job.request.cache is not None:
            caches = [call.steps for _, call in calls_of(self._pipe(job))]
            facts["cache"] = [str(steps.options) for steps in caches if steps is not None]
        if job.request.images:
            facts["images"] = [image.facts for image in job.request.images]
        if job.request.mask is not None:
            facts["mask"] = job.request.mask.facts
        if (control := job.request.control) is not None:
            facts["control"] = {"name": control.name, "scale": control.scale, "image": control.picture.facts}
        return facts | ({"fps": job.fps} if job.video else {})

    def verified(self, job: DiffusersJob, evaluations: int) -> tuple[Any, dict[str, Any]]:
        arguments = job.call_arguments(self.mesh.device)
        arguments.pop("output_type", None)
        steps = job.arguments["num_inference_steps"]
        if job.preset is None or not job.preset.sigmas:
            steps = min(math.ceil(evaluations / job.strength), steps)
        generator = torch.Generator().manual_seed(job.request.seed)
        pipe, arguments = self._pipe(job), arguments | {"num_inference_steps": steps, "generator": generator}
        return pipe, set_scale(pipe, arguments) if is_modular(pipe) else arguments

    def takes(self, job: DiffusersJob) -> bool:
        size = job.request.size or job.default_pixels
        return accepts(self._pipe(job), job.arguments, job.parameters, dict(zip(SIDES, size, strict=True)))

    def switch_loras(self, loras: Sequence[tuple[str, float]]) -> bool:
        return self.merging is not None and self.merging.switch(tuple(loras))

    def generate(self, job: DiffusersJob, events: Events) -> Result:
        pipe = self._pipe(job)
        if self.once:
            for one in self.pipes.values():
                forget_encoders(one)
        before, pipe.scheduler = pipe.scheduler, job.scheduler_of(self.scheduler)
        started = computed_steps(pipe)
        try:
            with passing(pipe, events.boundary), estimated(pipe.scheduler, events.estimates):
                images, sounds = job.make(pipe, events, self.mesh)
        finally:
            pipe.scheduler = before
        computed = None
        if (ended := computed_steps(pipe)) is not None and started is not None:
            computed = ended[0] - started[0], ended[1] - started[1]
            if computed[1] == 0:  # calls of which no cache can leave blocks out
                computed = job.steps, job.steps
        made = [*images, *(sound.samples_CT for sound in sounds)]
        return Result(images, "pixels", partial(digest, made), sounds, computed)

    def _pipe(self, job: DiffusersJob) -> Any:
        """Return the pipeline of a job's class, with its ControlNet; all have the same other parts."""
        control = job.request.control
        key = job.kind if control is None else (job.kind, control.name)
        if key not in self.pipes:
            self.pipes[key] = job.joined(next(iter(self.pipes.values())), self.controls)
            hide_bars(self.pipes[key])
            if self.why_rounded is None:
                keep_fp32(self.pipes[key])
        return self.pipes[key]
