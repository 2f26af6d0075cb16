"""Traces a diffusers scheduler to coefficients, so that its steps run on local tokens inside the CUDA graph.

Most schedulers are linear: the next state is a weighted sum of the last states and model outputs, and the weights
depend only on the step. Before the loop, a copy of the scheduler runs once on small random vectors in fp64, and least
squares gives the weights. Noise that a scheduler draws in its step enters linearly, too; it is drawn before the loop,
in the same order, and mixed into one tensor per step. The trace also tests whether the scheduler is linear: there are
many more equations than weights, at several magnitudes, so that clipping, thresholding and constants leave a residual.
The alternative, stepping the gathered latents on every rank, waits for the host at every step.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from math import log
from typing import Any

import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode

LEAST = 1e-20  # of a variance whose logarithm is taken, as in diffusers


@dataclass(frozen=True, eq=False)
class Coefficients:
    """The coefficients of S steps, (S, K) fp64, as `seqpar.kernels.ddim.Update` names them.

    noisy: whether each step draws noise. clipped: DDIM's use_clipped_model_output. learned: whether this is DDPM.
    """

    table_SK: Tensor
    noisy: tuple[bool, ...]
    clipped: bool = False
    learned: bool = False


def clip(scheduler: Any) -> float:
    """The range to which the predicted x0 is clipped; infinity if it is not."""
    return scheduler.config.clip_sample_range if scheduler.config.clip_sample else float("inf")


def ddim_steps(scheduler: Any, options: Mapping[str, Any]) -> Coefficients:
    """DDIM's steps, with 8 coefficients c each.

    For state x, model output m and noise z: x0 = c0 x + c1 m, clipped to +-c2, e = c3 x + c4 m, next x = c5 x0 + c6 e +
    c7 z. options: keyword arguments of the scheduler's step; with use_clipped_model_output, e = c3 x + c4 x0 instead,
    from the clipped x0. A step ends one stride earlier, as in diffusers, or at the next timestep of a respaced schedule
    (`respace`).
    """
    eta, clipped = options.get("eta", 0.0), bool(options.get("use_clipped_model_output"))
    rows, timesteps = [], scheduler.timesteps.tolist()
    stride = scheduler.config.num_train_timesteps // scheduler.num_inference_steps
    respaced = getattr(scheduler, "respaced", None) is scheduler.timesteps
    ends = [*timesteps[1:], -1] if respaced else [t - stride for t in timesteps]
    for t, end in zip(timesteps, ends, strict=True):
        alpha = float(scheduler.alphas_cumprod[t])
        before = float(scheduler.alphas_cumprod[end] if end >= 0 else scheduler.final_alpha_cumprod)
        sigma = eta * ((1 - before) / (1 - alpha) * (1 - alpha / before)) ** 0.5
        a, b = alpha**0.5, (1 - alpha) ** 0.5
        x0_x, x0_m, e_x, e_m = prediction_weights(scheduler.config.prediction_type, a, b)
        e_x, e_m = (1 / b, -a / b) if clipped else (e_x, e_m)
        keep, direction = before**0.5, max(0.0, 1 - before - sigma**2) ** 0.5
        rows.append((x0_x, x0_m, clip(scheduler), e_x, e_m, keep, direction, sigma))
    return Coefficients(torch.tensor(rows, dtype=torch.float64), (eta > 0,) * len(rows), clipped)


def prediction_weights(kind: str, a: float, b: float) -> tuple[float, float, float, float]:
    """The weights (x0/x, x0/m, e/x, e/m) that give x0 and noise e from state x = a x0 + b e and output m."""
    if kind == "epsilon":
        if a == 0:
            raise ValueError(
                "got prediction_type 'epsilon' with zero terminal SNR, expected 'v_prediction' or 'sample': the noise "
                "in a state of pure noise does not determine the picture"
            )
        return 1 / a, -b / a, 0.0, 1.0
    if kind == "sample":
        return 0.0, 1.0, 1 / b, -a / b
    if kind == "v_prediction":
        return a, -b, b, a
    raise ValueError(f"got a scheduler with prediction_type {kind!r}, expected epsilon, sample or v_prediction")


def ddpm_steps(scheduler: Any) -> Coefficients:
    """DDPM's steps, with 7 coefficients c each.

    They come from fp64 products of the scheduler's betas. For state x, model output m, its v and noise z: x0 = c0 x +
    c1 m, clipped to +-c2, next x = c3 x0 + c4 x + exp(c5 + c6 v) z. A step ends at the next timestep of the schedule,
    the last one at x0. A step at timestep 0 adds no noise, as in diffusers.
    """
    rows, timesteps = [], scheduler.timesteps.tolist()
    alphas = torch.cumprod(1 - scheduler.betas.double(), 0).tolist()
    for t, end in zip(timesteps, [*timesteps[1:], -1], strict=True):
        alpha, before = alphas[t], alphas[end] if end >= 0 else 1.0
        beta = 1 - alpha / before
        x0_x, x0_m, _, _ = prediction_weights(scheduler.config.prediction_type, alpha**0.5, (1 - alpha) ** 0.5)
        keep, stay = before**0.5 * beta / (1 - alpha), (alpha / before) ** 0.5 * (1 - before) / (1 - alpha)
        # the logarithm of sigma is half that of the variance, and v = -1 and 1 stand for its bounds
        low, high = log(max((1 - before) / (1 - alpha) * beta, LEAST)) / 2, log(beta) / 2
        rows.append((x0_x, x0_m, clip(scheduler), keep, stay, (high + low) / 2, (high - low) / 2))
    return Coefficients(torch.tensor(rows, dtype=torch.float64), tuple(t > 0 for t in timesteps), learned=True)


MOST = 4  # maximum number of states or outputs that a step may need, including the current one
CLEAN, ENOUGH = 1e-10, 1e-6  # relative residuals that rounding alone causes, and that a row may have at most
SHAPE = (2, 4, 4, 4)  # shape of the vectors, like small latents: 128 equations for at most about 20 weights
# of the vectors' channels: a linear step is linear at each of them
MAGNITUDES = torch.tensor((1.0, 1e-2, 1e3, 30.0), dtype=torch.float64, device="cpu").view(1, -1, 1, 1)
CASTS = {torch.Tensor.to, torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.type}
RANDOM = {
    torch.rand,
    torch.rand_like,
    torch.randint,
    torch.normal,
    torch.bernoulli,
    torch.multinomial,
    torch.Tensor.normal_,
    torch.Tensor.uniform_,
}


class NotLinearError(Exception):
    """Raised if a working scheduler cannot be expressed by coefficients; the message is the reason."""


@dataclass(frozen=True)
class Schedule:
    """The coefficients of a run of S model evaluations, all fp64 on the CPU.

    x_(i+1) = sum_j states_SP[i, j] x_(i-j) + sum_j outputs_SQ[i, j] o_(i-j) + sum_k noise_SK[i, k] z_k for the states
    x, model outputs o and noise draws z; the model's input is inputs_S[i] x_i. draws: the dtype of each draw, None for
    the dtype of the state. residual: the largest relative error of a row against the scheduler's own step.
    """

    inputs_S: Tensor
    states_SP: Tensor
    outputs_SQ: Tensor
    noise_SK: Tensor
    draws: tuple[torch.dtype | None, ...]
    residual: float


class Recorder(TorchFunctionMode):
    """Keeps vectors in fp64 where a scheduler casts them, and hands out known vectors where it draws noise.

    casts: whether vectors are cast, so that the dtypes of the draws (None: that of the state) are the scheduler's.
    """

    def __init__(self, generator: torch.Generator, casts: bool = False) -> None:
        super().__init__()
        self.draws: list[Tensor] = []
        self.dtypes: list[torch.dtype | None] = []
        self._generator, self._casts = generator, casts

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # a cast keeps fp64, and a random draw is recorded
        kwargs = kwargs or {}
        if func in RANDOM:
            raise NotLinearError(f"it draws random numbers by torch's {func.__name__}")
        if func in (torch.randn, torch.randn_like):
            return self._draw(func, args, kwargs)
        if not self._casts and func in CASTS and args[0].shape == SHAPE and args[0].dtype == torch.float64:
            return args[0].clone()
        return func(*args, **kwargs)

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        shape = args[0].shape if func is torch.randn_like else kwargs.get("size", args[0] if args else ())
        if tuple(shape) != SHAPE:
            raise NotLinearError(f"it draws noise of another shape than the state ({tuple(shape)}, not {SHAPE})")
        default = args[0].dtype if func is torch.randn_like else torch.get_default_dtype()
        dtype = kwargs.get("dtype") or default
        self.dtypes.append(None if dtype == torch.float64 else dtype)
        self.draws.append(vector(self._generator).to(dtype if self._casts else torch.float64))
        return self.draws[-1]


def trace(scheduler: Any, options: Mapping[str, Any]) -> Schedule:
    """The coefficients of a diffusers scheduler whose timesteps are set.

    options: keyword arguments of its step, such as eta; see `step_options`. The scheduler itself is not changed.
    Raises NotLinearError, with the reason, if coefficients cannot express its steps, and ValueError if it fails.
    """
    # 1. a copy of the scheduler runs on random vectors; before each step, `drawn` is the number of draws so far
    generator = torch.Generator().manual_seed(0)
    scales, states, drawn, recorder = [], [vector(generator)], [0], Recorder(generator)
    outputs = [vector(generator) for _ in scheduler.timesteps]  # not in the recorder, which would record them
    with recorder:
        for seen, state in stepped(scheduler, options, states[0], outputs):
            scales.append(scale_of(seen, states[-1]))
            states.append(state)
            drawn.append(len(recorder.draws))

    # 2. weights of each step, the last first, because many weights fit the short history of the first steps
    draws, rows, width = recorder.draws, [], (1, 1)
    noise = torch.zeros(len(outputs), len(draws), dtype=torch.float64)
    for index in reversed(range(len(outputs))):
        state_row, output_row, noise_row, residual = solve(states, outputs, draws, drawn, index, width)
        width = max(width[0], len(state_row)), max(width[1], len(output_row))
        rows.insert(0, (state_row, output_row, residual))
        noise[index, drawn[index + 1] - len(noise_row) : drawn[index + 1]] = noise_row
    return Schedule(
        torch.tensor(scales, dtype=torch.float64),
        pad_sequence([row for row, _, _ in rows], batch_first=True),
        pad_sequence([row for _, row, _ in rows], batch_first=True),
        noise,
        drawn_dtypes(scheduler, options) if draws else (),
        max(residual for _, _, residual in rows),
    )


def drawn_dtypes(scheduler: Any, options: Mapping[str, Any]) -> tuple[torch.dtype | None, ...]:
    """The dtype of each draw, None for that of the state: some schedulers make an fp64 state fp32 first."""
    generator = torch.Generator().manual_seed(0)
    state, output, recorder = vector(generator), vector(generator), Recorder(generator, casts=True)
    with recorder:
        list(stepped(scheduler, options, state, repeat(output)))
    return tuple(recorder.dtypes)


def check_whole(scheduler: Any, options: Mapping[str, Any]) -> None:
    """Raise ValueError, with the reason, if a scheduler cannot step whole latents identically on every rank.

    This runs a copy of the scheduler on random latents; see `trace` for the arguments.
    """
    generator = torch.Generator().manual_seed(0)
    state, *outputs = (torch.randn(SHAPE, generator=generator) for _ in [None, *scheduler.timesteps])
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        list(stepped(scheduler, options, state, outputs))
        if not torch.equal(torch.get_rng_state(), before):
            raise ValueError("it draws from torch's global generator, whose numbers differ between ranks")


def stepped(
    scheduler: Any, options: Mapping[str, Any], state: Tensor, outputs: Iterable[Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Step a copy of the scheduler; yield the model's input and the next state.

    Raises ValueError if a step returns no latents, or numbers that are not finite.
    """
    scheduler, dtype = copy.deepcopy(scheduler), state.dtype
    for index, (t, output) in enumerate(zip(scheduler.timesteps, outputs, strict=False)):
        seen = scheduler.scale_model_input(state, t) if hasattr(scheduler, "scale_model_input") else state
        following = scheduler.step(output.clone(), t, state.clone(), **options).prev_sample
        if following.shape != SHAPE or not following.is_floating_point():
            shape = tuple(following.shape)
            raise ValueError(f"step {index + 1} returns {following.dtype} of shape {shape}, not latents")
        if not following.isfinite().all():
            raise ValueError(f"step {index + 1} makes NaN or infinity from finite states and outputs")
        state = following.to(dtype)
        yield seen, state


