"""`measure_precision`: what 8 bits and a step cache change in the images of a pipeline.

Each prompt is computed three times with one seed: so, in the weights' dtype with all steps by the same fused blocks,
and by diffusers' own modules. The difference of the last two is the floor: what another order of the same roundings
changes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.families._modular import called, is_modular, parameters_of, stepping
from seqpar.loading.parts import transformers_of
from seqpar.transformer.lossy import computed_by, computed_steps
from seqpar.transformer.parallelize import call_of, calls_of

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
WORST = 5  # GEMMs that are named
BACKBONE = "alexnet-owt-7be5be79.pth"  # torchvision's; the package `lpips` has the weights of its own layers
LPIPS = ("lpips", "torchvision")  # packages of the extra `quality`
EXACT = 'the pipeline has neither 8 bits nor a step cache; call seqpar.parallelize(pipe, precision="fp8"), or cache='


@dataclass(frozen=True)
class Difference:
    """Two runs with one seed. latents, pixels: the relative error, |got - wanted| / |wanted|. psnr: of pixels, in dB.

    frames: the PSNR of the differences of neighbouring frames of a video, in dB; None for images. lpips: None where it
    cannot be computed (`lpips_on`).
    """

    latents: float | None
    pixels: float
    psnr: float
    frames: float | None
    lpips: float | None = None


@dataclass(frozen=True)
class PrecisionError:
    """The error of 8 bits and a step cache for each prompt, and the floor: all steps in the weights' dtype against
    diffusers' own modules.

    gemms: the GEMMs in 8 bits that rounding changes most in the calibration, with its error relative to their rms.
    no_lpips: why LPIPS is left out, or None. whose: the error. computed: how many steps of each prompt a step cache has
    computed, and of how many.
    """

    prompts: tuple[str, ...]
    errors: tuple[Difference, ...]
    floor: tuple[Difference, ...]
    gemms: tuple[tuple[str, float], ...] = ()
    no_lpips: str | None = None
    whose: str = "8 bits"
    computed: tuple[tuple[int, int], ...] = ()

    @property
    def worst_psnr(self) -> float:
        return worst(self.errors)

    def __str__(self) -> str:
        lines = [f"{'':14} {'PSNR mean, worst':>20} {'pixels mean, worst':>22} {'latents mean, worst':>22}"]
        for name, runs in ((self.whose, self.errors), ("floor", self.floor)):
            psnr = [run.psnr for run in runs]
            shown = f"{sum(psnr) / len(psnr):.1f}, {min(psnr):.1f} dB"
            pixels, latents = ([run.pixels for run in runs], [run.latents for run in runs if run.latents is not None])
            cells = [f"{sum(of) / len(of):.2e}, {max(of):.2e}" if of else "-" for of in (pixels, latents)]
            lines.append(f"{name:14} {shown:>20} {cells[0]:>22} {cells[1]:>22}")
            if frames := [run.frames for run in runs if run.frames is not None]:
                lines.append(f"{'  of frames':14} {f'{sum(frames) / len(frames):.1f}, {min(frames):.1f} dB':>20}")
            if lpips := [run.lpips for run in runs if run.lpips is not None]:
                lines.append(f"{'  LPIPS':14} {f'{sum(lpips) / len(lpips):.4f}, {max(lpips):.4f}':>20}")
        lines += [] if self.no_lpips is None else [self.no_lpips]
        if self.computed:
            lines.append(f"steps computed: {steps_text(self.computed)}")
        psnr = [*map(decibels, self.errors)]
        lines.append(f"worst prompt: {self.prompts[psnr.index(min(psnr))]}")
        if self.gemms:
            lines.append(f"worst GEMMs:  {'; '.join(f'{name} {error:.1%}' for name, error in self.gemms)}")
        return "\n".join(f"precision {line}" for line in lines)


def measure_precision(
    pipe: Any, prompts: Sequence[str] = PROMPTS, *, seed: int = 0, **arguments: Any
) -> PrecisionError:
    """Compare the images of a pipeline with those of all steps in its weights' dtype; rank 0 prints it. Collective.

    pipe: a diffusers pipeline after `parallelize` with precision="fp8", local="fp8" or cache=, or several, whose error
    is one number. arguments: of its call, such as `num_inference_steps`, `height` and `width`; the pipeline's own
    values otherwise. Prompt n has the seed `seed + n`. Raises ValueError for a pipeline without 8 bits and step cache,
    or one that takes no prompt.
    """
    runs = Runs(pipe, prompts, seed, arguments)
    result = runs.measured().error
    if runs.mesh.is_main:
        print(result, flush=True)
    return result


class Runs:
    """Runs of a pipeline: images of some prompts, each with its seed, to be compared with others."""

    def __init__(self, pipe: Any, prompts: Sequence[str], seed: int, arguments: Mapping[str, Any]) -> None:
        calls = [call for _, call in calls_of(pipe)]
        self._parameters = parameters_of(pipe, "image" in arguments)
        if not any(
            call.sharded.fused.calibration is not None or call.sharded.is_eight or call.steps is not None
            for call in calls
        ):
            raise ValueError(EXACT)
        if "prompt" not in self._parameters or not prompts:
            raise ValueError(f"{type(pipe).__name__} needs at least one prompt, and a call that takes prompt=")
        self.mesh, self._pipe, self._prompts, self._seed, self._arguments = (
            calls[0].mesh,
            pipe,
            prompts,
            seed,
            arguments,
        )

    def drawn(self, count: int | None = None) -> list[Drawn]:
        """Return the images of the first `count` prompts, or of all."""
        prompts = enumerate(self._prompts[:count])
        return [
            _drawn(self._pipe, self._parameters, {**self._arguments, "prompt": prompt}, self._seed + n)
            for n, prompt in prompts
        ]

    def measured(self) -> Measured:
        """Compute the images as the pipeline does, with all steps in the weights' dtype, and by diffusers' modules."""
        lossy, cached = self.drawn(), self.has_cache
        gemms = in_8_bits(self._pipe)
        eight = bool(gemms) or any(call.sharded.is_eight for _, call in calls_of(self._pipe))
        if not (eight or cached):
            raise ValueError(EXACT)
        with computed_by(self._pipe, eight=False, cache=False):
            plain = self.drawn()
        with computed_by(self._pipe, eight=False, fused=False, cache=False):
            modules = self.drawn()
        largest = sorted(gemms, key=lambda gemm: (-gemm.error, gemm.name))[:WORST]
        named = tuple((gemm.name.replace("|", "."), gemm.error) for gemm in largest if gemm.error)
        lpips, why = lpips_on(self.mesh.device)
        errors, floor = differences(lossy, plain, lpips), differences(plain, modules, lpips)
        whose = ", ".join(["8 bits"] * eight + ["cache"] * cached)
        error = PrecisionError(
            tuple(self._prompts), errors, floor, named, why, whose, computed(lossy) if cached else ()
        )
        return Measured(error, lossy, plain, gemms)

    @property
    def has_cache(self) -> bool:
        """Whether a step cache is on."""
        return any(call.steps is not None and call.steps.on for _, call in calls_of(self._pipe))


@dataclass(frozen=True)
class Gemm:
    """A GEMM in 8 bits. name: TRANSFORMER|BLOCK, MATRIX. path, block: of its block, the latter its class.

    weights: their number. error: what rounding changes in the calibration, relative to the rms of the product.
    """

    name: str
    path: str
    block: str
    role: str
    weights: int
    error: float


@dataclass(frozen=True)
class Measured:
    """The error, images with it and of all steps in the weights' dtype, and the GEMMs that computed in 8 bits."""

    error: PrecisionError
    lossy: Sequence[Drawn]
    plain: Sequence[Drawn]
    gemms: Sequence[Gemm]


