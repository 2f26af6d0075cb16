"""Writes the table of docs/schedulers.md: how every scheduler class of the installed diffusers is stepped.

python -m docs.tools.schedulers_page --write
"""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import diffusers
from diffusers.utils import logging

from seqpar.loading.errors import FAILURES
from seqpar.loading.schedulers import why_not_driven
from seqpar.loop.steppers import decide

STEPS = 25
FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
# settings that are tried besides the defaults of every class
MORE: dict[str, tuple[dict[str, Any], ...]] = {
    "DDIMParallelScheduler": ({"clip_sample": False},),
    "DDIMScheduler": ({"thresholding": True},),
    "DDPMParallelScheduler": ({"clip_sample": False},),
    "DDPMScheduler": ({"clip_sample": False}, {"clip_sample": False, "variance_type": "learned_range"}),
    "DDIMInverseScheduler": ({"clip_sample": False},),
    "DEISMultistepScheduler": ({"solver_order": 3}, FLOW),
    "DPMSolverMultistepScheduler": (
        {"use_karras_sigmas": True},
        FLOW,
        {"solver_order": 3},
        {"algorithm_type": "sde-dpmsolver++"},
        {"thresholding": True},
    ),
    "EulerDiscreteScheduler": ({"use_karras_sigmas": True}, {"prediction_type": "v_prediction"}),
    "FlowMatchEulerDiscreteScheduler": ({"stochastic_sampling": True}, {"use_dynamic_shifting": True}),
    "PNDMScheduler": ({"skip_prk_steps": True},),
    "UnCLIPScheduler": ({"clip_sample": False},),
    "UniPCMultistepScheduler": ({"use_karras_sigmas": True}, FLOW, {"solver_order": 3}),
}
# the package besides torch without which diffusers has a class of this name that does nothing
NEEDS = {
    "CosineDPMSolverMultistepScheduler": "torchsde",
    "DPMSolverSDEScheduler": "torchsde",
    "KarrasVeScheduler": "transformers",
    "LMSDiscreteScheduler": "scipy",
}
# what a class that is refused is for, in place of the error that it raises
FOR = {
    "AmusedScheduler": "for masked tokens, not for latents",
    "BlockRefinementScheduler": "for tokens of a language model, not for latents",
    "CogVideoXDPMScheduler": "its step takes the prediction before; CogVideoX's pipeline calls it",
    "DDPMWuerstchenScheduler": "its timesteps are ratios for each image; for Würstchen",
    "DiscreteDDIMScheduler": "for discrete tokens, not for latents",
    "EntropyBoundScheduler": "for discrete tokens, not for latents",
    "FlowMatchEulerDiscreteScheduler": "the shift depends on the size, which diffusers' pipelines pass",
    "HeliosDMDScheduler": "for Helios, whose pipeline changes resolution between steps",
    "HeliosScheduler": "for Helios, whose pipeline changes resolution between steps",
    "KarrasVeScheduler": "its step takes two sigmas",
    "PiflowScheduler": "for models that predict several grid points in one call",
    "RFD4ProteinaScheduler": "for proteins",
    "RePaintScheduler": "its step takes the original image and a mask",
    "SCMScheduler": "for one or two steps of Sana Sprint",
    "ScoreSdeVeScheduler": "its predictor and corrector are two steps",
    "VQDiffusionScheduler": "for quantised tokens, not for latents",
}
PAGE = Path(__file__).parents[1] / "schedulers.md"
HEAD = "| scheduler | settings | stepped | history, or reason |\n|---|---|---|---|\n"


def row(name: str, settings: dict[str, Any]) -> tuple[str, str]:
    """("local", "whole" or "refused"; history and residual, or the reason) of a class with these settings."""
    stepped, why = _row(name, settings)
    if stepped == "refused" and name not in missing():
        why = FOR.get(name, why)
    return stepped, f"{why} (needs {NEEDS[name]})" if name in NEEDS else why


def missing() -> set[str]:
    """Classes whose packages are not installed here: their rows say nothing about them."""
    return {name for name, package in NEEDS.items() if find_spec(package) is None}


def _row(name: str, settings: dict[str, Any]) -> tuple[str, str]:
    if name in missing():
        return "refused", "is not in diffusers here"
    try:
        scheduler = getattr(diffusers, name)(**settings)
    except FAILURES as error:
        return "refused", f"cannot be built: {plain(error)}"
    if (reason := why_not_driven(scheduler)) is not None:
        return "refused", reason
    try:
        scheduler.set_timesteps(STEPS)
        decision = decide(scheduler)
    except FAILURES as error:
        return "refused", plain(error)
    if decision.whole is not None:
        return "whole", re.sub(r" \(relative residual .*\)", "", decision.whole.split("is not traced, ")[1])
    if decision.schedule is None:
        return "local", "1 state, 1 output; own kernel"
    states, outputs = decision.schedule.states_SP.shape[1], decision.schedule.outputs_SQ.shape[1]
    size = next(limit for limit in ("1e-12", "1e-9", "1e-6") if decision.schedule.residual < float(limit))
    drawn = f"; {len(decision.schedule.draws)} draws of noise" if decision.schedule.draws else ""
    return "local", f"{count(states, 'state')}, {count(outputs, 'output')}, residual < {size}{drawn}"


def plain(error: BaseException) -> str:
    """The first sentence of an error, as a cell of a table."""
    text = " ".join(str(error).split()).replace("|", "\\|")
    text = re.sub(r"^got scheduler '\w+', which ", "", text)
    return re.split(r"(?<=[a-z)])\. ", text)[0][:160]


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}"


def page() -> str:
    """The page with the installed version and all classes and settings."""
    names = [name for name in dir(diffusers) if name.endswith("Scheduler")]
    lines = []
    logging.set_verbosity_error()  # diffusers warns of settings that these steps are tried with
    with contextlib.redirect_stdout(None), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchsde's, of sigmas that diffusers rounds beyond the ends of its range
        for name in names:
            for settings in ({}, *MORE.get(name, ())):
                fields = ", ".join(f"{key}={value}" for key, value in settings.items()) or "default"
                lines.append(f"| {name} | {fields} | {' | '.join(row(name, settings))} |")
    before = PAGE.read_text(encoding="utf-8").partition(HEAD)[0]
    text = re.sub(r"(?<=class of diffusers )\S+", diffusers.__version__, before)
    return text + HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    print(page(), end="")
