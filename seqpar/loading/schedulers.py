"""Builds a pipeline's diffusers scheduler, or another class with the same configuration, and refuses unusable ones."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Mapping, Sequence
from functools import wraps
from itertools import accumulate, repeat
from types import MethodType
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers.configuration_utils import register_to_config
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

from seqpar.loading.errors import context
from seqpar.loading.parts import check_scheduler
from seqpar.types.names import near


def spaced(respacing: str, train: int) -> list[int]:
    """Return the timesteps that a text of the original stands for, descending; train: number of training timesteps.

    "ddim25": every n-th timestep from 0 on, with the first n that gives 25. "10,20,30": equal sections of the training
    timesteps with 10, 20 and 30 timesteps each. "250": one such section. Raises ValueError for anything else.
    """
    ddim = respacing.startswith("ddim")
    parts = [respacing.removeprefix("ddim")] if ddim else respacing.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f'got respacing {respacing!r}, expected a text like "250", "ddim25" or "10,20,30"')
    counts = [int(part) for part in parts]
    if ddim:
        stride = next((stride for stride in range(1, train) if -(-train // stride) == counts[0]), None)
        if stride is None:
            expected = f"a number that an integer stride over {train} steps gives"
            raise ValueError(f"got respacing {respacing!r}, expected {expected}")
        return list(range(0, train, stride))[::-1]
    timesteps, start = [], 0
    for index, count in enumerate(counts):
        size = train // len(counts) + (index < train % len(counts))
        if count > size:
            raise ValueError(f"got respacing {respacing!r}, expected at most {size} timesteps in section {index + 1}")
        apart = (size - 1) / (count - 1) if count > 1 else 1
        timesteps += [start + round(place) for place in accumulate(repeat(apart, count - 1), initial=0.0)]
        start += size
    return timesteps[::-1]


def respace(scheduler: Any, respacing: str) -> None:
    """Set a scheduler's timesteps as the original's `space_timesteps` does; each step then ends at the next timestep.

    ValueError for a scheduler other than DDIM without thresholding, and DDPM.
    """
    _check(scheduler, f"respacing {respacing!r}")
    timesteps = spaced(respacing, scheduler.config.num_train_timesteps)
    if isinstance(scheduler, DDPMScheduler):
        scheduler.set_timesteps(timesteps=timesteps)
        return
    scheduler.respaced = scheduler.timesteps = torch.tensor(timesteps)  # until timesteps are set in another way
    scheduler.num_inference_steps = len(timesteps)


def clip_denoised(scheduler: Any) -> None:
    """Make a scheduler clip each predicted x0 to +-1, as the original does. ValueError as `respace`.

    DDIM then needs use_clipped_model_output in its steps, too.
    """
    _check(scheduler, "clip_denoised")
    scheduler.register_to_config(clip_sample=True, clip_sample_range=1.0)


def _check(scheduler: Any, what: str) -> None:
    if not steps_locally(scheduler) and (type(scheduler) is not DDPMScheduler or scheduler.config["thresholding"]):
        raise ValueError(
            f"got {what} with {type(scheduler).__name__}, expected DDIMScheduler or DDPMScheduler without thresholding"
        )


FLOW_PREDICTION = "flow_prediction"
KINDS = ("epsilon", "sample", "v_prediction", FLOW_PREDICTION)


def check_clean(scheduler: Any) -> None:
    """Raise ValueError if the clean latents of a scheduler's steps are not known."""
    reason, name, kind = None, type(scheduler).__name__, _kind(scheduler)
    if hasattr(scheduler, "precondition_outputs"):
        reason = f"{name} scales the model's output in its own way"
    elif not (hasattr(scheduler, "scale_noise") or hasattr(scheduler, "add_noise")):
        reason = f"{name} does not mix latents and noise"
    elif kind not in KINDS:
        reason = f"{name} has prediction_type {kind!r}"
    if reason is not None:
        raise ValueError(
            f"previews are not supported with this scheduler, because {reason}; use a scheduler such as "
            f"DDIMScheduler or FlowMatchEulerDiscreteScheduler, or no partial pictures"
        )


