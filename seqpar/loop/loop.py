"""The denoising loop: it predicts, guides and steps on this rank's tokens; `seqpar.loop.loop` does the work."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from types import FunctionType
from typing import Any, Unpack

import numpy as np
import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from seqpar.graphs.graphs import StepGraph
from seqpar.kernels.ddim import guide
from seqpar.loading.schedulers import check_clean, clean_weights, input_scale
from seqpar.loop.distributed import DistributedDiT
from seqpar.loop.interface import Prompt, Split
from seqpar.loop.request import (
    Course,
    Request,
    Settings,
    check_course,
    check_model,
    check_request,
    check_settings,
    course,
    rank_0s,
    why_not_captured,
)
from seqpar.loop.segment import Branches, Conditions, Segment, parted, rescaled
from seqpar.loop.steppers import (
    Decision,
    OneStep,
    Replicated,
    State,
    Stepper,
    Traced,
    decide,
    make_stepper,
    restart_stepper,
)
from seqpar.mesh.shard import Shard
from seqpar.mesh.watch import Calls
from seqpar.types.arguments import check_kind
from seqpar.types.protocols import state_dtype


def begin(dit: DistributedDiT, request: Request) -> Run:
    """Return a new run of rank 0's request; every rank must call this at the same time."""
    check_model(dit)
    check_request(dit, request)
    return Run(dit, course(rank_0s(dit.mesh, request)))


