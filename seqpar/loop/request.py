"""The inputs of a denoising run (`Request`), and the schedule that is built from them once (`Course`)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cached_property
from typing import Any, Required, TypedDict

import torch
from torch import Tensor

from seqpar.loading.schedulers import check_eta, check_variances, clip_denoised, respace, set_timesteps
from seqpar.loop.distributed import DistributedDiT
from seqpar.loop.interface import Prompt, check_lengths, completed
from seqpar.loop.steppers import Decision, decide
from seqpar.mesh.inputs import from_rank_0
from seqpar.mesh.mesh import Mesh
from seqpar.types.arguments import MOST_STEPS, check_floats, check_kind, check_named, check_real, check_whole, shown
from seqpar.types.guidance import Guidance, check_layout

FLAGS = ("use_clipped_model_output", "clip_denoised")
TOKENS = ("drawn", "negative_drawn")


def check_model(dit: object) -> None:
    """Refuse what is no `DistributedDiT`."""
    check_kind("dit", dit, DistributedDiT, expected="a seqpar.DistributedDiT; make one of the model")


def check_settings(dit: DistributedDiT, settings: Mapping[str, Any]) -> None:
    """Raise the same ValueError on all ranks for a setting that is missing or unknown; every rank must call this."""
    known = {each.name: each.default is MISSING and each.default_factory is MISSING for each in fields(Request)[3:]}
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
    """Raise the same ValueError on all ranks if an argument of any rank cannot be used; every rank must call this.

    Values of the prompt are checked on rank 0, because other ranks use its values.
    """
    dit.mesh.on_all_ranks(lambda: _check(dit, request, on_step))


def _check(dit: DistributedDiT, request: Request, on_step: object) -> None:
    if not callable(on_step):
        raise ValueError(f"got on_step={shown(on_step)}, expected a function of the step's index")
    _check_scheduler(request.scheduler)
    _check_settings(request)
    noise = request.noise if isinstance(request.noise, Mapping) else {"": request.noise}
    for name, x in noise.items():
        check_floats(f"noise {name}".strip(), x)
    prompt = check_named("prompt", request.prompt)
    negative = None if request.negative is None else check_named("negative", request.negative)
    for kind in TOKENS:
        check_named(kind, getattr(request, kind))
    if dit.mesh.is_main:
        for named in (prompt, negative):
            if named is not None and set(named) <= set(dit.model.PROMPT):
                dit.model.check_prompt(named)


def _check_scheduler(scheduler: Any) -> None:
    wanted = ("set_timesteps", "step", "config")
    if isinstance(scheduler, type) or not all(hasattr(scheduler, name) for name in wanted):
        raise ValueError(f"got scheduler={shown(scheduler)}, expected a scheduler object of diffusers")


def _check_settings(request: Request) -> None:
    check_kind("guidance", request.guidance, Guidance, expected="seqpar.Guidance(scale)")
    check_whole("steps", request.steps, 1, MOST_STEPS)
    check_whole("begin", request.begin, 0, MOST_STEPS)
    if request.eta is not None:
        check_real("eta", request.eta)
    for name in FLAGS:
        check_kind(name, getattr(request, name), bool, expected="True or False")
    expected = "a generator made by torch.Generator(), or None"
    check_kind("generator", request.generator, torch.Generator, type(None), expected=expected)
    if request.generator is not None and request.generator.device.type != "cpu":
        raise ValueError("got a generator on a GPU, expected one on the CPU, whose noise is the same everywhere")
    check_kind("respacing", request.respacing, str, type(None), expected='a text such as "250" or "ddim25", or None')
    check_kind("schedule", request.schedule, Mapping, expected="a mapping: arguments of set_timesteps")
    check_kind("segments", request.segments, Mapping, expected="a mapping: first evaluation -> DistributedDiT")
    for first, dit in request.segments.items():
        check_whole("the first evaluation of a segment", first, 0, MOST_STEPS)
        check_model(dit)


def why_not_captured(dit: DistributedDiT, decision: Decision) -> str | None:
    """Return why steps of this decision cannot be a CUDA graph, or None if they can."""
    if dit.device.type != "cuda":
        return "no GPU"
    if not decision.local:
        return f"the scheduler steps on the host ({decision.whole})"
    if dit.dtype == torch.float64:
        return "fp64 is for checking"
    return None


def check_course(dit: DistributedDiT, course: Course, whole: Mapping[str, Tensor]) -> None:
    """Raise ValueError if this mesh or model cannot run the request."""
    model, mesh, config, request = dit.model, dit.mesh, dit.config, course.request
    noise = whole[model.STATE[0]]
    if noise.dim() > 3 or model.STATE[0] == "image":  # other streams are tokens, which `stream_positions` checks
        if noise.dim() not in (4, 5) or noise.shape[1] != config.in_channels:
            raise ValueError(f"got noise of shape {tuple(noise.shape)}, expected (N, {config.in_channels}, H, W)")
        dit.check_size(*noise.shape[2:])
    if course.decision.learned:
        check_variances(config)
        if len(whole) > 1:
            raise ValueError(f"got variance_type 'learned_range' with {len(whole)} streams of the state, expected one")
    check_layout(mesh.data.size, mesh.cfg.size, len(noise), request.guidance, config.in_channels)
    prompt, negative = completed(model, request.prompt), completed(model, request.negative or request.prompt)
    check_lengths(model, prompt, negative)
    for name, x in (*prompt.items(), *negative.items(), *whole.items()):
        if len(x) != len(noise):
            raise ValueError(f"got {name} of shape {tuple(x.shape)}, expected ({len(noise)},), one an image")
    _check_drawn(request, len(course.timesteps_S), len(noise))


def _check_drawn(request: Request, evaluations: int, images: int) -> None:
    """Raise ValueError if streams that change at every evaluation have other shapes than the run."""
    for name, x in request.drawn.items():
        if x.dim() != 4 or x.shape[:2] != (evaluations, images):
            wanted = f"({evaluations}, {images}, tokens, width)"
            raise ValueError(f"got drawn {name} of shape {tuple(x.shape)}, expected {wanted}")
    for name, x in request.negative_drawn.items():
        like = request.drawn.get(name)
        if like is None or x.shape != like.shape:
            wanted = f"{tuple(like.shape)} as drawn" if like is not None else f"one of drawn: {sorted(request.drawn)}"
            raise ValueError(f"got negative_drawn {name} of shape {tuple(x.shape)}, expected {wanted}")


class Settings(TypedDict, total=False):
    """The keyword arguments of `sample` besides scheduler, noise and prompt; see `Request`."""

    steps: Required[int]
    guidance: Required[Guidance]
    eta: float | None
    generator: torch.Generator | None
    use_clipped_model_output: bool
    respacing: str | None
    clip_denoised: bool
    begin: int
    schedule: Mapping[str, Any]
    negative: Prompt | None
    drawn: Mapping[str, Tensor]
    negative_drawn: Mapping[str, Tensor]
    segments: Mapping[int, DistributedDiT]


@dataclass(frozen=True, eq=False)
class Request:
    """The inputs of one run, which does not change them.

    scheduler: a diffusers scheduler. noise: whole latents, (N, C, H, W) or (N, C, T, H, W); for a model that denoises
    several streams it is a mapping, in which 3-D tensors are tokens (N, L, C). prompt: the keyword arguments of the
    model's `encode`, N rows each. negative: the prompt of the unconditional branch, which may have another text length;
    None uses the model's null prompt. eta: the amount of noise that a step adds; None uses the scheduler's default.
    generator: a CPU generator for noise within the run; None uses seed 0. use_clipped_model_output: see diffusers'
    DDIM. begin: index of the first evaluation of the model; if it is not 0, the state is used as given, without scaling
    (image-to-image passes a picture with the noise of that step).
    respacing: timesteps by a text of the original DiT, such as "250" or "ddim25", which replace the number of steps
    (DDIM and DDPM; `seqpar.loading.schedulers.spaced`). clip_denoised: clip each predicted x0 to +-1, as the original
    code does (DDIM and DDPM).
    schedule: keyword arguments of the scheduler's `set_timesteps`; where they hold sigmas or
    timesteps, these replace the number of steps, as in diffusers' pipelines.
    drawn: streams of the model whose tokens change at every evaluation, (S, N, L, C). negative_drawn: those of them
    that are others in the unconditional branch (UniDiffuser: text that is noise), of the same shapes.
    segments: first evaluation -> the model that takes over there; it has the same streams and its own weights.
    """

    scheduler: Any
    noise: Tensor | Mapping[str, Tensor]
    prompt: Prompt
    steps: int
    guidance: Guidance
    eta: float | None = None
    generator: torch.Generator | None = None
    use_clipped_model_output: bool = False
    begin: int = 0
    respacing: str | None = None
    clip_denoised: bool = False
    schedule: Mapping[str, Any] = field(default_factory=dict)
    negative: Prompt | None = None
    drawn: Mapping[str, Tensor] = field(default_factory=dict)
    negative_drawn: Mapping[str, Tensor] = field(default_factory=dict)
    segments: Mapping[int, DistributedDiT] = field(default_factory=dict)

    def latents(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the noise of each stream of the state; ValueError if the names do not match."""
        noise = {names[0]: self.noise} if isinstance(self.noise, Tensor) else dict(self.noise)
        if set(noise) != set(names):
            raise ValueError(f"got noise for {', '.join(sorted(noise))}, expected {', '.join(names)}")
        return {name: noise[name] for name in names}


