"""The denoising loop: predict, guide, step, all on this rank's tokens.

DDIM steps where the tokens are. Any other diffusers scheduler is stepped whole, identically on every rank, from the
gathered prediction (latent-sized), then sliced again. Nothing in the DDIM loop waits on the host.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from seqpar.distributed import DistributedDiT
from seqpar.graph import StepGraph
from seqpar.kernels.ddim import Update, guided_step
from seqpar.trajectory import Conditions, Guidance, Trajectory


class Stepper(Protocol):
    """Moves a trajectory's state one step on, and lowers `bad` to the step where it stops being finite."""

    def __call__(self, trajectory: Trajectory, index: int, step: Tensor, bad: Tensor, /) -> None: ...


def sample(
    dit: DistributedDiT,
    scheduler: Any,
    noise_NCHW: Tensor,
    labels: Mapping[str, Tensor],
    *,
    steps: int,
    guidance: Guidance,
    eta: float = 0.0,
    generator: torch.Generator | None = None,
    graph: bool = True,
    on_step: Callable[[int], None] = lambda index: None,
) -> Tensor:
    """Latents (N, C, H, W) from noise of that shape, whole and equal on every rank.

    scheduler: diffusers'. Noise within the run (eta > 0, ancestral schedulers) comes from `generator`, a CPU one with
    the same seed on every rank; None is seed 0.
    graph: replay the step as a CUDA graph where that is possible (`why_no_graph` says where not).
    on_step(index) is called when a step has been queued; on a GPU it may still be running.
    Raises ValueError for arguments that do not fit, and where the latents stop being finite (says at which step).
    """
    run = Run(dit, scheduler, noise_NCHW, labels, steps, guidance, eta, generator)
    with torch.no_grad():  # not inference_mode: buffers made here must serve calls outside, too
        try:
            for chunk in run.trajectory.chunks():
                if graph and why_no_graph(dit, scheduler) is None:
                    run.capture()
                for index in chunk:
                    run.step(index)
                    on_step(index)
            latents = run.latents()
        finally:
            run.release()
    check_finite(min(dit.mesh.collect(int(run.bad))), run.timesteps)
    return latents


