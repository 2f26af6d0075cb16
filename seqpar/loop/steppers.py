"""Steps a denoised stream by a diffusers scheduler, in one of three ways that `decide` chooses.

DDIM, and DDPM with the model's variances, have a kernel with clipping. Other linear schedulers step on local tokens,
too, by the coefficients that `seqpar.loop.schedules` traces. For all others the prediction is gathered, every rank
steps the full latents identically, and they are sharded again. Noise is drawn for full latents on the CPU, in the order
of the steps, and every rank keeps its share, so it is the same on any number of ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from seqpar.kernels.ddim import Update, guide, guided_step
from seqpar.kernels.multistep import History, Steps, guided_multistep
from seqpar.loading.errors import FAILURES
from seqpar.loading.schedulers import learns_range, steps_locally, why_not_driven
from seqpar.loop.interface import SequenceModel
from seqpar.loop.schedules import (
    Coefficients,
    NotLinearError,
    Schedule,
    check_whole,
    ddim_steps,
    ddpm_steps,
    mixed_noise,
    step_options,
    trace,
)
from seqpar.mesh.mesh import Mesh
from seqpar.mesh.shard import Shard
from seqpar.transports.collective import gather
from seqpar.types.protocols import state_dtype

NOISE_BYTES = 256 * 2**20  # most of a run's noise that a rank holds at a time


@dataclass(frozen=True)
class Decision:
    """How a scheduler steps: exactly one of schedule, one_step and whole is given.

    schedule: traced coefficients. one_step: those of DDIM or DDPM. whole: the reason why full latents are stepped.
    options: the keyword arguments of the scheduler's step.
    """

    schedule: Schedule | None = None
    whole: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    one_step: Coefficients | None = None

    @property
    def learned(self) -> bool:
        """Whether this is DDPM with the model's variances, the second half of the model's output."""
        return self.one_step is not None and self.one_step.learned

    @property
    def local(self) -> bool:
        """Whether steps run on local tokens, so that they can be a CUDA graph."""
        return self.whole is None

    def __str__(self) -> str:
        if self.whole is not None:
            return f"on the gathered prediction: {self.whole}"
        if self.schedule is None:
            return "with the model's variances on local tokens" if self.learned else "on local tokens"
        states, outputs = self.schedule.states_SP.shape[1], self.schedule.outputs_SQ.shape[1]
        return f"on local tokens (from the last {states} state(s) and {outputs} output(s))"


def decide(scheduler: Any, options: Mapping[str, Any] | None = None) -> Decision:
    """Decide how a diffusers scheduler steps, whose timesteps are set.

    options: keyword arguments for its step (eta, use_clipped_model_output); None and unknown ones are left out. Raises
    ValueError, with the reason, if the scheduler does not work with its settings.
    """
    name = type(scheduler).__name__
    if (reason := why_not_driven(scheduler)) is not None:
        raise ValueError(f"got scheduler {name!r}, which {reason}; use a scheduler such as DDIMScheduler")
    accepted = step_options(scheduler, **(options or {}))
    drawn = accepted | step_options(scheduler, generator=torch.Generator())
    try:
        if steps_locally(scheduler):
            return Decision(options=accepted, one_step=ddim_steps(scheduler, accepted))
        if learns_range(scheduler):
            return Decision(options=accepted, one_step=ddpm_steps(scheduler))
        try:
            return Decision(trace(scheduler, drawn), None, accepted)
        except NotLinearError as error:
            check_whole(scheduler, drawn)
            causes = [flag for flag in ("thresholding", "clip_sample", "clip_denoised") if scheduler.config.get(flag)]
            reason = f"because of its {' and '.join(causes)}" if causes else str(error)
            return Decision(None, f"{name} is not traced, {reason}", accepted)
    except FAILURES as error:  # such as an index past the end of its tables
        reason = " ".join(str(error).split())
        raise ValueError(f"got scheduler {name!r}, which fails in its step: {reason}") from error


class State:
    """This rank's images and tokens of one stream.

    tokens: the model's input, (n, l, C*p*p) fp32 (fp64 for an fp64 model). shape: of the full latent.
    """

    tokens: Tensor

    def __init__(self, model: SequenceModel, mesh: Mesh, latent: Tensor, channels: int | None) -> None:
        """Shard a latent (or tokens) that every rank has. channels: number of guided channels, None for all."""
        self._model, self._mesh, self._size = model, mesh, tuple(latent.shape[2:]) if latent.dim() > 3 else None
        self.shape = tuple(latent.shape)
        patch = prod(model.patch)
        count = latent.shape[1] if self._size is None else prod(self._size) // patch
        width = latent.shape[2] if self._size is None else latent.shape[1] * patch
        self._dtype = state_dtype(next(model.parameters()).dtype)
        self.shard, self._images = Shard(count, mesh.sequence.size), Shard(len(latent), mesh.data.size)
        self.guided_width = width if channels is None else channels * (1 if self._size is None else patch)
        self.tokens = self.slice(latent).clone()  # a copy, because steps write here

    def slice(self, latent: Tensor) -> Tensor:
        """This rank's images and tokens of a tensor of the latent's shape that every rank has."""
        local = latent[self._images.slice(self._mesh.data.rank)].to(self._mesh.device, self._dtype)
        local = local if self._size is None else self._model.patchify(local)
        return local[:, self.shard.slice(self._mesh.sequence.rank)].contiguous()

    def gather(self, tokens: Tensor | None = None) -> Tensor:
        """The full latent on every rank, gathered from the state or from tokens of its shape."""
        tokens = self.tokens if tokens is None else tokens
        if self._mesh.sequence.size > 1:
            tokens = gather(tokens, self._mesh.sequence, self.shard.sizes, dim=1)
        if self._mesh.data.size > 1:
            tokens = gather(tokens, self._mesh.data, self._images.sizes)
        return tokens if self._size is None else self._model.unpatchify(tokens, *self._size)


class Stepper:
    """Steps the state of one stream."""

    history_tensors: tuple[Tensor, ...] = ()
    """The tensors that a step changes besides the state's tokens."""

    def __init__(self, state: State) -> None:
        self.state = state

    def __call__(self, cond: Tensor, uncond: Tensor | None, index: int, step: Tensor, bad: Tensor, /) -> None:
        """Step by the model's outputs with and without the prompt (None if there is one branch).

        index, step: the step's number on the host and on the device. bad: a device scalar that is lowered to the step
        at which the state stops being finite.
        """
        raise NotImplementedError

    def load(self, index: int) -> None:
        """Prepare the step of this number on the host, before it is queued."""

    def restart(self, decision: Decision, guidance_S: Tensor, generator: torch.Generator) -> None:
        """Copy another run's schedule and noise into the buffers of a captured step; the state's tokens are new."""
        raise NotImplementedError

    def latents(self) -> Tensor:
        """The full latents on every rank."""
        return self.state.gather()


