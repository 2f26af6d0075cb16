"""Writes docs/schedulers.md: tries every scheduler class of the installed diffusers and lists how it is stepped.

python -m docs.tools.schedulers_page > docs/schedulers.md
"""

from __future__ import annotations

import contextlib
import re
import warnings
from importlib.util import find_spec
from typing import Any

import diffusers
from diffusers.utils import logging

from seqpar.loading.errors import FAILURES
from seqpar.loading.schedulers import why_not_driven
from seqpar.loop.schedules import MOST
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
HEAD = f"""# Schedulers

How each scheduler class of diffusers {diffusers.__version__} is stepped, found by trying it with {STEPS} steps.
`python -m docs.tools.schedulers_page > docs/schedulers.md` makes this page again; a test compares it with what the
installed diffusers does.

- **local**: the scheduler's steps are traced to coefficients before the loop (`seqpar/loop/schedules.py`) and run
  on each rank's own tokens, inside the CUDA graph. The history says how many states and model outputs a step uses, this
  step's included; the residual is the largest relative difference between a row of coefficients and the scheduler's own
  step. Noise that the scheduler draws in its steps is drawn before the loop, in the same order from the same generator.
- **whole**: the scheduler itself steps the gathered latents, identically on every rank, outside of a graph. A scheduler
  is traced where its steps are linear in at most {MOST} states and {MOST} outputs.
- **refused**: the scheduler cannot be built with these settings, or cannot be driven by the denoising loop.

DDIM, and DDPM with the variances that the model predicts, have a kernel of their own, which also clips. A
`--scheduler` of another noise process (diffusion by betas, flow matching) than that of the model's own scheduler is
refused; in Python, `sample` takes any scheduler, as a checkpoint alone does not say what it was trained with. Some
classes need a package that diffusers does not install; their rows name it, and say what the class does where it is
installed.

The authors of DiT and Large-DiT sample with DDPM in 250 steps, with the variances that the model predicts, guidance on
3 of 4 channels and no clipping: `--scheduler DDPMScheduler --respacing 250 --guidance-channels 3`. `--respacing` takes
the texts of their `space_timesteps`: "250" runs from the first to the last training timestep, which is not a spacing of
diffusers' DDIM; "ddim25" (with `--scheduler DDIMScheduler`) takes every 40th. A step ends at the next timestep of the
schedule. In Python, `sample(..., respacing="250", clip_denoised=True)` also clips each predicted x0 to -1 ... 1, and
DDIM then recomputes the noise from it. DDPM takes the model's variances if the model predicts them and its
scheduler_config.json names no other variance_type; in Python, pass `DDPMScheduler(variance_type="learned_range", ...)`.
diffusers' own `DiTPipeline` cuts the variances off, so that such a scheduler fails there; `seqpar.parallelize(pipe)`
makes it work, and without it `seqpar.loading.schedulers.pass_variances(pipe)` does, which also takes a generator.

| scheduler | settings | stepped | history, or reason |
|---|---|---|---|
"""


def row(name: str, settings: dict[str, Any]) -> tuple[str, str]:
    """("local", "whole" or "refused"; history and residual, or the reason) of a class with these settings."""
    stepped, why = _row(name, settings)
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
        return "local", "1 state, 1 output; a kernel of its own"
    states, outputs = decision.schedule.states_SP.shape[1], decision.schedule.outputs_SQ.shape[1]
    size = next(limit for limit in ("1e-12", "1e-9", "1e-6") if decision.schedule.residual < float(limit))
    drawn = f"; {len(decision.schedule.draws)} draws of noise" if decision.schedule.draws else ""
    return "local", f"{count(states, 'state')}, {count(outputs, 'output')}, residual < {size}{drawn}"


def plain(error: BaseException) -> str:
    """Return an error's first sentence, formatted for one line of a table."""
    text = " ".join(str(error).split()).replace("|", "\\|")
    text = re.sub(r"^got scheduler '\w+', which ", "", text)
    return re.split(r"(?<=[a-z)])\. ", text)[0][:160]


def count(number: int, noun: str) -> str:
    """Return "1 state" or "2 states"."""
    return f"{number} {noun}{'s' if number > 1 else ''}"


def page() -> str:
    """Return the page with all classes and settings."""
    names = [name for name in dir(diffusers) if name.endswith("Scheduler")]
    lines = []
    logging.set_verbosity_error()  # diffusers warns of settings that these steps are tried with
    with contextlib.redirect_stdout(None), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchsde's, of sigmas that diffusers rounds beyond the ends of its range
        for name in names:
            for settings in ({}, *MORE.get(name, ())):
                told = ", ".join(f"{key}={value}" for key, value in settings.items()) or "default"
                lines.append(f"| {name} | {told} | {' | '.join(row(name, settings))} |")
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
