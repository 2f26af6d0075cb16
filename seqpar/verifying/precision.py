"""`measure_precision`: what 8 bits change in the images of a pipeline, against its weights' own dtype.

Each prompt is computed three times with one seed: in 8 bits, in the weights' dtype by the same fused blocks, and by
diffusers' own modules. The difference of the last two is the floor: what another order of the same roundings changes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqpar.transformer.parallelize import calls_of, computed_by

PROMPTS = (
    "A photograph of an old sailing ship in a harbour at dawn",
    "A portrait of a woman with grey hair and round glasses, in soft light",
    "A street in the rain at night, with the reflections of neon signs",
    "A bowl of cherries on a blue table cloth, painted in oil",
    "A shop window with the words: open from nine to five",
    "A snow leopard on a rock above a valley, in winter",
    "An isometric drawing of a small library with a reading lamp",
    "A close view of a watch with its gears, macro photograph",
)


@dataclass(frozen=True)
class Difference:
    """Two runs with one seed. latents, pixels: the relative error, |got - wanted| / |wanted|. psnr: of pixels, in dB.

    frames: the PSNR of the differences of neighbouring frames of a video, in dB; None for images.
    """

    latents: float | None
    pixels: float
    psnr: float
    frames: float | None


@dataclass(frozen=True)
class PrecisionError:
    """The error of 8 bits for each prompt, and the floor: the weights' dtype against diffusers' own modules."""

    prompts: tuple[str, ...]
    errors: tuple[Difference, ...]
    floor: tuple[Difference, ...]

    @property
    def worst_psnr(self) -> float:
        return min(map(_decibels, self.errors))

    def __str__(self) -> str:
        lines = [f"{'':12} {'PSNR mean, worst':>20} {'pixels mean, worst':>22} {'latents mean, worst':>22}"]
        for name, runs in (("8 bits", self.errors), ("floor", self.floor)):
            psnr = [run.psnr for run in runs]
            decibels = f"{sum(psnr) / len(psnr):.1f}, {min(psnr):.1f} dB"
            pixels, latents = ([run.pixels for run in runs], [run.latents for run in runs if run.latents is not None])
            cells = [f"{sum(of) / len(of):.2e}, {max(of):.2e}" if of else "-" for of in (pixels, latents)]
            lines.append(f"{name:12} {decibels:>20} {cells[0]:>22} {cells[1]:>22}")
            if frames := [run.frames for run in runs if run.frames is not None]:
                lines.append(f"{'  of frames':12} {f'{sum(frames) / len(frames):.1f}, {min(frames):.1f} dB':>20}")
        worst = self.prompts[min(range(len(self.errors)), key=lambda index: _decibels(self.errors[index]))]
        return "\n".join(f"precision {line}" for line in (*lines, f"worst prompt: {worst}"))


def measure_precision(
    pipe: Any, prompts: Sequence[str] = PROMPTS, *, seed: int = 0, **arguments: Any
) -> PrecisionError:
    """Compare the images of a pipeline in 8 bits with those in its weights' dtype; rank 0 prints it. Collective.

    pipe: a diffusers pipeline after `parallelize(pipe, precision="fp8")`, or with local="fp8". arguments: of its call,
    such as `num_inference_steps`, `height` and `width`; the pipeline's own values otherwise. Prompt n has the seed
    `seed + n`. Raises ValueError for a pipeline that does not compute in 8 bits or takes no prompt.
    """
    calls = [call for _, call in calls_of(pipe)]
    parameters = inspect.signature(type(pipe).__call__).parameters
    if not any(call.sharded.is_eight for call in calls):
        raise ValueError('the pipeline does not compute in 8 bits; call seqpar.parallelize(pipe, precision="fp8")')
    if "prompt" not in parameters or not prompts:
        raise ValueError(f"{type(pipe).__name__} needs at least one prompt, and a call that takes prompt=")

    def drawn() -> list[tuple[Tensor | None, np.ndarray]]:
        return [_drawn(pipe, parameters, {**arguments, "prompt": prompt}, seed + n) for n, prompt in enumerate(prompts)]

    eight = drawn()
    with computed_by(pipe, eight=False):
        plain = drawn()
    with computed_by(pipe, eight=False, fused=False):
        modules = drawn()
    errors, floor = (
        tuple(_difference(*pair) for pair in zip(got, wanted, strict=True))
        for got, wanted in ((eight, plain), (plain, modules))
    )
    result = PrecisionError(tuple(prompts), errors, floor)
    if calls[0].mesh.is_main:
        print(result, flush=True)
    return result


def _drawn(pipe: Any, parameters: Any, arguments: dict[str, Any], seed: int) -> tuple[Tensor | None, np.ndarray]:
    # the last latents, where the pipeline reports its steps, and the images as numbers from 0 to 1
    latents = list[Tensor]()

    def stepped(_: Any, step: int, timestep: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        latents[:] = [tensors["latents"].clone()] if "latents" in tensors else []
        return {}

    settings = {"callback_on_step_end": stepped, "output_type": "np"}
    known = {name: value for name, value in settings.items() if name in parameters}
    made = pipe(**arguments, **known, generator=torch.Generator().manual_seed(seed))
    return latents[0] if latents else None, np.asarray(made[0], dtype=np.float64)


def _difference(got: tuple[Tensor | None, np.ndarray], wanted: tuple[Tensor | None, np.ndarray]) -> Difference:
    (got_latents, got_pixels), (latents, pixels) = got, wanted
    of_latents = None
    if latents is not None and got_latents is not None:
        of_latents = float((got_latents.double() - latents.double()).norm() / latents.double().norm())
    frames = None
    if pixels.ndim == 5:  # a video: (1, frames, height, width, channels)
        frames = _psnr(np.diff(got_pixels, axis=1), np.diff(pixels, axis=1))
    error = float(np.linalg.norm(got_pixels - pixels) / np.linalg.norm(pixels))
    return Difference(of_latents, error, _psnr(got_pixels, pixels), frames)


def _decibels(of: Difference) -> float:
    return -math.inf if math.isnan(of.psnr) else of.psnr  # an image that is not finite is the worst


def _psnr(got: np.ndarray, wanted: np.ndarray) -> float:
    mean = float(np.square(got - wanted).mean())
    return 10 * math.log10(1 / mean) if mean else math.inf
