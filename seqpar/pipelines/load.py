"""`load`: any diffusers pipeline with a transformer, from its folder or hub id, parallelized on all ranks.

Unlike `from_pretrained` on every rank, it reads each file once per host and holds text encoders on rank 0 only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from seqpar.families import Preset
from seqpar.families._find import presets, why_no_preset
from seqpar.families._modular import is_modular, set_scale
from seqpar.loading import lora as _lora
from seqpar.loading.checkpoint import WEIGHTS
from seqpar.loading.encoders import NAMES, no_collection
from seqpar.loading.folder import PipelineParts, parts_of_folder
from seqpar.loading.names import resolve
from seqpar.loading.parts import transformers_of
from seqpar.loading.pipeline import load_pipeline
from seqpar.loading.schedulers import FlowMatchFixedSigmas
from seqpar.mesh.mesh import Mesh, default_dtype
from seqpar.planner.plan import choose_local, is_lossy
from seqpar.planner.search import Preferences
from seqpar.transformer.attention8 import check_steps
from seqpar.transformer.blocks import expected
from seqpar.transformer.budget import Budget, check_budget, steps_of
from seqpar.transformer.calibration import Precision, check_precision, why_not
from seqpar.transformer.estimate import dtype_of, planned_work
from seqpar.transformer.parallelize import calls_of, choices, parallelize
from seqpar.transformer.step_cache import StepCache, check_blocks_for, step_cache
from seqpar.types.arguments import check_kind, shown
from seqpar.types.say import say
from seqpar.vae.pipeline import PREPARE, VaeMode, attach, check_mode


class LoadedPipeline(Protocol):
    """What all pipelines of `load` have. Each is a pipeline of diffusers and has the other attributes of its class."""

    transformer: Any
    vae: Any
    scheduler: Any

    @property
    def components(self) -> dict[str, Any]: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate on all ranks. Arguments and output, such as `.images` or `.frames`, are the pipeline's own."""
        ...

    def __getattr__(self, name: str) -> Any: ...


@no_collection()
def load(
    path_or_id: str | Path,
    *,
    dtype: torch.dtype | None = None,
    mesh: Mesh | str | None = None,
    strategy: str = "auto",
    local: str = "auto",
    transport: str = "auto",
    vae: VaeMode = "auto",
    loras: Sequence[str] = (),
    fp32_state: bool = False,
    precision: Precision | None = None,
    min_psnr: float | None = None,
    budget_steps: int | None = None,
    attention_steps: str | None = None,
    cache: StepCache | str | None = None,
    workflow: str | None = None,
    park: bool = False,
    preset: str | None = None,
) -> LoadedPipeline:
    """Return a diffusers pipeline that runs on all ranks. Collective: call on all ranks.

    path_or_id: a folder as diffusers saves it, a hub id, or the file of a transformer in such a folder. dtype: None
    takes bf16 on GPUs and fp32 on CPUs. loras: files, each as `FILE[:SCALE][@TRANSFORMER]`; of several
    transformers (Wan 2.2) it changes the named one, or the one that the file itself names. fp32_state:
    whether the pipeline's loop, and so callbacks, have fp32 latents. workflow: one of a modular pipeline, of which only
    the parts load; None loads all parts but a transformer that is for one workflow alone (MiniMax-H3's for references).
    park: whether Wan 2.2's two transformers, and text encoders, wait in page-locked memory of the host while they are
    not in use, with the same bits; rank 0 prints what does.
    preset: how distilled weights or LoRAs are sampled, as "lightning-4" (docs/models): it sets the scheduler, and what
    calls have by default. The others are those of `seqpar.parallelize`.

    Each host reads each file once. Text and image encoders are on rank 0 only, and their results are broadcast: all
    ranks make the same calls of the pipeline, as after `parallelize`. Raises the same ValueError on all ranks; a part
    that does not fit its files is found before weights are read.
    """
    ranks = mesh if isinstance(mesh, Mesh) else Mesh.joined()
    dtype = default_dtype(ranks.device) if dtype is None else dtype
    preferences = Preferences(strategy=strategy, local=local, transport=transport)

    def check() -> tuple[PipelineParts, tuple[_lora.Lora, ...], Preset | None]:
        choices(mesh, preferences, True, True)
        check_kind("fp32_state", fp32_state, bool, expected="True or False")
        check_kind("park", park, bool, expected="True or False")
        check_precision(precision)
        check_budget(min_psnr, budget_steps, precision, step_cache(cache))
        check_steps(attention_steps, is_lossy(local), min_psnr)
        if preset is not None and min_psnr is not None:
            raise ValueError("got min_psnr= with preset=, expected one of them: budgets are searched without presets")
        parts, adapters = checked(path_or_id, dtype, loras, vae, workflow)
        known, name = presets(parts.kind.__name__, parts.index), parts.kind.__name__
        if preset is not None and preset not in known:
            raise ValueError(f"got preset={preset!r}, but {why_no_preset(name, known)}")
        few = None if preset is None else known[preset]
        choices(mesh, preferences, True, _is_guided(few))
        for module in parts.transformers.values() if precision is not None else ():
            if (reason := why_not(module, ranks.device, dtype)) is not None:
                raise ValueError(f'precision="{precision}" cannot be used: {reason}')
        check_blocks_for(step_cache(cache), parts.transformers.values())
        if local != "auto":
            choose_local(local, ranks.device, dtype, planned_work(parts.transformer).head_dim)
        return parts, adapters, few

    parts, adapters, few = ranks.on_all_ranks(check)
    if min_psnr is not None:
        steps = steps_of(parts.caller) if budget_steps is None else budget_steps
        Budget(min_psnr, steps, "", str(path_or_id), precision, step_cache(cache)).check_searched(ranks)
    options: Any = {"look": expected, "eight": precision is not None, "park": park, "preset": preset}
    pipe = load_pipeline(parts, parts.kind, dtype, ranks, adapters, **options)
    names: Any = {"strategy": strategy, "local": local, "transport": transport, "vae": vae}
    eight: Any = {"precision": precision, "min_psnr": min_psnr, "budget_steps": budget_steps}
    eight["attention_steps"] = attention_steps
    parallelize(pipe, mesh, **names, **eight, cfg=_is_guided(few), cache=cache)
    if few is not None:
        set_preset(pipe, few)
    if fp32_state and (reason := keep_fp32(pipe)) is not None and ranks.is_main:
        say(f"the state is kept as the pipeline keeps it, because {reason}")
    return pipe