def solve(
    states: Sequence[Tensor],
    outputs: Sequence[Tensor],
    draws: Sequence[Tensor],
    drawn: Sequence[int],
    index: int,
    width: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor, float]:
    """(state weights, output weights, noise weights, residual) of one step, with the shortest history that fits.

    width: the numbers of states and outputs that other rows need; a history within these is tried first.
    """
    best = float("inf")
    fits: list[tuple[Tensor, Tensor, Tensor, float]] = []
    most = min(MOST, index + 1)
    sizes = [(p, q) for p in range(1, most + 1) for q in range(1, most + 1)]
    sizes.sort(key=lambda size: (max(size[0], width[0]) + max(size[1], width[1]), sum(size), size))
    for steps in {1: None, most: None}:  # whose draws enter
        noise = draws[drawn[index + 1 - steps] : drawn[index + 1]]
        for p, q in sizes:
            columns = [*(states[index - j] for j in range(p)), *(outputs[index - j] for j in range(q)), *noise]
            weights, residual = fit(columns, states[index + 1])
            best = min(best, residual)
            if residual <= ENOUGH:
                fits.append((weights[:p], weights[p : p + q], weights[p + q :], residual))
            if residual <= CLEAN:
                return fits[-1]
    if not fits:
        raise NotLinearError(
            f"step {index + 1} is not linear in the last {most} states and outputs (relative residual {best:.0e})"
        )
    return fits[0]