def clean_weights(scheduler: Any, timestep: Any) -> tuple[float, float]:
    """Return the weights (of x, of m) that give x0 at a timestep; the scheduler's timesteps are set.

    Where the state is noise alone (a = 0) and the model predicts noise, nothing is known of x0: both weights are 0.
    With DPM-Solver-2 (KDPM2) the evaluations between two steps count as those at the end of the step.
    """
    own = copy.copy(scheduler)  # it moves its tables to the device of what it mixes
    one, times = torch.ones(1, 1, 1, 1, dtype=torch.float64), torch.as_tensor(timestep).reshape(1).cpu()
    if hasattr(own, "scale_noise"):
        mixed = [own.scale_noise(one * x, times, one * e) for x, e in ((1, 0), (0, 1))]
    else:
        mixed = [own.add_noise(one * x, one * e, times) for x, e in ((1, 0), (0, 1))]
    a, b = (float(each) for each in mixed)
    match _kind(scheduler):
        case "epsilon":
            return (1 / a, -b / a) if a else (0.0, 0.0)
        case "v_prediction":  # of a state whose a and b are scaled to a^2 + b^2 = 1, as Euler's are not
            return a / (a * a + b * b), -b / (a * a + b * b) ** 0.5
        case "flow_prediction":
            return 1 / (a + b), -b / (a + b)
        case _:
            return 0.0, 1.0


def input_scale(scheduler: Any, timestep: Any) -> float:
    """Return the factor that makes the model's input of a state at a timestep."""
    if not hasattr(scheduler, "scale_model_input"):
        return 1.0
    return float(copy.copy(scheduler).scale_model_input(torch.ones(1, 1, 1, 1, dtype=torch.float64), timestep))


def _kind(scheduler: Any) -> Any:
    return scheduler.config.get("prediction_type") or (FLOW_PREDICTION if hasattr(scheduler, "scale_noise") else None)


def steps_locally(scheduler: Any) -> bool:
    """Return whether this is DDIM without dynamic thresholding, which has its own kernel."""
    return type(scheduler) is DDIMScheduler and not scheduler.config["thresholding"]


def learns_range(scheduler: Any) -> bool:
    """Return whether this is DDPM whose variance the model interpolates, without dynamic thresholding."""
    config = scheduler.config
    return type(scheduler) is DDPMScheduler and config.variance_type == "learned_range" and not config.thresholding


def check_variances(config: Any) -> None:
    """Raise ValueError if a model of this config predicts no variances; config: has in_channels and out_channels."""
    if config.out_channels < 2 * config.in_channels:
        raise ValueError(
            f"got variance_type 'learned_range' with a model of {config.out_channels} output channels, expected "
            f"{2 * config.in_channels}, half of them variances; take variance_type 'fixed_small'"
        )


STEP = ["model_output", "timestep", "sample"]  # the only arguments that a scheduler's step may require


def why_not_driven(scheduler: Any) -> str | None:
    """Return why the denoising loop cannot use a scheduler, or None if it can."""
    parameters = inspect.signature(scheduler.step).parameters.values() if hasattr(scheduler, "step") else ()
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    if required != STEP:
        return f"steps with ({', '.join(required)}), not with ({', '.join(STEP)})"
    variances = str(getattr(scheduler.config, "variance_type", ""))
    if variances.startswith("learned") and not learns_range(scheduler):
        return (
            f"needs the model's variances (variance_type {variances!r}), which the loop passes on to DDPMScheduler "
            f"with 'learned_range' and without thresholding alone"
        )
    return None


