"""The denoising loop: predict, guide, step, all on this rank's tokens.

Nothing in the loop waits on the host where the scheduler steps on local tokens (see `seqpar.sampling.steppers`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from seqpar.distributed import DistributedDiT
from seqpar.kernels.ddim import Update
from seqpar.kernels.multistep import Steps
from seqpar.sampling.graph import StepGraph
from seqpar.sampling.schedules import Schedule
from seqpar.sampling.steppers import (
    DDIM,
    Decision,
    Replicated,
    Stepper,
    Traced,
    check_eta,
    clip,
    ddim_update,
    decide,
    traced_steps,
)
from seqpar.sampling.trajectory import Conditions, Guidance


def sample(
    dit: DistributedDiT,
    scheduler: Any,
    noise_NCHW: Tensor,
    labels: Mapping[str, Tensor],
    *,
    steps: int,
    guidance: Guidance,
    eta: float | None = None,
    generator: torch.Generator | None = None,
    graph: bool = True,
    on_step: Callable[[int], None] = lambda index: None,
) -> Tensor:
    """Latents (N, C, H, W) from noise of that shape, whole and equal on every rank.

    scheduler: diffusers'. eta: how much noise, None for the scheduler's own default. Noise within the run (eta > 0,
    ancestral schedulers) comes from `generator`, a CPU one with the same seed on every rank; None is seed 0.
    graph: replay the step as a CUDA graph where that is possible (`why_no_graph` says where not).
    on_step(index) is called when a step has been queued; on a GPU it may still be running.
    Raises ValueError for arguments that do not fit, and where the latents stop being finite (says at which step).
    """
    with Sampler(dit, graph=graph) as sampler:
        return sampler(scheduler, noise_NCHW, labels, steps=steps, guidance=guidance, eta=eta, generator=generator,
                       on_step=on_step)  # fmt: skip


class Sampler:
    """`sample` for who samples again and again: the last run's buffers and its graph serve the next run of its kind.

    Of one kind are runs with the same shape, number of steps, guidance and number of different labels; noise, labels,
    schedule and (in place) weights may change. A run of another kind frees the last one and begins anew. Release it (or
    use it in a `with`) before the process group ends: a graph may hold NCCL's exchanges.
    When it wins: capturing costs about three steps, a tenth of a run of 25.
    """

    def __init__(self, dit: DistributedDiT, *, graph: bool = True) -> None:
        self.dit = dit
        self._graph = graph
        self._run: Run | None = None
        self._kind: object = None

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    @torch.inference_mode(False)  # buffers made here must serve calls outside of it, too
    @torch.no_grad()
    def __call__(
        self,
        scheduler: Any,
        noise_NCHW: Tensor,
        labels: Mapping[str, Tensor],
        *,
        steps: int,
        guidance: Guidance,
        eta: float | None = None,
        generator: torch.Generator | None = None,
        on_step: Callable[[int], None] = lambda index: None,
    ) -> Tensor:
        """See `sample`."""
        order = Order(scheduler, noise_NCHW, labels, steps, guidance, eta, generator)
        kind = (order.kind, self.dit.state)
        if self._run is None or self._kind != kind or not self._run.restart(order):
            self.release()
            self._run, self._kind = Run(self.dit, order), kind
        run = self._run
        for chunk in run.trajectory.chunks():
            if self._graph and why_not_captured(self.dit, order.decision) is None:
                run.capture()
            for index in chunk:
                run.step(index)
                on_step(index)
        self.dit.check_delivered()  # before the next collective, which would wait for whoever is gone
        latents = run.latents()
        check_finite(min(self.dit.mesh.collect(int(run.bad))), run.timesteps)
        return latents

    def release(self) -> None:
        """Free what is kept."""
        if self._run is not None:
            self._run.release()
        self._run = self._kind = None


@dataclass(frozen=True, eq=False)
class Order:
    """What one run is asked for; see `sample`. Sets the scheduler's timesteps.

    begin: the evaluation of the model that the run begins with; the state is then taken as it is given (image-to-image:
    a picture with that step's noise). use_clipped_model_output: see diffusers' DDIM.
    """

    scheduler: Any
    noise_NCHW: Tensor
    labels: Mapping[str, Tensor]
    steps: int
    guidance: Guidance
    eta: float | None = None
    generator: torch.Generator | None = None
    use_clipped_model_output: bool = False
    begin: int = 0

    def __post_init__(self) -> None:
        check_eta(self.scheduler, self.eta)
        self.scheduler.set_timesteps(self.steps)
        if not 0 <= self.begin < len(self.scheduler.timesteps):
            raise ValueError(f"got begin {self.begin}, expected 0 to {len(self.scheduler.timesteps) - 1}")

    @cached_property
    def decision(self) -> Decision:
        """How the scheduler steps."""
        options = {"eta": self.eta, "use_clipped_model_output": self.use_clipped_model_output or None}
        return decide(self.scheduler, options, self.begin)

    @property
    def timesteps(self) -> Tensor:
        """Of all evaluations of the model, (S,)."""
        return torch.as_tensor(self.scheduler.timesteps)[self.begin :]

    @property
    def start(self) -> Tensor:
        """The state before the first step."""
        return self.noise_NCHW * (1.0 if self.begin else float(getattr(self.scheduler, "init_noise_sigma", 1.0)))

    @property
    def kind(self) -> object:
        """Equal for orders that one run can serve after another; of its own where the scheduler steps on the host."""
        decision, schedule = self.decision, self.decision.schedule
        if not decision.local:
            return object()
        same = tuple(self.noise_NCHW.shape), len(self.timesteps), self.guidance.on, self.guidance.channels
        if schedule is None:
            options = decision.options
            return *same, options.get("eta", 0.0) > 0, clip(self.scheduler), options.get("use_clipped_model_output")
        sizes = schedule.states_SP.shape[1], schedule.outputs_SQ.shape[1], bool((schedule.inputs_S == 1).all())
        return *same, sizes, bool(schedule.draws)

    def draws(self) -> torch.Generator:
        """Where noise within the run comes from."""
        return self.generator or torch.Generator().manual_seed(0)


class Run:
    """One denoising run: the sharded state, how it steps, and the step counter on the device."""

    def __init__(self, dit: DistributedDiT, order: Order) -> None:
        self.timesteps = order.timesteps
        conditions = Conditions(self.timesteps, order.labels)
        self.trajectory = dit.trajectory(order.start, conditions, order.guidance)
        self._advance = self._stepper(order)
        self._count = torch.zeros((), dtype=torch.int64, device=dit.device)
        self.bad = torch.full_like(self._count, len(self.timesteps))
        self._graph: StepGraph | None = None

    def restart(self, order: Order) -> bool:
        """Begin again with another order of the same kind, in the same buffers; False where its labels need others."""
        if isinstance(self._advance, Replicated):
            return False
        if not self.trajectory.restart(order.start, Conditions(order.timesteps, order.labels)):
            return False
        self.timesteps = order.timesteps
        schedule = order.decision.schedule
        if isinstance(self._advance, DDIM):
            self._advance.restart(self._update(order))
        elif isinstance(self._advance, Traced) and schedule is not None:
            self._advance.restart(self.trajectory, schedule, self._steps(order, schedule))
        self._count.zero_()
        self.bad.fill_(len(self.timesteps))
        return True

    def _stepper(self, order: Order) -> Stepper:
        decision = order.decision
        if not decision.local:
            return Replicated(
                order.scheduler, decision, self.trajectory, order.start, self._guidance(order), order.draws()
            )
        if decision.schedule is None:
            return DDIM(self._update(order))
        return Traced(self.trajectory, decision.schedule, self._steps(order, decision.schedule))

    def _update(self, order: Order) -> Update:
        shape = tuple(order.noise_NCHW.shape)
        guidance_S = self._guidance(order)
        return ddim_update(self.trajectory, order.scheduler, order.decision, guidance_S, shape, order.draws())

    def _steps(self, order: Order, schedule: Schedule) -> Steps:
        shape = tuple(order.noise_NCHW.shape)
        return traced_steps(self.trajectory, schedule, self._guidance(order), shape, order.draws())

    def _guidance(self, order: Order) -> Tensor:
        tokens = self.trajectory.tokens
        return order.guidance.vector(len(order.timesteps)).to(tokens.device, tokens.dtype)

    def step(self, index: int) -> None:
        """Queue one step: a graph's replay where there is one. Without a graph `index` must be the step's number."""
        if self._graph is not None:
            self._graph.replay()
            return
        self._advance(self.trajectory, index, self._count, self.bad)
        self._count.add_(1).remainder_(len(self.timesteps))  # a bench may go round

    def capture(self) -> None:
        """Make later steps replays of a graph. The state stays as it is."""
        if self._graph is None:
            self._graph = StepGraph(lambda: self.step(0), (self.trajectory.tokens, self._count, self.bad))

    def latents(self) -> Tensor:
        """The latents as they are, whole, on every rank."""
        return self._advance.latents if isinstance(self._advance, Replicated) else self.trajectory.gather()

    def release(self) -> None:
        """End the graph, if there is one, and give its memory back."""
        if self._graph is not None:
            torch.cuda.synchronize()
            self._graph.release()
            self._graph = None


def why_no_graph(dit: DistributedDiT, scheduler: Any) -> str | None:
    """None where a step of this scheduler, whose timesteps are set, can be a CUDA graph, else the reason why not."""
    return why_not_captured(dit, decide(scheduler))


def why_not_captured(dit: DistributedDiT, decision: Decision) -> str | None:
    """None where steps that run like this can be a CUDA graph, else the reason why not."""
    if dit.device.type != "cuda":
        return "no GPU"
    if not decision.local:
        return f"the scheduler steps on the host ({decision.whole})"
    if dit.dtype == torch.float64:
        return "fp64 is for checking"
    return None


def draw_noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """fp32 noise on the CPU in one draw for all images: the same bits for any number and kind of ranks."""
    return randn_tensor(shape, generator=generator, device=torch.device("cpu"), dtype=torch.float32)


def digest(latents: Tensor) -> str:
    """16 hex digits that differ where a bit differs: to compare runs on other meshes or machines."""
    return hashlib.sha256(latents.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def check_finite(first_bad: int, timesteps: Tensor) -> None:
    """Raise ValueError where a step produced NaN or infinity."""
    if first_bad < len(timesteps):
        raise ValueError(
            f"latents stopped being finite at step {first_bad + 1} of {len(timesteps)} (timestep "
            f"{timesteps[first_bad].item():g}); try dtype fp32, a lower guidance, or check the weights"
        )