class Run:
    """One denoising run: the sharded state, how it steps, and the step counter on the device."""

    def __init__(
        self,
        dit: DistributedDiT,
        scheduler: Any,
        noise_NCHW: Tensor,
        labels: Mapping[str, Tensor],
        steps: int,
        guidance: Guidance,
        eta: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        check_eta(scheduler, eta)
        generator = generator or torch.Generator().manual_seed(0)
        scheduler.set_timesteps(steps)
        self.timesteps = torch.as_tensor(scheduler.timesteps)
        noise = noise_NCHW * float(getattr(scheduler, "init_noise_sigma", 1.0))
        self.trajectory = dit.trajectory(noise, Conditions(self.timesteps, labels), guidance)
        self._advance: Stepper
        if steps_locally(scheduler):
            self._advance = DDIM(scheduler, steps, eta, self.trajectory, noise_NCHW.shape, generator)
        else:
            self._advance = Replicated(scheduler, eta, self.trajectory, noise, generator)
        self._count = torch.zeros((), dtype=torch.int64, device=dit.device)
        self.bad = torch.full_like(self._count, len(self.timesteps))
        self._graph: StepGraph | None = None

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
    """None where a step can be a CUDA graph, else the reason why not."""
    if dit.device.type != "cuda":
        return "no GPU"
    if not steps_locally(scheduler):
        return f"{type(scheduler).__name__} steps on the host"
    if dit.dtype == torch.float64:
        return "fp64 is for checking"
    return None


def steps_locally(scheduler: Any) -> bool:
    """Whether this scheduler's step needs one token at a time: DDIM without dynamic thresholding."""
    return type(scheduler) is DDIMScheduler and not scheduler.config["thresholding"]


def draw_noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """fp32 noise on the CPU in one draw for all images: the same bits for any number and kind of ranks."""
    return randn_tensor(shape, generator=generator, device=torch.device("cpu"), dtype=torch.float32)


def digest(latents: Tensor) -> str:
    """16 hex digits that differ where a bit differs: to compare runs on other meshes or machines."""
    return hashlib.sha256(latents.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def check_eta(scheduler: Any, eta: float) -> None:
    """Raise ValueError for an amount of noise that is none, or that this scheduler does not know."""
    if not 0 <= eta <= 1:
        raise ValueError(f"got eta {eta:g}, expected 0 (deterministic) to 1 (DDPM's noise)")
    if eta > 0 and "eta" not in inspect.signature(scheduler.step).parameters:
        raise ValueError(f"got eta {eta:g} with {type(scheduler).__name__}, expected 0: this scheduler has no eta")


def check_finite(first_bad: int, timesteps: Tensor) -> None:
    """Raise ValueError where a step produced NaN or infinity."""
    if first_bad < len(timesteps):
        raise ValueError(
            f"latents stopped being finite at step {first_bad + 1} of {len(timesteps)} (timestep "
            f"{timesteps[first_bad].item():g}); try dtype fp32, a lower guidance, or check the weights"
        )


class DDIM:
    """DDIM (arXiv 2010.02502, formulas 12 and 16) on tokens, with a diffusers scheduler's coefficients."""

    def __init__(
        self,
        scheduler: Any,
        steps: int,
        eta: float,
        trajectory: Trajectory,
        shape: tuple[int, ...],
        generator: torch.Generator,
    ) -> None:
        like = trajectory.tokens
        table = ddim_coefficients(scheduler, steps, eta).to(like.device, like.dtype)
        clip = scheduler.config.clip_sample_range if scheduler.config.clip_sample else None
        # drawn whole and before the loop, then sliced: the same noise for any number of ranks
        noise = [trajectory.slice(randn_tensor(shape, generator=generator)) for _ in range(steps if eta > 0 else 0)]
        drawn = torch.stack(noise) if noise else None
        self._update = Update(table, trajectory.scale, trajectory.guided_width, clip, drawn)

    def __call__(self, trajectory: Trajectory, index: int, step: Tensor, bad: Tensor, /) -> None:
        """See `Stepper`; `step` picks the coefficients on the device."""
        cond, uncond = trajectory.branches(step)
        guided_step(trajectory.tokens, cond, uncond, self._update, step, bad)


class Replicated:
    """Any diffusers scheduler: gather the prediction, step the whole latents on every rank alike, slice."""

    def __init__(
        self, scheduler: Any, eta: float, trajectory: Trajectory, noise: Tensor, generator: torch.Generator
    ) -> None:
        accepted = inspect.signature(scheduler.step).parameters
        options = {"eta": eta, "generator": generator}
        self._scheduler, self._options = scheduler, {key: x for key, x in options.items() if key in accepted}
        self.latents = noise.to(trajectory.tokens.device, trajectory.tokens.dtype)
        self._show(trajectory, 0)

    def __call__(self, trajectory: Trajectory, index: int, step: Tensor, bad: Tensor, /) -> None:
        """See `Stepper`; needs `index` on the host, as diffusers' schedulers do."""
        whole = trajectory.gather(trajectory.predict(step))
        timestep = self._scheduler.timesteps[index]
        self.latents = self._scheduler.step(whole, timestep, self.latents, **self._options).prev_sample
        if index + 1 < len(self._scheduler.timesteps):
            self._show(trajectory, index + 1)
        else:
            trajectory.tokens.copy_(trajectory.slice(self.latents))
        torch.where(self.latents.isfinite().all(), bad, torch.minimum(bad, step), out=bad)

    def _show(self, trajectory: Trajectory, index: int) -> None:
        """Put what the model sees at a step into the trajectory."""
        seen = self._scheduler.scale_model_input(self.latents, self._scheduler.timesteps[index])
        trajectory.tokens.copy_(trajectory.slice(seen))


def ddim_coefficients(scheduler: Any, steps: int, eta: float) -> Tensor:
    """(steps, 7) fp64: x0 = c0 x + c1 m, e = c2 x + c3 m, next = c4 x0 + c5 e + c6 noise, for model output m."""
    rows = []
    stride = scheduler.config.num_train_timesteps // steps
    for t in scheduler.timesteps.tolist():
        now = float(scheduler.alphas_cumprod[t])
        before = float(scheduler.alphas_cumprod[t - stride] if t >= stride else scheduler.final_alpha_cumprod)
        sigma = eta * ((1 - before) / (1 - now) * (1 - now / before)) ** 0.5
        x0_e = _prediction(scheduler.config.prediction_type, now**0.5, (1 - now) ** 0.5)
        rows.append((*x0_e, before**0.5, max(0.0, 1 - before - sigma**2) ** 0.5, sigma))
    return torch.tensor(rows, dtype=torch.float64)


def _prediction(kind: str, a: float, b: float) -> tuple[float, float, float, float]:
    """How x0 and noise e follow from state x = a x0 + b e and model output m: (x0/x, x0/m, e/x, e/m)."""
    if kind == "epsilon":
        if a == 0:
            raise ValueError("got prediction_type 'epsilon' with zero terminal SNR, expected 'v_prediction' or "
                             "'sample': pure noise says nothing of the picture")  # fmt: skip
        return 1 / a, -b / a, 0.0, 1.0
    if kind == "sample":
        return 0.0, 1.0, 1 / b, -a / b
    if kind == "v_prediction":
        return a, -b, b, a
    raise ValueError(f"got a scheduler with prediction_type {kind!r}, expected epsilon, sample or v_prediction")