def _is_guided(preset: Preset | None) -> bool:
    # whether calls may compute a second branch by default
    scales = () if preset is None else (preset.arguments.get(name, 1) for name in ("guidance_scale", "true_cfg_scale"))
    return preset is None or max(scales) > 1


def set_preset(pipe: Any, preset: Preset) -> None:
    if preset.sigmas:
        pipe.scheduler = FlowMatchFixedSigmas(preset.sigmas)
    values, kind = {"num_inference_steps": preset.steps, **preset.arguments}, type(pipe)
    values = set_scale(pipe, values) if is_modular(pipe) else values
    signature = inspect.signature(kind.__call__)
    parameters = [x.replace(default=values.get(x.name, x.default)) for x in signature.parameters.values()]

    @wraps(kind.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind_partial(self, *args, **kwargs).arguments
        return kind.__call__(self, *args, **{name: x for name, x in values.items() if name not in given} | kwargs)

    call.__dict__["__signature__"] = signature.replace(parameters=parameters)
    # a call is looked up in the class: the pipeline's own derives from diffusers' and has its name
    pipe.__class__ = type(
        kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__, "__doc__": kind.__doc__}
    )


def keep_fp32(pipe: Any) -> str | None:
    """Let a parallelized pipeline keep its state in fp32 until the release; return why it does not, or None.

    Every rank must call this after `parallelize`, before the pipeline's first call.
    """
    if is_modular(pipe):
        return "blocks of a modular pipeline make the latents"
    modules = transformers_of(pipe)
    for name, part in pipe.components.items():
        if isinstance(part, nn.Module) and name not in (*modules, "vae") and not name.startswith(NAMES):
            return f"{name} may read the latents, too"
    dtypes = {dtype_of(module) for module in modules.values()}
    if any(dtype.itemsize != 2 for dtype in dtypes):
        return f"the transformer has weights of {', '.join(sorted(map(str, dtypes)))}".replace("torch.", "")
    calls = [call for _, call in calls_of(pipe)]
    for call in calls:
        call.narrow = dtype_of(call.sharded.module)
    calls[0].ends.callback(_prepare_fp32(pipe))
    return None


def _prepare_fp32(pipe: Any) -> Callable[[], None]:
    # converts the latents that a pipeline's loop begins with; the function that is returned undoes it
    theirs = getattr(pipe, PREPARE, None)
    if theirs is None:
        return lambda: None

    @wraps(theirs)
    def prepared(*args: Any, **kwargs: Any) -> Any:
        latents = theirs(*args, **kwargs)
        first, *others = latents if isinstance(latents, tuple) else (latents,)
        first = first.to(torch.float32) if isinstance(first, Tensor) else first
        return (first, *others) if isinstance(latents, tuple) else first

    return attach(pipe, {PREPARE: prepared})


def checked(
    path_or_id: str | Path, dtype: object, loras: Sequence[str], vae: VaeMode = "auto", workflow: str | None = None
) -> tuple[PipelineParts, tuple[_lora.Lora, ...]]:
    """Return a pipeline's parts and LoRAs, which fit each other; ValueError otherwise. Reads headers."""
    check_kind("path_or_id", path_or_id, str, Path, expected="a pipeline's folder or hub id")
    if not str(path_or_id):
        raise ValueError("got path_or_id='', expected a pipeline's folder or hub id")
    if not isinstance(dtype, torch.dtype) or dtype not in WEIGHTS:
        eight = '; for 8 bits use precision="fp8"' if getattr(dtype, "itemsize", 1) == 1 else ""
        raise ValueError(f"got dtype={dtype!r}, expected {', '.join(map(str, WEIGHTS))}{eight}")
    if isinstance(loras, str) or not isinstance(loras, Sequence) or not all(isinstance(each, str) for each in loras):
        raise ValueError(f"got loras={shown(loras)}, expected a list of files, as ['style.safetensors:0.8']")
    path = resolve(path_or_id)
    if path is None:
        raise ValueError(
            f"got {path_or_id}, a model with random weights, expected a diffusers pipeline's folder or hub id"
        )
    adapters, parts = tuple(map(_lora.parse, loras)), parts_of_folder(path, workflow)
    check_mode(parts.kind.__name__, parts.vae, vae)
    return parts, _lora.check(adapters, parts.kind, parts.models)