def rank_0s(mesh: Mesh, request: Request) -> Request:
    """Return rank 0's request on every rank; the same ValueError on all if shapes or settings differ between ranks.

    Values that are no tensors are refused before, by `check_request`.
    """
    if mesh.world.size == 1:
        return request
    generator = request.generator or torch.Generator().manual_seed(0)
    tensors = _tensors_of_rank_0(mesh, request, generator)
    generator.set_state(tensors["generator"].cpu().clone())  # torch reads the storage of a view from its beginning
    guidance, eta = mesh.share((request.guidance, request.eta), tuple[Guidance, float | None])

    def named(kind: str) -> dict[str, Tensor]:
        return {name.removeprefix(f"{kind} "): x for name, x in tensors.items() if name.startswith(f"{kind} ")}

    return replace(
        request,
        noise=named("noise") if isinstance(request.noise, Mapping) else tensors["noise"],
        prompt=named("prompt"),
        negative=None if request.negative is None else named("negative"),
        drawn=named("drawn"),
        negative_drawn=named("negative_drawn"),
        guidance=guidance,
        eta=eta,
        generator=generator,
    )


def _tensors_of_rank_0(mesh: Mesh, request: Request, generator: torch.Generator) -> dict[str, Tensor]:
    """Return rank 0's noise, prompts and drawn streams, named by kind and stream ("prompt class_labels").

    The state of its generator is among them.
    """
    noise = request.noise
    named = {f"noise {name}": x for name, x in noise.items()} if isinstance(noise, Mapping) else {"noise": noise}
    parts = {"prompt": request.prompt, "negative": request.negative or {}}
    named["generator"] = generator.get_state()
    parts |= {"drawn": request.drawn, "negative_drawn": request.negative_drawn}
    for kind, part in parts.items():
        named |= {f"{kind} {name}": x for name, x in part.items()}
    return from_rank_0(mesh, named, _form(request))