class Drawn(NamedTuple):
    """The images of a prompt, as numbers from 0 to 1, and its last latents, where the pipeline reports its steps.

    computed: how many steps a step cache has computed, and of how many; None without one.
    """

    latents: Tensor | None
    pixels: np.ndarray
    seconds: float
    computed: tuple[int, int] | None = None


Distance = Callable[[np.ndarray, np.ndarray], float]


def differences(got: Sequence[Drawn], wanted: Sequence[Drawn], lpips: Distance | None = None) -> tuple[Difference, ...]:
    """Return the difference of each pair; the shorter sequence ends them."""
    return tuple(_difference(*pair, lpips) for pair in zip(got, wanted, strict=False))


def computed(drawn: Sequence[Drawn]) -> tuple[tuple[int, int], ...]:
    """Return how many steps of each image a step cache has computed, and of how many; empty without one."""
    return tuple(image.computed for image in drawn if image.computed is not None)


def steps_text(computed: Sequence[tuple[int, int]]) -> str:
    """Return the steps of several prompts as text."""
    counts = [count for count, _ in computed]
    return f"{sum(counts) / len(counts):.1f} of {computed[0][1]} on average ({min(counts)} to {max(counts)})"


def in_8_bits(pipe: Any) -> list[Gemm]:
    """Return the GEMMs that computed in 8 bits in the last call, in the transformers' order."""
    gemms = list[Gemm]()
    for name, module in transformers_of(pipe).items():
        fused = call_of(module).sharded.fused  # pyright: ignore[reportOptionalMemberAccess]
        errors = {} if fused.calibration is None else fused.calibration.errors
        for key, matrix in fused.in_8_bits.items():
            path, _, role = key.rpartition(", ")
            kind, weights = type(module.get_submodule(path)).__name__, matrix.values.numel()
            gemms.append(Gemm(f"{name}|{key}", f"{name}.{path}", kind, role, weights, errors.get(key, 0.0)))
    return gemms


