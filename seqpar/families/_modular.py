"""diffusers' modular pipelines: what their blocks take in a call, their guiders and their loops.

A modular pipeline's `__call__` has no parameters of its own: its blocks declare inputs, and guidance is a component.
`caller` below is a pipeline, or the class of one that is not modular.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from inspect import Parameter
from types import SimpleNamespace
from typing import Any

HOME = "diffusers.modular_pipelines.modular_pipeline"  # of the base class; importing it takes seconds
SCALE = "guidance_scale"  # of a call, or of its guiders
OUTPUTS = ("images", "videos", "audio", "sampling_rate")  # of a call that are results


def is_modular(caller: Any) -> bool:
    """Return whether this is a modular pipeline, or the class of one."""
    kind = caller if isinstance(caller, type) else type(caller)
    return any(base.__module__ == HOME and base.__name__ == "ModularPipeline" for base in kind.__mro__)


def parameters_of(caller: Any, images: bool = False) -> Mapping[str, Parameter]:
    """Return the parameters of a pipeline's call; of a modular one the inputs of the blocks that run.

    images: whether they run with an input image. A guider's scale counts as an input. Inputs without a default that
    the blocks need have none here either.
    """
    if not is_modular(caller):
        kind = caller if isinstance(caller, type) else type(caller)
        return inspect.signature(kind.__call__).parameters
    blocks = caller.blocks
    given = {"prompt": True, "num_frames": True} | ({"image": True} if images else {})
    found = dict[str, Parameter]()
    for one in blocks.get_execution_blocks(**given).inputs:
        if one.name is not None:
            default = getattr(caller, f"default_{one.name}", None) if one.default is None else one.default
            default = Parameter.empty if one.required and default is None else default
            found[one.name] = Parameter(one.name, Parameter.POSITIONAL_OR_KEYWORD, default=default)
    if SCALE not in found and (guiders := guiders_of(caller)):
        guider = next(iter(guiders.values())).config
        scale = guider[SCALE] if guider["enabled"] else 1.0
        found[SCALE] = Parameter(SCALE, Parameter.POSITIONAL_OR_KEYWORD, default=scale)
    return found


def takes_image(caller: Any) -> bool:
    """Return whether a pipeline's call takes an input image, in one of its workflows."""
    if is_modular(caller):
        return "image" in caller.blocks.input_names
    return "image" in parameters_of(caller)


def guiders_of(pipe: Any) -> dict[str, Any]:
    """Return the guiders of a modular pipeline whose scale `--guidance` sets, by name.

    Wan 2.2 has one per transformer; that of LTX-2's sound (`audio_guider`) keeps its scale.
    """
    parts = {name: part for name, part in pipe.components.items() if name.startswith("guider")}
    return {name: part for name, part in parts.items() if part is not None and SCALE in part.config}


def calls_twice(pipe: Any) -> bool:
    """Return whether a modular pipeline's guiders make calls of one model, which they do not change between these.

    Those that skip layers or attention (SLG, PAG, AutoGuidance) put hooks on it.
    """
    kinds = {kind for guider in guiders_of(pipe).values() for kind in type(guider).__mro__}
    return bool(kinds) and not any("prepare_models" in vars(kind) for kind in kinds if kind.__name__ != "BaseGuidance")


def is_guided_by(pipe: Any) -> bool:
    """Return whether a modular pipeline computes a second branch, by its guider's own settings, of the same model."""
    return calls_twice(pipe) and any(guider.num_conditions > 1 for guider in guiders_of(pipe).values())


def set_scale(pipe: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Set a scale among the arguments on a modular pipeline's guiders, unless its blocks take it; return the others."""
    if SCALE not in arguments or SCALE in pipe.blocks.input_names:
        return dict(arguments)
    for name, guider in guiders_of(pipe).items():
        setattr(pipe, name, guider.new(**{SCALE: arguments[SCALE]}, enabled=True))  # Z-Image's is not by default
    return {name: value for name, value in arguments.items() if name != SCALE}


def called(pipe: Any, arguments: Mapping[str, Any]) -> Any:
    """Call a modular pipeline, with a guider's scale among the arguments; return its `OUTPUTS` as attributes."""
    guiders = guiders_of(pipe)
    try:
        made = pipe(**set_scale(pipe, arguments), output=[*OUTPUTS])
    finally:
        for name, guider in guiders.items():
            setattr(pipe, name, guider)
    return SimpleNamespace(**made, frames=made["videos"])


def hide_bars(pipe: Any, hidden: bool = True) -> None:
    """Hide or show a pipeline's progress bars; a modular pipeline's own method does not reach its loops."""
    for owner in loops_of(pipe) if is_modular(pipe) else [pipe]:
        owner.set_progress_bar_config(disable=hidden)


@contextmanager
def stepping(pipe: Any, stepped: Callable[[int, Any], object]) -> Iterator[None]:
    """Call `stepped(index, latents)` after each step of a modular pipeline's loop, in this context."""

    def watched(loop: Any) -> Callable[..., Any]:
        step = loop.loop_step

        @wraps(step)
        def stepped_on(components: Any, state: Any, **kwargs: Any) -> Any:
            components, state = step(components, state, **kwargs)
            stepped(kwargs["i"], state["latents"])
            return components, state

        return stepped_on

    loops = [*loops_of(pipe)]
    try:
        for loop in loops:
            loop.loop_step = watched(loop)
        yield
    finally:
        for loop in loops:
            vars(loop).pop("loop_step", None)


def loops_of(pipe: Any) -> Iterator[Any]:
    """Yield the denoising loops of a modular pipeline; of its `blocks` one gets copies (diffusers 0.42.1)."""
    blocks = [pipe._blocks]
    while blocks:
        block = blocks.pop()
        if hasattr(block, "loop_step"):
            yield block
        blocks += block.sub_blocks.values()