class OneStep(Stepper):
    """Steps whose result depends only on the state before them.

    A long run of large latents draws its noise in chunks, before the first step of each.
    """

    def __init__(
        self, state: State, coefficients: Coefficients, guidance_S: Tensor, generator: torch.Generator
    ) -> None:
        super().__init__(state)
        like, learned, noise = state.tokens, coefficients.learned, None
        table = coefficients.table_SK.to(like.device, torch.float64 if learned else like.dtype)
        if learned or any(coefficients.noisy):
            steps = NOISE_BYTES // max(1, like.numel() * like.element_size())
            noise = like.new_zeros((max(1, min(len(table), steps)), *like.shape))
        first = torch.zeros((), dtype=torch.int64, device=like.device)
        self._update = Update(table, guidance_S, state.guided_width, noise, first, coefficients.clipped, learned)
        self._begin(coefficients, generator)

    def _begin(self, coefficients: Coefficients, generator: torch.Generator) -> None:
        self._generator, self._before, self._loaded = generator, generator.get_state(), -1
        self._noisy = coefficients.noisy
        self.load(0)

    def __call__(self, cond: Tensor, uncond: Tensor | None, index: int, step: Tensor, bad: Tensor, /) -> None:
        guided_step(self.state.tokens, cond, uncond, self._update, step, bad)

    def restart(self, decision: Decision, guidance_S: Tensor, generator: torch.Generator) -> None:
        coefficients = decision.one_step
        assert coefficients is not None
        self._update.coefficients_SK.copy_(coefficients.table_SK)
        self._update.guidance_S.copy_(guidance_S)
        self._begin(coefficients, generator)

    def load(self, index: int) -> None:
        """Draw the noise of the chunk that holds this step; the first chunk starts the same sequence again."""
        noise, first = self._update.noise_TnlC, self._update.first
        if noise is None or first is None or (start := index // len(noise) * len(noise)) == self._loaded:
            return
        if start == 0:
            self._generator.set_state(self._before)
        for row, noisy in zip(noise, self._noisy[start : start + len(noise)], strict=False):
            if noisy:
                shape, dtype = self.state.shape, self.state.tokens.dtype
                row.copy_(self.state.slice(randn_tensor(shape, generator=self._generator, dtype=dtype)))
            else:
                row.zero_()
        first.fill_(start)
        self._loaded = start


class Traced(Stepper):
    """Any linear scheduler on tokens, by its coefficients, with the history in ring buffers on the device.

    The state's tokens are the model's input: the state times the next step's input scale (1 after the last).
    """

    def __init__(self, state: State, schedule: Schedule, steps: Steps) -> None:
        super().__init__(state)
        states, outputs = schedule.states_SP.shape[1], schedule.outputs_SQ.shape[1]
        tokens, self._steps = state.tokens, steps
        past = tokens.new_zeros((outputs - 1, *tokens.shape)) if outputs > 1 else None
        if states == 1 and bool((schedule.inputs_S == 1).all()):
            self.history = History(tokens[None], past, None)
        else:
            self.history = History(tokens.new_zeros((states, *tokens.shape), dtype=torch.float64), past, tokens)
        self.history_tensors = tuple(x for x in (self.history.states_PnlC, self.history.outputs_QnlC) if x is not None)
        self._show(schedule)

    def __call__(self, cond: Tensor, uncond: Tensor | None, index: int, step: Tensor, bad: Tensor, /) -> None:
        guided_multistep(self.history, cond, uncond, self._steps, step, bad)

    def restart(self, decision: Decision, guidance_S: Tensor, generator: torch.Generator) -> None:
        # the history is not cleared, even of NaN, because a step reads only slots that this run has written
        schedule = decision.schedule
        assert schedule is not None
        steps = traced_steps(self.state, schedule, guidance_S, generator)
        self._steps.table_SK.copy_(steps.table_SK)
        self._steps.guidance_S.copy_(steps.guidance_S)
        if self._steps.noise_SnlC is not None and steps.noise_SnlC is not None:
            self._steps.noise_SnlC.copy_(steps.noise_SnlC)
        self._show(schedule)

    def _show(self, schedule: Schedule) -> None:
        """Save the first state, and scale the state's tokens to the model's input."""
        if self.history.seen_nlC is not None:
            self.history.states_PnlC[0].copy_(self.state.tokens)
            self.state.tokens.mul_(float(schedule.inputs_S[0]))


class Replicated(Stepper):
    """Any diffusers scheduler: gathers the prediction, steps the full latents identically on all ranks, shards them."""

    def __init__(
        self,
        scheduler: Any,
        decision: Decision,
        state: State,
        start: Tensor,
        guidance_S: Tensor,
        generator: torch.Generator,
    ) -> None:
        """Set up the scheduler. start: the full latents before the first step."""
        super().__init__(state)
        self._scheduler, self._guidance_S = scheduler, guidance_S
        self._options = {**decision.options, **step_options(scheduler, generator=generator)}
        self._timesteps = scheduler.timesteps
        self._latents = start.to(state.tokens.device, state.tokens.dtype)
        self._show(0)

    def __call__(self, cond: Tensor, uncond: Tensor | None, index: int, step: Tensor, bad: Tensor, /) -> None:
        state, scale = self.state, self._guidance_S.index_select(0, step.view(1))[0]
        prediction = state.gather(guide(state.tokens, cond, uncond, scale, state.guided_width))
        timestep = self._timesteps[index]  # diffusers needs it on the host
        self._latents = self._scheduler.step(prediction, timestep, self._latents, **self._options).prev_sample
        if index + 1 < len(self._timesteps):
            self._show(index + 1)
        else:
            state.tokens.copy_(state.slice(self._latents))
        torch.where(self._latents.isfinite().all(), bad, torch.minimum(bad, step), out=bad)

    def _show(self, index: int) -> None:
        """Copy the model's input at a step into the state's tokens."""
        seen = self._latents
        if hasattr(self._scheduler, "scale_model_input"):  # flow matching schedulers lack it
            seen = self._scheduler.scale_model_input(seen, self._timesteps[index])
        self.state.tokens.copy_(self.state.slice(seen))

    def latents(self) -> Tensor:
        return self._latents


def make_stepper(
    decision: Decision, scheduler: Any, state: State, start: Tensor, guidance_S: Tensor, generator: torch.Generator
) -> Stepper:
    """The stepper of one stream. start: the full latents before the first step."""
    if not decision.local:  # each stream needs its own scheduler, which holds its history
        return Replicated(copy.deepcopy(scheduler), decision, state, start, guidance_S, generator)
    if decision.one_step is not None:
        return OneStep(state, decision.one_step, guidance_S, generator)
    assert decision.schedule is not None
    return Traced(state, decision.schedule, traced_steps(state, decision.schedule, guidance_S, generator))


def traced_steps(state: State, schedule: Schedule, guidance_S: Tensor, generator: torch.Generator) -> Steps:
    """All steps of a run by a traced schedule."""
    like = state.tokens
    after = torch.cat((schedule.inputs_S[1:], torch.ones(1, dtype=torch.float64)))
    table = torch.cat((after[:, None], schedule.states_SP, schedule.outputs_SQ), dim=1).to(like.device)
    noise = None
    if schedule.draws:
        noise = torch.stack([state.slice(x) for x in mixed_noise(schedule, state.shape, like.dtype, generator)])
    return Steps(table, guidance_S, state.guided_width, noise)
