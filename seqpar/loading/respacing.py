"""Settings of the original DiT's samplers for diffusers' schedulers: respacing, clipping and the model's variances.

The original code (facebookresearch/DiT, after OpenAI's improved-diffusion) chooses timesteps by texts such as "250" and
"ddim25", which are not the spacings that diffusers offers, and clips by `clip_denoised`.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from itertools import accumulate, repeat
from typing import Any

import torch
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from torch import Tensor

from seqpar.loading.variances import check_variances, learns_range, steps_locally


def spaced(respacing: str, train: int) -> list[int]:
    """Return the timesteps that a text of the original stands for, descending; train: number of training timesteps.

    "ddim25": every n-th timestep from 0 on, with the first n that gives 25. "10,20,30": equal sections of the training
    timesteps with 10, 20 and 30 timesteps each, from the first to the last of a section. "250": one such section.
    Raises ValueError for other texts, and for numbers that cannot be had.
    """
    ddim = respacing.startswith("ddim")
    parts = [respacing.removeprefix("ddim")] if ddim else respacing.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f'got respacing {respacing!r}, expected one like "250", "ddim25" or "10,20,30"')
    counts = [int(part) for part in parts]
    if ddim:
        return list(range(0, train, _stride(counts[0], train)))[::-1]
    timesteps, start = [], 0
    for index, count in enumerate(counts):
        size = train // len(counts) + (index < train % len(counts))
        if count > size:
            raise ValueError(f"got respacing {respacing!r}, expected at most {size} timesteps in section {index + 1}")
        apart = (size - 1) / (count - 1) if count > 1 else 1
        timesteps += [start + round(place) for place in accumulate(repeat(apart, count - 1), initial=0.0)]
        start += size
    return timesteps[::-1]


def _stride(count: int, train: int) -> int:
    for stride in range(1, train):
        if -(-train // stride) == count:
            return stride
    raise ValueError(f"got respacing 'ddim{count}', expected a number that an integer stride over {train} steps gives")


def respace(scheduler: Any, respacing: str) -> None:
    """Set a scheduler's timesteps as the original's `space_timesteps` does; each step then ends at the next timestep.

    Raises ValueError for a scheduler other than DDIM without thresholding, and DDPM.
    """
    _check(scheduler, f"respacing {respacing!r}")
    timesteps = spaced(respacing, scheduler.config.num_train_timesteps)
    if isinstance(scheduler, DDPMScheduler):
        scheduler.set_timesteps(timesteps=timesteps)
        return
    scheduler.respaced = scheduler.timesteps = torch.tensor(timesteps)  # until timesteps are set in another way
    scheduler.num_inference_steps = len(timesteps)


def clip_denoised(scheduler: Any) -> None:
    """Make a scheduler clip each predicted x0 to +-1, as the original's `clip_denoised=True` does.

    DDIM then needs use_clipped_model_output in its steps, too. Raises ValueError as `respace` does.
    """
    _check(scheduler, "clip_denoised")
    scheduler.register_to_config(clip_sample=True, clip_sample_range=1.0)


def _check(scheduler: Any, what: str) -> None:
    if not steps_locally(scheduler) and (type(scheduler) is not DDPMScheduler or scheduler.config["thresholding"]):
        raise ValueError(
            f"got {what} with {type(scheduler).__name__}, expected DDIMScheduler or DDPMScheduler without thresholding"
        )


def pass_variances(pipe: Any, generator: torch.Generator | None = None) -> Callable[[], None]:
    """Make a diffusers DiTPipeline pass the model's variances to its `DDPMScheduler`, in place; return what undoes it.

    The pipeline cuts the variances off, so that a scheduler with variance_type "learned_range" raises TypeError. After
    this, the scheduler's step takes them from the transformer's last output. Call it when the pipeline has its final
    transformer (a `DistributedDiT`, or diffusers' own) and scheduler; `seqpar.parallelize` calls it for pipelines.
    generator: draws the noise of the steps, for which the pipeline uses no generator. Without it, what was given in an
    earlier call still counts, and otherwise torch's default generator draws.
    Raises ValueError for another scheduler, and for a model without variances.
    """
    scheduler = pipe.scheduler
    if not learns_range(scheduler):
        raise ValueError(
            f"got a pipeline with {type(scheduler).__name__}, expected DDPMScheduler with variance_type 'learned_range'"
        )
    check_variances(pipe.transformer.config)
    step = WithVariances(scheduler.step, generator)
    before = {name: x for name, x in vars(scheduler).items() if name == "step"}
    hook = pipe.transformer.register_forward_hook(lambda module, args, output: step.outputs.append(output[0]))
    scheduler.step = step

    def undo() -> None:
        if vars(scheduler).get("step") is step:  # otherwise a later call has wrapped it, and passes variances itself
            del scheduler.step
            vars(scheduler).update(before)
        hook.remove()

    return undo


class WithVariances:
    """A scheduler's `step` that takes the variances from the transformer's last output, if the pipeline cut them off.

    generator: draws the noise, unless a caller names another.
    """

    def __init__(self, step: Callable[..., Any], generator: torch.Generator | None) -> None:
        self.outputs: deque[Tensor] = deque(maxlen=1)
        self._step, self._options = step, {} if generator is None else {"generator": generator}
        functools.update_wrapper(self, step)

    def __call__(self, model_output: Tensor, timestep: Any, sample: Tensor, **options: Any) -> Any:
        """Return what the scheduler's step makes of the whole output."""
        if model_output.shape[1] == sample.shape[1]:
            model_output = torch.cat((model_output, self.outputs[0][:, sample.shape[1] :]), dim=1)
        return self._step(model_output, timestep, sample, **self._options | options)