def _drawn(pipe: Any, parameters: Any, arguments: dict[str, Any], seed: int) -> Drawn:
    latents = list[Tensor]()

    def look(step: int, x: Any) -> None:
        latents[:] = [] if x is None else [x.clone()]

    def stepped(_: Any, step: int, timestep: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        look(step, tensors.get("latents"))
        return {}

    settings = {"callback_on_step_end": stepped, "output_type": "np"}
    known = {name: value for name, value in settings.items() if name in parameters}
    start, before = perf_counter(), computed_steps(pipe) or (0, 0)
    arguments = {**arguments, **known, "generator": torch.Generator().manual_seed(seed)}
    if is_modular(pipe):
        with stepping(pipe, look):
            made = called(pipe, arguments)
        images = made.frames if made.images is None else made.images
    else:
        images = pipe(**arguments)[0]
    pixels, seconds = np.asarray(images, dtype=np.float64), perf_counter() - start
    after = computed_steps(pipe)
    count = None if after is None else (after[0] - before[0], after[1] - before[1])
    return Drawn(latents[0] if latents else None, pixels, seconds, count)


def _difference(got: Drawn, wanted: Drawn, lpips: Distance | None) -> Difference:
    (got_latents, got_pixels, *_), (latents, pixels, *_) = got, wanted
    of_latents = None
    if latents is not None and got_latents is not None:
        of_latents = float((got_latents.double() - latents.double()).norm() / latents.double().norm())
    frames = None
    if pixels.ndim == 5:  # a video: (1, frames, height, width, channels)
        frames = _psnr(np.diff(got_pixels, axis=1), np.diff(pixels, axis=1))
    error = float(np.linalg.norm(got_pixels - pixels) / np.linalg.norm(pixels))
    distance = None if lpips is None else lpips(got_pixels, pixels)
    return Difference(of_latents, error, _psnr(got_pixels, pixels), frames, distance)


def worst(errors: Sequence[Difference]) -> float:
    """Return the lowest PSNR, in dB."""
    return min(map(decibels, errors))


def decibels(of: Difference) -> float:
    """Return the PSNR of the pixels, in dB."""
    return -math.inf if math.isnan(of.psnr) else of.psnr  # an image that is not finite is the worst


def _psnr(got: np.ndarray, wanted: np.ndarray) -> float:
    mean = float(np.square(got - wanted).mean())
    return 10 * math.log10(1 / mean) if mean else math.inf


def lpips_on(device: torch.device) -> tuple[Callable[[np.ndarray, np.ndarray], float] | None, str | None]:
    """Return the mean LPIPS of images (..., height, width, 3) with values from 0 to 1, or why it is left out.

    Nothing is downloaded. Source: https://arxiv.org/abs/1801.03924.
    """
    if not all(map(find_spec, LPIPS)):
        return None, "LPIPS is left out: it needs lpips and torchvision (the extra `quality`)"
    file = Path(torch.hub.get_dir()) / "checkpoints" / BACKBONE
    if not file.exists():
        return (
            None,
            f"LPIPS is left out: there is no {file}; torchvision.models.alexnet(weights='DEFAULT') downloads it",
        )
    import lpips  # pyright: ignore[reportMissingImports]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it names torchvision's weights as older versions do
        net: Any = lpips.LPIPS(net="alex", verbose=False).to(device)

    def image(pixels_HWC: np.ndarray) -> Tensor:
        return torch.from_numpy(pixels_HWC).permute(2, 0, 1)[None].to(device, torch.float32)

    @torch.no_grad()
    def of(got: np.ndarray, wanted: np.ndarray) -> float:
        pairs = zip(*(pixels.reshape(-1, *pixels.shape[-3:]) for pixels in (got, wanted)), strict=True)
        values = [float(net(image(one), image(other), normalize=True)) for one, other in pairs]
        return sum(values) / len(values)

    return of, None
