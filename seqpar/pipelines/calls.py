"""What is done around a call of a pipeline of diffusers: its parts and check, estimates, finite results."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from seqpar.loading import schedulers as _schedulers
from seqpar.loading.checkpoint import Fitted
from seqpar.loading.errors import context
from seqpar.loading.names import building
from seqpar.pipelines.pictures import Sound
from seqpar.pipelines.protocol import Estimates, as_text
from seqpar.vae.shared import looked_at


def loaded_control(fitted: Fitted, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a ControlNet, which every rank reads and computes whole; ValueError if it does not load."""
    with context(f"got ControlNet {fitted.path}, which does not load"), building():
        net = fitted.kind.from_pretrained(fitted.path, dtype=dtype, use_safetensors=True).to(device).eval()
    fitted.checkpoint.check_unchanged()

    def rounded(net: Any, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        latents = given.get("hidden_states")  # in fp32 where the pipeline's state is
        return args, given if latents is None else {**given, "hidden_states": latents.to(dtype)}

    net.register_forward_pre_hook(rounded, with_kwargs=True)
    return net


def with_parts_of(pipe: Any, kind: Any, **more: Any) -> Any:
    """Return a pipeline of another class with the same parts; diffusers' own `from_pipe` changes their dtypes."""
    names = inspect.signature(kind.__init__).parameters
    parts = {name: part for name, part in (*pipe.config.items(), *pipe.components.items()) if name in names}
    return kind(**parts | more)


def accepts(
    pipe: Any, arguments: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter], sides: Mapping[str, int]
) -> bool:
    """Return whether the check of a pipeline's inputs accepts a call. parameters: those of the call."""
    check = getattr(pipe, "check_inputs", None)
    names = {} if check is None else inspect.signature(check).parameters
    defaults = {name: x.default for some in (names, parameters) for name, x in some.items() if x.default is not x.empty}
    given = {name: arguments.get(name, defaults.get(name)) for name in names}
    given |= sides if {*sides} <= {*given} else {}
    try:
        return check is None or check(**given) is None
    except (ValueError, TypeError):
        return False


def sounds_of(pipe: Any, result: Any) -> list[Sound]:
    audio_BCT = getattr(result, "audio", None)
    if audio_BCT is None:
        return []
    rate = getattr(result, "sampling_rate", None) or pipe.vocoder.config.output_sampling_rate
    return [Sound(x_CT.float().cpu().numpy(), int(rate)) for x_CT in audio_BCT]


def watched_vae(
    vae: Any, name: str, look: Callable[[Any], None], begin: Callable[[], None]
) -> AbstractContextManager[None]:
    return looked_at(vae, name, look, begin) if hasattr(vae, name) else nullcontext()


@contextmanager
def estimated(scheduler: Any, estimates: Callable[[int], Estimates] | None) -> Iterator[None]:
    """Estimate clean latents in a run of a scheduler (see `Events.estimates`), whose steps are not changed.

    The latents are whole on every rank: nothing is exchanged. Raises ValueError if the clean latents are not known.
    """
    if estimates is None:
        yield
        return
    _schedulers.check_clean(scheduler)
    original, patched, count = scheduler.step, "step" in vars(scheduler), 0
    signature = inspect.signature(original)

    @wraps(original)  # pipelines read the names of its arguments
    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        first = getattr(scheduler, "begin_index", None) or 0
        indices, look = estimates(len(scheduler.timesteps) - first)
        if count in indices:
            given = signature.bind(*args, **kwargs).arguments
            of_state, of_output = _schedulers.clean_weights(scheduler, given["timestep"])
            look(count, of_state * given["sample"].float() + of_output * given["model_output"].float())
        count += 1
        return original(*args, **kwargs)

    scheduler.step = step
    try:
        yield
    finally:
        del scheduler.step
        if patched:
            scheduler.step = original


def refuse_latents(finite: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Raise FloatingPointError for the first step whose latents are not finite. finite: whether each step's are."""
    bad = [] if not finite else torch.stack([*finite]).logical_not().nonzero().flatten().tolist()
    if bad:
        raise FloatingPointError(
            f"latents stopped being finite at step {bad[0] + 1} of {len(finite)} in {as_text(dtype)}; try dtype fp32 "
            f"or bf16, or check the weights"
        )
