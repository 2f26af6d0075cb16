"""Checks the arguments of a run where a caller passes them: types, ranges and dtypes of all that a `Request` holds.

What depends on the schedule or on several arguments together is checked where it is used (`seqpar.loop.run`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from difflib import get_close_matches
from typing import Any

import torch

from seqpar.loop.distributed import DistributedDiT
from seqpar.loop.request import Request
from seqpar.types.arguments import MOST_STEPS, check_floats, check_kind, check_named, check_real, check_whole, shown
from seqpar.types.guidance import Guidance

FLAGS = ("use_clipped_model_output", "clip_denoised")
TOKENS = ("drawn", "negative_drawn")


def check_model(dit: object) -> None:
    """Refuse what is no `DistributedDiT`."""
    check_kind("dit", dit, DistributedDiT, expected="a seqpar.DistributedDiT; make one of the model")


def check_settings(dit: DistributedDiT, settings: Mapping[str, Any]) -> None:
    """Raise the same ValueError on all ranks for a setting that is missing or unknown; every rank must call this."""
    known = {each.name: each.default is MISSING and each.default_factory is MISSING for each in fields(Request)[3:]}
    expected = {"steps": "the number of steps", "guidance": "seqpar.Guidance(scale); a scale of 1 is no guidance"}

    def check() -> None:
        for name, required in known.items():
            if required and name not in settings:
                raise ValueError(f"got no {name}=, expected {expected[name]}")
        for name in settings.keys() - known:
            near = get_close_matches(name, known, 1)
            raise ValueError(f"got {name}=, expected {f'{near[0]}=' if near else ', '.join(known)}")

    dit.mesh.together(check)


def check_request(dit: DistributedDiT, request: Request, on_step: object = print) -> None:
    """Raise the same ValueError on all ranks if an argument of any rank cannot be used; every rank must call this.

    Values of the prompt are checked on rank 0, because other ranks use its values.
    """
    dit.mesh.together(lambda: _check(dit, request, on_step))


def _check(dit: DistributedDiT, request: Request, on_step: object) -> None:
    if not callable(on_step):
        raise ValueError(f"got on_step={shown(on_step)}, expected a function of the step's index")
    _check_scheduler(request.scheduler)
    _check_settings(request)
    noise = request.noise if isinstance(request.noise, Mapping) else {"": request.noise}
    for name, x in noise.items():
        check_floats(f"noise {name}".strip(), x)
    prompt = check_named("prompt", request.prompt)
    negative = None if request.negative is None else check_named("negative", request.negative)
    for kind in TOKENS:
        check_named(kind, getattr(request, kind))
    if dit.mesh.is_main:
        for named in (prompt, negative):
            if named is not None and set(named) <= set(dit.model.PROMPT):
                dit.model.check_prompt(named)


def _check_scheduler(scheduler: Any) -> None:
    wanted = ("set_timesteps", "step", "config")
    if isinstance(scheduler, type) or not all(hasattr(scheduler, name) for name in wanted):
        raise ValueError(f"got scheduler={shown(scheduler)}, expected a scheduler object of diffusers")


def _check_settings(request: Request) -> None:
    check_kind("guidance", request.guidance, Guidance, expected="seqpar.Guidance(scale)")
    check_whole("steps", request.steps, 1, MOST_STEPS)
    check_whole("begin", request.begin, 0, MOST_STEPS)
    if request.eta is not None:
        check_real("eta", request.eta)
    for name in FLAGS:
        check_kind(name, getattr(request, name), bool, expected="True or False")
    expected = "a generator made by torch.Generator(), or None"
    check_kind("generator", request.generator, torch.Generator, type(None), expected=expected)
    if request.generator is not None and request.generator.device.type != "cpu":
        raise ValueError("got a generator on a GPU, expected one on the CPU, whose noise is the same everywhere")
    check_kind("respacing", request.respacing, str, type(None), expected='a text such as "250" or "ddim25", or None')
    check_kind("schedule", request.schedule, Mapping, expected="a mapping: arguments of set_timesteps")
    check_kind("segments", request.segments, Mapping, expected="a mapping: first evaluation -> DistributedDiT")
    for first, dit in request.segments.items():
        check_whole("the first evaluation of a segment", first, 0, MOST_STEPS)
        check_model(dit)