class Run:
    """A denoising run: `step` runs one step, `latents` gathers the state, `capture` records steps as CUDA graphs."""

    def __init__(self, dit: DistributedDiT, course: Course) -> None:
        """Set up the run. The course must be the same on every rank (see `begin`); ValueError if it does not fit."""
        self._dit, self._course = dit, course
        request, model = course.request, dit.model
        whole = request.latents(model.STATE)
        check_course(dit, course, whole)
        self._images = len(next(iter(whole.values())))
        starts = {name: x * course.start_scale for name, x in whole.items()}
        channels = request.guidance.channels
        self._states = {
            name: State(model, dit.mesh, x, channels if name == model.STATE[0] else None) for name, x in starts.items()
        }
        self._count = torch.zeros((), dtype=torch.int64, device=dit.device)
        self._bad = torch.full_like(self._count, len(course.timesteps_S))
        self._batched = request.guidance.on and dit.mesh.cfg.size == 1
        self._guidance_S = guidance_S = course.guidance_S.to(dit.device, self.tokens.dtype)
        self._segments = self._made_segments(whole)
        self._steppers: dict[str, Stepper] = {
            name: make_stepper(course.decision, course.scheduler, state, starts[name], guidance_S, course.generator)
            for name, state in self._states.items()
        }
        self._index, self._calls = 0, Calls()
        self._segment = self._segments[0]
        self._segment.load(0)

    # Public methods -----------------------------------------------------------------------------------------------

    @property
    def timesteps(self) -> Tensor:
        """Return the timestep of each evaluation of the model, (S,)."""
        return self._course.timesteps_S

    @property
    def tokens(self) -> Tensor:
        """Return this rank's tokens of the state's first stream, as the next input of the model, (n, l, C*p*p)."""
        return next(iter(self._states.values())).tokens

    @property
    def split(self) -> Split:
        """Return which tokens of each stream this rank has in the next step."""
        return self._segment.split

    @property
    def why_no_graph(self) -> str | None:
        """Return why a step cannot be a CUDA graph, or None if it can."""
        return why_not_captured(self._dit, self._course.decision)

    def step(self) -> None:
        """Queue the next step, as a replay if its graph was captured; after the last step the first one follows.

        Raises TimeoutError if it is known by now that this rank waits for another in vain.
        """
        self._load()
        segment, what = self._segment, f"step {self._index + 1} of {len(self.timesteps)}"
        with self._dit.mesh.call(self._dit.mesh.replica, what, self._calls.is_first(segment.steps)):
            if segment.graph is not None:
                segment.replay()
            else:
                outputs = segment.model.forward_tokens(*segment.inputs(self._seen(), self._count))
                for name, out in outputs.items():
                    branches = segment.branches[name] = self._guided(name, out)
                    self._steppers[name](*branches, self._index, self._count, self._bad)
                self._count.add_(1).remainder_(len(self.timesteps))  # a benchmark may run more steps
        self._index = (self._index + 1) % len(self.timesteps)
        self._dit.keeper.check_now()

    def capture(self) -> None:
        """Capture the segment of the next step as a CUDA graph, so that its steps are replays; keeps the state."""
        self._load()
        if self._segment.graph is None:
            changed = [self._count, self._bad]
            for name, stepper in self._steppers.items():
                changed += [self._states[name].tokens, *(stepper.kept if isinstance(stepper, Traced) else ())]
            with self._dit.mesh.call(self._dit.mesh.replica, "the capture of a step", True):
                self._segment.graph = StepGraph(self._same_step, changed)
            self._calls.forget(self._segment.steps)

    def _same_step(self) -> None:
        """Run `step`, but leave the host's step index unchanged."""
        index = self._index
        self.step()
        self._index = index

    def predict(self, step: Tensor | None = None) -> dict[str, Tensor]:
        """Return the guided prediction (n, l, C*p*p) of each stream for the current state, in the state's dtype.

        step: index of the evaluation whose modulation is used, as a device scalar; None means the next one.
        """
        scale, predictions = self._scale(self._count if step is None else step), {}
        for name, (cond, uncond) in self.branches(step).items():
            state = self._states[name]
            predictions[name] = guide(state.tokens, cond, uncond, scale, state.guided_width)
        return predictions

    def branches(self, step: Tensor | None = None) -> dict[str, Branches]:
        """Return the model's outputs of both branches for the current state; step: see `predict`."""
        if step is None:
            self._load()
        segment = self._segment
        outputs = segment.model.forward_tokens(*segment.inputs(self._seen(), self._count if step is None else step))
        return {name: self._parted(name, out) for name, out in outputs.items()}

    def clean(self, before: Tensor) -> Tensor:
        """Return the estimate of the clean latents in the last step's prediction, complete on every rank.

        It is of the state's first stream. before: a copy of `tokens` from before that step, whose branches are still
        there. Every rank must call this at the same time.
        """
        name, state = next(iter(self._states.items()))
        index, scheduler = (self._index - 1) % len(self.timesteps), self._course.scheduler
        timestep, branches = self.timesteps[index], self._segment.branches[name]
        guided = guide(before, *branches, self._guidance_S[index], state.guided_width)
        of_state, of_output = clean_weights(scheduler, timestep)
        return state.gather(of_state / input_scale(scheduler, timestep) * before + of_output * guided)

    def inputs(self) -> dict[str, Tensor]:
        """Return the model's next input of each stream (after the last step the latents), complete on every rank."""
        return {name: state.gather() for name, state in self._states.items()}

    def predict_on(self, index: int, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the guided prediction of each stream for whole model inputs (`inputs`), complete on every rank.

        index: the evaluation whose timestep and prompt are used. The state and the next step stay as they are. Every
        rank must call this at the same time.
        """
        kept, upcoming = {name: state.tokens.clone() for name, state in self._states.items()}, self._index
        for name, state in self._states.items():
            state.tokens.copy_(state.slice(inputs[name]))
        self._index = index
        self._load()
        predictions = self.predict(torch.full_like(self._count, index))
        for name, state in self._states.items():
            state.tokens.copy_(kept[name])
        self._index = upcoming
        return {name: self._states[name].gather(x) for name, x in predictions.items()}

    def latents(self) -> dict[str, Tensor]:
        """Return the current latents of every stream of the state, complete on every rank."""
        latents = {}
        for name, stepper in self._steppers.items():
            whole = isinstance(stepper, Replicated)
            latents[name] = stepper.latents if whole else self._states[name].gather()
        return latents

    def restart(self, course: Course) -> bool:
        """Start over with a course of the same kind, in the same buffers, so that captured graphs stay valid.

        Returns False if its prompts need other buffers; the run must not be used after that.
        """
        whole = course.request.latents(self._dit.model.STATE)
        check_course(self._dit, course, whole)
        self._course = course
        self._guidance_S.copy_(course.guidance_S)
        conditions = self._conditions()
        if not all(segment.restart(conditions) for segment in self._segments):
            return False
        for name, state in self._states.items():
            state.tokens.copy_(state.slice(whole[name] * course.start_scale))
            restart_stepper(self._steppers[name], course.decision, self._guidance_S, course.generator)
        self._count.zero_()
        self._bad.fill_(len(course.timesteps_S))
        self._index = 0
        self._load()
        return True

    def first_bad(self) -> int:
        """Return the first step after which a stream was not finite on any rank, else the number of steps.

        Waits for the devices of all ranks.
        """
        return min(self._dit.mesh.collect(int(self._bad), int))

    def release(self) -> None:
        """Free the CUDA graphs and their memory."""
        for segment in self._segments:
            segment.release()

    # A step -------------------------------------------------------------------------------------------------------

    def _seen(self) -> dict[str, Tensor]:
        """Return the model's input of each stream of the state, repeated if this rank computes both branches."""
        seen = {name: state.tokens for name, state in self._states.items()}
        return {name: torch.cat((x, x)) for name, x in seen.items()} if self._batched else seen

    def _load(self) -> None:
        """Select the segment of the next step and load its modulation."""
        self._segment = next(segment for segment in self._segments if self._index in segment.steps)
        self._segment.load(self._index)
        for each in self._steppers.values():
            if isinstance(each, OneStep):
                each.load(self._index)

    def _scale(self, step: Tensor) -> Tensor:
        """Return guidance's scale at a step, a device scalar."""
        return self._guidance_S.index_select(0, step.view(1))[0]

    def _parted(self, name: str, out: Tensor) -> Branches:
        return parted(out, self._states[name], name, self._course, self._dit.keeper, self)

    def _guided(self, name: str, out: Tensor) -> Branches:
        cond, uncond = self._parted(name, out)
        if uncond is None or not self._course.request.guidance.rescale:
            return cond, uncond
        scale = self._scale(self._count)
        return rescaled((cond, uncond), self._states[name], name, scale, self._course, self._dit.keeper, self)

    # Beginning ----------------------------------------------------------------------------------------------------

    def _conditions(self) -> Conditions:
        return Conditions.of(self._dit, self._course, self._images)

    def _made_segments(self, whole: Mapping[str, Tensor]) -> list[Segment]:
        lengths = {name: state.shard.total for name, state in self._states.items()}
        size, conditions = tuple(whole[self._dit.model.STATE[0]].shape[2:]), self._conditions()
        dits = {0: self._dit, **self._course.request.segments}
        firsts = sorted(dits)
        ends = [*firsts[1:], len(self.timesteps)]
        return [
            Segment(dits[first], range(first, end), lengths, size, conditions)
            for first, end in zip(firsts, ends, strict=True)
        ]


MOST = 8  # parts
LEAST = 1 << 14  # values of a part: fewer take less time than a thread
BLOCK = 16  # torch draws a multiple of 16 values from as many numbers; other counts draw their last 16 again

Shapes = Mapping[str, tuple[int, ...]]


def draw_steps(
    shapes: Shapes, count: int, generator: torch.Generator, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Return noise (count, *shape) of each stream, as `draw_noise` gives it stream by stream in each of `count` turns.

    The generator is on the CPU; it ends where that would leave it. dtype: see `draw_noise`.
    """
    sizes = [prod(shape) for shape in shapes.values()]
    parts = min(MOST, os.cpu_count() or 1, count, sum(sizes) * count // LEAST)
    if parts > 1 and dtype.itemsize < 4 and all(size and size % BLOCK == 0 for size in sizes):
        noise = _in_parts(shapes, Shard(count, parts), generator, dtype)
        if noise is not None:
            return noise
    return _in_turn(shapes, count, generator, dtype)


def _in_turn(shapes: Shapes, count: int, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
    turns = [{name: draw_noise(shape, generator, dtype) for name, shape in shapes.items()} for _ in range(count)]
    return {name: torch.stack([turn[name] for turn in turns]) for name in shapes}


def _in_parts(shapes: Shapes, turns: Shard, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor] | None:
    """Draw parts of the turns at the same time; None, and the generator as it was, if they do not join."""

    def part(state: Tensor, count: int) -> tuple[dict[str, Tensor], Tensor]:
        own = torch.Generator()
        own.set_state(state)
        return _in_turn(shapes, count, own, dtype), own.get_state()

    states, ahead = [generator.get_state()], torch.Generator()
    ahead.set_state(states[0])
    values = sum(prod(shape) for shape in shapes.values())
    with ThreadPoolExecutor(turns.parts) as pool:  # torch draws without Python's lock
        drawing = []
        for count in turns.sizes:
            drawing.append(pool.submit(part, states[-1], count))
            torch.empty(values * count, dtype=torch.int32).random_(generator=ahead)
            states.append(ahead.get_state())
        parts = [each.result() for each in drawing]
    if any(not torch.equal(end, state) for (_, end), state in zip(parts, states[1:], strict=True)):
        return None
    generator.set_state(states[-1])
    return {name: torch.cat([noise[name] for noise, _ in parts]) for name in shapes}


PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)  # repr tells all of these
Noise = Tensor | Mapping[str, Tensor]


def sample(
    dit: DistributedDiT,
    scheduler: Any,
    noise: Noise,
    prompt: Prompt,
    *,
    graph: bool = True,
    on_step: Callable[[int], None] = lambda index: None,
    **settings: Unpack[Settings],
) -> Tensor:
    """Denoise noise into latents (N, C, H, W) of the same shape, complete and equal on every rank.

    scheduler, noise, prompt and settings (steps, guidance, eta, generator ...): see `Request`. Every rank uses rank 0's
    values; those of other ranks must have the same shapes, dtypes and number of steps.
    graph: replay the step as a CUDA graph if possible (`Run.why_no_graph` gives the reason if not).
    on_step(index): called when a step has been queued; on a GPU the step may still be running.
    Raises ValueError for arguments that do not fit, and FloatingPointError if the latents stop being finite (it names
    the step).
    """
    with Sampler(dit, graph=graph) as sampler:
        return sampler(scheduler, noise, prompt, on_step=on_step, **settings)


class Sampler:
    """Reusable sampler: keeps buffers and the CUDA graph between compatible calls.

    Calls are compatible if shapes, number of steps, kind of guidance and number of distinct prompts are the same;
    noise, prompts, schedule and (in place) weights may change. Any other call frees the last run and starts a new one.
    Release it (or use it in a `with` block) before the process group ends, because a graph may hold NCCL's exchanges.
    When it wins: for repeated calls; each one saves a capture, which costs about three steps, a tenth of a run of 25.
    """

    def __init__(self, dit: DistributedDiT, *, graph: bool = True) -> None:
        check_model(dit)
        check_kind("graph", graph, bool, expected="True or False")
        self.dit = dit
        self._graph = graph
        self._run: Run | None = None
        self._kind: object = None
        self._decision: tuple[object, Decision] | None = None
        self._latents: dict[str, Tensor] | None = None
        self._shown: Collection[int] = ()
        self._on_clean: Callable[[int, Tensor], None] = lambda index, latents: None

    @contextmanager
    def estimating(self, evaluations: Collection[int], on_clean: Callable[[int, Tensor], None]) -> Iterator[None]:
        """While it is entered, calls estimate the clean latents after these evaluations, by their index.

        on_clean(index, latents): called on every rank, with the first stream's estimate, complete. Only these
        evaluations are gathered; the result has the same bits. Every rank must enter it with the same evaluations.
        Calls raise ValueError for a scheduler whose clean latents are not known (`seqpar.loading.schedulers`).
        """
        before = self._shown, self._on_clean
        self._shown, self._on_clean = evaluations, on_clean
        try:
            yield
        finally:
            self._shown, self._on_clean = before

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    @torch.inference_mode(False)  # buffers made here must serve calls outside of it, too
    @torch.no_grad()
    def __call__(
        self,
        scheduler: Any,
        noise: Noise,
        prompt: Prompt,
        *,
        on_step: Callable[[int], None] = lambda index: None,
        **settings: Unpack[Settings],
    ) -> Tensor:
        """Denoise noise into latents; see `sample` for the arguments and the errors."""
        self._latents = None
        check_settings(self.dit, settings)
        request = Request(scheduler, noise, prompt, **settings)
        check_request(self.dit, request, on_step)
        if self._shown:
            self.dit.mesh.on_all_ranks(lambda: check_clean(scheduler))
        agreed = course(rank_0s(self.dit.mesh, request), self._decided)
        run, captured = self._ready(agreed), self._graph and why_not_captured(self.dit, agreed.decision) is None
        for index in range(len(agreed.timesteps_S)):
            self._step(run, index, captured)
            on_step(index)
        self.dit.wait()  # before the next collective, which would wait for a rank that has died
        # copies, because without a gather a stream of tokens is the buffer that the next call writes to
        self._latents = {name: x.clone() for name, x in run.latents().items()}
        check_finite(run.first_bad(), run.timesteps)
        return self._latents[self.dit.model.STATE[0]]

    def _step(self, run: Run, index: int, captured: bool) -> None:
        """Queue a step, as a graph if it can be captured, and estimate its clean latents where that is wished."""
        with _checked_before(index):
            if captured:
                run.capture()
            before = run.tokens.clone() if index in self._shown else None
            run.step()
        if before is not None:
            self.dit.wait()  # before a collective, as at the end
            self._on_clean(index, run.clean(before))

    def _decided(self, scheduler: Any, options: Mapping[str, Any], begin: int) -> Decision:
        """Return what `decide` returns, kept for the next call with an equal scheduler.

        Tracing 50 steps takes 60 ms, in which the GPU would wait for the host.
        """
        key = type(scheduler), _written(vars(scheduler)), _written(sorted(options.items())), begin
        if self._decision is None or self._decision[0] != key:
            self._decision = key, decide(scheduler, options, begin)
        return self._decision[1]

    def streams(self) -> dict[str, Tensor]:
        """Return every stream of the state after the last call, complete on every rank."""
        if self._latents is None:
            raise ValueError("got a sampler without a run, expected one that was called")
        return dict(self._latents)

    def _ready(self, course: Course) -> Run:
        """Return the kept run, restarted, if it can serve this course on every rank; otherwise a new run."""
        kind = (course.kind, self.dit.state)
        kept = all(self.dit.mesh.collect(self._run is not None and self._kind == kind, bool))
        if self._run is None or not kept or not self._run.restart(course):
            self.release()
            self._run, self._kind = Run(self.dit, course), kind
        return self._run

    def release(self) -> None:
        """Free the kept run with its buffers and CUDA graph."""
        if self._run is not None:
            self._run.release()
        self._run = self._kind = self._latents = None


@contextmanager
def _checked_before(index: int) -> Iterator[None]:
    """Make a ValueError of a step a RuntimeError: a run's arguments are checked before, so that no caller is to blame.

    The command counts a ValueError as the user's mistake (`seqpar.cli.exits`).
    """
    try:
        yield
    except ValueError as error:
        raise RuntimeError(f"step {index + 1} failed: {error}") from error


def draw_noise(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return noise in fp32, drawn on the CPU for all images at once: the same bits for any number and kind of ranks.

    dtype: in which it is drawn. Some versions of torch draw other numbers in bf16 than in fp32 from the same seed.
    """
    return randn_tensor(shape, generator=generator, device=torch.device("cpu"), dtype=dtype).to(state_dtype(dtype))


def _written(value: Any) -> Any:
    """Return what is equal only for equal values, and for a value of unknown type what equals nothing else."""
    if isinstance(value, Mapping):
        return [(_written(name), _written(each)) for name, each in value.items()]
    if isinstance(value, (list, tuple)):
        return [_written(each) for each in value]
    if isinstance(value, Tensor):
        bits = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return value.dtype, tuple(value.shape), bits.numpy().tobytes()
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, FunctionType) and value.__closure__ is None:
        return value
    return (type(value), repr(value)) if type(value) in PLAIN else object()


def digest(latents: Tensor) -> str:
    """Return 16 hex digits of a hash over all bits, to compare runs on different meshes or machines."""
    return hashlib.sha256(latents.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def check_finite(first_bad: int, timesteps: Tensor) -> None:
    """Raise FloatingPointError if a step produced NaN or infinity.

    first_bad: the step's index, or the number of steps if none did.
    """
    if first_bad < len(timesteps):
        raise FloatingPointError(
            f"latents stopped being finite at step {first_bad + 1} of {len(timesteps)} (timestep "
            f"{timesteps[first_bad].item():g}); try dtype fp32, a lower guidance, or check the weights"
        )
