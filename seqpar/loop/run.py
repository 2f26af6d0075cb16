"""One denoising run: it owns the sharded state, its history, the modulation tables, the step counter and the graphs.

It splits the tokens once before the first step and gathers them once after the last. If the scheduler steps on local
tokens (see `seqpar.loop.steppers`), nothing in a step waits for the host, so that a step can be a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from seqpar.graphs.capture import StepGraph
from seqpar.kernels.ddim import guide
from seqpar.loading.clean import clean_weights, input_scale
from seqpar.loop.arguments import check_model, check_request
from seqpar.loop.branches import Branches, parted, rescaled
from seqpar.loop.checks import check_course, why_not_captured
from seqpar.loop.conditions import Conditions
from seqpar.loop.distributed import DistributedDiT
from seqpar.loop.request import Course, Request, course, rank_0s
from seqpar.loop.segment import Segment
from seqpar.loop.state import State
from seqpar.loop.steppers import OneStep, Replicated, Stepper, Traced, make_stepper, restart_stepper
from seqpar.loop.streams import Split
from seqpar.mesh.deadlines import Calls


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
