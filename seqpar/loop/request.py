"""The inputs of a denoising run (`Request`), their checks, and the schedule that is built from them (`Course`)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from seqpar.loading.schedulers import check_eta, check_variances, clip_denoised, respace, set_timesteps
from seqpar.loop.distributed import DistributedDiT
from seqpar.loop.interface import Prompt, checked_prompt
from seqpar.loop.steppers import Decision, decide
from seqpar.mesh.inputs import from_rank_0
from seqpar.mesh.mesh import Mesh
from seqpar.types.arguments import MOST_STEPS, check_floats, check_kind, check_named, check_real, check_whole, shown
from seqpar.types.guidance import Guidance, check_layout

Noise = Tensor | Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Request:
    """The inputs of one run, which does not change them.

    scheduler: a diffusers scheduler. noise: full latents, (N, C, H, W) or (N, C, T, H, W); for a model that denoises
    several streams a mapping, in which 3-D tensors are tokens (N, L, C). prompt: the keyword arguments of the model's
    `encode`, N rows each. negative: the prompt of the unconditional branch; None uses the model's null prompt.
    eta: noise that a step adds; None uses the scheduler's default. generator: a CPU generator for noise within the run;
    None uses seed 0. use_clipped_model_output: see diffusers' DDIM. respacing: timesteps by a text of the original DiT,
    such as "250" or "ddim25", which replace the number of steps (DDIM and DDPM; `seqpar.loading.schedulers.spaced`).
    clip_denoised: clip each predicted x0 to +-1, as the original code does (DDIM and DDPM). schedule: keyword arguments
    of the scheduler's `set_timesteps`; sigmas or timesteps in it replace the number of steps, as in diffusers'
    pipelines.
    drawn: streams of the model whose tokens change at every evaluation, (S, N, L, C). negative_drawn: those of them
    that differ in the unconditional branch (UniDiffuser: text that is noise), of the same shapes.
    """

    scheduler: Any
    noise: Noise
    prompt: Prompt
    steps: int
    guidance: Guidance
    eta: float | None = None
    generator: torch.Generator | None = None
    use_clipped_model_output: bool = False
    respacing: str | None = None
    clip_denoised: bool = False
    schedule: Mapping[str, Any] = field(default_factory=dict)
    negative: Prompt | None = None
    drawn: Mapping[str, Tensor] = field(default_factory=dict)
    negative_drawn: Mapping[str, Tensor] = field(default_factory=dict)

    def latents(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The noise of each denoised stream; ValueError if the names do not match."""
        noise = {names[0]: self.noise} if isinstance(self.noise, Tensor) else dict(self.noise)
        if set(noise) != set(names):
            raise ValueError(f"got noise for {', '.join(sorted(noise))}, expected {', '.join(names)}")
        return {name: noise[name] for name in names}


# Checks ------------------------------------------------------------------------------------------------------------


def check_settings(dit: DistributedDiT, settings: Mapping[str, Any]) -> None:
    """Raise the same ValueError on all ranks for a missing or unknown setting. Collective: call on all ranks."""
    known = {item.name: item.default is MISSING and item.default_factory is MISSING for item in fields(Request)[3:]}
    expected = {"steps": "the number of steps", "guidance": "seqpar.Guidance(scale); a scale of 1 is no guidance"}

    def check() -> None:
        for name, required in known.items():
            if required and name not in settings:
                raise ValueError(f"got no {name}=, expected {expected[name]}")
        for name in settings.keys() - known:
            near = get_close_matches(name, known, 1)
            raise ValueError(f"got {name}=, expected {f'{near[0]}=' if near else ', '.join(known)}")

    dit.mesh.on_all_ranks(check)


def check_request(dit: DistributedDiT, request: Request, on_step: object = print) -> None:
    """Raise the same ValueError on all ranks if an argument of any rank is invalid. Collective: call on all ranks.

    Values of the prompt are checked on rank 0, because other ranks use its values.
    """
    dit.mesh.on_all_ranks(lambda: _check(dit, request, on_step))


