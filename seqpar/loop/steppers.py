"""Steps a stream of the state by a diffusers scheduler, in one of three ways that `decide` chooses from.

DDIM, and DDPM with the model's variances, have a kernel of their own, with clipping. Any other linear scheduler steps
on local tokens, too, by the coefficients that `seqpar.loop.schedules` traces. All others gather the prediction (of
the latent's size), step the whole latents identically on every rank and split them again; they win only where a
scheduler is not linear. Noise is drawn whole on the CPU, in the order of the steps, and every rank keeps its share, so
that any number of ranks has the same noise.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from seqpar.kernels.ddim import guide
from seqpar.kernels.multistep import History, Steps, guided_multistep
from seqpar.loading.drivable import why_not_driven
from seqpar.loading.failures import FAILURES
from seqpar.loading.variances import learns_range, steps_locally
from seqpar.loop.coefficients import Coefficients, ddim_steps, ddpm_steps
from seqpar.loop.one_step import OneStep
from seqpar.loop.schedules import NotLinearError, Schedule, check_whole, mixed_noise, step_options, trace
from seqpar.loop.state import State


class Stepper(Protocol):
    """Steps a stream of the state by the model's outputs with and without the prompt (None if there is one branch).

    index: the step's number on the host. step: the same number on the device. bad: a device scalar that is lowered to
    the step at which the state stops being finite.
    """

    def __call__(self, cond: Tensor, uncond: Tensor | None, index: int, step: Tensor, bad: Tensor, /) -> None: ...


@dataclass(frozen=True)
class Decision:
    """The way in which a scheduler steps.

    One of three is given: schedule, traced coefficients; one_step, those of DDIM or DDPM; whole, the reason why the
    whole latents are stepped. options: the keyword arguments of the scheduler's step. begin: index of the first
    evaluation.
    """

    schedule: Schedule | None = None
    whole: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    begin: int = 0
    one_step: Coefficients | None = None

    @property
    def learned(self) -> bool:
        """Return whether this is DDPM with the model's variances, the second half of the model's output."""
        return self.one_step is not None and self.one_step.learned

    @property
    def local(self) -> bool:
        """Return whether steps run on local tokens, so that they can be a CUDA graph."""
        return self.whole is None

    def __str__(self) -> str:
        if self.whole is not None:
            return f"on the gathered prediction: {self.whole}"
        if self.schedule is None:
            return "with the model's variances on local tokens" if self.learned else "on local tokens"
        states, outputs = self.schedule.states_SP.shape[1], self.schedule.outputs_SQ.shape[1]
        return f"on local tokens (from the last {states} state(s) and {outputs} output(s))"


def decide(scheduler: Any, options: Mapping[str, Any] | None = None, begin: int = 0) -> Decision:
    """Return the way in which a diffusers scheduler, whose timesteps are set, steps from its evaluation `begin` on.

    options: keyword arguments for its step (eta, use_clipped_model_output), without those that are None or that the
    step does not accept. Raises ValueError, with the reason, if the scheduler does not work with its settings.
    """
    name = type(scheduler).__name__
    if (reason := why_not_driven(scheduler)) is not None:
        raise ValueError(f"got scheduler {name!r}, which {reason}; expected one like DDIMScheduler")
    accepted = step_options(scheduler, **(options or {}))
    if steps_locally(scheduler):
        return Decision(None, None, accepted, begin, ddim_steps(scheduler, accepted, begin))
    if learns_range(scheduler):
        return Decision(None, None, accepted, begin, ddpm_steps(scheduler, begin))
    drawn = accepted | step_options(scheduler, generator=torch.Generator())
    try:
        try:
            return Decision(trace(scheduler, drawn, begin), None, accepted, begin)
        except NotLinearError as reason:
            check_whole(scheduler, drawn, begin)
            return Decision(None, f"{name} is not traced, {_why(scheduler, str(reason))}", accepted, begin)
    except FAILURES as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"got scheduler {name!r}, which fails in its step: {reason}") from error


def _why(scheduler: Any, reason: str) -> str:
    known = [name for name in ("thresholding", "clip_sample", "clip_denoised") if scheduler.config.get(name)]
    return f"because of its {' and '.join(known)}" if known else reason


class Traced:
    """Any linear scheduler on tokens, by its coefficients, with the history in ring buffers on the device.

    The tokens of its `State` are the model's input: the state times the next step's input scale (1 after the last).
    """

    def __init__(self, state: State, schedule: Schedule, steps: Steps) -> None:
        states, outputs = schedule.states_SP.shape[1], schedule.outputs_SQ.shape[1]
        tokens, self._steps, self._state = state.tokens, steps, state
        past = tokens.new_zeros((outputs - 1, *tokens.shape)) if outputs > 1 else None
        if states == 1 and bool((schedule.inputs_S == 1).all()):
            self.history = History(tokens[None], past, None)
        else:
            self.history = History(tokens.new_zeros((states, *tokens.shape), dtype=torch.float64), past, tokens)
        self._show(schedule)

    def __call__(self, cond: Tensor, uncond: Tensor | None, index: int, step: Tensor, bad: Tensor, /) -> None:
        """Step the state; see `Stepper`. `step` selects coefficients and slots of the history on the device."""
        guided_multistep(self.history, cond, uncond, self._steps, step, bad)

    def restart(self, schedule: Schedule, guidance_S: Tensor, generator: torch.Generator) -> None:
        """Copy another run's coefficients, noise and first state into the buffers that a captured step reads.

        The history is not cleared, even of NaN, because a step reads only slots that this run has written.
        """
        steps = traced_steps(self._state, schedule, guidance_S, generator)
        self._steps.table_SK.copy_(steps.table_SK)
        self._steps.guidance_S.copy_(steps.guidance_S)
        if self._steps.noise_SnlC is not None and steps.noise_SnlC is not None:
            self._steps.noise_SnlC.copy_(steps.noise_SnlC)
        self._show(schedule)

    @property
    def kept(self) -> list[Tensor]:
        """Return the tensors that a step changes besides the state's tokens."""
        return [x for x in (self.history.states_PnlC, self.history.outputs_QnlC) if x is not None]

    def _show(self, schedule: Schedule) -> None:
        """Keep the first state, and put the model's input, which is scaled, into the state's tokens."""
        if self.history.seen_nlC is not None:
            self.history.states_PnlC[0].copy_(self._state.tokens)
            self._state.tokens.mul_(float(schedule.inputs_S[0]))