def fit(columns: Sequence[Tensor], wanted: Tensor) -> tuple[Tensor, float]:
    """The weights of the columns whose sum is closest to `wanted`, and the relative residual.

    Negligible weights are set to 0.
    """
    matrix = torch.stack([(column / MAGNITUDES).flatten() for column in columns], dim=1)
    target = (wanted / MAGNITUDES).flatten()
    norms = matrix.norm(dim=0).clamp_min(1e-300)
    weights = torch.linalg.lstsq(matrix / norms, target[:, None], driver="gelsd").solution[:, 0]
    size = float(target.norm()) or 1.0
    weights = torch.where(weights.abs() < 1e-13 * size, 0.0, weights) / norms
    return weights, float((matrix @ weights - target).abs().max()) * len(target) ** 0.5 / size


def scale_of(seen: Tensor, state: Tensor) -> float:
    """The factor by which `scale_model_input` multiplies the state; NotLinearError if it does anything else."""
    scale = float((seen / state).median())
    if not torch.allclose(seen, scale * state, rtol=ENOUGH, atol=0):
        raise NotLinearError("its scale_model_input is not a multiplication by a number")
    return scale


def step_options(scheduler: Any, **options: Any) -> dict[str, Any]:
    """The options that are not None and that this scheduler's step accepts."""
    accepted = inspect.signature(scheduler.step).parameters
    return {name: value for name, value in options.items() if value is not None and name in accepted}


def mixed_noise(
    schedule: Schedule, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> list[Tensor]:
    """The noise term of every step, whole and on the CPU, from the same draws in the same order as diffusers."""
    draws = [randn_tensor(shape, generator=generator, dtype=own or dtype).to(dtype) for own in schedule.draws]
    mixed = []
    for weights in schedule.noise_SK:
        total = torch.zeros(shape, dtype=dtype)
        for draw, weight in zip(draws, weights.tolist(), strict=True):
            total = total + weight * draw if weight else total
        mixed.append(total)
    return mixed


def vector(generator: torch.Generator) -> Tensor:
    """A random vector of `SHAPE`, whose channels have several magnitudes."""
    return torch.randn(SHAPE, generator=generator, dtype=torch.float64) * MAGNITUDES
