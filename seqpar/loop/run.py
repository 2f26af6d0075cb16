"""`Run`: one denoising run on this rank's tokens. It predicts, guides and steps; tokens stay sharded until the end.

Everything that depends only on timestep and prompt is tabulated before the steps. A step reads its rows by a counter on
the device, so it never waits for the host and can be replayed as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from seqpar.graphs.graphs import StepGraph
from seqpar.kernels.ddim import guide
from seqpar.loading.schedulers import clean_weights, input_scale
from seqpar.loop.distributed import DistributedDiT, tokens_of
from seqpar.loop.interface import Encoded, Split, checked_prompt, distinct, rows
from seqpar.loop.request import Course, Request, check_course, check_request, course, rank_0s, why_not_captured
from seqpar.loop.steppers import State, make_stepper
from seqpar.mesh.shard import Shard
from seqpar.mesh.watch import Calls
from seqpar.planner.predict import TABLE_BYTES

Branches = tuple[Tensor, Tensor | None]
"""The model's outputs with the prompt and without it (None if there is one branch), (n, l, at least C*p*p) each."""


def begin(dit: DistributedDiT, request: Request) -> Run:
    """A new run of rank 0's request. Collective: call on all ranks."""
    check_request(dit, request)
    return Run(dit, course(rank_0s(dit.mesh, request)))


@dataclass(frozen=True)
class Conditions:
    """The inputs of all evaluations besides the state, for this rank's rows of both branches.

    prompt: the distinct prompts, P rows. count: P, or 1 without a prompt. row_B: the prompt of each row of the batch.
    encoded: the encoded prompts. drawn: streams whose tokens change at every evaluation, (S, B, L, C).
    """

    prompt: Mapping[str, Tensor]
    count: int
    row_B: Tensor
    encoded: Encoded
    drawn: Mapping[str, Tensor]

    @property
    def shapes(self) -> object:
        """Equal for conditions that fit the same buffers, on all ranks: these are whole tensors."""
        tensors = self.encoded.streams, self.encoded.pooled, self.drawn
        return self.count, [{name: (x.shape, x.dtype) for name, x in named.items()} for named in tensors]


def conditions_of(dit: DistributedDiT, request: Request, images: int) -> Conditions:
    """The conditions of this rank's rows. images: number of images of the whole run."""
    mesh, device, model = dit.mesh, dit.device, dit.model
    local, branches = Shard(images, mesh.data.size).slice(mesh.data.rank), 2 if request.guidance.on else 1
    # distinct prompts of both branches: equal labels share their modulation
    prompt = {name: x.to(device) for name, x in checked_prompt(model, request.prompt).items()}
    index = torch.zeros(branches * images, dtype=torch.int64, device=device)
    if prompt:
        if request.guidance.on:
            given = request.negative
            negative = model.null_prompt(prompt) if given is None else checked_prompt(model, given)
            prompt = {name: torch.cat((x, negative[name].to(x.device))) for name, x in prompt.items()}
        prompt, index = distinct(prompt)
    index = index.view(branches, images)[:, local]
    drawn = [request.drawn, {**request.drawn, **request.negative_drawn}][:branches]
    if mesh.cfg.size > 1:  # rank 0 of the cfg axis computes the conditional branch, rank 1 the unconditional one
        index, drawn = index[mesh.cfg.rank : mesh.cfg.rank + 1], drawn[mesh.cfg.rank : mesh.cfg.rank + 1]
    streams = {
        name: torch.cat([branch[name][:, local].to(device) for branch in drawn], dim=1) for name in request.drawn
    }
    with torch.no_grad():
        encoded = model.encode(**prompt)
    count = max(1, len(next(iter(prompt.values())))) if prompt else 1
    return Conditions(prompt, count, index.flatten(), encoded, streams)