class Replicated:
    """Any diffusers scheduler: gathers the prediction, steps the whole latents alike on every rank, splits them."""

    def __init__(
        self,
        scheduler: Any,
        decision: Decision,
        state: State,
        start: Tensor,
        guidance_S: Tensor,
        generator: torch.Generator,
    ) -> None:
        """Set up the scheduler. start: the whole latents before the first step."""
        self._scheduler, self._guidance_S, self._state = scheduler, guidance_S, state
        self._options = {**decision.options, **step_options(scheduler, generator=generator)}
        self._timesteps = scheduler.timesteps[decision.begin :]
        if decision.begin and hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(decision.begin)
        self.latents = start.to(state.tokens.device, state.tokens.dtype)
        self._show(0)

    def __call__(self, cond: Tensor, uncond: Tensor | None, index: int, step: Tensor, bad: Tensor, /) -> None:
        """Step the state; see `Stepper`. It reads the timestep by `index`, because diffusers needs it on the host."""
        scale = self._guidance_S.index_select(0, step.view(1))[0]
        whole = self._state.gather(guide(self._state.tokens, cond, uncond, scale, self._state.guided_width))
        timestep = self._timesteps[index]
        self.latents = self._scheduler.step(whole, timestep, self.latents, **self._options).prev_sample
        if index + 1 < len(self._timesteps):
            self._show(index + 1)
        else:
            self._state.tokens.copy_(self._state.slice(self.latents))
        torch.where(self.latents.isfinite().all(), bad, torch.minimum(bad, step), out=bad)

    def _show(self, index: int) -> None:
        """Put the model's input at a step into the state's tokens."""
        seen = self.latents
        if hasattr(self._scheduler, "scale_model_input"):  # flow matching schedulers lack it
            seen = self._scheduler.scale_model_input(seen, self._timesteps[index])
        self._state.tokens.copy_(self._state.slice(seen))


def make_stepper(
    decision: Decision, scheduler: Any, state: State, start: Tensor, guidance_S: Tensor, generator: torch.Generator
) -> Stepper:
    """Return the stepper of one stream of the state. start: the whole latents before the first step."""
    if not decision.local:
        own = copy.deepcopy(scheduler)  # each stream needs the scheduler's history of its own
        return Replicated(own, decision, state, start, guidance_S, generator)
    if decision.one_step is not None:
        return OneStep(state, decision.one_step, guidance_S, generator)
    assert decision.schedule is not None
    return Traced(state, decision.schedule, traced_steps(state, decision.schedule, guidance_S, generator))


def restart_stepper(stepper: Stepper, decision: Decision, guidance_S: Tensor, generator: torch.Generator) -> None:
    """Copy a run's schedule and noise into the buffers of a stepper of the same kind; the state is new already."""
    if isinstance(stepper, OneStep) and decision.one_step is not None:
        stepper.restart(decision.one_step, guidance_S, generator)
    elif isinstance(stepper, Traced) and decision.schedule is not None:
        stepper.restart(decision.schedule, guidance_S, generator)


def traced_steps(state: State, schedule: Schedule, guidance_S: Tensor, generator: torch.Generator) -> Steps:
    """Return all steps of a run by a traced schedule."""
    like = state.tokens
    after = torch.cat((schedule.inputs_S[1:], torch.ones(1, dtype=torch.float64)))
    table = torch.cat((after[:, None], schedule.states_SP, schedule.outputs_SQ), dim=1).to(like.device)
    noise = None
    if schedule.draws:
        noise = torch.stack([state.slice(x) for x in mixed_noise(schedule, state.shape, like.dtype, generator)])
    return Steps(table, guidance_S, state.guided_width, noise)
