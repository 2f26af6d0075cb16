"""Checks of a request for a pipeline of diffusers: its preset, precision, step cache and guidance."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from seqpar.families import Preset
from seqpar.families._find import is_distilled, is_guided, presets, why_no_preset
from seqpar.loading.folder import PipelineParts
from seqpar.pipelines.protocol import GenerationRequest
from seqpar.transformer.step_cache import check_blocks_for, step_cache
from seqpar.types.guidance import Guidance


def preset_of(request: GenerationRequest, name: str, index: Mapping[str, Any]) -> Preset | None:
    """Return the preset that a request names, or that of its own sigmas. name, index: of the pipeline's class."""
    known = presets(name, index)
    if request.sigmas:
        request.refuse("the sigmas set the steps", preset=request.preset)
        return Preset("sigmas", "", len(request.sigmas), sigmas=request.sigmas)
    if request.preset not in known:
        request.refuse(why_no_preset(name, known), preset=request.preset)
    return known.get(request.preset or "")


def check_guidance(
    request: GenerationRequest, preset: Preset, parameters: Mapping[str, inspect.Parameter], embeds: bool
) -> None:
    """Refuse a preset with guidance as an input of a transformer that takes none. embeds: whether it takes one."""
    if "guidance_scale" in preset.arguments and "true_cfg_scale" in parameters and not embeds:
        request.refuse("it sets guidance as an input, which this transformer does not take", preset=request.preset)


def with_preset(request: GenerationRequest, preset: Preset) -> GenerationRequest:
    """Return the request with a preset's steps, and with its scales where the request has none."""
    scale, true_scale = preset.arguments.get("guidance_scale"), preset.arguments.get("true_cfg_scale")
    what = f"the preset {preset.name} sets" if not request.sigmas else "the sigmas set"
    request.refuse(f"{what} it; leave one out", scheduler=request.scheduler)
    return replace(
        request,
        steps=preset.steps,
        guidance=scale if request.guidance is None else request.guidance,
        true_guidance=true_scale if request.true_guidance is None else request.true_guidance,
    )


def check_blocks(request: GenerationRequest, parts: PipelineParts, why_not: Callable[[Any], str | None]) -> None:
    """Refuse a precision that a transformer's blocks cannot compute in."""
    if request.precision is None:
        return
    for module in parts.transformers.values():
        if (reason := why_not(module)) is not None:
            request.refuse(reason, precision=request.precision)


def check_cache(request: GenerationRequest, parts: PipelineParts) -> None:
    """Refuse a step cache that a transformer cannot have."""
    options = step_cache(request.cache)
    try:
        check_blocks_for(options, parts.transformers.values())
    except ValueError as error:
        request.refuse(str(error), cache=request.cache)


def guidance_of(
    request: GenerationRequest, parts: PipelineParts, parameters: Mapping[str, inspect.Parameter]
) -> tuple[Guidance, float | None]:
    """Return classifier-free guidance, and the scale that the transformer takes as an input, or None."""
    scale: Any = request.guidance
    if scale is None and "guidance_scale" in parameters:
        scale = parameters["guidance_scale"].default
    if is_distilled(str(parts.index["_class_name"]), parts.index):
        request.refuse("this model is distilled: it has one branch", guidance=request.guidance)
        scale = 1.0
    scale = float(scale) if isinstance(scale, (int, float)) else 1.0
    if "true_cfg_scale" in parameters:
        return Guidance(request.true_guidance or 1.0), scale if parts.config.get("guidance_embeds") else None
    if is_guided(parts.transformer) or "guidance_scale" not in parameters:
        return Guidance(scale), None
    return Guidance(1.0), scale