def check_eta(scheduler: Any, eta: float | None) -> None:
    """Raise ValueError if eta is not between 0 and 1, or if this scheduler has none. None: the scheduler's default."""
    if eta is None:
        return
    if not 0 <= eta <= 1:
        raise ValueError(f"got eta {eta:g}, expected 0 (deterministic) to 1 (DDPM's noise)")
    if eta > 0 and "eta" not in inspect.signature(scheduler.step).parameters:
        raise ValueError(f"got eta {eta:g} with {type(scheduler).__name__}, expected 0: this scheduler has no eta")


def set_timesteps(scheduler: Any, steps: int, schedule: Mapping[str, Any]) -> None:
    """Set a scheduler's timesteps by a number of steps, or by the sigmas or timesteps that `schedule` holds."""
    replacing = schedule.keys() & {"sigmas", "timesteps"}
    try:
        scheduler.set_timesteps(*([] if replacing else [steps]), **schedule)
    except TypeError as error:
        names = ", ".join(sorted(schedule)) or "nothing"
        raise ValueError(
            f"got schedule with {names}, expected arguments of {type(scheduler).__name__}.set_timesteps: {error}"
        ) from error


FLOW, DIFFUSION = "flow matching", "diffusion by betas"
LIKE = {  # some of the schedulers of each process
    FLOW: "FlowMatchEulerDiscreteScheduler or UniPCMultistepScheduler",
    DIFFUSION: "DDIMScheduler, DDPMScheduler, DPMSolverMultistepScheduler or UniPCMultistepScheduler",
}


@functools.cache
def known() -> tuple[str, ...]:
    """Return the names of diffusers' schedulers."""
    return tuple(name for name in dir(diffusers) if name.endswith("Scheduler"))


def build(config: Mapping[str, Any], name: str | None = None, model: Any = None) -> Any:
    """Return the scheduler of a configuration, or the diffusers class `name` with that configuration.

    model: a config with in_channels and out_channels: DDPM takes the variances that such a model predicts, unless the
    configuration names its variance_type. Raises ValueError if the scheduler cannot be built, if the denoising loop
    cannot use it, or if it steps another noise process than that of the configuration.
    """
    check_scheduler(config)
    chosen = config.get("_class_name", "DDIMScheduler") if name is None else name
    if chosen not in known():
        raise ValueError(f"got scheduler {chosen!r}, expected one of diffusers': {near(chosen, known(), 'Scheduler')}")
    kind, settings = getattr(diffusers, chosen), dict[str, Any]()
    learned = model is not None and model.out_channels == 2 * model.in_channels
    if learned and chosen == "DDPMScheduler" and "variance_type" not in config:
        settings["variance_type"] = "learned_range"
    # multistep schedulers (UniPC, DPM-Solver) know flow matching by these settings; others have their own classes
    if name is not None and "shift" in config and "use_flow_sigmas" in inspect.signature(kind.__init__).parameters:
        settings |= {"use_flow_sigmas": True, "prediction_type": FLOW_PREDICTION, "flow_shift": config["shift"]}
    with context(f"got scheduler {chosen!r}, which cannot be built"):
        scheduler = kind.from_config(config, **settings)
    if (reason := why_not_driven(scheduler)) is not None:
        raise ValueError(f"got scheduler {chosen!r}, which {reason}; use a scheduler such as DDIMScheduler")
    if name is not None:
        own = build(config)
        got, expected = _process(scheduler), _process(own)  # the model was trained with that of its own
        if got != expected:
            mine, theirs = type(scheduler).__name__, type(own).__name__
            raise ValueError(
                f"got scheduler {mine!r} of {got} for a model whose own, {theirs}, is of {expected}, expected one of "
                f"the same, like {LIKE.get(expected, theirs)}"
            )
    return scheduler


def _process(scheduler: Any) -> str:
    name = type(scheduler).__name__
    if scheduler.config.get("use_flow_sigmas") or name.startswith(("FlowM", "LTXEuler")):
        return FLOW
    return DIFFUSION if hasattr(scheduler, "alphas_cumprod") else f"{name}'s own process"


