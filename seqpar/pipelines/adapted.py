"""Runs a pipeline folder of diffusers that has no loop here: its own loop, with a parallelized transformer.

It takes the flags of the command line to the arguments of the pipeline's call, as far as the pipeline has them, and
refuses the others. Every rank makes the same call; the pipeline's parts are loaded by `seqpar.pipelines._parts`.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.image_processor import VaeImageProcessor

from seqpar.pipelines import _lora, _schedulers
from seqpar.pipelines._family import FOR_CLASSES, Order
from seqpar.pipelines._folder import check_parts, kind_of, model_of
from seqpar.pipelines._naming import naming_loop
from seqpar.pipelines._parts import Folder, load_pipeline
from seqpar.ranks.mesh import Mesh
from seqpar.vae.shared import looked_at
from seqpar.weights.parts import read_pipeline, read_scheduler

PIPELINES = ()  # those of no other file
MODELS = ()  # nor native models


@dataclass(frozen=True)
class Adapted:
    """Checked work of a pipeline with diffusers' own loop, before any weight is read.

    kind: the pipeline's class. arguments: those of its call, without generator and callback. scheduler: the class name
    of another scheduler, or None. video: whether it makes videos. why: the reason for diffusers' loop. file: that of
    the transformer, where it is not diffusers' (`seqpar.weights.single_file`). loras: adapters, with their scales.
    """

    kind: Any
    folder: Path
    dtype: torch.dtype
    arguments: Mapping[str, Any]
    seed: int
    scheduler: str | None
    video: bool
    why: str
    file: Path | None = None
    loras: tuple[_lora.Lora, ...] = ()

    @property
    def steps(self) -> int:
        """Return the number of denoising steps."""
        return self.arguments["num_inference_steps"]

    @property
    def count(self) -> int:
        """Return the number of pictures or videos."""
        return len(self.arguments["prompt"])

    @property
    def counts_steps(self) -> bool:
        """Return whether the pipeline tells of every step."""
        return "callback_on_step_end" in inspect.signature(self.kind.__call__).parameters

    def load(self, mesh: Mesh) -> Any:
        """Return diffusers' pipeline on this rank's device; the same ValueError on every rank if it does not load."""
        folder = Folder(self.folder, self.kind, read_pipeline(self.folder), self.file, self.loras)
        pipe = load_pipeline(folder, self.dtype, mesh)
        if self.scheduler is not None:
            pipe.scheduler = _schedulers.build(dict(pipe.scheduler.config), self.scheduler)
        return pipe

    def make(self, pipe: Any, on_step: Callable[[int], None], mesh: Mesh) -> list[Any]:
        """Return the pictures as PIL images, or the videos as arrays (frames, height, width, 3) in [0, 1].

        Raises FloatingPointError if one of them is not finite, and ValueError where diffusers fails in its loop, as a
        value in a file that no schema here knows can make it.
        """
        arguments = dict(self.arguments)
        if self.counts_steps:
            arguments["callback_on_step_end"] = partial(_counted, on_step)
        failing = f"got pipeline {self.folder}, which fails in its loop"
        with naming_loop(failing, mesh.world.size > 1), _checked_vae(getattr(pipe, "vae", None), self.dtype):
            result = pipe(**arguments, generator=torch.Generator().manual_seed(self.seed))
        results = list(result.frames if self.video else result.images)
        if self.arguments.get("output_type") == "np":
            _refuse_infinite([bool(np.isfinite(each).all()) for each in results], self.dtype)
        if self.video or not isinstance(results[0], np.ndarray):
            return results
        return VaeImageProcessor.numpy_to_pil(np.stack(results))


def check(order: Order, path: Path, why: str | None = None) -> Adapted:
    """Return the work that an order describes; ValueError for whatever does not fit. Reads configs, no weights.

    path: a pipeline's folder, or the file of a transformer in one. why: the reason for diffusers' loop where seqpar has
    a loop of its own for the pipeline.
    """
    path, file = (path.parent, path) if path.is_file() else (path, None)
    index = read_pipeline(path)
    kind = kind_of(index, path)
    parameters = inspect.signature(kind.__call__).parameters
    video = "num_frames" in parameters
    _check_flags(order, kind.__name__, parameters)
    if video:
        _check_exporter(kind.__name__)
    if order.scheduler is not None:
        _schedulers.build(read_scheduler(path / "scheduler"), order.scheduler)
    config = check_parts(path, index, file)
    arguments = _arguments(order, kind.__name__, parameters, bool(config.get("guidance_embeds")))
    _lora.check(order.loras, kind, model_of(index), config)
    why = why or f"seqpar has no loop of its own for {kind.__name__}"
    return Adapted(kind, path, order.dtype, arguments, order.seed, order.scheduler, video, why, file, order.loras)


def _check_flags(order: Order, name: str, parameters: Mapping[str, inspect.Parameter]) -> None:
    """Raise ValueError for flags that no pipeline takes this way, and for a pipeline that needs more than a prompt."""
    order.refuse(f"expected none: {name} takes texts", classes=order.classes)
    order.refuse(FOR_CLASSES, respacing=order.respacing)
    order.refuse("expected none: its files say the number", heads=order.heads)
    order.refuse("expected none: diffusers' loop has none", eta=order.eta, guidance_channels=order.guidance_channels)
    if "num_frames" not in parameters:
        order.refuse(f"expected none: {name} makes no videos", frames=order.frames, fps=order.fps)
    if not order.prompts:
        raise ValueError(f"got --model {order.model} without --prompt, expected one: {name} takes texts")
    known, plain = ("self", "prompt"), inspect.Parameter.POSITIONAL_OR_KEYWORD
    needed = [key for key, each in parameters.items() if each.default is each.empty and each.kind is plain]
    needed = [key for key in needed if key not in known]
    if "prompt" not in parameters or needed:
        takes = ", ".join(needed) or "no prompt"
        raise ValueError(f"got a {name}, which takes {takes}, expected one that needs nothing but a prompt")


def _arguments(order: Order, name: str, parameters: Mapping[str, Any], embeds: bool) -> dict[str, Any]:
    """Return the arguments of the pipeline's call that the flags name.

    parameters: those of the call. embeds: whether the transformer takes the guidance scale as an input.
    """
    prompts = [text for text in order.prompts for _ in range(order.repeat)]
    arguments: dict[str, Any] = {"prompt": prompts, "num_inference_steps": order.steps}
    flags: dict[str, tuple[str, Any]] = {
        "negative_prompt": ("negative_prompt", None if order.negative is None else [order.negative] * len(prompts)),
        "guidance_scale": ("guidance", order.guidance),
        "true_cfg_scale": ("true_guidance", order.true_guidance),
        "num_frames": ("frames", order.frames),
        "height": ("size", None if order.size is None else order.size[0]),
        "width": ("size", None if order.size is None else order.size[1]),
    }
    for argument, (flag, value) in flags.items():
        if argument not in parameters:
            order.refuse(f"expected none: {name} takes no {argument}", **{flag: value})
        elif value is not None:
            arguments[argument] = value
    if "true_cfg_scale" in parameters:
        arguments |= _distilled(order, name, embeds, len(prompts))
    if "output_type" in parameters:  # arrays show NaN, which pictures hide as black
        arguments["output_type"] = "np"
    return arguments


def _distilled(order: Order, name: str, embeds: bool, count: int) -> dict[str, Any]:
    """Return further arguments of a pipeline with both guidances; ValueError for a flag that would have no effect."""
    if not embeds:
        without = f"expected --true-guidance: the transformer of this {name} takes no scale as an input"
        order.refuse(without, guidance=order.guidance)
    if (order.true_guidance or 1.0) <= 1:
        order.refuse(
            "expected --true-guidance over 1, too: without it there is one branch", negative_prompt=order.negative
        )
        return {}
    return {} if order.negative is not None else {"negative_prompt": [""] * count}


def _check_exporter(name: str) -> None:
    """Raise ValueError if diffusers cannot write a video here, so that a long run does not fail at its end."""
    if importlib.util.find_spec("imageio") and importlib.util.find_spec("imageio_ffmpeg"):
        return
    raise ValueError(
        f"got a {name}, whose videos diffusers writes by other packages; pip install imageio imageio-ffmpeg"
    )


def _checked_vae(vae: Any, dtype: torch.dtype) -> AbstractContextManager[None]:
    """Raise FloatingPointError if what a VAE decodes is not finite: pipelines clamp infinity to black or white."""
    if not hasattr(vae, "decode"):
        return nullcontext()

    def look(made: Any) -> None:
        _refuse_infinite([bool(each.isfinite().all()) for each in made[0]], dtype)

    return looked_at(vae, "decode", look)


def _refuse_infinite(finite: Sequence[bool], dtype: torch.dtype) -> None:
    """Raise FloatingPointError if one of the results is not finite."""
    bad = [number for number, right in enumerate(finite, 1) if not right]
    if bad:
        raise FloatingPointError(
            f"the decoder made pixels that are not finite in {len(bad)} of {len(finite)} results (the first is number "
            f"{bad[0]}) in {str(dtype).removeprefix('torch.')}; try dtype fp32 or bf16, or check the weights"
        )


def _counted(on_step: Callable[[int], None], pipe: Any, index: int, timestep: Any, tensors: Any) -> dict[str, Any]:
    """Tell of a step that diffusers' loop has made; the form is that of its callbacks."""
    on_step(index)
    return {}