class Run:
    """A denoising run: `step` runs one step, `latents` gathers the state, `capture` makes steps CUDA graph replays."""

    def __init__(self, dit: DistributedDiT, course: Course) -> None:
        """Set up the run of a course that is the same on every rank (see `begin`); ValueError if it does not fit."""
        self._dit, self._course = dit, course
        model, mesh, request = dit.model, dit.mesh, course.request
        latents = request.latents(model.STATE)
        check_course(dit, course, latents)
        first = latents[model.STATE[0]]
        self._images, self._batched = len(first), request.guidance.on and mesh.cfg.size == 1

        # state: this rank's tokens of each denoised stream
        starts = {name: x * course.start_scale for name, x in latents.items()}
        states = {
            name: State(model, mesh, x, request.guidance.channels if name == model.STATE[0] else None)
            for name, x in starts.items()
        }
        dtype = states[model.STATE[0]].tokens.dtype
        self._count = torch.zeros((), dtype=torch.int64, device=dit.device)  # the step, on the device
        self._bad = torch.full_like(self._count, len(course.timesteps_S))  # the first step that was not finite
        self._guidance_S = course.guidance_S.to(dit.device, dtype)

        # conditions: constant streams, attention and positions, and the modulation table
        given = conditions_of(dit, request, self._images)
        lengths = {name: state.shard.total for name, state in states.items()}
        lengths |= {name: x.shape[2] for name, x in given.drawn.items()}
        batch, size = len(given.row_B), tuple(first.shape[2:])
        self._share = dit.share(given.encoded, lengths, size, batch, given.row_B, self)
        self._shapes, self._row_B, self._pooled = given.shapes, given.row_B.clone(), given.encoded.pooled
        self._prompts, self._drawn = given.count, self._local(given.drawn)
        self._timesteps_S = course.timesteps_S.to(dit.device)
        self._table: dict[str, Tensor] = {}
        self._first = torch.zeros((), dtype=torch.int64, device=dit.device)  # the table's first step, on the device
        self._loaded = -1
        row = sum(x.numel() * x.element_size() for x in self._modulate(slice(0, 1), 1, 1).values())
        self._chunk = max(1, min(len(course.timesteps_S), TABLE_BYTES // max(1, self._prompts * row)))

        self.steppers = {
            name: make_stepper(
                course.decision, course.scheduler, state, starts[name], self._guidance_S, course.generator
            )
            for name, state in states.items()
        }
        self._index, self._calls = 0, Calls()
        self._graph: StepGraph | None = None
        self._branches: dict[str, Branches] = {}  # of the last step; those of a replay are where the capture's are
        self._releases = dit.keeper.releases
        self._load(0)

    @property
    def timesteps(self) -> Tensor:
        """Of each evaluation of the model, (S,)."""
        return self._course.timesteps_S

    @property
    def tokens(self) -> Tensor:
        """This rank's tokens of the first denoised stream, as the next input of the model, (n, l, C*p*p)."""
        return next(iter(self.steppers.values())).state.tokens

    @property
    def split(self) -> Split:
        return self._share.split

    @property
    def why_no_graph(self) -> str | None:
        """Why a step cannot be a CUDA graph, or None if it can."""
        return why_not_captured(self._dit, self._course.decision)

    def step(self) -> None:
        """Queue the next step, as a replay if it was captured; after the last step the first one follows.

        Raises TimeoutError if this rank is known to have timed out waiting for another.
        """
        self._load(self._index)
        what = f"step {self._index + 1} of {len(self.timesteps)}"
        with self._dit.mesh.call(self._dit.mesh.replica, what, self._calls.is_first("step")):
            if self._graph is not None:
                if self._dit.keeper.releases != self._releases:
                    raise ValueError("cannot step after DistributedDiT.release freed the buffers; begin a new run")
                self._graph.replay()
            else:
                for name, output in self._outputs(self._count).items():
                    branches = self._branches[name] = self._parted(name, output)
                    self.steppers[name](*branches, self._index, self._count, self._bad)
                self._count.add_(1).remainder_(len(self.timesteps))  # a benchmark may run more steps
        self._index = (self._index + 1) % len(self.timesteps)
        self._dit.keeper.check_now()

    def capture(self) -> None:
        """Capture a step as a CUDA graph, so that further steps are replays; the state stays as it is."""
        if self._graph is not None:
            return
        self._load(self._index)
        changed = [self._count, self._bad]
        for stepper in self.steppers.values():
            changed += [stepper.state.tokens, *stepper.history_tensors]

        def same_step() -> None:  # leaves the host's step index as it is
            index = self._index
            self.step()
            self._index = index

        with self._dit.mesh.call(self._dit.mesh.replica, "the capture of a step", True):
            self._graph = StepGraph(same_step, changed)
        self._calls.forget("step")

    def predict(self, index: int | None = None) -> dict[str, Tensor]:
        """The guided prediction (n, l, C*p*p) of each stream for the current state.

        index: the evaluation whose timestep and prompt are used; None means the next one.
        """
        index, predictions = self._index if index is None else index, dict[str, Tensor]()
        self._load(index)
        for name, output in self._outputs(torch.full_like(self._count, index)).items():
            state, branches = self.steppers[name].state, self._parted(name, output)
            predictions[name] = guide(state.tokens, *branches, self._guidance_S[index], state.guided_width)
        return predictions

    def predict_on(self, index: int, inputs: Mapping[str, Tensor]) -> None:
        """Compute `predict` for whole model inputs (`inputs`), to show it to others. The state stays as it is."""
        states = {name: stepper.state for name, stepper in self.steppers.items()}
        before = {name: state.tokens.clone() for name, state in states.items()}
        for name, state in states.items():
            state.tokens.copy_(state.slice(inputs[name]))
        self.predict(index)
        for name, state in states.items():
            state.tokens.copy_(before[name])

    def clean(self, before: Tensor) -> Tensor:
        """The estimate of the first stream's clean latents in the last step's prediction, complete on every rank.

        before: a copy of `tokens` from before that step. Collective: call on all ranks.
        """
        name, stepper = next(iter(self.steppers.items()))
        index, scheduler = (self._index - 1) % len(self.timesteps), self._course.scheduler
        timestep, state = self.timesteps[index], stepper.state
        guided = guide(before, *self._branches[name], self._guidance_S[index], state.guided_width)
        of_state, of_output = clean_weights(scheduler, timestep)
        return state.gather(of_state / input_scale(scheduler, timestep) * before + of_output * guided)

    def inputs(self) -> dict[str, Tensor]:
        """The model's next input of each stream (after the last step the latents), complete on every rank."""
        return {name: stepper.state.gather() for name, stepper in self.steppers.items()}

    def latents(self) -> dict[str, Tensor]:
        """The current latents of each denoised stream, complete on every rank."""
        return {name: stepper.latents() for name, stepper in self.steppers.items()}

    def first_bad(self) -> int:
        """The first step after which any rank had NaN or infinity, else the number of steps. Waits for all devices."""
        return min(self._dit.mesh.collect(int(self._bad), int))

    def restart(self, course: Course) -> bool:
        """Start over with a course of the same kind, in the same buffers, so that a captured graph stays valid.

        Returns False if its prompts need other buffers; the run must not be used after that.
        """
        latents = course.request.latents(self._dit.model.STATE)
        check_course(self._dit, course, latents)
        given = conditions_of(self._dit, course.request, self._images)
        if given.shapes != self._shapes:
            return False
        self._course, self._pooled, self._loaded = course, given.encoded.pooled, -1
        self._timesteps_S = course.timesteps_S.to(self._dit.device)
        self._guidance_S.copy_(course.guidance_S)
        self._row_B.copy_(given.row_B)
        constant = tokens_of(given.encoded, self.split, given.row_B)
        for buffers, new in ((self._share.constant, constant), (self._drawn, self._local(given.drawn))):
            for name, x in buffers.items():
                x.copy_(new[name])
        for name, stepper in self.steppers.items():
            stepper.state.tokens.copy_(stepper.state.slice(latents[name] * course.start_scale))
            stepper.restart(course.decision, self._guidance_S, course.generator)
        self._count.zero_()
        self._bad.fill_(len(course.timesteps_S))
        self._index = 0
        self._load(0)
        return True

    def release(self) -> None:
        """Free the CUDA graph and its memory."""
        if self._graph is not None:
            torch.cuda.synchronize()
            self._branches = {}
            self._graph.release()
            self._graph = None
            torch.cuda.empty_cache()  # captures and peer memory cannot take what a graph's pool leaves there

    # A step --------------------------------------------------------------------------------------------------------

    def _load(self, step: int) -> None:
        """Compute the chunk of the modulation table, and of the noise, that holds a step, unless it is loaded."""
        self._dit.follow_weights()
        for stepper in self.steppers.values():
            stepper.load(step)
        start = step // self._chunk * self._chunk
        if start == self._loaded:
            return
        end = min(start + self._chunk, len(self.timesteps))
        # all rows on every rank, on every mesh, because a matrix product of another shape may round differently
        chunk = self._modulate(slice(start, end), end - start, self._prompts)
        if not self._table:
            self._table = dict(chunk)
        for name, table in self._table.items():  # in place, because a captured step reads it
            table[: len(chunk[name])].copy_(chunk[name])
        self._first.fill_(start)
        self._loaded = start

    @torch.no_grad()
    def _modulate(self, steps: slice, count: int, prompts: int) -> Mapping[str, Tensor]:
        # a row for each step and prompt
        pooled = {name: x[:prompts].repeat(count, *[1] * (x.dim() - 1)) for name, x in self._pooled.items()}
        return self._dit.model.modulate(self._timesteps_S[steps].repeat_interleave(prompts), **pooled)

    def _local(self, drawn: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.split.mine(name, x, dim=2).contiguous() for name, x in drawn.items()}

    def _outputs(self, step: Tensor) -> dict[str, Tensor]:
        """The model's outputs for the current state; step: a device scalar."""
        tokens = {name: stepper.state.tokens for name, stepper in self.steppers.items()}
        if self._batched:  # this rank computes both branches
            tokens = {name: torch.cat((x, x)) for name, x in tokens.items()}
        drawn = {name: x.index_select(0, step.view(1))[0] for name, x in self._drawn.items()}
        conditioning = rows(self._table, (step - self._first) * self._prompts + self._row_B)
        share = self._share
        streams = {**share.constant, **tokens, **drawn}
        with self._dit.computing():
            return self._dit.model.forward_tokens(streams, share.positions, conditioning, share.attend)

    def _parted(self, name: str, output: Tensor) -> Branches:
        """Both branches of a stream's output on this rank; a cfg axis gathers them."""
        if not self._course.request.guidance.on:
            return output, None
        keeper, state = self._dit.keeper, self.steppers[name].state
        cfg = keeper.mesh.cfg
        if cfg.size == 1:
            cond, uncond = output.chunk(2)
            return cond, uncond
        width = state.tokens.shape[-1] * (2 if self._course.decision.learned else 1)
        used = output[..., :width].to(state.tokens.dtype)
        cond, uncond = keeper.gathered((f"branches of {name}", state.shard), cfg, used[None], user=self)
        return cond, uncond