def is_flow(config: Mapping[str, Any]) -> bool:
    """Return whether the scheduler of a configuration steps flow matching."""
    return _process(build(config)) == FLOW


def counts_the_end(config: Mapping[str, Any] | None) -> bool:
    """Return whether a scheduler's number of steps is that of its sigmas with the last one, at which no model runs."""
    return config is not None and config.get("_class_name") == "MiniMaxH3Scheduler"


def check_steps(scheduler: Any, steps: int) -> None:
    """Raise ValueError if a number of steps is not from 1 to the number that the model was trained with."""
    most = getattr(scheduler.config, "num_train_timesteps", steps)
    if not 1 <= steps <= most:
        raise ValueError(f"got {steps} steps, expected 1 to {most}")


class FlowMatchFixedSigmas(FlowMatchEulerDiscreteScheduler):
    """Steps at the sigmas of a preset, whatever shift or sigmas a pipeline passes.

    Raises ValueError for another number of steps.
    """

    @register_to_config
    def __init__(self, sigmas: Sequence[float] = (1.0,), num_train_timesteps: int = 1000) -> None:
        super().__init__(num_train_timesteps)

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: Any = None,
        sigmas: Any = None,
        mu: float | None = None,
        timesteps: Any = None,
    ) -> None:
        fixed = [*self.config["sigmas"]]
        count = num_inference_steps or len(timesteps if sigmas is None else sigmas)
        if count != len(fixed):
            raise ValueError(f"got {count} steps, expected the {len(fixed)} of the preset; leave the number out")
        super().set_timesteps(device=device, sigmas=fixed)


def taking_mu(scheduler: Any) -> Any:
    """Return a scheduler whose `set_timesteps` takes `mu`, as pipelines pass it; multistep schedulers refuse it."""
    own = type(scheduler).set_timesteps
    if scheduler.config.get("use_dynamic_shifting") or "mu" not in inspect.signature(own).parameters:
        return scheduler

    @wraps(own)
    def set_timesteps(self: Any, *args: Any, mu: object = None, **kwargs: Any) -> None:
        own(self, *args, **kwargs)

    scheduler.set_timesteps = MethodType(set_timesteps, scheduler)  # of a copy in a copy, as LTX-2 makes for sound
    return scheduler


def flow_timing(scheduler: Any, steps: int, tokens: int) -> dict[str, Any]:
    """Return keyword arguments of a flow matching scheduler's `set_timesteps`, those of diffusers' FluxPipeline.

    Sigmas fall from 1 to 1 / steps in equal steps; `mu`, if the scheduler shifts them dynamically, is linear in the
    number of image tokens. Raises ValueError for a scheduler that does not follow them.
    """
    name, config = type(scheduler).__name__, scheduler.config
    flows = bool(config.get("use_flow_sigmas"))
    takes = "sigmas" in inspect.signature(scheduler.set_timesteps).parameters
    if not flows and not ("FlowMatch" in name and takes):
        raise ValueError(
            f"got scheduler {name!r}, expected one of flow matching that takes sigmas, like "
            f"FlowMatchEulerDiscreteScheduler or UniPCMultistepScheduler"
        )
    timing: dict[str, Any] = {} if flows else {"sigmas": np.linspace(1.0, 1 / steps, steps).tolist()}
    if config.get("use_dynamic_shifting"):
        named = {key: value for key, value in config.items() if value is not None}
        few, many = named.get("base_image_seq_len", 256), named.get("max_image_seq_len", 4096)
        low, high = named.get("base_shift", 0.5), named.get("max_shift", 1.15)
        with context(f"got scheduler {name!r}, whose sigmas cannot be shifted"):
            slope = (high - low) / (many - few)
            timing["mu"] = tokens * slope + (low - slope * few)
    return timing