def _check(dit: DistributedDiT, request: Request, on_step: object) -> None:
    if not callable(on_step):
        raise ValueError(f"got on_step={shown(on_step)}, expected a function of the step's index")
    scheduler, methods = request.scheduler, ("set_timesteps", "step", "config")
    if isinstance(scheduler, type) or not all(hasattr(scheduler, name) for name in methods):
        raise ValueError(f"got scheduler={shown(scheduler)}, expected a scheduler object of diffusers")

    # settings
    check_kind("guidance", request.guidance, Guidance, expected="seqpar.Guidance(scale)")
    check_whole("steps", request.steps, 1, MOST_STEPS)
    if request.eta is not None:
        check_real("eta", request.eta)
    for name in ("use_clipped_model_output", "clip_denoised"):
        check_kind(name, getattr(request, name), bool, expected="True or False")
    expected = "a generator made by torch.Generator(), or None"
    check_kind("generator", request.generator, torch.Generator, type(None), expected=expected)
    if request.generator is not None and request.generator.device.type != "cpu":
        raise ValueError("got a generator on a GPU, expected a CPU generator, whose noise is the same on every device")
    check_kind("respacing", request.respacing, str, type(None), expected='a text such as "250" or "ddim25", or None')
    check_kind("schedule", request.schedule, Mapping, expected="a mapping: arguments of set_timesteps")

    # tensors
    noise = request.noise if isinstance(request.noise, Mapping) else {"": request.noise}
    for name, x in noise.items():
        check_floats(f"noise {name}".strip(), x)
    prompts = [check_named("prompt", request.prompt)]
    prompts += [] if request.negative is None else [check_named("negative", request.negative)]
    for name in ("drawn", "negative_drawn"):
        check_named(name, getattr(request, name))
    if dit.mesh.is_main:
        for prompt in prompts:
            if set(prompt) <= set(dit.model.PROMPT):
                dit.model.check_prompt(prompt)


def why_not_captured(dit: DistributedDiT, decision: Decision) -> str | None:
    """Why steps of this decision cannot be a CUDA graph, or None if they can."""
    if dit.device.type != "cuda":
        return "no GPU"
    if not decision.local:
        return f"the scheduler steps on the host ({decision.whole})"
    if dit.dtype == torch.float64:
        return "fp64 is for checking"
    return None


def check_course(dit: DistributedDiT, course: Course, latents: Mapping[str, Tensor]) -> None:
    """Raise ValueError if this mesh or model cannot run the request. latents: full noise of each denoised stream."""
    model, mesh, config, request = dit.model, dit.mesh, dit.config, course.request
    noise = latents[model.STATE[0]]
    if noise.dim() > 3 or model.STATE[0] == "image":  # other streams are tokens, which `stream_positions` checks
        if noise.dim() not in (4, 5) or noise.shape[1] != config.in_channels:
            raise ValueError(f"got noise of shape {tuple(noise.shape)}, expected (N, {config.in_channels}, H, W)")
        dit.check_size(*noise.shape[2:])
    if course.decision.learned:
        check_variances(config)
        if len(latents) > 1:
            raise ValueError(f"got variance_type 'learned_range' with {len(latents)} denoised streams, expected 1")
    check_layout(mesh.data.size, mesh.cfg.size, len(noise), request.guidance, config.in_channels)

    # every tensor has a row for each image
    prompt, negative = checked_prompt(model, request.prompt), checked_prompt(model, request.negative or request.prompt)
    for name, x in prompt.items():
        if (other := tuple(negative[name].shape[1:])) != tuple(x.shape[1:]):
            raise ValueError(f"got a negative {name} of shape {other} per row, expected {tuple(x.shape[1:])}")
    for name, x in (*prompt.items(), *negative.items(), *latents.items()):
        if len(x) != len(noise):
            raise ValueError(f"got {name} of shape {tuple(x.shape)}, expected ({len(noise)},), one per image")
    check_drawn(request, len(course.timesteps_S), len(noise))


def check_drawn(request: Request, evaluations: int, images: int) -> None:
    """Raise ValueError if streams that change at every evaluation do not have the shapes of the run."""
    for name, x in request.drawn.items():
        if x.dim() != 4 or x.shape[:2] != (evaluations, images):
            expected = f"({evaluations}, {images}, tokens, width)"
            raise ValueError(f"got drawn {name} of shape {tuple(x.shape)}, expected {expected}")
    for name, x in request.negative_drawn.items():
        like = request.drawn.get(name)
        if like is None or x.shape != like.shape:
            expected = f"{tuple(like.shape)} as drawn" if like is not None else f"one of drawn: {sorted(request.drawn)}"
            raise ValueError(f"got negative_drawn {name} of shape {tuple(x.shape)}, expected {expected}")