def _form(request: Request) -> dict[str, object]:
    """Return the settings, besides tensors, that must be equal on all ranks."""
    config = {name: value for name, value in request.scheduler.config.items() if not name.startswith("_")}
    return {
        "scheduler": (type(request.scheduler).__name__, sorted(config.items())),
        "steps": request.steps,
        "begin": request.begin,
        "schedule": sorted(request.schedule.items()),
        "use_clipped_model_output": request.use_clipped_model_output,
        "respacing": request.respacing,
        "clip_denoised": request.clip_denoised,
        "segments": sorted(request.segments),
        "negative": request.negative is None,
        "generator": "cpu" if request.generator is None else request.generator.device.type,
    }


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
        """Return the factor that multiplies the noise before the first step."""
        return 1.0 if self.request.begin else float(getattr(self.scheduler, "init_noise_sigma", 1.0))

    @cached_property
    def generator(self) -> torch.Generator:
        """Return the generator of noise within the run."""
        return self.request.generator or torch.Generator().manual_seed(0)

    @property
    def kind(self) -> object:
        """Return a key that is equal for requests that one run can serve in turn.

        A scheduler that steps on the host gets a key of its own every time, so that its run is never reused.
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
            guidance.rescale,
            tuple((first, dit.state) for first, dit in request.segments.items()),
        )
        if (one := decision.one_step) is not None:
            return *same, one.learned, any(one.noisy), one.clipped
        assert schedule is not None
        sizes = schedule.states_SP.shape[1], schedule.outputs_SQ.shape[1], bool((schedule.inputs_S == 1).all())
        return *same, sizes, bool(schedule.draws)


def course(request: Request, decided: Callable[[Any, Mapping[str, Any], int], Decision] = decide) -> Course:
    """Return the request with its schedule; ValueError for settings that do not fit the scheduler.

    decided: `decide`, or a function that keeps its answers.
    """
    scheduler = copy.deepcopy(request.scheduler)
    check_eta(scheduler, request.eta)
    if request.clip_denoised:
        clip_denoised(scheduler)
    if request.respacing is None:
        set_timesteps(scheduler, request.steps, request.schedule)
    else:
        respace(scheduler, request.respacing)
    evaluations = len(scheduler.timesteps)
    if not 0 <= request.begin < evaluations:
        raise ValueError(f"got begin {request.begin}, expected 0 to {evaluations - 1}")
    clipped = request.use_clipped_model_output or request.clip_denoised
    options = {"eta": request.eta, "use_clipped_model_output": clipped or None}
    timesteps = torch.as_tensor(scheduler.timesteps)[request.begin :]
    if any(not 0 < first < len(timesteps) for first in request.segments):
        raise ValueError(f"got segments from {sorted(request.segments)}, expected 1 to {len(timesteps) - 1}")
    decision = decided(scheduler, options, request.begin)
    return Course(request, scheduler, decision, timesteps, request.guidance.vector(len(timesteps)))