# Rank 0's request --------------------------------------------------------------------------------------------------


def rank_0s(mesh: Mesh, request: Request) -> Request:
    """Rank 0's request on every rank; the same ValueError on all if shapes or settings differ between ranks."""
    if mesh.world.size == 1:
        return request
    generator = request.generator or torch.Generator().manual_seed(0)
    config = {name: value for name, value in request.scheduler.config.items() if not name.startswith("_")}
    equal = ("steps", "use_clipped_model_output", "respacing", "clip_denoised")
    form = {name: getattr(request, name) for name in equal} | {
        "scheduler": (type(request.scheduler).__name__, sorted(config.items())),
        "schedule": sorted(request.schedule.items()),
        "negative": request.negative is None,
        "generator": "cpu" if request.generator is None else request.generator.device.type,
    }
    parts = {name: getattr(request, name) for name in ("noise", "prompt", "negative", "drawn", "negative_drawn")}
    tensors: dict[str, Tensor] = {"generator": generator.get_state()}
    for kind, part in parts.items():
        tensors |= (
            {kind: part} if isinstance(part, Tensor) else {f"{kind} {name}": x for name, x in (part or {}).items()}
        )
    tensors = from_rank_0(mesh, tensors, form)
    guidance, eta = mesh.share((request.guidance, request.eta), tuple[Guidance, float | None])
    generator.set_state(tensors["generator"].cpu().clone())  # torch reads the storage of a view from its beginning
    shared: dict[str, Any] = {"guidance": guidance, "eta": eta, "generator": generator}
    for kind, part in parts.items():
        names = part.keys() if isinstance(part, Mapping) else ()
        shared[kind] = tensors.get(kind, None if part is None else {name: tensors[f"{kind} {name}"] for name in names})
    return replace(request, **shared)


# Schedule ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Course:
    """A request and its schedule.

    scheduler: a copy of the caller's scheduler, with its timesteps set. timesteps_S: the timestep of each evaluation of
    the model. guidance_S: the guidance scale of each evaluation, fp64 on the CPU.
    """

    request: Request
    scheduler: Any
    decision: Decision
    timesteps_S: Tensor
    guidance_S: Tensor

    @property
    def start_scale(self) -> float:
        # multiplies the noise before the first step
        return float(getattr(self.scheduler, "init_noise_sigma", 1.0))

    @cached_property
    def generator(self) -> torch.Generator:
        return self.request.generator or torch.Generator().manual_seed(0)

    @property
    def kind(self) -> object:
        """A key that is equal for requests that one run can serve in turn.

        It is unique for a scheduler that steps on the host, so that its run is never reused.
        """
        decision, schedule, request = self.decision, self.decision.schedule, self.request
        if not decision.local:
            return object()
        noise = {"": request.noise} if isinstance(request.noise, Tensor) else request.noise
        guidance = request.guidance
        same = (
            tuple((name, tuple(x.shape)) for name, x in noise.items()),
            tuple((name, tuple(x.shape)) for name, x in request.drawn.items()),
            tuple(sorted(request.negative_drawn)),
            len(self.timesteps_S),
            guidance.on,
            guidance.channels,
        )
        if (one := decision.one_step) is not None:
            return *same, one.learned, any(one.noisy), one.clipped
        assert schedule is not None
        sizes = schedule.states_SP.shape[1], schedule.outputs_SQ.shape[1], bool((schedule.inputs_S == 1).all())
        return *same, sizes, bool(schedule.draws)


def course(request: Request, decided: Callable[[Any, Mapping[str, Any]], Decision] = decide) -> Course:
    """Build the schedule of a request; ValueError for settings that do not fit the scheduler.

    decided: `decide`, or a function that caches its results.
    """
    scheduler = copy.deepcopy(request.scheduler)
    check_eta(scheduler, request.eta)
    if request.clip_denoised:
        clip_denoised(scheduler)
    if request.respacing is None:
        set_timesteps(scheduler, request.steps, request.schedule)
    else:
        respace(scheduler, request.respacing)
    clipped = request.use_clipped_model_output or request.clip_denoised
    options = {"eta": request.eta, "use_clipped_model_output": clipped or None}
    timesteps = torch.as_tensor(scheduler.timesteps)
    decision = decided(scheduler, options)
    return Course(request, scheduler, decision, timesteps, request.guidance.vector(len(timesteps)))
